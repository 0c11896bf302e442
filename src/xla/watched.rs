//! Execution of an operation under observation: with a record, and compared with the other ranks or sampled.

use std::sync::Arc;

use crate::call::{Call, Phase, Site};
use crate::error::{Cause, Error};
use crate::record::recorder::{self, Record, Running};
use crate::record::{events, log, timeline};
use crate::watch::{self, CheckLevel, check_level};

#[inline]
fn end(mut running: Running, result: Result<(), Error>) -> Result<(), Box<Error>> {
    let result = result.map_err(Box::new);
    if result.is_err() {
        running.fail();
    }
    if timeline::is_enabled() {
        timeline::write(running);
    }
    result
}

/// Waits at a line for what was started, as `started` says, between the two ends of a record of its own.
pub fn wait_for(
    started: &Record,
    line: Arc<str>,
    body: impl FnOnce() -> Result<(), Error>,
) -> Result<(), Box<Error>> {
    let running = recorder::begin_wait(started, line);
    watch::notice();
    let result = body();
    end(running, result)
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
    let running = recorder::begin(site, call);
    let (begun, compared) = watch::begin(call, &running);
    let execute = |call: &Call| body(call, &running);
    let result = compared.and_then(|()| {
        if events::wants_calls() { log::logged(site.mpi_name(), call, execute) } else { execute(call) }
    });
    begun.end(call, &running);
    end(running, result)
}

/// What is said of an operation that has failed, or of the wait for it, before the job ends.
#[cold]
pub fn explain(site: &Arc<Site>, phase: Phase, cause: &Cause) -> String {
    let mut text = cause.to_string();
    if matches!(cause, Cause::Mismatch { .. }) {
        return text; // says it all
    }
    let is_ours = |record: &Record| Arc::ptr_eq(&record.site, site) && record.phase() == phase;
    if let Some(record) = recorder::records().into_iter().rev().find(is_ours) {
        text += &format!("\n  in {record}");
        if !site.forms.sent.is_empty() {
            text += &format!(", of {}", site.forms.sent);
        }
        if record.location().is_empty()
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
