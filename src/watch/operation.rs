//! What is done here where an operation begins, and where it ends.

use super::compare::{self, CheckLevel, check_level, first, samples};
use super::shared;
use super::waits::notice;
use crate::call::{Call, Phase};
use crate::error::Error;
use crate::record::recorder::Running;

/// An operation that has begun.
#[must_use]
pub struct Begun {
    has_sample: bool,
    is_compared_at_once: bool,
}

impl Begun {
    const UNSAMPLED: Self = Self { has_sample: false, is_compared_at_once: false };
}

/// An operation begins. An error: the ranks are about to do different things.
#[inline]
pub fn begin(call: &Call, running: &Running) -> (Begun, Result<(), Error>) {
    notice();
    let (level, is_collective) = (check_level(), call.site.op.row().is_collective());
    if is_collective
        && running.sequence() == 1
        && let Err(cause) = shared::compare_members(&call.site.comm)
    {
        return (Begun::UNSAMPLED, Err(call.site.error(cause)));
    }
    if level == CheckLevel::Operations && is_collective {
        // What is started is asked about by `ask`, and judged in the wait.
        let is_started = call.site.phase == Phase::Start;
        let compared = if is_started { Ok(()) } else { compare::compare(call, running) };
        return (Begun::UNSAMPLED, compared);
    }
    let is_sampled = level != CheckLevel::Off && call.site.comm.size > 1 && samples::is_due(call, running);
    if is_sampled {
        samples::take(call, running);
    }
    let is_compared_at_once = is_sampled && first::is_due(call);
    if is_compared_at_once {
        first::before(call);
    }
    (Begun { has_sample: is_sampled && is_collective, is_compared_at_once }, Ok(()))
}

impl Begun {
    /// It has ended.
    #[inline]
    pub fn end(self, call: &Call, running: &Running) {
        if self.has_sample {
            samples::end(&call.site.comm, running.sequence());
        }
        if self.is_compared_at_once {
            first::after(call);
        }
    }
}
