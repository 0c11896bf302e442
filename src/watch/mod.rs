//! The watchdog, which reports operations that hang, and the comparison of what the ranks call.
//!
//! The [`watchdog`] is a thread. It finds out what this process [`waits`] for, and where [`python`] is, and publishes that to
//! the other ranks of the host, as the status of [`this_rank`] (see [`job`]). One of them is the [`leader`], and carries out
//! what [`decide`] returns: the wait-for [`graph`] of the ranks shows which waits cannot end. A [`report`] puts what all ranks do in a
//! few lines, with [`groups`] of ranks, and each leaves a [`dump`]. What the ranks do is [compared](compare), before or
//! afterwards. An [`operation`] begins and ends, [`api`] is what else the package calls, with its [`settings`], of which some
//! are [`shared`] by all ranks, and [`end`] ends the job or this rank.

mod api;
mod compare;
mod decide;
mod dump;
mod end;
mod graph;
mod groups;
mod job;
mod leader;
mod operation;
mod python;
mod report;
mod settings;
mod shared;
mod succession;
mod this_rank;
mod threads;
mod traffic;
mod waits;
mod watchdog;

pub use self::api::{agree, choose_default, open_link, settings_difference, start, user_frame};
pub use self::compare::{CheckLevel, ask, check_level, mismatch, set_check};
pub use self::end::{abort_after, ending, python_runs, take_signals};
pub use self::operation::begin;
pub use self::python::{Frame, Thread, answer, questions};
pub use self::settings::Settings;
pub use self::waits::{enter, enter_limit, enter_on, leave, leave_limit, notice};
