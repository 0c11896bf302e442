//! The flight recorder: the last operations of this process, readable at any time.
//!
//! Every field is an atomic, and a record is claimed by adding to a counter: an operation writes its
//! record without a lock, an allocation or a system call, and the watchdog reads it while it runs.

use std::fmt;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::Serialize;

use super::clock;
use super::gate::Gate;
use crate::call::{Call, Phase, Site};
use crate::comm::Comm;
use crate::mpilib::{Tag, wildcards};
use crate::ops::{Dtype, Op, Reduction};

/// How many operations are remembered.
pub const CAPACITY: usize = 1024;

/// What is known of an operation before it runs. Records point to it after the program that held it is gone.
#[derive(Debug)]
pub struct OpInfo {
    pub op: Op,
    pub phase: Phase,
    pub comm: Arc<Comm>,
    pub reduction: Option<Reduction>,
    pub root: i32,
    /// The user's source line.
    pub location: Box<str>,
    pub transport: &'static str,
}

/// Every `OpInfo` that a program or a record may point to.
///
/// Records hold plain pointers, so that operations write them without a lock. A reader of one holds this lock, under
/// which nothing goes that a record points to; and what no program holds, no record begins to point to.
static OP_INFOS: Mutex<Vec<Arc<OpInfo>>> = Mutex::new(Vec::new());

fn op_infos() -> MutexGuard<'static, Vec<Arc<OpInfo>>> {
    OP_INFOS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the records of this site will say.
pub fn describe(site: &Site, transport: &'static str) -> Arc<OpInfo> {
    let &Site { op, phase, ref comm, reduction, root, ref location, .. } = site;
    keep(OpInfo { op, phase, comm: comm.clone(), reduction, root, location: location.clone(), transport })
}

/// What the records of a wait say, at a line, for what was started.
pub fn describe_wait(started: &OpInfo, line: &str) -> Arc<OpInfo> {
    let &OpInfo { op, ref comm, reduction, root, ref location, transport, .. } = started;
    let location = match (location.is_empty(), line.is_empty()) {
        (true, _) => line.into(),
        (false, true) => format!("started at {location}").into(),
        (false, false) => format!("started at {location}, {line}").into(),
    };
    keep(OpInfo { op, phase: Phase::Wait, comm: comm.clone(), reduction, root, location, transport })
}

fn keep(info: OpInfo) -> Arc<OpInfo> {
    let info = Arc::new(info);
    let mut infos = op_infos();
    if infos.len() == infos.capacity() {
        clear(&mut infos);
    }
    infos.push(info.clone());
    info
}

/// The list is full: what is not used any more goes.
#[cold]
fn clear(infos: &mut Vec<Arc<OpInfo>>) {
    let idle: Vec<bool> = infos.iter().map(|info| Arc::strong_count(info) == 1).collect();
    // A thread that has dropped one has written its records before.
    fence(Ordering::Acquire);
    let mut used: Vec<_> = SLOTS.iter().map(|slot| slot.info.load(Ordering::Relaxed).cast_const()).collect();
    used.sort_unstable();
    let mut idle = idle.into_iter();
    infos.retain(|info| idle.next() != Some(true) || used.binary_search(&Arc::as_ptr(info)).is_ok());
    // Half of it is free then, so that this comes once in so many programs.
    let room = (2 * infos.len()).max(CAPACITY);
    infos.shrink_to(room);
    infos.reserve_exact(room - infos.len());
}

/// One record, one cache line.
#[repr(align(64))]
struct Slot {
    /// The lowest bit of how it has ended is set if it failed.
    gate: Gate,
    info: AtomicPtr<OpInfo>,
    /// Number of the operation among the collectives, or the messages, of its communicator; from 1.
    sequence: AtomicU64,
    /// The element count, and above it the index of the data type.
    items: AtomicU64,
    /// Source and destination.
    peers: AtomicU64,
    /// Tags of the receiving and the sending side.
    tags: AtomicU64,
    started: AtomicU64,
}

static NEXT: AtomicU64 = AtomicU64::new(0);
static SLOTS: [Slot; CAPACITY] = [const { Slot::new() }; CAPACITY];
/// Of operations that find no slot, because so many run. It is never read.
static OVERFLOW: Slot = Slot::new();

impl Slot {
    const fn new() -> Self {
        Self {
            gate: Gate { ticket: AtomicU64::new(0), ended: AtomicU64::new(1) },
            info: AtomicPtr::new(std::ptr::null_mut()),
            sequence: AtomicU64::new(0),
            items: AtomicU64::new(0),
            peers: AtomicU64::new(0),
            tags: AtomicU64::new(0),
            started: AtomicU64::new(0),
        }
    }
}

/// The threads that the operations of these slots run on, as Python numbers a thread and as the system does.
static THREADS: [(AtomicU64, AtomicI32); CAPACITY] =
    [const { (AtomicU64::new(0), AtomicI32::new(0)) }; CAPACITY];

/// This thread, as Python numbers it.
#[inline]
pub fn this_thread() -> u64 {
    // SAFETY: takes nothing.
    unsafe { libc::pthread_self() as u64 }
}

/// This thread, as the system numbers it; 0 where that is not needed.
#[inline]
fn system_thread() -> i32 {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: takes nothing.
        thread_local!(static NUMBER: i32 = unsafe { libc::gettid() });
        NUMBER.try_with(|number| *number).unwrap_or(0)
    }
    #[cfg(not(target_os = "linux"))]
    0
}

const COUNT_BITS: u32 = 56;
const NO_DTYPE: u64 = 0xff;

fn pair(low: i32, high: i32) -> u64 {
    u64::from(low as u32) | (u64::from(high as u32) << 32)
}

fn unpair(pair: u64) -> (i32, i32) {
    (pair as u32 as i32, (pair >> 32) as u32 as i32)
}

/// An operation under way. Dropped, it has ended.
pub struct Running {
    slot: &'static Slot,
    failed: bool,
}

/// Records that an operation starts.
///
/// The caller holds `info` for as long as the operation runs.
#[inline]
pub fn begin(info: &Arc<OpInfo>, call: &Call) -> Running {
    let Comm { collectives, messages, .. } = &*info.comm;
    let numbers = if info.op.row().is_collective() { collectives } else { messages };
    let dtype = call.send.or(call.recv).map_or(NO_DTYPE, |buffer| buffer.dtype() as u64);
    claim(
        info,
        &Numbers {
            sequence: numbers.fetch_add(1, Ordering::Relaxed) + 1,
            items: call.items() as u64 | (dtype << COUNT_BITS),
            peers: pair(call.envelope.source, call.envelope.dest),
            tags: pair(call.envelope.recvtag, call.envelope.sendtag),
        },
    )
}

/// Records that a wait begins, for what this record says was started.
pub fn begin_wait(info: &Arc<OpInfo>, started: &Record) -> Running {
    let dtype = started.dtype.map_or(NO_DTYPE, |dtype| dtype as u64);
    claim(
        info,
        &Numbers {
            sequence: started.sequence,
            items: started.count | (dtype << COUNT_BITS),
            peers: pair(started.source, started.dest),
            tags: pair(started.recvtag, started.sendtag),
        },
    )
}

/// What a record has of one execution.
struct Numbers {
    sequence: u64,
    items: u64,
    peers: u64,
    tags: u64,
}

#[inline(always)]
fn claim(info: &Arc<OpInfo>, numbers: &Numbers) -> Running {
    let &Numbers { sequence, items, peers, tags } = numbers;
    // An operation that runs for long keeps its record while others, of other threads, come and go.
    // SeqCst: either this thread then sees that the watchdog sleeps, or the watchdog sees the number.
    let mut tickets = (0..CAPACITY).map(|_| NEXT.fetch_add(1, Ordering::SeqCst) + 1);
    let claimed = tickets.find(|&ticket| SLOTS[ticket as usize % CAPACITY].gate.claim());
    let slot = claimed.map_or(&OVERFLOW, |ticket| &SLOTS[ticket as usize % CAPACITY]);
    slot.info.store(Arc::as_ptr(info).cast_mut(), Ordering::Relaxed);
    slot.sequence.store(sequence, Ordering::Relaxed);
    slot.items.store(items, Ordering::Relaxed);
    slot.peers.store(peers, Ordering::Relaxed);
    slot.tags.store(tags, Ordering::Relaxed);
    slot.started.store(clock::ticks(), Ordering::Relaxed);
    if let Some(ticket) = claimed {
        let thread = &THREADS[ticket as usize % CAPACITY];
        thread.0.store(this_thread(), Ordering::Relaxed);
        thread.1.store(system_thread(), Ordering::Relaxed);
        slot.gate.publish(ticket);
    }
    Running { slot, failed: false }
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
        self.slot.sequence.load(Ordering::Relaxed)
    }

    /// A copy of the record.
    pub fn record(&self) -> Option<Record> {
        self.slot.read()
    }

    /// Ends the operation; a copy of its record.
    pub fn end(self) -> Option<Record> {
        let slot = self.slot;
        drop(self);
        slot.read()
    }
}

impl Drop for Running {
    #[inline]
    fn drop(&mut self) {
        let ended = (clock::ticks() & !1) | u64::from(self.failed);
        self.slot.gate.end(ended);
    }
}

/// How far an operation has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    Started,
    Done,
    Failed,
}

/// A copy of what the recorder has of one operation.
#[derive(Clone, Debug)]
pub struct Record {
    pub ticket: u64,
    pub info: Arc<OpInfo>,
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
    pub state: State,
    /// The thread that it runs on, as Python knows it and as the system does.
    pub thread: (u64, i32),
}

impl OpInfo {
    pub fn name(&self) -> &'static str {
        self.op.name_of(self.phase)
    }
}

impl Slot {
    /// A copy, unless the record is being written.
    fn read(&self) -> Option<Record> {
        let _all_there = op_infos();
        let load = |field: &AtomicU64| field.load(Ordering::Relaxed);
        let (ticket, ended, fields) = self.gate.read(|ticket| {
            let info = self.info.load(Ordering::Relaxed);
            let thread = &THREADS[ticket as usize % CAPACITY];
            let thread = (load(&thread.0), thread.1.load(Ordering::Relaxed));
            let numbers = [&self.sequence, &self.items, &self.peers, &self.tags, &self.started];
            (info, thread, numbers.map(load))
        })?;
        let (info, thread, [sequence, items, peers, tags, started]) = fields;
        let ((source, dest), (recvtag, sendtag)) = (unpair(peers), unpair(tags));
        let (state, ended) = match ended {
            0 => (State::Started, started),
            ended if ended & 1 == 0 => (State::Done, ended),
            ended => (State::Failed, ended),
        };
        Some(Record {
            ticket,
            // SAFETY: from `Arc::as_ptr`, of a member of `OP_INFOS` that stays one while a record points to it.
            info: unsafe {
                Arc::increment_strong_count(info);
                Arc::from_raw(info)
            },
            sequence,
            count: items & ((1 << COUNT_BITS) - 1),
            dtype: Dtype::ALL.get((items >> COUNT_BITS) as usize).copied(),
            source,
            dest,
            recvtag,
            sendtag,
            started,
            ended,
            state,
            thread,
        })
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
    let started = |slot: &&Slot| slot.gate.ended.load(Ordering::Relaxed) == 0;
    let mut records: Vec<Record> = SLOTS.iter().filter(started).filter_map(Slot::read).collect();
    records.retain(|record| record.state == State::Started);
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
    /// Seconds that the operation took, or has taken so far.
    pub fn seconds(&self) -> f64 {
        match self.state {
            State::Started => clock::seconds_since(self.started),
            State::Done | State::Failed => clock::seconds(self.started, self.ended),
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
            return write!(f, "{word} nobody");
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
        let OpInfo { op, comm, reduction, root, location, .. } = &*self.info;
        let row = op.row();
        write!(f, "{} ", self.info.name())?;
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
        if location.is_empty() { Ok(()) } else { write!(f, ", {location}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::Stream;
    use crate::comm;

    #[test]
    fn a_record_says_what_runs_and_then_how_it_ended() {
        let comm = comm::register(Comm::new("recorder-test", 1, 0, 2));
        let mut site = Site::new(Op::Recv, &comm);
        site.envelope.source = 1;
        site.location = "solver.py:81".into();
        let info = describe(&site, "mpi");
        let call = Call::of(&site, Stream::NONE);
        let mut first = begin(&info, &call);
        let record = first.record().unwrap();
        assert_eq!(record.to_string(), "recv from 1, tag 0 on recorder-test, solver.py:81");
        assert_eq!((record.sequence, record.state), (1, State::Started));
        assert!(running().iter().any(|running| running.ticket == record.ticket));

        // However many operations follow, what runs stays visible.
        for _ in 0..2 * CAPACITY {
            drop(begin(&info, &call));
        }
        assert!(running().iter().any(|running| running.ticket == record.ticket));
        // As many as there are records, and one more, of which nothing is remembered.
        let others: Vec<Running> = (0..CAPACITY).map(|_| begin(&info, &call)).collect();
        assert!(others.iter().filter_map(Running::record).count() < CAPACITY);
        assert_eq!(first.record().unwrap().ticket, record.ticket);
        drop(others);
        first.fail();
        drop(first);
        let find = || records().into_iter().find(|other| other.ticket == record.ticket);
        assert_eq!(find().unwrap().state, State::Failed);
        assert!(!running().iter().any(|running| running.ticket == record.ticket));
        assert!(records().is_sorted_by_key(|record| record.ticket));
    }

    /// Programs come and go, and their records stay readable, for as long as they are remembered.
    #[test]
    fn what_no_program_and_no_record_needs_goes() {
        let comm = Arc::new(Comm::new("recorder-programs", 1, 0, 2));
        for program in 0..100 * CAPACITY {
            let mut site = Site::new(Op::Barrier, &comm);
            site.location = format!("program.py:{program}").into();
            let info = describe(&site, "mpi");
            let running = begin(&info, &Call::of(&site, Stream::NONE));
            drop(info);
            let record = running.end();
            if program % CAPACITY == 0 {
                let record = record.expect("nobody writes to it");
                assert!(record.to_string().ends_with(&format!("program.py:{program}")), "{record}");
                assert!(records().iter().all(|record| record.info.transport == "mpi"));
            }
        }
        // Those of `CAPACITY` records, those that came since the last of them went, and other tests' few.
        assert!(op_infos().len() < 4 * CAPACITY, "{}", op_infos().len());
        assert!(Arc::strong_count(&comm) < 4 * CAPACITY);
    }
}
