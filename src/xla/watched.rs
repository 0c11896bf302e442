//! How an operation of a compiled program is run: between the two ends of its record, compared with the other ranks' or sampled.

use std::sync::Arc;

use crate::call::{Call, Site};
use crate::compare::{self, CheckLevel, check_level, samples};
use crate::error::{Cause, Error};
use crate::record::recorder::{self, OpInfo, Record, Running};
use crate::record::timeline;
use crate::transport::Transport;
use crate::watch;

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

/// Waits for what was started, as `started` says, between the two ends of a record of its own.
pub fn wait_for(
    watched: &Watched,
    started: &Record,
    body: impl FnOnce() -> Result<(), Error>,
) -> Result<(), Box<Error>> {
    let running = recorder::begin_wait(&watched.info, started);
    watch::notice();
    let result = body();
    end(running, result)
}

/// What the handler keeps for each operation of a compiled program.
#[derive(Debug)]
pub struct Watched {
    info: Arc<OpInfo>,
    /// Whether the ranks compare it before it runs.
    is_checked: bool,
    /// Whether samples of it are taken.
    is_sampled: bool,
}

impl Watched {
    pub fn new(site: &Site, transport: &Transport) -> Self {
        let level = check_level();
        let is_checked = level == CheckLevel::Operations && site.op.row().is_collective();
        let is_sampled = level != CheckLevel::Off && !is_checked && site.comm.size > 1;
        Self { info: recorder::describe(site, transport.name()), is_checked, is_sampled }
    }

    /// Of the waits, at a line, for what was started.
    pub fn of_wait(started: &Record, line: &str) -> Self {
        let info = recorder::describe_wait(&started.info, line);
        Self { info, is_checked: false, is_sampled: false }
    }

    /// Runs an operation between the two ends of its record.
    ///
    /// Errors are boxed because they are large, and results move around.
    #[inline]
    pub fn run(
        &self,
        call: &Call,
        body: impl FnOnce(&Call, &Running) -> Result<(), Error>,
    ) -> Result<(), Box<Error>> {
        let running = recorder::begin(&self.info, call);
        watch::notice();
        let is_sampled = self.is_sampled && samples::is_due(call, &running);
        if is_sampled {
            samples::take(call, &running);
        }
        let compared = if self.is_checked { compare::compare(call, &running) } else { Ok(()) };
        let result = compared.and_then(|()| body(call, &running));
        if is_sampled && self.info.op.row().is_collective() {
            samples::end(&self.info.comm, running.sequence());
        }
        end(running, result)
    }

    /// What is said of an operation that has failed, before the job ends.
    #[cold]
    pub fn explain(&self, cause: &Cause) -> String {
        let mut text = cause.to_string();
        if matches!(cause, Cause::Mismatch { .. }) {
            return text; // says it all
        }
        let is_ours = |record: &Record| Arc::ptr_eq(&record.info, &self.info);
        if let Some(record) = recorder::records().into_iter().rev().find(is_ours) {
            text += &format!("\n  in {record}");
            if self.info.location.is_empty()
                && let Some(frame) = watch::user_frame()
            {
                text += &format!("; Python is at {frame}");
            }
        }
        if check_level() != CheckLevel::Operations {
            text += "\n  the operands of the ranks may not match: MPI4JAX_CHECK=1 compares operations before they run";
        }
        text
    }
}
