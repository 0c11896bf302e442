//! The handler behind every target, one function per stage.

use super::c_api::{CallFrame, FfiError};
use super::state::{Bound, Sites, State, bind, enter, get_state, guard, judged, kind, set_state, usable};
use super::watched::Watched;
use super::{frame, pages};
use crate::call::{Blocks, Call, EagerCall, Site};
use crate::error::{Cause, Error};
use crate::ops;
use crate::record::log;
use crate::transport::{self, Platform, Transport};

/// Stage 1, once per operation in a compiled program: decodes the attributes.
///
/// # Safety
/// Called by XLA with a frame of its own making.
pub unsafe extern "C" fn instantiate<const KIND: u8>(frame: *mut CallFrame) -> *mut FfiError {
    // SAFETY: promised by the caller.
    unsafe {
        guard(frame, |frame| {
            let site = frame::Attributes::new(&frame.attrs).site()?;
            let platform = kind::platform::<KIND>();
            let transport = transport::selected(platform).map_err(|error| site.error(error.cause))?;
            check_form(&site, platform)?;
            let site = Sites::of(site, transport)?;
            Ok(set_state(frame, State { transport, site, request: None })?)
        })
    }
}

/// An error if a program gives blocks that the transport does not reach: one that was exported for another transport.
fn check_form(site: &Site, platform: Platform) -> Result<(), Error> {
    if transport::takes_packed(platform) && site.halo.as_ref().is_some_and(|halo| !halo.is_packed()) {
        let (expected, actual) = ("ghost cells that XLA packs for this transport", "blocks".into());
        return Err(site.error(Cause::Attribute { name: "packed", expected, actual }));
    }
    Ok(())
}

/// Stage 2, every time that the operation runs.
///
/// # Safety
/// Called by XLA with a frame of its own making, whose buffers stay valid until this returns.
pub unsafe extern "C" fn execute<const KIND: u8>(frame: *mut CallFrame) -> *mut FfiError {
    // SAFETY: promised by the caller.
    unsafe {
        guard(frame, |frame| {
            let &State { transport, ref site, .. } = get_state(frame)?;
            let of_operand;
            let Bound { site, watched } = match site {
                Sites::One(bound) => bound,
                Sites::ByOperand { template, bound } => {
                    let eager = frame::eager_call(frame).map_err(|cause| template.error(cause))?;
                    let EagerCall::Run { comm, line, .. } = eager else { return Ok(()) };
                    of_operand = bind(template, bound, (comm, line), transport)?;
                    &*of_operand
                }
            };
            let _guard = usable(site)?;
            judged(site, watched, run::<KIND>(frame, site, transport, watched))
        })
    }
}

/// # Safety
/// As `execute`.
#[inline]
unsafe fn run<const KIND: u8>(
    frame: &CallFrame,
    site: &Site,
    transport: &Transport,
    watched: &Watched,
) -> Result<(), Box<Error>> {
    // SAFETY: promised by the caller.
    unsafe {
        let (stream, _context) = enter::<KIND>(frame).map_err(|cause| site.error(cause))?;
        let (mut others, mut counts) = (Blocks::new(), ops::Counts::new());
        let mut call = Call::of(site, stream);
        frame::fill(&mut call, frame, transport, (&mut others, &mut counts))?;
        if KIND == kind::CPU {
            pages::prepare(&call);
        }
        carry_out(&mut call, transport, watched)
    }
}

#[inline]
pub(super) fn carry_out(call: &mut Call, transport: &Transport, watched: &Watched) -> Result<(), Box<Error>> {
    watched.run(call, |call, _, _| {
        let execute = |call: &Call| transport.execute(call);
        if log::is_enabled() { log::logged(call, execute) } else { execute(call) }
    })
}
