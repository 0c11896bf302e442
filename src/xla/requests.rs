//! Handlers of nonblocking operations: start, wait, and those that order computation between the two.

use std::sync::Arc;

use super::c_api::{CallFrame, FfiError};
use super::state::{Instantiated, enter, fail, get_state, guard, platform, set_up};
use super::{frame, pages, watched};
use crate::call::{Blocks, Call, EagerCall, Phase, Site, Stream};
use crate::device::Device;
use crate::error::{Cause, Error};
use crate::finalize;
use crate::ops::{self, Counts};
use crate::transport::{self, AnyTransport, Handle, RequestLayout, RequestMemory, Transport};
use crate::watch;

/// Both stages of the target that returns a token after its operands, and does nothing else.
///
/// # Safety
/// Called by XLA with a frame of its own making.
pub unsafe extern "C" fn after<const GPU: bool>(frame: *mut CallFrame) -> *mut FfiError {
    // SAFETY: promised by the caller.
    unsafe { guard::<GPU>(frame, |_| Ok(())) }
}

/// The execute stage of the target that returns the null handle, zeros, after its operands.
///
/// # Safety
/// Called by XLA with a frame of its own making.
pub unsafe extern "C" fn ready<const GPU: bool>(frame: *mut CallFrame) -> *mut FfiError {
    // SAFETY: promised by the caller.
    let zeros = |frame: &CallFrame| unsafe {
        let (stream, _context) = enter::<GPU>(frame)?;
        let transport = transport::selected(platform::<GPU>())?;
        let handle = frame::handle(frame)?;
        Ok::<_, Error>(transport.device().clear(&handle, stream)?)
    };
    // SAFETY: promised by the caller.
    unsafe { guard::<GPU>(frame, |frame| Ok(zeros(frame)?)) }
}

/// Stage 1 of a start, or of a wait.
///
/// # Safety
/// Called by XLA with a frame of its own making.
pub unsafe extern "C" fn instantiate<const GPU: bool, const START: bool>(
    frame: *mut CallFrame,
) -> *mut FfiError {
    // SAFETY: promised by the caller.
    unsafe { set_up::<GPU>(frame, if START { Phase::Start } else { Phase::Wait }) }
}

/// # Safety
/// Called by XLA with a frame of its own making, whose buffers stay valid until this returns.
pub unsafe extern "C" fn start<const GPU: bool>(frame: *mut CallFrame) -> *mut FfiError {
    // SAFETY: promised by the caller.
    unsafe {
        guard::<GPU>(frame, |frame| {
            let state = get_state::<GPU>(frame)?;
            let layout = state.description.layout().map_err(|cause| state.error(cause))?;
            let (stream, _context) = enter::<GPU>(frame).map_err(|cause| state.error(cause))?;
            state.run(frame, stream, |site, eager| begin(frame, site, layout, state.transport, eager, stream))
        })
    }
}

/// # Safety
/// As `start`.
unsafe fn begin(
    frame: &CallFrame,
    site: &Arc<Site>,
    layout: &RequestLayout,
    transport: &'static AnyTransport,
    eager: Option<&EagerCall>,
    stream: Stream,
) -> Result<(), Box<Error>> {
    let located = |cause| site.error(cause);
    transport::check_room().map_err(located)?;
    let (mut others, mut counts) = (Blocks::new(), Counts::new());
    let mut call = Call::of(site, stream);
    // SAFETY: promised by the caller.
    let handle =
        unsafe { frame::fill(&mut call, frame, transport, eager, Some(layout), (&mut others, &mut counts))? };
    let handle = handle.ok_or_else(|| located(Cause::missing("result")))?;
    let operand = call.send;
    call.send = operand.filter(|_| layout.sends);
    let own = if layout.local { None } else { transport.own_stream(&call)? };
    let streams = (stream, own);
    // SAFETY: promised by the caller.
    let memory = unsafe { RequestMemory::new(transport, site.op, layout, operand.as_ref(), streams) };
    let memory = memory.map_err(located)?;
    let mut found = Handle::default();
    if layout.local {
        found = transport::keep(site, memory);
    } else {
        memory.lend(&mut call);
        call.check()?;
        watched::run(site, &call, |call, running| {
            let asked = watch::ask(call, running)?;
            // SAFETY: the buffers are lent above.
            found = unsafe { transport::start(transport, site, call, own, memory, running.keep(), asked)? };
            Ok(())
        })?;
    }
    // SAFETY: a result of XLA's.
    unsafe { transport.device().write(&found.map(f32::to_bits), &handle, stream) }.map_err(located)?;
    Ok(())
}

/// # Safety
/// Called by XLA with a frame of its own making, whose buffers stay valid until this returns.
pub unsafe extern "C" fn wait<const GPU: bool>(frame: *mut CallFrame) -> *mut FfiError {
    // SAFETY: promised by the caller.
    unsafe {
        guard::<GPU>(frame, |frame| {
            let state = get_state::<GPU>(frame)?;
            let (stream, _context) = enter::<GPU>(frame).map_err(|cause| state.error(cause))?;
            let line = match state.eager_call(frame, stream)? {
                None => state.location.clone(),
                Some(EagerCall::Run { line, .. }) => ops::numbered_line(line).into(),
                Some(EagerCall::Compile) => return Ok(()),
            };
            end(frame, state, line, stream)
        })
    }
}

/// Waits at a line for what the handle of a frame names.
///
/// # Safety
/// As `wait`.
unsafe fn end(
    frame: &CallFrame,
    state: &Instantiated,
    line: Arc<str>,
    stream: Stream,
) -> Result<(), Box<Error>> {
    let failed = |cause| match cause {
        Cause::Request { message } if !line.is_empty() => {
            state.error(Cause::Request { message: format!("{message}, {line}") })
        }
        cause => state.error(cause),
    };
    if finalize::is_ending() {
        return Err(failed(Cause::Finalized).into());
    }
    let Instantiated { description, transport, .. } = state;
    let device = transport.device();
    let layout = description.layout().map_err(failed)?;
    // SAFETY: promised by the caller.
    let read = unsafe { frame::wait(frame, description.operand, layout, transport, stream) };
    let (handle, results) = read.map_err(failed)?;
    let Some(request) = transport::take(handle, &results).map_err(failed)? else {
        // In a derivative, zeros.
        if !layout.initial {
            return Err(failed(Cause::Request { message: "the request was never started".into() }).into());
        }
        for result in results.into_iter().flatten() {
            // SAFETY: a result of XLA's.
            unsafe { device.clear(&result, stream) }.map_err(failed)?;
        }
        return Ok(());
    };
    let copy = |memory: &RequestMemory| {
        for (from, to) in memory.results().into_iter().zip(results).filter_map(|(from, to)| from.zip(to)) {
            if matches!(device, Device::Host) {
                pages::prepare(&to);
            }
            // SAFETY: a result of XLA's, which is as large: the request was taken for it.
            unsafe { memory.copy(&from, &to, stream)? };
        }
        Ok(())
    };
    let wait = || {
        if let Some(lines) = request.difference()? {
            return Err(request.site.error(watch::mismatch(&request.site.comm, &lines)));
        }
        request.logged(|| request.wait(stream, copy))
    };
    let Some(record) = &request.record else { return Ok(request.wait(stream, copy)?) };
    watched::wait_for(record, &request.site, &line, wait)
        .inspect_err(|error| fail(error, &request.site, Phase::Wait))
}
