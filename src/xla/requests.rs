//! The handlers of what is started and waited for later, and of what orders computation beside it. On the CPU.

use std::sync::{Arc, Mutex, PoisonError};

use super::c_api::{CallFrame, FfiError};
use super::handler::{Bound, Sites, State, bind, end_if_fatal, get_state, guard, kind, set_state, usable};
use super::targets::Target;
use super::{frame, pages};
use crate::call::{Call, Operand, Phase, Site, Stream};
use crate::error::{Cause, Error};
use crate::ops::{self, Buffer, Counts};
use crate::record::log;
use crate::record::recorder::{Record, What};
use crate::transport::{self, AnyTransport, Held, Memory, Platform, Request, Transport};
use crate::watch::{Watched, wait_for};

/// What is known of a request when a program is compiled.
pub struct Known {
    held: Held,
    /// Of the waits: how each operation that was waited for here last is recorded, with the line of the wait.
    waits: Mutex<Vec<Wait>>,
}

/// What was started, the number of the line of the wait, and how that is recorded.
type Wait = (Arc<What>, i32, Arc<Watched>);

/// How many of those are kept.
const WAITS: usize = 16;

const CPU: u8 = kind::CPU;

pub fn targets() -> impl Iterator<Item = Target> {
    let start = Target {
        name: "mpi4jax_start".into(),
        platform: "cpu",
        instantiate: instantiate::<true>,
        execute: start,
    };
    let wait = Target {
        name: "mpi4jax_wait".into(),
        platform: "cpu",
        instantiate: instantiate::<false>,
        execute: wait,
    };
    let ready = Target { name: "mpi4jax_ready".into(), platform: "cpu", instantiate: after, execute: ready };
    [start, wait, ready].into_iter()
}

/// Both stages of the target that gives a token once its operands are there, and does nothing else.
///
/// # Safety
/// Called by XLA with a frame of its own making.
pub unsafe extern "C" fn after(frame: *mut CallFrame) -> *mut FfiError {
    // SAFETY: promised by the caller.
    unsafe { guard::<CPU>(frame, |_| Ok(())) }
}

/// The execute stage of the target that gives zeros, the handle of nothing, once its operands are there.
///
/// # Safety
/// Called by XLA with a frame of its own making.
unsafe extern "C" fn ready(frame: *mut CallFrame) -> *mut FfiError {
    // SAFETY: promised by the caller.
    unsafe { guard::<CPU>(frame, |frame| Ok(frame::zero_handle(frame).map_err(Error::from)?)) }
}

/// # Safety
/// Called by XLA with a frame of its own making.
unsafe extern "C" fn instantiate<const START: bool>(frame: *mut CallFrame) -> *mut FfiError {
    // SAFETY: promised by the caller.
    unsafe {
        guard::<CPU>(frame, |frame| {
            let attributes = frame::Attributes::new(&frame.attrs);
            let site = attributes.site()?;
            let phase = if START { Phase::Start } else { Phase::Wait };
            let site = Site { phase, ..site };
            let held = attributes.held().map_err(|cause| site.error(cause))?;
            let transport = transport::selected(Platform::Cpu).map_err(|error| site.error(error.cause))?;
            refuse(&site, &held, transport)?;
            let site = if START {
                Sites::of(site, transport)?
            } else {
                Sites::ByOperand { template: site, bound: Default::default() }
            };
            let request = Some(Known { held, waits: Mutex::default() });
            Ok(set_state(frame, State { transport, site, request })?)
        })
    }
}

/// What is started goes through MPI, whatever carries the other operations.
fn refuse(site: &Site, held: &Held, transport: &AnyTransport) -> Result<(), Error> {
    if site.op.row().started.is_none() {
        let what = format!("starting {} without waiting for its end", site.op);
        return Err(site.error(Cause::Unsupported { what, reason: "MPI has no such function" }));
    }
    if !site.op.row().is_collective() && !held.local && transport.name() == "ucx" {
        let reason = "with MPI4JAX_TRANSPORT=ucx, send and recv do not meet the messages of MPI";
        return Err(site.error(Cause::Unsupported { what: site.name().into(), reason }));
    }
    Ok(())
}

/// # Safety
/// Called by XLA with a frame of its own making, whose buffers stay valid until this returns.
unsafe extern "C" fn start(frame: *mut CallFrame) -> *mut FfiError {
    // SAFETY: promised by the caller.
    unsafe {
        guard::<CPU>(frame, |frame| {
            let (state, known) = state(frame)?;
            let kept;
            let Bound { site, watched } = match &state.site {
                Sites::One(bound) => bound,
                Sites::ByOperand { template, bound } => {
                    let operand = frame::call_operand(frame).map_err(|cause| template.error(cause))?;
                    let [.., comm, line, _, _] = operand;
                    kept = bind(template, bound, (comm, line), state.transport)?;
                    &*kept
                }
            };
            let _kept = usable(site)?;
            let result = begin(frame, site, known.held, watched);
            if let Err(error) = &result {
                end_if_fatal(error, &site.comm, watched);
                site.comm.fail(&error.to_string());
            }
            result
        })
    }
}

/// # Safety
/// `frame` is XLA's, of the execute stage.
unsafe fn state(frame: &CallFrame) -> Result<(&State, &Known), Error> {
    // SAFETY: promised by the caller.
    let state = unsafe { get_state(frame)? };
    match &state.request {
        Some(known) => Ok((state, known)),
        None => {
            Err(Cause::Request { message: "the state of a request is that of an operation".into() }.into())
        }
    }
}

/// # Safety
/// As `start`.
unsafe fn begin(frame: &CallFrame, site: &Site, held: Held, watched: &Watched) -> Result<(), Box<Error>> {
    let located = |cause| site.error(cause);
    let mut counts = Counts::new();
    // SAFETY: promised by the caller.
    let (operand, peers, handle) =
        unsafe { frame::start(frame, site, &held, &mut counts) }.map_err(located)?;
    let memory = Memory::of(site.op, &held, operand.as_ref()).map_err(located)?;
    let mut call = Call { counts: &counts, ..Call::of(site, Stream::NONE) };
    let mut found = None;
    if held.local {
        found = Some(transport::start(&call, held, memory, None, None)?);
    } else {
        memory.lend(&mut call, &held);
        call.check()?;
        if let Some(peers) = peers {
            frame::address(&mut call, peers)?;
        }
        watched.run(&mut call, |call, running, ahead| {
            let execute = |call: &Call| {
                found = Some(transport::start(call, held, memory, running.record(), ahead)?);
                Ok(())
            };
            if log::is_enabled() { log::logged(call, execute) } else { execute(call) }
        })?;
    }
    if let Some(found) = found {
        // SAFETY: a result of three float32, as `frame::start` has checked.
        unsafe { handle.write_unaligned(found) };
    }
    Ok(())
}

/// # Safety
/// Called by XLA with a frame of its own making, whose buffers stay valid until this returns.
unsafe extern "C" fn wait(frame: *mut CallFrame) -> *mut FfiError {
    // SAFETY: promised by the caller.
    unsafe {
        guard::<CPU>(frame, |frame| {
            let (state, known) = state(frame)?;
            let (Sites::ByOperand { template: site, .. } | Sites::One(Bound { site, .. })) = &state.site;
            let located = |cause| site.error(cause);
            let line = match site.operand {
                Operand::Call => frame::call_operand(frame).map_err(located)?[5],
                _ => 0,
            };
            let (handle, results) = frame::wait(frame, site, &known.held).map_err(located)?;
            let taken = transport::take(handle, &known.held);
            let Some(request) = taken.map_err(|cause| site.error(at(site, line, cause)))? else {
                return nothing(site, line, &known.held, results);
            };
            let end = || request.wait(|found| copy(site, found, results));
            let Some(record) = &request.record else { return Ok(end()?) };
            let watched = known.watched(site, line, record);
            let result = wait_for(&watched, record, || logged(&request, end));
            if let Err(error) = &result {
                end_if_fatal(error, request.comm(), &watched);
                request.comm().fail(&error.to_string());
            }
            result
        })
    }
}

fn logged(request: &Request, end: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
    if log::is_enabled() { request.with_call(|call| log::logged(call, |_| end())) } else { end() }
}

/// The user's line of a wait.
fn line_of(site: &Site, line: i32) -> Box<str> {
    if line == 0 { site.location.clone() } else { ops::numbered_line(line) }
}

/// An error about a request, with the line of the wait.
#[cold]
fn at(site: &Site, line: i32, cause: Cause) -> Cause {
    let line = line_of(site, line);
    match cause {
        Cause::Request { message } if !line.is_empty() => {
            Cause::Request { message: format!("{message}, {line}") }
        }
        cause => cause,
    }
}

impl Known {
    fn watched(&self, site: &Site, line: i32, started: &Record) -> Arc<Watched> {
        let mut waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        let is_same =
            |(what, other, _): &&(Arc<What>, i32, _)| Arc::ptr_eq(what, &started.what) && *other == line;
        if let Some((.., watched)) = waits.iter().find(is_same) {
            return watched.clone();
        }
        let watched = Arc::new(Watched::of_wait(started, &line_of(site, line)));
        if waits.len() == WAITS {
            waits.remove(0);
        }
        waits.push((started.what.clone(), line, watched.clone()));
        watched
    }
}

/// A wait for what was never started: in a derivative, zeros.
fn nothing(site: &Site, line: i32, held: &Held, results: [Option<Buffer>; 2]) -> Result<(), Box<Error>> {
    if !held.initial {
        let message = "the request was never started".into();
        return Err(site.error(at(site, line, Cause::Request { message })).into());
    }
    for result in results.into_iter().flatten() {
        // SAFETY: a result of XLA's of so many bytes.
        unsafe { result.data.write_bytes(0, result.bytes()) };
    }
    Ok(())
}

/// Copies what the wait gives to where XLA wants it.
fn copy(site: &Site, found: [Option<Buffer>; 2], results: [Option<Buffer>; 2]) -> Result<(), Cause> {
    for (from, to) in found.into_iter().zip(results) {
        let (from, to) = match (from, to) {
            (Some(from), Some(to)) => (from, to),
            (None, None) => continue,
            (from, to) => {
                let [expected, actual] = [from, to].map(|it| usize::from(it.is_some()));
                return Err(Cause::Buffers { what: "result", expected, actual });
            }
        };
        if (from.dtype, from.count) != (to.dtype, to.count) {
            let [from, to] = [from, to].map(|it| format!("{} x {}", it.count, it.dtype.name()));
            let message = format!("the request is of {from}, and waited for as {to}");
            return Err(Cause::Request { message });
        }
        pages::prepare(&Call { recv: Some(to), ..Call::of(site, Stream::NONE) });
        // SAFETY: as many bytes on both sides; ours are nobody else's.
        unsafe { std::ptr::copy_nonoverlapping(from.data, to.data, to.bytes()) };
    }
    Ok(())
}
