//! The handler behind every target, one function per stage.

use std::sync::Arc;

use super::c_api::{CallFrame, FfiError};
use super::state::{enter, get_state, guard, set_up};
use super::{frame, pages, watched};
use crate::call::{Blocks, Call, EagerCall, Phase, Site, Stream};
use crate::device::Device;
use crate::error::Error;
use crate::ops::{self, Buffer};
use crate::transport::{AnyTransport, Transport};

/// Stage 1, once per operation in a compiled program: decodes the attributes.
///
/// # Safety
/// Called by XLA with a frame of its own making.
pub unsafe extern "C" fn instantiate<const GPU: bool>(frame: *mut CallFrame) -> *mut FfiError {
    // SAFETY: promised by the caller.
    unsafe { set_up::<GPU>(frame, Phase::Whole) }
}

/// Stage 2, every time that the operation runs.
///
/// # Safety
/// Called by XLA with a frame of its own making, whose buffers stay valid until this returns.
pub unsafe extern "C" fn execute<const GPU: bool>(frame: *mut CallFrame) -> *mut FfiError {
    // SAFETY: promised by the caller.
    unsafe {
        guard::<GPU>(frame, |frame| {
            let state = get_state::<GPU>(frame)?;
            let (stream, _context) = enter::<GPU>(frame).map_err(|cause| state.error(cause))?;
            state.run(frame, stream, |site, eager| run(frame, site, state.transport, eager, stream))
        })
    }
}

/// # Safety
/// As `execute`.
#[inline]
unsafe fn run(
    frame: &CallFrame,
    site: &Arc<Site>,
    transport: &AnyTransport,
    eager: Option<&EagerCall>,
    stream: Stream,
) -> Result<(), Box<Error>> {
    let (mut others, mut counts) = (Blocks::new(), ops::Counts::new());
    let mut call = Call::of(site, stream);
    // SAFETY: promised by the caller.
    unsafe { frame::fill(&mut call, frame, transport, eager, None, (&mut others, &mut counts))? };
    let is_in_place = |recv: &Buffer| call.send.is_some_and(|send| send.data() == recv.data());
    if let (Device::Host, Some(recv)) = (transport.device(), call.recv.filter(|recv| !is_in_place(recv))) {
        pages::prepare(&recv);
    }
    watched::run(site, &call, |call, _| transport.execute(call))
}
