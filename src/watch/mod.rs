//! Nothing hangs in silence.
//!
//! [`watchdog`] is a thread that observes, and does what [`decide`] says. What this process [`waits`] for, and where [`python`]
//! is, it tells the other ranks as its [`own`] status (see [`job`](crate::job)). The [`graph`] of who waits for whom says which
//! waits cannot end. A [`report`] puts what all ranks do in a few lines, with [`groups`] of ranks. [`start`] is what the rest of
//! the package calls, [`end`] ends the job, [`terminate`] has a word to say where a signal ends this rank, and [`default`] is
//! about the default communicator where a rank ends without it.

mod decide;
mod default;
mod end;
mod graph;
mod groups;
mod own;
mod python;
mod report;
mod start;
mod terminate;
mod waits;
mod watchdog;

use std::sync::{Arc, OnceLock};

pub use self::python::use_answers;
pub use self::start::{
    Settings, abort_after, choose_default, ending, exit, open_link, report_all, start, take_signals,
};
pub use self::terminate::python_runs;
pub use self::waits::{enter, enter_limit, leave, leave_limit};
use crate::call::{Call, Site};
use crate::compare::{self, samples};
use crate::error::{Cause, Error};
use crate::record::recorder::{self, Record, Running};
pub use crate::record::samples::share_default;
use crate::record::timeline;
use crate::transport::{self, Ahead, Platform, Transport};

/// What is compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CheckLevel {
    Off,
    /// [`samples`], after the fact.
    #[default]
    Samples,
    /// Every operation, before it runs.
    Operations,
}

static CHECK: OnceLock<CheckLevel> = OnceLock::new();

/// Decides for the life of the process whether operations are checked before they run.
pub fn set_check(level: CheckLevel) {
    let _ = CHECK.set(level);
}

fn check_level() -> CheckLevel {
    CHECK.get().copied().unwrap_or_default()
}

/// Whether the ranks compare operations before they run.
pub fn is_checking() -> bool {
    check_level() == CheckLevel::Operations
}

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
    let running = recorder::begin_wait(&watched.what, started);
    waits::notice();
    let result = body();
    end(running, result)
}

/// What the handler keeps for each operation of a compiled program.
#[derive(Debug)]
pub struct Watched {
    what: Arc<recorder::OpInfo>,
    /// Whether the ranks compare it before it runs.
    is_checked: bool,
    /// Whether samples of it are taken.
    is_sampled: bool,
    exact: bool,
}

impl Watched {
    pub fn new(site: &Site, transport: &dyn Transport) -> Self {
        Self {
            what: recorder::describe(site, transport.name()),
            is_checked: is_checking(),
            is_sampled: check_level() == CheckLevel::Samples
                && site.comm.size > 1
                // What XLA replays is not counted, and each rank decides what that is.
                && !transport::is_recorded(Platform::Cuda),
            exact: transport.has_exact_lengths(),
        }
    }

    /// Of the waits, at a line, for what was started.
    pub fn of_wait(started: &Record, line: &str) -> Self {
        let what = recorder::describe_wait(&started.what, line);
        Self { what, is_checked: is_checking(), is_sampled: false, exact: false }
    }

    /// Runs an operation between the two ends of its record.
    ///
    /// Errors are boxed because they are large, and results move around.
    #[inline]
    pub fn run(
        &self,
        call: &mut Call,
        body: impl FnOnce(&Call, &Running, Option<Box<dyn Ahead>>) -> Result<(), Error>,
    ) -> Result<(), Box<Error>> {
        let running = recorder::begin(&self.what, call);
        waits::notice();
        let is_sampled = self.is_sampled && samples::is_due(call, &running);
        if is_sampled {
            samples::take(call, &running);
        }
        let result = if self.is_checked {
            let compared = compare::compare(self.exact, call, &running);
            compared.and_then(|ahead| body(call, &running, ahead))
        } else {
            body(call, &running, None)
        };
        if is_sampled && self.what.op.row().is_collective() {
            samples::end(&self.what.comm, running.sequence());
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
        let is_ours = |record: &Record| Arc::ptr_eq(&record.what, &self.what);
        if let Some(record) = recorder::records().into_iter().rev().find(is_ours) {
            text += &format!("\n  in {record}");
            if self.what.location.is_empty()
                && let Some(frame) = start::user_frame()
            {
                text += &format!("; Python is at {frame}");
            }
        }
        if !self.is_checked {
            text += "\n  MPI4JAX_CHECK=1 compares what the ranks are about to do, before they do it";
        }
        text
    }
}
