//! What this process waits for: operations, and calls of Python's that are none. And for how long it may.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use crate::comm::origin::FREED;
use crate::comm::{self, Comm};
use crate::finalize;
use crate::mpilib::wildcards;
use crate::record::clock;
use crate::record::recorder::{self, Record};
use crate::sync::lock;
use crate::system::signal;
use crate::transport;
use crate::watch::job::ranks::Ranks;
use crate::watch::job::status::{CommId, Need, Peer, Wait, WaitId};

static ENDS: AtomicBool = AtomicBool::new(false);

/// `MPI_Finalize` begins.
pub fn end() {
    ENDS.store(true, Ordering::Release);
}

/// Whether `MPI_Finalize` has begun: no operation begins any more.
pub fn has_ended() -> bool {
    ENDS.load(Ordering::Acquire)
}

/// Whether this rank begins nothing any more, neither with this package nor without: what the program has attached to `MPI_COMM_SELF`
/// has been called too.
pub fn has_finished() -> bool {
    has_ended() && finalize::are_others_deleted()
}

// ---- Calls that are no operations

/// A collective call of Python's that is no operation: the creation of the default communicator, or the freeing of one.
struct Blocked {
    number: u64,
    words: String,
    /// The ranks that take part; None: all.
    members: Option<Ranks>,
    started: u64,
    thread: (u64, i32),
}

/// Threads may be in one each.
static BLOCKED: Mutex<Vec<Blocked>> = Mutex::new(Vec::new());

/// This thread is about to wait for all ranks.
#[cfg_attr(feature = "python", pyo3::pyfunction(name = "watch_enter"))]
pub fn enter(words: String) {
    enter_with(words, None);
}

/// This thread is about to wait for the ranks of a communicator.
pub fn enter_on(comm: &Comm, words: String) {
    enter_with(words, Some(comm.world.iter().copied().collect()));
}

fn enter_with(words: String, members: Option<Ranks>) {
    static CALLS: AtomicU64 = AtomicU64::new(0);
    let (number, thread) = (CALLS.fetch_add(1, Ordering::Relaxed), recorder::this_thread());
    lock(&BLOCKED).push(Blocked { number, words, members, started: clock::ticks(), thread });
    notice();
}

/// The last call that this thread has entered has ended.
#[cfg_attr(feature = "python", pyo3::pyfunction(name = "watch_leave"))]
pub fn leave() {
    let (mut blocked, thread) = (lock(&BLOCKED), recorder::this_thread());
    if let Some(last) = blocked.iter().rposition(|call| call.thread == thread) {
        blocked.remove(last);
    }
}

// ---- The watchdog sleeps while nothing is under way

static ASLEEP: AtomicBool = AtomicBool::new(false);

/// Wakes the watchdog, if it sleeps: an operation or a call begins.
#[inline]
pub fn notice() {
    if ASLEEP.load(Ordering::SeqCst) {
        wake();
    }
}

#[cold]
fn wake() {
    if ASLEEP.swap(false, Ordering::Relaxed) {
        signal::wake();
    }
}

/// Marks the watchdog as asleep. True if it was marked before and nothing has begun since: the next operation that begins
/// wakes it, so it may sleep until then.
pub fn sleep() -> bool {
    ASLEEP.swap(true, Ordering::SeqCst)
}

/// The watchdog looks at operations by itself: those that begin need not wake it.
pub fn awake() {
    ASLEEP.store(false, Ordering::Relaxed);
}

// ---- Limits

/// After how long a wait counts as hung: what the user has set for the job, or for a part of the program.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limit {
    /// Infinity: never.
    pub seconds: f64,
    /// When the part was entered.
    since: Option<Instant>,
}

impl Limit {
    /// Its name in reports, after "has not ended after".
    fn name(&self) -> String {
        let seconds = self.seconds;
        if self.since.is_some() {
            format!("time_limit({seconds} s)")
        } else {
            format!("MPI4JAX_TIMEOUT={seconds} s")
        }
    }

    /// The seconds until an operation that has waited so long exceeds it.
    fn left(&self, waited: f64) -> f64 {
        let entered = self.since.map_or(f64::INFINITY, |since| since.elapsed().as_secs_f64());
        self.seconds - waited.min(entered)
    }
}

/// The limits of the parts that the program is in, by number, the innermost last.
static PARTS: Mutex<Vec<(u64, Limit)>> = Mutex::new(Vec::new());

/// A part begins; its number.
#[cfg_attr(feature = "python", pyo3::pyfunction(name = "limit_enter"))]
pub fn enter_limit(seconds: f64) -> u64 {
    static COUNT: AtomicU64 = AtomicU64::new(1);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    lock(&PARTS).push((number, Limit { seconds, since: Some(Instant::now()) }));
    number
}

/// A part ends; parts of other threads may have begun after it.
#[cfg_attr(feature = "python", pyo3::pyfunction(name = "limit_leave"))]
pub fn leave_limit(number: u64) {
    lock(&PARTS).retain(|(part, _)| *part != number);
}

/// The limit that holds now, in a job with this time-out.
pub fn current_limit(job: f64) -> Limit {
    lock(&PARTS).last().map_or(Limit { seconds: job, since: None }, |(_, limit)| *limit)
}

// ---- Waits

/// What this process waits for, as it goes on.
#[derive(Default)]
pub struct Waits {
    list: Vec<Wait>,
    /// The threads that wait, as Python knows them and as the system does.
    threads: Vec<(u64, i32)>,
}

pub fn comm_id(comm: &Comm) -> CommId {
    let name = if comm.has_own_name() { comm.id } else { 0 };
    CommId { class: comm.class, origin: comm.origin, name }
}

fn need_of(record: &Record) -> Need {
    let (comm, row, any) = (&record.site.comm, record.site.op.row(), wildcards());
    if row.is_collective() {
        return Need::Collective { comm: comm_id(comm), number: record.sequence };
    }
    let end = |takes_part: bool, rank: i32, tag: i32| {
        let world = |rank| comm.world_rank(rank).filter(|rank| *rank >= 0).unwrap_or(Ranks::ELSEWHERE);
        (takes_part && rank != any.proc_null).then(|| Peer {
            rank: (rank != any.source).then(|| world(rank)),
            tag: (tag != any.tag).then_some(tag),
        })
    };
    let from = end(row.receives(), record.source, record.recvtag);
    let to = end(row.sends(), record.dest, record.sendtag);
    Need::Message { comm: comm_id(comm), from, to }
}

/// Messages that this rank has started and not waited for: other ranks may wait for them.
pub fn started() -> Vec<Need> {
    transport::outstanding().iter().map(need_of).filter(|need| matches!(need, Need::Message { .. })).collect()
}

fn wait(id: WaitId, need: Need, members: Ranks, seconds: f64, words: String) -> Wait {
    Wait { id, need, members, seconds, bytes: 0, late: String::new(), words, has_line: false }
}

/// A wait as its record describes it, which names a line only in compiled functions.
fn wait_of(record: &Record) -> Wait {
    let members = record.site.comm.world.iter().copied().collect();
    let bytes = record.count.saturating_mul(record.dtype.map_or(0, |dtype| dtype.size() as u64));
    let has_line = !record.location().is_empty();
    let id = WaitId::Operation(record.ticket);
    let wait = wait(id, need_of(record), members, record.seconds(), record.to_string());
    Wait { bytes, has_line, ..wait }
}

/// What is under way: operations, and calls of Python's.
pub fn under_way() -> Vec<WaitId> {
    Waits::now(0).list.iter().map(|wait| wait.id).collect()
}

impl Waits {
    /// What this process waits for now, of a job of so many ranks.
    fn now(size: i32) -> Self {
        let mut waits = Self::default();
        for record in recorder::running() {
            waits.list.push(wait_of(&record));
            waits.threads.push(record.thread);
        }
        for Blocked { number, words, members, started, thread } in &*lock(&BLOCKED) {
            let members = members.clone().unwrap_or_else(|| Ranks::all(size));
            waits.list.push(wait(
                WaitId::Call(*number),
                Need::Call,
                members,
                clock::seconds_since(*started),
                words.clone(),
            ));
            waits.threads.push(*thread);
        }
        for op in transport::unfinished() {
            let members = op.comm.world.iter().copied().collect();
            let late = op.failure.as_ref().map_or_else(String::new, |failure| format!("failed: {failure}"));
            let wait = wait(WaitId::Stream(op.number), Need::Stream, members, op.seconds, op.to_string());
            waits.list.push(Wait { late, ..wait });
        }
        if has_finished() {
            let words = "this rank has finished, and".into();
            let end = wait(WaitId::End, Need::End, Ranks::all(size), 0.0, words);
            waits.list.push(Wait { has_line: true, ..end });
        }
        waits
    }

    /// Updates the list, after so many seconds in which this process ran.
    pub fn update(&mut self, passed: f64, limit: &Limit, size: i32) {
        let before: HashMap<WaitId, f64> = self.list.iter().map(|wait| (wait.id, wait.seconds)).collect();
        *self = Self::now(size);
        for wait in &mut self.list {
            // A process that was stopped has not waited meanwhile.
            wait.seconds = before.get(&wait.id).map_or(wait.seconds.min(passed), |before| before + passed);
            if limit.left(wait.seconds) < 0.0 && wait.need != Need::End && wait.late.is_empty() {
                wait.late = format!("has not ended after {}", limit.name());
            }
        }
    }

    pub fn list(&self) -> &[Wait] {
        &self.list
    }

    /// The members of collectives that this rank has waited in for a while; the making of the default communicator is one.
    pub fn collectives(&self, size: i32) -> impl Iterator<Item = &Ranks> {
        let is_one = move |wait: &&Wait| match wait.need {
            Need::Collective { .. } => true,
            Need::Call => wait.members == Ranks::all(size),
            _ => false,
        };
        self.list.iter().filter(|wait| wait.seconds > 1.0).filter(is_one).map(|wait| &wait.members)
    }

    pub fn threads(&self) -> &[(u64, i32)] {
        &self.threads
    }

    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub fn longest(&self) -> f64 {
        self.list.iter().map(|wait| wait.seconds).fold(0.0, f64::max)
    }

    /// The seconds until the next wait exceeds its limit.
    pub fn next_limit(&self, limit: &Limit) -> f64 {
        let limited = self.list.iter().filter(|wait| wait.late.is_empty());
        limited.map(|wait| limit.left(wait.seconds)).fold(f64::INFINITY, f64::min)
    }
}

/// How many collectives this rank has begun on each communicator; of those that were freed, the most on one of a class.
pub fn counts() -> Vec<(CommId, u64)> {
    let live = comm::live();
    let live = live.iter().map(|comm| (comm_id(comm), comm.collectives.load(Ordering::Relaxed)));
    let freed = comm::freed_collectives();
    let freed = freed.into_iter().map(|(class, count)| (CommId { class, origin: FREED, name: 0 }, count));
    live.chain(freed).collect()
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

    /// What has ended when the watchdog looks is no reason to miss what comes next.
    #[test]
    fn what_was_short_wakes_the_watchdog_once_and_it_says_again_that_it_sleeps() {
        let (reader, writer) = signal::pipe().unwrap();
        signal::open(writer);
        for _ in 0..2 {
            while !sleep() {}
            notice();
            // Another test may have been faster to wake it.
            while signal::wait(&reader, None, None, 0.01).signals.is_empty() {}
            assert!(!sleep(), "what begins now would wake no thread");
        }
        awake();
    }

    #[test]
    fn calls_of_several_threads_are_seen_and_their_limits_count_from_their_own_start() {
        enter("A.Free".into());
        std::thread::spawn(|| enter("B.Free".into())).join().unwrap();
        let entered = Instant::now();
        let job = Limit { seconds: 3.0, since: None };
        let mut part = Limit { seconds: 1.5, since: Some(entered) };
        let mut waits = Waits::default();
        let late = |waits: &Waits| waits.list().iter().map(|wait| !wait.late.is_empty()).collect::<Vec<_>>();
        (0..3).for_each(|_| waits.update(1.0, &job, 2));
        let words: Vec<&str> = waits.list().iter().map(|wait| &*wait.words).collect();
        assert_eq!(words, ["A.Free", "B.Free"]);
        assert_eq!(late(&waits), [false; 2]);
        waits.update(1.0, &part, 2);
        assert_eq!(late(&waits), [false; 2], "they have waited for 4 s, but not in this part");
        part.since = entered.checked_sub(Duration::from_secs(2));
        waits.update(1.0, &part, 2);
        assert_eq!(late(&waits), [true; 2]);
        // A number that no clock can show: nothing is ever late.
        let never = Limit { seconds: 1e20, since: None };
        waits.update(1.0, &never, 2);
        assert!(waits.next_limit(&never) > 1e19);
        leave();
        waits.update(1.0, &job, 2);
        assert_eq!(waits.list().len(), 1, "this thread's has ended");
    }
}
