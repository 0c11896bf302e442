//! The watchdog, which reports operations that hang, and the comparison of what the ranks call.
//!
//! All that ranks of a host know of each other is on the [board](crate::board). The [`watchdog`] is a thread of each rank. Of the
//! ranks that wait, one [reads](read) the [states](state) of all, [asks other hosts](hosts) through a [`link`], finds a
//! [`verdict`], and [decides](decide) what is done: a line, or a [`report`] and the [`end`] of the job. Collectives are
//! [compared](compare) before they run, exactly by [`exact`], and [between] hosts when states are exchanged. An [`operation`]
//! begins and ends, [`waits`] are what else is waited for, [`python`] says where Python is, and [`default`] makes the default
//! communicator.

mod api;
mod between;
mod compare;
mod decide;
mod default;
mod end;
mod exact;
mod groups;
mod hosts;
mod link;
mod operation;
mod postmortem;
mod python;
mod read;
mod report;
mod settings;
mod state;
mod verdict;
mod waits;
mod watchdog;

pub use self::api::{build, settings_difference, start, thread_communicates, user_frame};
pub use self::compare::{CheckLevel, check_level, print_of, set_check, share_default};
pub use self::default::make as make_default;
pub use self::end::{abort_after, abort_after_interrupt, ending, take_signals};
pub use self::exact::{ask, mismatch};
pub use self::operation::{begin, end as end_operation, end_message};
pub use self::postmortem::read_board;
pub use self::python::{Frame, answer, questions};
pub use self::settings::Settings;
pub use self::waits::{enter_limit, enter_on, leave, leave_limit};
