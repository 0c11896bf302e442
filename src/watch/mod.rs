//! Nothing hangs in silence.
//!
//! The [`watchdog`] is a thread that observes. It finds out what this process [`waits`] for, and where [`python`] is, and tells
//! the other ranks of the host, as this rank's [`own`] status (see [`job`](crate::job)). One of them is the [`leader`], and does
//! what [`decide`] says: the wait-for [`graph`] of the ranks shows which waits cannot end. A [`report`] puts what all ranks do
//! in a few lines, with [`groups`] of ranks, and each leaves a [`dump`]. [`api`] is what the rest of the package calls, with its
//! [`settings`], and [`end`] ends the job or this rank.

mod api;
mod decide;
mod dump;
mod end;
mod graph;
mod groups;
mod leader;
mod own;
mod python;
mod report;
mod settings;
mod waits;
mod watchdog;

pub use self::api::{choose_default, open_link, start, user_frame};
pub use self::end::{abort_after, ending, python_runs, take_signals};
pub use self::python::{Frame, Thread, answer, questions};
pub use self::settings::Settings;
pub use self::waits::{enter, enter_limit, enter_on, leave, leave_limit, notice};
