//! The handlers of what is started and waited for later, and of what orders computation beside it.

use std::sync::{Arc, PoisonError};

use super::c_api::{CallFrame, FfiError};
use super::frame::{self, started};
use super::pages;
use super::state::{Bound, RequestPlan, State, enter, fail, get_state, guard, kind, set_up};
use super::watched::{Watched, wait_for};
use crate::call::{Call, EagerCall, Phase, Stream};
use crate::error::{Cause, Error};
use crate::mpilib;
use crate::ops::{self, Buffer, Counts};
use crate::record::log;
use crate::record::recorder::Record;
use crate::transport::{self, Request, RequestLayout, RequestMemory, Transport};

/// Both stages of the target that gives a token once its operands are there, and does nothing else.
///
/// # Safety
/// Called by XLA with a frame of its own making.
pub unsafe extern "C" fn after<const KIND: u8>(frame: *mut CallFrame) -> *mut FfiError {
    // SAFETY: promised by the caller.
    unsafe { guard::<KIND>(frame, |_| Ok(())) }
}

/// The execute stage of the target that gives zeros, the handle of nothing, once its operands are there.
///
/// # Safety
/// Called by XLA with a frame of its own making.
pub unsafe extern "C" fn ready<const KIND: u8>(frame: *mut CallFrame) -> *mut FfiError {
    // SAFETY: promised by the caller.
    let zeros = |frame: &CallFrame| unsafe {
        let (stream, _context) = enter::<KIND>(frame)?;
        let transport = transport::selected(kind::platform::<KIND>())?;
        let handle = started::handle(frame)?;
        Ok::<_, Error>(transport.device().clear(&handle, stream)?)
    };
    // SAFETY: promised by the caller.
    unsafe { guard::<KIND>(frame, |frame| Ok(zeros(frame)?)) }
}

/// Stage 1 of a start, or of a wait.
///
/// # Safety
/// Called by XLA with a frame of its own making.
pub unsafe extern "C" fn instantiate<const KIND: u8, const START: bool>(
    frame: *mut CallFrame,
) -> *mut FfiError {
    // SAFETY: promised by the caller.
    unsafe { set_up::<KIND>(frame, if START { Phase::Start } else { Phase::Wait }) }
}

/// # Safety
/// Called by XLA with a frame of its own making, whose buffers stay valid until this returns.
pub unsafe extern "C" fn start<const KIND: u8>(frame: *mut CallFrame) -> *mut FfiError {
    // SAFETY: promised by the caller.
    unsafe {
        guard::<KIND>(frame, |frame| {
            let (state, plan) = state::<KIND>(frame)?;
            let (stream, _context) = enter::<KIND>(frame).map_err(|cause| state.error(cause))?;
            let eager = state.eager_call(frame, stream)?;
            state.run(eager, |bound| begin(frame, bound, &plan.layout, state.transport, stream))
        })
    }
}

/// # Safety
/// `frame` is XLA's, of the execute stage.
unsafe fn state<const KIND: u8>(frame: &CallFrame) -> Result<(&State, &RequestPlan), Error> {
    // SAFETY: promised by the caller.
    let state = unsafe { get_state::<KIND>(frame)? };
    let none = || Cause::Request { message: "the state of a request is that of an operation".into() };
    Ok((state, state.request.as_ref().ok_or_else(none)?))
}

/// # Safety
/// As `start`.
unsafe fn begin(
    frame: &CallFrame,
    Bound { site, watched }: &Bound,
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
        // SAFETY: nothing is communicated.
        found = Some(unsafe { transport::start(transport, &call, None, layout, memory, None)? });
    } else {
        memory.lend(&mut call, &layout);
        call.check()?;
        if let Some(peers) = peers {
            frame::address(&mut call, peers)?;
        }
        watched.run(&call, |call, running| {
            let execute = |call: &Call| {
                let record = running.record();
                // SAFETY: the buffers are lent above.
                found = Some(unsafe { transport::start(transport, call, own, layout, memory, record)? });
                Ok(())
            };
            if log::is_enabled() { log::logged(call, execute) } else { execute(call) }
        })?;
    }
    if let Some(found) = found {
        // SAFETY: a result of XLA's.
        unsafe { transport.device().write(found.map(f32::to_bits), &handle, stream) }.map_err(located)?;
    }
    Ok(())
}

/// # Safety
/// Called by XLA with a frame of its own making, whose buffers stay valid until this returns.
pub unsafe extern "C" fn wait<const KIND: u8>(frame: *mut CallFrame) -> *mut FfiError {
    // SAFETY: promised by the caller.
    unsafe {
        guard::<KIND>(frame, |frame| {
            let (state, plan) = state::<KIND>(frame)?;
            let (stream, _context) = enter::<KIND>(frame).map_err(|cause| state.error(cause))?;
            let line = match state.eager_call(frame, stream)? {
                None => None,
                Some(EagerCall::Run { line, .. }) => Some(line),
                Some(EagerCall::Compile) => return Ok(()),
            };
            let wait = Wait { state, plan, line, stream };
            if mpilib::is_ending() {
                return Err(wait.error(Cause::Finalized).into());
            }
            let operand = state.description.operand;
            let (handle, results) = started::wait(frame, operand, &plan.layout, state.transport, stream)
                .map_err(|cause| wait.error(cause))?;
            let taken = transport::take(handle, &plan.layout).map_err(|cause| wait.error(cause))?;
            let Some(request) = taken else { return Ok(wait.nothing(results)?) };
            let end = || request.wait(stream, |memory| wait.copy::<KIND>(memory, results));
            let Some(record) = &request.record else { return Ok(end()?) };
            let watched = wait.watched(record);
            let result = wait_for(&watched, record, || logged(&request, end));
            result.inspect_err(|error| fail(error, request.comm(), &watched))
        })
    }
}

fn logged(request: &Request, end: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
    if log::is_enabled() { request.with_call(|call| log::logged(call, |_| end())) } else { end() }
}

/// One run of a wait.
struct Wait<'a> {
    state: &'a State,
    plan: &'a RequestPlan,
    /// The number of the user's line, of an eager one.
    line: Option<i32>,
    stream: Stream,
}

impl Wait<'_> {
    /// The user's line.
    fn location(&self) -> Box<str> {
        self.line.map_or_else(|| self.state.description.location(), ops::numbered_line)
    }

    /// An error, which names the line if it is about a request.
    #[cold]
    fn error(&self, cause: Cause) -> Error {
        let line = self.location();
        self.state.error(match cause {
            Cause::Request { message } if !line.is_empty() => {
                Cause::Request { message: format!("{message}, {line}") }
            }
            cause => cause,
        })
    }

    /// How it is recorded: as the last one, if that was for the same operation and came from the same line.
    fn watched(&self, started: &Record) -> Arc<Watched> {
        let mut last = self.plan.last_wait.lock().unwrap_or_else(PoisonError::into_inner);
        match &*last {
            Some((info, line, watched)) if Arc::ptr_eq(info, &started.info) && *line == self.line => {
                watched.clone()
            }
            _ => {
                let watched = Arc::new(Watched::of_wait(started, &self.location()));
                *last = Some((started.info.clone(), self.line, watched.clone()));
                watched
            }
        }
    }

    /// Of what was never started: in a derivative, zeros.
    fn nothing(&self, results: [Option<Buffer>; 2]) -> Result<(), Error> {
        if !self.plan.layout.initial {
            return Err(self.error(Cause::Request { message: "the request was never started".into() }));
        }
        for result in results.into_iter().flatten() {
            // SAFETY: a result of XLA's.
            unsafe { self.state.transport.device().clear(&result, self.stream) }
                .map_err(|cause| self.error(cause))?;
        }
        Ok(())
    }

    /// Copies what the wait gives to the results of XLA's.
    fn copy<const KIND: u8>(
        &self,
        memory: &RequestMemory,
        results: [Option<Buffer>; 2],
    ) -> Result<(), Cause> {
        for (from, to) in memory.results(&self.plan.layout).into_iter().zip(results) {
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
                pages::prepare(&to);
            }
            // SAFETY: a result of XLA's, of as many bytes.
            unsafe { memory.copy(&from, &to, self.stream)? };
        }
        Ok(())
    }
}
