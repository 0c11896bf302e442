//! The handler behind every target, one function per stage.

use super::c_api::{CallFrame, FfiError};
use super::description::Description;
use super::state::{Bound, State, enter, get_state, guard, kind, set_state};
use super::watched::Watched;
use super::{frame, pages};
use crate::call::{Blocks, Call, EagerCall, Phase, Stream};
use crate::error::{Cause, Error};
use crate::ops;
use crate::record::log;
use crate::transport::{self, Transport};

/// Stage 1, once per operation in a compiled program: decodes the attributes.
///
/// # Safety
/// Called by XLA with a frame of its own making.
pub unsafe extern "C" fn instantiate<const KIND: u8>(frame: *mut CallFrame) -> *mut FfiError {
    // SAFETY: promised by the caller.
    unsafe {
        guard::<KIND>(frame, |frame| {
            let description = Description::of(&frame.attrs).map_err(Error::from)?;
            let located = |cause| description.error(Phase::Whole, cause);
            let platform = kind::platform::<KIND>();
            let transport = transport::selected(platform).map_err(|error| located(error.cause))?;
            if description.op.row().has_blocks && transport::takes_packed(platform) {
                // A program that was exported for another transport.
                let (expected, actual) = ("ghost cells that XLA packs for this transport", "blocks".into());
                return Err(located(Cause::Attribute { name: "halo", expected, actual }).into());
            }
            Ok(set_state::<KIND>(frame, State::new(Phase::Whole, description, transport, None)?)?)
        })
    }
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
