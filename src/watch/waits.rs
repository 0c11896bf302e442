//! What this process waits for besides operations, and the time limits of waits.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::read;
use super::state::{Need, Wait, WaitId};
use crate::board::own;
use crate::board::ranks::Ranks;
use crate::comm::Comm;
use crate::record::clock;
use crate::sync::lock;
use crate::system::{signal, this_thread};
use crate::transport;

// ---- Calls that are no operations

/// A collective call of Python's that is no operation: the creation of the default communicator, or the freeing of one.
struct Blocked {
    thread: i32,
    started: u64,
    wait: Wait,
}

/// Threads may be in one each.
static BLOCKED: Mutex<Vec<Blocked>> = Mutex::new(Vec::new());

/// This thread is about to wait for the ranks of a communicator.
pub fn enter_on(comm: &Comm, words: String) {
    enter(words, comm.world.iter().copied().collect());
}

/// This thread is about to wait for these ranks.
pub fn enter(words: String, members: Ranks) {
    static CALLS: AtomicU64 = AtomicU64::new(0);
    let id = WaitId::Call(CALLS.fetch_add(1, Ordering::Relaxed));
    let wait = Wait::new(id, Need::Call, members, words);
    lock(&BLOCKED).push(Blocked { thread: this_thread(), started: clock::ticks(), wait });
}

/// The last call that this thread has entered has ended.
pub fn leave() {
    let (mut blocked, thread) = (lock(&BLOCKED), this_thread());
    if let Some(last) = blocked.iter().rposition(|call| call.thread == thread) {
        blocked.remove(last);
    }
}

/// The threads that are in such calls.
pub fn threads() -> Vec<i32> {
    lock(&BLOCKED).iter().map(|call| call.thread).collect()
}

// ---- Limits

/// The time limit of a wait, which the user has set for the job, or for a part of the program.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limit {
    /// Infinity: never.
    pub seconds: f64,
    /// When the part was entered.
    since: Option<Instant>,
}

impl Limit {
    /// Its name in reports, after "has not completed after".
    fn name(&self) -> String {
        let seconds = self.seconds;
        if self.since.is_some() {
            format!("time_limit({seconds} s)")
        } else {
            format!("MPI4JAX_TIMEOUT={seconds} s")
        }
    }

    /// The seconds until an operation that has waited for `waited` seconds exceeds the limit.
    fn left(&self, waited: f64) -> f64 {
        let entered = self.since.map_or(f64::INFINITY, |since| since.elapsed().as_secs_f64());
        self.seconds - waited.min(entered)
    }
}

/// The limits of the parts of the program that are being executed, by number, the innermost last.
static PARTS: Mutex<Vec<(u64, Limit)>> = Mutex::new(Vec::new());

/// A part of the program with a time limit begins. Returns its number.
#[cfg_attr(feature = "python", pyo3::pyfunction(name = "limit_enter"))]
pub fn enter_limit(seconds: f64) -> u64 {
    static COUNT: AtomicU64 = AtomicU64::new(1);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    lock(&PARTS).push((number, Limit { seconds, since: Some(Instant::now()) }));
    // The limit may be shorter than the watchdog's pause.
    signal::wake();
    number
}

/// A part ends; parts of other threads may have begun after it.
#[cfg_attr(feature = "python", pyo3::pyfunction(name = "limit_leave"))]
pub fn leave_limit(number: u64) {
    lock(&PARTS).retain(|(part, _)| *part != number);
}

/// The limit that applies now, in a job with this timeout.
pub fn current_limit(job: f64) -> Limit {
    lock(&PARTS).last().map_or(Limit { seconds: job, since: None }, |(_, limit)| *limit)
}

// ---- Waits

/// The operations and calls of Python that have not completed.
pub fn under_way() -> Vec<WaitId> {
    read::waits(own()).iter().map(|wait| wait.id).collect()
}

/// Waits that are no operations.
fn others() -> Vec<Wait> {
    let age = |call: &Blocked| Wait { seconds: clock::seconds_since(call.started), ..call.wait.clone() };
    let mut waits: Vec<Wait> = lock(&BLOCKED).iter().map(age).collect();
    waits.extend(transport::unfinished().into_iter().map(|op| {
        let members = op.comm.world.iter().copied().collect();
        let late = op.failure.as_ref().map_or_else(String::new, |failure| format!("failed: {failure}"));
        let wait = Wait::new(WaitId::Stream(op.number), Need::Stream, members, op.to_string());
        Wait { seconds: op.seconds, late, ..wait }
    }));
    waits
}

/// What this process waits for, updated at each look of the watchdog.
#[derive(Default)]
pub struct Waits {
    /// The oldest last, with the time that this process has waited.
    list: Vec<Wait>,
}

impl Waits {
    /// Updates the list after `passed` seconds in which this process ran, and publishes the waits that are not operations.
    pub fn update(&mut self, passed: f64, limit: &Limit) {
        own().waits.write(&serde_json::to_string(&others()).unwrap_or_default());
        let before: HashMap<WaitId, f64> = self.list.iter().map(|wait| (wait.id, wait.seconds)).collect();
        self.list = read::waits(own());
        for wait in &mut self.list {
            // A process that was stopped has not waited meanwhile.
            wait.seconds = before.get(&wait.id).map_or(wait.seconds.min(passed), |before| before + passed);
            if limit.left(wait.seconds) < 0.0 && wait.late.is_empty() {
                wait.late = format!("has not completed after {}", limit.name());
            }
        }
    }

    /// A wait that is too long, or has failed.
    pub fn late(&self) -> Option<&Wait> {
        self.list.iter().find(|wait| !wait.late.is_empty())
    }

    /// The members of collectives that this rank has waited in for a while; the making of the default communicator is one.
    pub fn collectives(&self) -> impl Iterator<Item = &Ranks> {
        let is_one =
            |wait: &&Wait| matches!(wait.need, Need::Collective { .. } | Need::Call) && wait.seconds > 1.0;
        self.list.iter().filter(is_one).map(|wait| &wait.members)
    }

    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub fn longest(&self) -> f64 {
        self.list.iter().map(|wait| wait.seconds).fold(0.0, f64::max)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_innermost_limit_holds() {
        assert_eq!(current_limit(5.0), Limit { seconds: 5.0, since: None });
        let outer = enter_limit(2.0);
        let inner = enter_limit(f64::INFINITY);
        assert_eq!(current_limit(5.0).seconds, f64::INFINITY);
        leave_limit(outer);
        assert_eq!(current_limit(5.0).name(), "time_limit(inf s)");
        leave_limit(inner);
        assert_eq!(current_limit(5.0).name(), "MPI4JAX_TIMEOUT=5 s");
    }

    #[test]
    fn calls_of_several_threads_are_seen_and_their_limits_count_from_their_own_start() {
        enter("A.Free".into(), Ranks::all(2));
        std::thread::spawn(|| enter("B.Free".into(), Ranks::all(2))).join().unwrap();
        let entered = Instant::now();
        let job = Limit { seconds: 90.0, since: None };
        let mut part = Limit { seconds: 45.0, since: Some(entered) };
        let mut waits = Waits::default();
        let calls = |waits: &Waits| -> Vec<Wait> {
            waits.list.iter().filter(|wait| wait.need == Need::Call).cloned().collect()
        };
        let late = |waits: &Waits| calls(waits).iter().map(|wait| !wait.late.is_empty()).collect::<Vec<_>>();
        (0..3).for_each(|_| waits.update(30.0, &job));
        let words: Vec<String> = calls(&waits).into_iter().map(|wait| wait.words).collect();
        assert_eq!(words, ["A.Free", "B.Free"]);
        assert_eq!(late(&waits), [false; 2]);
        waits.update(30.0, &part);
        assert_eq!(late(&waits), [false; 2], "they have waited for 120 s, but not in this part");
        part.since = entered.checked_sub(Duration::from_secs(60));
        waits.update(1.0, &part);
        assert_eq!(late(&waits), [true; 2]);
        leave();
        waits.update(1.0, &job);
        assert_eq!(calls(&waits).len(), 1, "this thread's has ended");
    }
}
