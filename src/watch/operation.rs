//! What is done here where an operation begins, and where it ends.

use super::compare::{self, CheckLevel, check_level};
use super::{exact, settings};
use crate::call::{Call, Phase, Site};
use crate::error::{Cause, Error};
use crate::record::messages;
use crate::record::recorder::Running;

/// An operation begins. An error: the ranks are about to do different things.
#[inline]
pub fn begin(call: &Call, running: &Running) -> Result<(), Error> {
    let (level, comm) = (check_level(), &call.site.comm);
    if comm.size == 1 {
        return Ok(());
    }
    if !call.site.op.row().is_collective() {
        if level != CheckLevel::Off && call.site.op.row().sends() {
            messages::sends(call);
        }
        return Ok(());
    }
    // Nothing is known of ranks that have not come yet, or are on other hosts.
    if running.sequence() == 1
        && let Some(report) = settings::difference_among(comm.world.iter().copied())
    {
        return Err(call.site.error(Cause::Mismatch { report }));
    }
    match level {
        CheckLevel::Off => Ok(()),
        CheckLevel::Neighbors => compare::before(call, running),
        // For a nonblocking operation, `ask` sends the comparison at initiation, and the wait
        // evaluates it.
        CheckLevel::Operations if call.site.phase == Phase::Start => Ok(()),
        CheckLevel::Operations => exact::compare_all(call, running),
    }
}

/// An operation has ended, or the wait for one.
#[inline]
pub fn end(call: &Call, running: &Running) -> Result<(), Error> {
    let row = call.site.op.row();
    if call.site.comm.size == 1 {
        return Ok(());
    }
    if row.is_collective() {
        return if check_level() == CheckLevel::Neighbors { compare::after(call, running) } else { Ok(()) };
    }
    if call.site.phase != Phase::Start {
        end_message(call.site, (call.envelope.dest, call.envelope.sendtag));
    }
    Ok(())
}

/// A message has been sent, or received, or both. What NCCL carries is received on a stream, and not counted.
#[inline]
pub fn end_message(site: &Site, (dest, tag): (i32, i32)) {
    if site.op.row().sends() && site.transport != "nccl" {
        messages::has_sent(&site.comm, dest, tag);
    }
    if check_level() != CheckLevel::Off
        && let Some(difference) = messages::difference()
    {
        compare::message(&difference);
    }
}
