//! Execution of an operation under observation: with a record, and compared with the other ranks or sampled.

use std::sync::Arc;

use crate::board::own;
use crate::call::{Call, Phase, Site};
use crate::error::{Cause, Error};
use crate::record::recorder::{self, Plain, Record, Running};
use crate::record::{events, log, timeline};
use crate::watch::{self, CheckLevel, check_level};

#[inline]
fn end(
    mut running: Running,
    result: Result<(), Error>,
    messages: impl FnOnce() -> Option<usize>,
) -> Result<(), Box<Error>> {
    let result = result.map_err(Box::new);
    if result.is_err() {
        running.fail();
    }
    if timeline::is_enabled() {
        timeline::write(running, messages());
    }
    result
}

/// Waits at a line for what was started, as `started` says, between the two ends of a record of its own.
pub fn wait_for(
    started: &Plain,
    site: &Site,
    line: &str,
    body: impl FnOnce() -> Result<(), Error>,
) -> Result<(), Box<Error>> {
    let running = recorder::begin_wait(started, site, line);
    let result = body();
    if result.is_ok() && !site.op.row().is_collective() {
        watch::end_message(site, started.destination());
    }
    end(running, result, || Some(0))
}

/// Runs an operation of a site between the two ends of its record.
///
/// Errors are boxed because they are large, and results move around.
#[inline]
pub fn run(
    site: &Arc<Site>,
    call: &Call,
    body: impl FnOnce(&Call, &Running) -> Result<(), Error>,
) -> Result<(), Box<Error>> {
    let running = recorder::begin(site, call, |count| watch::print_of(call, count));
    let execute = |call: &Call| body(call, &running);
    let result = watch::begin(call, &running).and_then(|()| {
        if events::wants_calls() { log::logged(site.mpi_name(), call, execute) } else { execute(call) }
    });
    let result = result.and_then(|()| watch::end_operation(call, &running));
    end(running, result, || call.messages())
}

/// What is said of an operation that has failed, or of the wait for it, before the job ends.
#[cold]
pub fn explain(site: &Arc<Site>, phase: Phase, cause: &Cause) -> String {
    let mut text = cause.to_string();
    if matches!(cause, Cause::Mismatch { .. }) {
        return text; // says it all
    }
    let is_ours = |record: &Record| {
        let is_site = record.op == site.op
            && *record.comm.key == *site.comm.key
            && record.line.contains(&*site.location);
        is_site && record.phase == phase
    };
    if let Some(record) = recorder::records(own()).into_iter().rev().find(is_ours) {
        text += &format!("\n  in {record}");
        if !site.forms.sent.is_empty() {
            text += &format!(", of {}", site.forms.sent);
        }
        if record.line.is_empty()
            && let Some(frame) = watch::user_frame()
        {
            text += &format!("; Python is at {frame}");
        }
    }
    if !site.op.row().is_collective() {
        text += "\n  the message may not fit: it must have the same shape and dtype on the two ranks";
    } else if check_level() != CheckLevel::Operations {
        text += "\n  the operands of the ranks may not match: MPI4JAX_CHECK=1 compares operations before they run";
    }
    text
}
