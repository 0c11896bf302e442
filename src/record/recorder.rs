//! The flight recorder: the last operations of this process, readable at any time.
//!
//! An operation writes its record when it begins, under a lock that nothing but a reader of this record holds, and marks it as
//! ended without one: no allocation and no system call. The watchdog reads it while it runs.

use std::borrow::Cow;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use serde::Serialize;

use super::clock;
use crate::call::{Call, Phase, Site};
use crate::comm::Comm;
use crate::mpilib::{Tag, wildcards};
use crate::ops::Dtype;
use crate::sync::lock;

/// How many operations are remembered.
pub const CAPACITY: usize = 1024;

/// How far an operation has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RecordState {
    Started,
    Done,
    Failed,
}

/// What the recorder has of one operation.
#[derive(Clone, Debug)]
pub struct Record {
    /// Its number in this process, from 1.
    pub ticket: u64,
    pub site: Arc<Site>,
    /// The user's source line of the wait, in the record of a wait for a non-blocking operation.
    pub wait: Option<Arc<str>>,
    /// Number of the operation among the collectives, or the messages, of its communicator; from 1.
    pub sequence: u64,
    pub count: u64,
    pub dtype: Option<Dtype>,
    pub source: i32,
    pub dest: i32,
    pub recvtag: i32,
    pub sendtag: i32,
    pub started: u64,
    /// Equal to `started` while the operation runs.
    pub ended: u64,
    pub state: RecordState,
    /// The thread that it runs on: Python's number and the system's.
    pub thread: (u64, i32),
}

/// A record, and how its operation has ended: 0 while that runs; the lowest bit is set if it failed.
///
/// Only a thread that holds the lock, and has found that the last operation has ended, sets that to 0; and only the thread of
/// the operation sets it to something else. While the lock is held, `ended` therefore belongs to the record.
#[repr(align(128))]
struct Slot {
    ended: AtomicU64,
    record: Mutex<Option<Record>>,
}

static NEXT: AtomicU64 = AtomicU64::new(0);
static SLOTS: [Slot; CAPACITY] =
    [const { Slot { ended: AtomicU64::new(1), record: Mutex::new(None) } }; CAPACITY];

impl Slot {
    #[inline]
    fn lock(&self) -> MutexGuard<'_, Option<Record>> {
        lock(&self.record)
    }

    fn read(&self) -> Option<Record> {
        let record = self.lock();
        let ended = self.ended.load(Ordering::Acquire);
        let mut record = record.clone()?;
        (record.state, record.ended) = match ended {
            0 => (RecordState::Started, record.started),
            ended if ended & 1 == 0 => (RecordState::Done, ended),
            ended => (RecordState::Failed, ended),
        };
        Some(record)
    }
}

/// This thread, as Python numbers it, and as the system does: 0 where that is not needed.
#[inline]
pub fn this_thread() -> (u64, i32) {
    #[cfg(target_os = "linux")]
    let system = {
        thread_local!(static NUMBER: i32 = rustix::thread::gettid().as_raw_pid());
        NUMBER.try_with(|number| *number).unwrap_or(0)
    };
    #[cfg(not(target_os = "linux"))]
    let system = 0;
    // SAFETY: takes nothing.
    (unsafe { libc::pthread_self() as u64 }, system)
}

/// An operation under way, which ends when this is dropped.
pub struct Running {
    /// `None` if more operations run at the same time than there are records.
    slot: Option<&'static Slot>,
    sequence: u64,
    failed: bool,
}

/// Records that an operation of a site starts.
#[inline]
pub fn begin(site: &Arc<Site>, call: &Call) -> Running {
    let Comm { collectives, messages, .. } = &*site.comm;
    let numbers = if site.op.row().is_collective() { collectives } else { messages };
    let sequence = numbers.fetch_add(1, Ordering::Relaxed) + 1;
    claim(sequence, |ticket, started| Record {
        ticket,
        site: site.clone(),
        wait: None,
        sequence,
        count: call.items() as u64,
        dtype: call.send.or(call.recv).map(|buffer| buffer.dtype()),
        source: call.envelope.source,
        dest: call.envelope.dest,
        recvtag: call.envelope.recvtag,
        sendtag: call.envelope.sendtag,
        started,
        ended: 0,
        state: RecordState::Started,
        thread: this_thread(),
    })
}

/// Records that a wait begins, at a line, for what this record says was started.
pub fn begin_wait(of: &Record, line: Arc<str>) -> Running {
    let thread = this_thread();
    claim(of.sequence, |ticket, started| Record { ticket, wait: Some(line), started, thread, ..of.clone() })
}

/// Makes the record of an operation, of its number and its start, where the last one has ended: in its place, since a record that
/// is made elsewhere and copied makes the processor wait.
#[inline(always)]
fn claim(sequence: u64, record: impl FnOnce(u64, u64) -> Record) -> Running {
    for _ in 0..CAPACITY {
        // SeqCst: either this thread then sees that the watchdog sleeps, or the watchdog sees the number.
        let ticket = NEXT.fetch_add(1, Ordering::SeqCst) + 1;
        let slot = &SLOTS[ticket as usize % CAPACITY];
        let mut place = slot.lock();
        // An operation that runs for long keeps its record while others, of other threads, come and go.
        if slot.ended.load(Ordering::Acquire) != 0 {
            slot.ended.store(0, Ordering::Relaxed);
            let last = place.replace(record(ticket, clock::ticks()));
            drop(place);
            drop(last);
            return Running { slot: Some(slot), sequence, failed: false };
        }
    }
    Running { slot: None, sequence, failed: false }
}

impl Running {
    /// The operation has failed.
    #[cold]
    pub fn fail(&mut self) {
        self.failed = true;
    }

    /// The number of the operation among the collectives, or the messages, of its communicator.
    #[inline]
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// A copy of the record.
    pub fn record(&self) -> Option<Record> {
        self.slot?.read()
    }

    /// Ends the operation; a copy of its record.
    pub fn end(self) -> Option<Record> {
        let slot = self.slot;
        drop(self);
        slot?.read()
    }
}

impl Drop for Running {
    #[inline]
    fn drop(&mut self) {
        if let Some(slot) = self.slot {
            slot.ended.store((clock::ticks() & !1) | u64::from(self.failed), Ordering::Release);
        }
    }
}

/// All records, the oldest first.
pub fn records() -> Vec<Record> {
    let mut records: Vec<Record> = SLOTS.iter().filter_map(Slot::read).collect();
    records.sort_by_key(|record| record.ticket);
    records
}

/// The operations that are running, the oldest first.
pub fn running() -> Vec<Record> {
    let started = |slot: &&Slot| slot.ended.load(Ordering::Relaxed) == 0;
    let mut records: Vec<Record> = SLOTS.iter().filter(started).filter_map(Slot::read).collect();
    records.retain(|record| record.state == RecordState::Started);
    records.sort_by_key(|record| record.ticket);
    records
}

/// How many operations have begun.
pub fn count() -> u64 {
    NEXT.load(Ordering::SeqCst)
}

/// Waits until the operations that are running now have ended.
pub fn wait() {
    let last = NEXT.load(Ordering::Relaxed);
    while running().iter().any(|record| record.ticket <= last) {
        std::thread::sleep(Duration::from_micros(20));
    }
}

impl Record {
    /// The name of the operation in Python, or that of the wait for it.
    pub fn name(&self) -> &'static str {
        self.site.op.name_of(self.phase())
    }

    /// That of the site, or a wait for what was started there.
    pub fn phase(&self) -> Phase {
        if self.wait.is_some() { Phase::Wait } else { self.site.phase }
    }

    /// The user's source line; of a wait, that of the start too.
    pub fn location(&self) -> Cow<'_, str> {
        let started = &*self.site.location;
        match (started, self.wait.as_deref()) {
            (_, None) => started.into(),
            ("", Some(line)) => line.into(),
            (_, Some("")) => format!("started at {started}").into(),
            (_, Some(line)) => format!("started at {started}, {line}").into(),
        }
    }

    /// Seconds that the operation took, or has taken so far.
    pub fn seconds(&self) -> f64 {
        match self.state {
            RecordState::Started => clock::seconds_since(self.started),
            RecordState::Done | RecordState::Failed => clock::seconds(self.started, self.ended),
        }
    }
}

/// One side of a message.
struct Endpoint<'a>(&'a str, i32, i32);

impl fmt::Display for Endpoint<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let &Endpoint(word, rank, tag) = self;
        let any = wildcards();
        if rank == any.proc_null {
            return write!(f, "{word} PROC_NULL");
        }
        // Every MPI's wildcards are negative, and its ranks and tags are not.
        let rank = if rank < 0 { "any rank".into() } else { rank.to_string() };
        let tag = if tag < 0 { "any tag".into() } else { Tag(tag).to_string() };
        write!(f, "{word} {rank}, {tag}")
    }
}

/// `allreduce #118 (SUM, 3 x float32) on mpi4jax.default, solver.py:97`
impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Site { op, comm, reduction, root, .. } = &*self.site;
        let row = op.row();
        write!(f, "{} ", self.name())?;
        let (from, to) =
            (Endpoint("from", self.source, self.recvtag), Endpoint("to", self.dest, self.sendtag));
        match (row.receives(), row.sends()) {
            (false, false) => write!(f, "#{}", self.sequence)?,
            (true, false) => write!(f, "{from}")?,
            (false, true) => write!(f, "{to}")?,
            (true, true) => write!(f, "{from} and {to}")?,
        }
        let mut details = Vec::new();
        details.extend(row.has_root.then(|| format!("root {root}")));
        details.extend(reduction.map(|reduction| reduction.to_string()));
        details.extend(self.dtype.map(|dtype| format!("{} x {}", self.count, dtype.name())));
        if !details.is_empty() {
            write!(f, " ({})", details.join(", "))?;
        }
        write!(f, " on {}", comm.key)?;
        let location = self.location();
        if location.is_empty() { Ok(()) } else { write!(f, ", {location}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::Stream;
    use crate::comm;
    use crate::ops::Op;

    #[test]
    fn a_record_says_what_runs_and_then_how_it_ended() {
        let comm = comm::register(Comm::new("recorder-test", 0, 2));
        let mut site = Site::new(Op::Recv, &comm);
        site.envelope.source = 1;
        (site.location, site.transport) = ("solver.py:81".into(), "mpi");
        let site = Arc::new(site);
        let call = Call::of(&site, Stream::NONE);
        let mut first = begin(&site, &call);
        let record = first.record().unwrap();
        assert_eq!(record.to_string(), "recv from 1, tag 0 on recorder-test, solver.py:81");
        assert_eq!((record.sequence, record.state), (1, RecordState::Started));
        assert!(running().iter().any(|running| running.ticket == record.ticket));

        // However many operations follow, what runs stays visible.
        for _ in 0..2 * CAPACITY {
            drop(begin(&site, &call));
        }
        assert!(running().iter().any(|running| running.ticket == record.ticket));
        // As many as there are records, and one more, of which nothing is remembered.
        let others: Vec<Running> = (0..CAPACITY).map(|_| begin(&site, &call)).collect();
        assert!(others.iter().filter_map(Running::record).count() < CAPACITY);
        assert_eq!(first.record().unwrap().ticket, record.ticket);
        drop(others);
        first.fail();
        drop(first);
        let find = || records().into_iter().find(|other| other.ticket == record.ticket);
        assert_eq!(find().unwrap().state, RecordState::Failed);
        assert!(!running().iter().any(|running| running.ticket == record.ticket));
        assert!(records().is_sorted_by_key(|record| record.ticket));
    }

    /// Programs come and go, and their records stay readable, for as long as they are remembered.
    #[test]
    fn what_no_program_and_no_record_needs_goes() {
        let comm = Arc::new(Comm::new("recorder-programs", 0, 2));
        for program in 0..100 * CAPACITY {
            let mut site = Site::new(Op::Barrier, &comm);
            (site.location, site.transport) = (format!("program.py:{program}").into(), "mpi");
            let site = Arc::new(site);
            let running = begin(&site, &Call::of(&site, Stream::NONE));
            drop(site);
            let record = running.end();
            if program % CAPACITY == 0 {
                let record = record.expect("no other operation has taken its record");
                assert!(record.to_string().ends_with(&format!("program.py:{program}")), "{record}");
                assert!(records().iter().all(|record| record.site.transport == "mpi"));
            }
        }
        assert!(Arc::strong_count(&comm) <= 1 + CAPACITY);
    }
}
