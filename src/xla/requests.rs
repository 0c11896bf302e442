//! The handlers of what is started and waited for later, and of what orders computation beside it.

use std::sync::{Arc, Mutex, PoisonError};

use super::c_api::{CallFrame, FfiError};
use super::frame::{self, started};
use super::pages;
use super::state::kind::{self, platform};
use super::state::{
    Bound, RecordedWait, RequestPlan, Sites, State, bind, end_if_fatal, enter, get_state, guard, judged,
    set_state, usable,
};
use super::watched::{Watched, wait_for};
use crate::call::{Call, EagerCall, Operand, Phase, Site, Stream};
use crate::error::{Cause, Error};
use crate::mpilib;
use crate::ops::{self, Buffer, Counts};
use crate::record::log;
use crate::record::recorder::Record;
use crate::transport::{self, Handle, Platform, Request, RequestLayout, RequestMemory, Transport};

/// How many waits are remembered.
const WAITS: usize = 16;

/// Both stages of the target that gives a token once its operands are there, and does nothing else.
///
/// # Safety
/// Called by XLA with a frame of its own making.
pub unsafe extern "C" fn after(frame: *mut CallFrame) -> *mut FfiError {
    // SAFETY: promised by the caller.
    unsafe { guard(frame, |_| Ok(())) }
}

/// The execute stage of the target that gives zeros, the handle of nothing, once its operands are there.
///
/// # Safety
/// Called by XLA with a frame of its own making.
pub unsafe extern "C" fn ready<const KIND: u8>(frame: *mut CallFrame) -> *mut FfiError {
    // SAFETY: promised by the caller.
    let zeros = |frame: &CallFrame| unsafe {
        let (stream, _context) = enter::<KIND>(frame)?;
        let transport = transport::selected(platform::<KIND>())?;
        Ok::<_, Error>(transport.write(Handle::default(), &started::handle(frame)?, stream)?)
    };
    // SAFETY: promised by the caller.
    unsafe { guard(frame, |frame| Ok(zeros(frame)?)) }
}

/// # Safety
/// Called by XLA with a frame of its own making.
pub unsafe extern "C" fn instantiate<const KIND: u8, const START: bool>(
    frame: *mut CallFrame,
) -> *mut FfiError {
    // SAFETY: promised by the caller.
    unsafe {
        guard(frame, |frame| {
            let attributes = frame::Attributes::new(&frame.attrs);
            let site = attributes.site()?;
            let phase = if START { Phase::Start } else { Phase::Wait };
            let site = Site { phase, ..site };
            let layout = attributes.layout().map_err(|cause| site.error(cause))?;
            let transport =
                transport::selected(platform::<KIND>()).map_err(|error| site.error(error.cause))?;
            refuse(&site, &layout, platform::<KIND>())?;
            let site = if START {
                Sites::of(site, transport)?
            } else {
                Sites::ByOperand { template: site, bound: Default::default() }
            };
            let request = Some(RequestPlan { layout, waits: Mutex::default() });
            Ok(set_state(frame, State { transport, site, request })?)
        })
    }
}

/// What is started goes through MPI, whatever carries the other operations, or is put on a stream of the transport's own.
fn refuse(site: &Site, layout: &RequestLayout, platform: Platform) -> Result<(), Error> {
    if site.op.row().started.is_none() {
        let feature = format!("starting {} without waiting for its end", site.op);
        return Err(site.error(Cause::Unsupported { feature, reason: "MPI has no such function" }));
    }
    if !site.op.row().is_collective()
        && !layout.local
        && let Some(reason) = transport::messages_apart(platform)
    {
        return Err(site.error(Cause::Unsupported { feature: site.name().into(), reason }));
    }
    Ok(())
}

/// # Safety
/// Called by XLA with a frame of its own making, whose buffers stay valid until this returns.
pub unsafe extern "C" fn start<const KIND: u8>(frame: *mut CallFrame) -> *mut FfiError {
    // SAFETY: promised by the caller.
    unsafe {
        guard(frame, |frame| {
            let (state, plan) = state(frame)?;
            let (stream, _context) = enter::<KIND>(frame).map_err(Error::from)?;
            let of_operand;
            let Bound { site, watched } = match &state.site {
                Sites::One(bound) => bound,
                Sites::ByOperand { template, bound } => {
                    let eager = started::eager_call(frame, state.transport, stream);
                    let eager = eager.map_err(|cause| template.error(cause))?;
                    let EagerCall::Run { comm, line, .. } = eager else { return Ok(()) };
                    of_operand = bind(template, bound, (comm, line), state.transport)?;
                    &*of_operand
                }
            };
            let _guard = usable(site)?;
            judged(site, watched, begin(frame, (site, watched), &plan.layout, state.transport, stream))
        })
    }
}

/// # Safety
/// `frame` is XLA's, of the execute stage.
unsafe fn state(frame: &CallFrame) -> Result<(&State, &RequestPlan), Error> {
    // SAFETY: promised by the caller.
    let state = unsafe { get_state(frame)? };
    match &state.request {
        Some(plan) => Ok((state, plan)),
        None => {
            Err(Cause::Request { message: "the state of a request is that of an operation".into() }.into())
        }
    }
}

/// # Safety
/// As `start`.
unsafe fn begin(
    frame: &CallFrame,
    (site, watched): (&Site, &Watched),
    &layout: &RequestLayout,
    transport: &'static Transport,
    stream: Stream,
) -> Result<(), Box<Error>> {
    let located = |cause| site.error(cause);
    let mut counts = Counts::new();
    // SAFETY: promised by the caller.
    let (operand, peers, handle) =
        unsafe { started::start(frame, site, &layout, &mut counts, transport, stream) }.map_err(located)?;
    let mut call = Call { counts: &counts, ..Call::of(site, stream) };
    call.send = operand.filter(|_| layout.sends);
    let own = if layout.local { None } else { transport.own_stream(&call)? };
    let streams = (stream, own);
    // SAFETY: promised by the caller.
    let memory = unsafe { RequestMemory::new(transport, site.op, &layout, operand.as_ref(), streams) };
    let memory = memory.map_err(located)?;
    let mut found = None;
    if layout.local {
        found = Some(transport::start(&call, layout, memory, None, None)?);
    } else {
        memory.lend(&mut call, &layout);
        call.check()?;
        if let Some(peers) = peers {
            frame::address(&mut call, peers)?;
        }
        watched.run(&mut call, |call, running, ahead| {
            let execute = |call: &Call| {
                let record = running.record();
                found = Some(match own {
                    None => transport::start(call, layout, memory, record, ahead)?,
                    Some(own) => transport::start_on(own, transport, call, layout, memory, record)?,
                });
                Ok(())
            };
            if log::is_enabled() { log::logged(call, execute) } else { execute(call) }
        })?;
    }
    if let Some(found) = found {
        // SAFETY: a result of XLA's.
        unsafe { transport.write(found, &handle, stream) }.map_err(located)?;
    }
    Ok(())
}

/// # Safety
/// Called by XLA with a frame of its own making, whose buffers stay valid until this returns.
pub unsafe extern "C" fn wait<const KIND: u8>(frame: *mut CallFrame) -> *mut FfiError {
    // SAFETY: promised by the caller.
    unsafe {
        guard(frame, |frame| {
            let (state, plan) = state(frame)?;
            let (stream, _context) = enter::<KIND>(frame).map_err(Error::from)?;
            let (Sites::ByOperand { template: site, .. } | Sites::One(Bound { site, .. })) = &state.site;
            let located = |cause| site.error(cause);
            let line = match site.operand {
                Operand::Call => {
                    let eager = started::eager_call(frame, state.transport, stream).map_err(located)?;
                    let EagerCall::Run { line, .. } = eager else { return Ok(()) };
                    line
                }
                _ => 0,
            };
            if mpilib::is_ending() {
                return Err(site.error(at(site, line, Cause::Finalized)).into());
            }
            let (handle, results) =
                started::wait(frame, site, &plan.layout, state.transport, stream).map_err(located)?;
            let taken = transport::take(handle, &plan.layout);
            let Some(request) = taken.map_err(|cause| site.error(at(site, line, cause)))? else {
                let is_zero = plan.layout.initial;
                return nothing(site, line, is_zero.then_some(state.transport), results, stream);
            };
            let end = || request.wait(stream, |memory| copy::<KIND>(site, plan, memory, results, stream));
            let Some(record) = &request.record else { return Ok(end()?) };
            let watched = plan.watched(site, line, record);
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

impl RequestPlan {
    fn watched(&self, site: &Site, line: i32, started: &Record) -> Arc<Watched> {
        let mut waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        let is_same = |(info, other, _): &&RecordedWait| Arc::ptr_eq(info, &started.info) && *other == line;
        if let Some((.., watched)) = waits.iter().find(is_same) {
            return watched.clone();
        }
        let watched = Arc::new(Watched::of_wait(started, &line_of(site, line)));
        if waits.len() == WAITS {
            waits.remove(0);
        }
        waits.push((started.info.clone(), line, watched.clone()));
        watched
    }
}

/// A wait for what was never started: in a derivative, `transport` writes zeros; elsewhere it is an error.
fn nothing(
    site: &Site,
    line: i32,
    transport: Option<&Transport>,
    results: [Option<Buffer>; 2],
    stream: Stream,
) -> Result<(), Box<Error>> {
    let Some(transport) = transport else {
        let message = "the request was never started".into();
        return Err(site.error(at(site, line, Cause::Request { message })).into());
    };
    for result in results.into_iter().flatten() {
        // SAFETY: a result of XLA's.
        unsafe { transport.clear(&result, stream) }.map_err(|cause| site.error(cause))?;
    }
    Ok(())
}

/// Copies what the wait gives to where XLA wants it.
fn copy<const KIND: u8>(
    site: &Site,
    plan: &RequestPlan,
    memory: &RequestMemory,
    results: [Option<Buffer>; 2],
    stream: Stream,
) -> Result<(), Cause> {
    for (from, to) in memory.results(&plan.layout).into_iter().zip(results) {
        let (from, to) = match (from, to) {
            (Some(from), Some(to)) => (from, to),
            (None, None) => continue,
            (from, to) => {
                let [expected, actual] = [from, to].map(|it| usize::from(it.is_some()));
                return Err(Cause::Buffers { operand: "result", expected, actual });
            }
        };
        if (from.dtype(), from.count()) != (to.dtype(), to.count()) {
            let [from, to] = [from, to].map(|it| format!("{} x {}", it.count(), it.dtype().name()));
            let message = format!("the request is of {from}, and waited for as {to}");
            return Err(Cause::Request { message });
        }
        if KIND == kind::CPU {
            pages::prepare(&Call { recv: Some(to), ..Call::of(site, stream) });
        }
        // SAFETY: a result of XLA's, of as many bytes.
        unsafe { memory.copy(&from, &to, stream)? };
    }
    Ok(())
}
