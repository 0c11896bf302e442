//! Nothing hangs in silence.
//!
//! The [`watchdog`] is a thread that observes. It finds out what this process [`waits`] for, and where [`python`] is, and tells
//! the other ranks of the host, as this rank's [`own`] status (see [`job`](crate::job)). One of them is the [`leader`], and does
//! what [`decide`] says: the wait-for [`graph`] of the ranks shows which waits cannot end. A [`report`] puts what all ranks do
//! in a few lines, with [`groups`] of ranks, and each leaves a [`dump`]. [`start`] is what the rest of the package calls, [`end`]
//! ends the job, and [`terminate`] prints a line where a signal ends this rank.

mod decide;
mod dump;
mod end;
mod graph;
mod groups;
mod leader;
mod own;
mod python;
mod report;
mod start;
mod terminate;
mod waits;
mod watchdog;

pub use self::python::{Frame, Thread, answer, use_answers};
pub use self::start::{
    Settings, abort_after, choose_default, ending, exit, open_link, start, take_signals, user_frame,
};
pub use self::terminate::python_runs;
pub use self::waits::{enter, enter_limit, leave, leave_limit, notice};
