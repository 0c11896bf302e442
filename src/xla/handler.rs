//! The handler behind every target, one function per stage.

use super::c_api::{CallFrame, FfiError};
use super::state::{Bound, enter, get_state, guard, kind, set_up};
use super::watched::Watched;
use super::{frame, pages};
use crate::call::{Blocks, Call, EagerCall, Phase, Stream};
use crate::error::Error;
use crate::ops;
use crate::record::log;
use crate::transport::Transport;

/// Stage 1, once per operation in a compiled program: decodes the attributes.
///
/// # Safety
/// Called by XLA with a frame of its own making.
pub unsafe extern "C" fn instantiate<const KIND: u8>(frame: *mut CallFrame) -> *mut FfiError {
    // SAFETY: promised by the caller.
    unsafe { set_up::<KIND>(frame, Phase::Whole) }
}

/// Stage 2, every time that the operation runs.
///
/// # Safety
/// Called by XLA with a frame of its own making, whose buffers stay valid until this returns.
pub unsafe extern "C" fn execute<const KIND: u8>(frame: *mut CallFrame) -> *mut FfiError {
    // SAFETY: promised by the caller.
    unsafe {
        guard::<KIND>(frame, |frame| {
            let state = get_state::<KIND>(frame)?;
            let (stream, _context) = enter::<KIND>(frame).map_err(|cause| state.error(cause))?;
            let eager = state.eager_call(frame, stream)?;
            state.run(eager, |bound| run::<KIND>(frame, bound, state.transport, eager, stream))
        })
    }
}

/// # Safety
/// As `execute`.
#[inline]
unsafe fn run<const KIND: u8>(
    frame: &CallFrame,
    Bound { site, watched }: &Bound,
    transport: &Transport,
    eager: Option<EagerCall>,
    stream: Stream,
) -> Result<(), Box<Error>> {
    let (mut others, mut counts) = (Blocks::new(), ops::Counts::new());
    let mut call = Call::of(site, stream);
    // SAFETY: promised by the caller.
    unsafe { frame::fill(&mut call, frame, transport, eager, (&mut others, &mut counts))? };
    if let Some(recv) =
        call.recv.filter(|recv| KIND == kind::CPU && call.send.is_none_or(|send| send.data() != recv.data()))
    {
        pages::prepare(&recv);
    }
    carry_out(&mut call, transport, watched)
}

#[inline]
fn carry_out(call: &mut Call, transport: &Transport, watched: &Watched) -> Result<(), Box<Error>> {
    watched.run(call, |call, _| {
        let execute = |call: &Call| transport.execute(call);
        if log::is_enabled() { log::logged(call, execute) } else { execute(call) }
    })
}
