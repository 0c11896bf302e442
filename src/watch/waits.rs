//! What this process waits for: operations, and calls of Python's that are none.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::limits::Limit;
use crate::record::{clock, recorder};
use crate::transport;

static FINISHED: AtomicBool = AtomicBool::new(false);

/// This rank has done its last operation: Python is not looked at any more.
pub fn set_finished() {
    FINISHED.store(true, Ordering::Relaxed);
}

pub fn is_finished() -> bool {
    FINISHED.load(Ordering::Relaxed)
}

/// A collective call of Python's that is no operation, such as the duplication of a communicator.
pub struct Blocked {
    pub number: u64,
    pub what: String,
    pub started: u64,
}

static BLOCKED: Mutex<Option<Blocked>> = Mutex::new(None);

/// Numbers of [`Blocked`] calls, apart from those of records.
static CALLS: AtomicU64 = AtomicU64::new(1 << 63);

/// Python is about to wait for other ranks, in `what`.
pub fn enter(what: String) {
    let number = CALLS.fetch_add(1, Ordering::Relaxed);
    *blocked() = Some(Blocked { number, what, started: clock::ticks() });
}

/// What Python waited for has come.
pub fn leave() {
    *blocked() = None;
}

pub fn blocked() -> MutexGuard<'static, Option<Blocked>> {
    BLOCKED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What is under way: the numbers of the operations, or of a call of Python's.
pub fn under_way() -> Vec<u64> {
    let mut numbers: Vec<u64> = recorder::running().iter().map(|record| record.ticket).collect();
    numbers.extend(blocked().as_ref().map(|call| call.number));
    numbers.extend(transport::unfinished().iter().map(|op| op.number));
    numbers
}

/// Something that this process waits for.
pub struct Wait {
    pub number: u64,
    /// For how long, while this process ran: a stopped process does not count.
    pub waited: Duration,
    /// For how long under the limit of this number.
    pub limited: (u64, Duration),
    /// After how long a wait it was first seen that it cannot end, and since then each time.
    pub lost: Option<Duration>,
    /// What the ranks' files, at a number of their listing, said of whether it can still end.
    pub judged: Option<(u64, Option<String>)>,
    /// When it is looked at next whether it still can, and when something is said of it next.
    pub look_at: Duration,
    pub tell_at: Duration,
    /// It has been reported as hung.
    pub reported: bool,
}

impl Wait {
    /// `tell_at`: when something is said of it first.
    pub fn new(number: u64, tell_at: Duration) -> Self {
        let zero = Duration::ZERO;
        let (limited, lost, judged, look_at, reported) = ((0, zero), None, None, zero, false);
        Self { number, waited: zero, limited, lost, judged, look_at, tell_at, reported }
    }

    /// So much time has passed, under this limit.
    pub fn pass(&mut self, time: Duration, limit: &Limit) {
        self.waited += time;
        if self.limited.0 != limit.number {
            self.limited = (limit.number, Duration::ZERO);
        }
        self.limited.1 += time;
    }

    /// Whether it has taken longer than the limit.
    pub fn exceeds(&self, limit: &Limit) -> bool {
        limit.seconds > 0.0 && self.limited.1.as_secs_f64() > limit.seconds
    }
}

/// Brings a list of waits up to date: what is under way stays or comes, what has ended goes.
pub fn update(waits: &mut Vec<Wait>, passed: Duration, limit: &Limit, tell_at: Duration) {
    let numbers = under_way();
    waits.retain(|wait| numbers.contains(&wait.number));
    for number in numbers {
        match waits.iter_mut().find(|wait| wait.number == number) {
            Some(wait) => wait.pass(passed, limit),
            None => waits.push(Wait::new(number, tell_at)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_counts_from_its_own_start() {
        let (job, part) = (Limit { number: 0, seconds: 3.0 }, Limit { number: 7, seconds: 1.5 });
        let second = Duration::from_secs(1);
        let mut wait = Wait::new(1, Duration::MAX);
        (0..2).for_each(|_| wait.pass(second, &job));
        assert!(!wait.exceeds(&job));
        wait.pass(second, &part);
        assert!(!wait.exceeds(&part), "it has waited for 3 s, but for 1 s in this part");
        wait.pass(second, &part);
        assert!(wait.exceeds(&part));
        assert!(!wait.exceeds(&Limit { number: 7, seconds: 0.0 }));
        assert_eq!(wait.waited, 4 * second);
    }
}
