//! The flight recorder: the last operations of this process, readable at any time.
//!
//! Every field is an atomic, and a record is claimed by adding to a counter: an operation writes its
//! record without a lock, an allocation or a system call, and the watchdog reads it while it runs.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering, fence};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::clock::{self, Epoch};
use crate::ops::{Call, Comm, Dtype, Op, Reduction, Site};

/// How many operations are remembered.
pub const CAPACITY: usize = 1024;

/// A communicator, as the reports of all its ranks know it.
#[derive(Debug)]
pub struct Group {
    pub comm: &'static Comm,
    /// Its members' ranks in `MPI_COMM_WORLD`.
    pub world: Box<[i32]>,
    collectives: AtomicU64,
    messages: AtomicU64,
}

impl Group {
    /// How many collective operations this rank has begun.
    pub fn collectives(&self) -> u64 {
        self.collectives.load(Ordering::Relaxed)
    }

    /// The rank in `MPI_COMM_WORLD` of a rank of this communicator.
    pub fn world_rank(&self, rank: i32) -> Option<i32> {
        self.world.get(usize::try_from(rank).ok()?).copied()
    }
}

/// What is known of an operation before it runs. Never dropped: records point to it after the program
/// that held it is gone. Equal sites share one, so compiling again and again costs no memory.
#[derive(Debug)]
pub struct What {
    pub op: Op,
    pub group: &'static Group,
    pub reduction: Option<Reduction>,
    pub root: i32,
    /// The user's source line.
    pub location: Box<str>,
    pub transport: &'static str,
}

impl What {
    /// Whether all ranks of the communicator take part.
    pub fn is_collective(&self) -> bool {
        !self.op.row().has_peer
    }
}

static GROUPS: Mutex<Vec<&'static Group>> = Mutex::new(Vec::new());
static WHATS: Mutex<Option<HashMap<String, &'static What>>> = Mutex::new(None);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Every communicator that this process has used.
pub fn groups() -> Vec<&'static Group> {
    lock(&GROUPS).clone()
}

/// What is known of a communicator that has been introduced.
pub fn group_of(comm: &Comm) -> Option<&'static Group> {
    lock(&GROUPS).iter().copied().find(|group| std::ptr::eq(group.comm, comm))
}

/// Introduces a communicator whose members have these ranks in `MPI_COMM_WORLD`.
pub fn join(comm: &'static Comm, world: impl FnOnce() -> Box<[i32]>) -> &'static Group {
    let mut groups = lock(&GROUPS);
    if let Some(&group) = groups.iter().find(|group| std::ptr::eq(group.comm, comm)) {
        return group;
    }
    let (collectives, messages) = (AtomicU64::new(0), AtomicU64::new(0));
    let group: &'static Group = Box::leak(Box::new(Group { comm, world: world(), collectives, messages }));
    groups.push(group);
    group
}

/// What the records of this site will say.
pub fn describe(site: &Site, transport: &'static str) -> &'static What {
    let group = join(site.comm, || (0..site.comm.size).collect());
    let (op, reduction, root, location) = (site.op, site.reduction, site.root, &site.location);
    let key = format!("{op} {group:p} {reduction:?} {root} {transport} {location}");
    lock(&WHATS).get_or_insert_default().entry(key).or_insert_with(|| {
        let location = location.clone();
        Box::leak(Box::new(What { op, group, reduction, root, location, transport }))
    })
}

/// One record, one cache line.
#[repr(align(64))]
struct Slot {
    /// The record's number, from 1; 0 while it is being written.
    ticket: AtomicU64,
    what: AtomicPtr<What>,
    /// Number of the operation among the collectives, or the messages, of its communicator; from 1.
    sequence: AtomicU64,
    /// The element count, and above it the index of the data type.
    items: AtomicU64,
    /// Source and destination.
    peers: AtomicU64,
    /// Tags of the receiving and the sending side.
    tags: AtomicU64,
    started: AtomicU64,
    /// 0 while the operation runs; the lowest bit is set if it failed.
    ended: AtomicU64,
}

static NEXT: AtomicU64 = AtomicU64::new(0);
static SLOTS: [Slot; CAPACITY] = [const {
    Slot {
        ticket: AtomicU64::new(0),
        what: AtomicPtr::new(std::ptr::null_mut()),
        sequence: AtomicU64::new(0),
        items: AtomicU64::new(0),
        peers: AtomicU64::new(0),
        tags: AtomicU64::new(0),
        started: AtomicU64::new(0),
        ended: AtomicU64::new(1),
    }
}; CAPACITY];

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
#[inline]
pub fn begin(what: &'static What, call: &Call) -> Running {
    let Group { collectives, messages, .. } = what.group;
    let numbers = if what.is_collective() { collectives } else { messages };
    let sequence = numbers.fetch_add(1, Ordering::Relaxed) + 1;
    // An operation that runs for long keeps its record while others, of other threads, come and go.
    let mut ticket = NEXT.fetch_add(1, Ordering::Relaxed) + 1;
    let mut slot = &SLOTS[ticket as usize % CAPACITY];
    for _ in 0..CAPACITY {
        if slot.ended.load(Ordering::Relaxed) != 0 {
            break;
        }
        ticket = NEXT.fetch_add(1, Ordering::Relaxed) + 1;
        slot = &SLOTS[ticket as usize % CAPACITY];
    }
    let dtype = call.send.or(call.recv).map_or(NO_DTYPE, |buffer| buffer.dtype as u64);
    // A reader that sees any of the writes below sees that the ticket is no longer the old one.
    slot.ticket.store(0, Ordering::Relaxed);
    fence(Ordering::Release);
    slot.ended.store(0, Ordering::Relaxed);
    slot.what.store(std::ptr::from_ref(what).cast_mut(), Ordering::Relaxed);
    slot.sequence.store(sequence, Ordering::Relaxed);
    slot.items.store(call.items() as u64 | (dtype << COUNT_BITS), Ordering::Relaxed);
    slot.peers.store(pair(call.envelope.source, call.envelope.dest), Ordering::Relaxed);
    slot.tags.store(pair(call.envelope.recvtag, call.envelope.sendtag), Ordering::Relaxed);
    slot.started.store(clock::ticks(), Ordering::Relaxed);
    slot.ticket.store(ticket, Ordering::Release);
    Running { slot, failed: false }
}

impl Running {
    /// The operation has failed.
    #[cold]
    pub fn fail(&mut self) {
        self.failed = true;
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
        self.slot.ended.store(ended, Ordering::Release);
    }
}

/// How far an operation has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Started,
    Done,
    Failed,
}

impl State {
    pub fn name(self) -> &'static str {
        match self {
            Self::Started => "started",
            Self::Done => "done",
            Self::Failed => "failed",
        }
    }
}

/// A copy of what the recorder has of one operation.
#[derive(Clone, Copy, Debug)]
pub struct Record {
    pub ticket: u64,
    pub what: &'static What,
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
}

impl Slot {
    /// A copy, unless the record is being written.
    fn read(&self) -> Option<Record> {
        let ticket = self.ticket.load(Ordering::Acquire);
        let what = self.what.load(Ordering::Relaxed);
        let sequence = self.sequence.load(Ordering::Relaxed);
        let items = self.items.load(Ordering::Relaxed);
        let (source, dest) = unpair(self.peers.load(Ordering::Relaxed));
        let (recvtag, sendtag) = unpair(self.tags.load(Ordering::Relaxed));
        let started = self.started.load(Ordering::Relaxed);
        let ended = self.ended.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        if ticket == 0 || self.ticket.load(Ordering::Relaxed) != ticket {
            return None;
        }
        let (state, ended) = match ended {
            0 => (State::Started, started),
            ended if ended & 1 == 0 => (State::Done, ended),
            ended => (State::Failed, ended),
        };
        Some(Record {
            ticket,
            // SAFETY: whole records point to what `describe` leaked.
            what: unsafe { &*what },
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
    let started = |slot: &&Slot| slot.ended.load(Ordering::Relaxed) == 0;
    let mut records: Vec<Record> = SLOTS.iter().filter(started).filter_map(Slot::read).collect();
    records.retain(|record| record.state == State::Started);
    records.sort_by_key(|record| record.ticket);
    records
}

impl Record {
    /// Seconds that the operation took, or has taken so far.
    pub fn seconds(&self, epoch: &Epoch) -> f64 {
        match self.state {
            State::Started => epoch.seconds_since(self.started),
            State::Done | State::Failed => epoch.seconds(self.started, self.ended),
        }
    }

    fn peer(&self, f: &mut fmt::Formatter<'_>, word: &str, rank: i32, tag: i32) -> fmt::Result {
        // Every MPI's wildcards and MPI_PROC_NULL are negative, and its ranks and tags are not.
        if rank < 0 {
            write!(f, " {word} any rank")?
        } else {
            write!(f, " {word} {rank}")?
        }
        if tag < 0 { write!(f, ", any tag") } else { write!(f, ", tag {tag}") }
    }
}

/// `allreduce #118 (SUM, 3 x float32) on mpi4jax.default, solver.py:97`
impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = self.what;
        write!(f, "{}", what.op)?;
        match what.op {
            Op::Recv => self.peer(f, "from", self.source, self.recvtag)?,
            Op::Send => self.peer(f, "to", self.dest, self.sendtag)?,
            Op::Sendrecv => {
                self.peer(f, "from", self.source, self.recvtag)?;
                f.write_str(" and")?;
                self.peer(f, "to", self.dest, self.sendtag)?;
            }
            _ => write!(f, " #{}", self.sequence)?,
        }
        let mut details = Vec::new();
        if what.op.row().has_root {
            details.push(format!("root {}", what.root));
        }
        if let Some(reduction) = what.reduction {
            details.push(reduction.to_string());
        }
        if let Some(dtype) = self.dtype {
            details.push(format!("{} x {}", self.count, dtype.name()));
        }
        if !details.is_empty() {
            write!(f, " ({})", details.join(", "))?;
        }
        write!(f, " on {}", what.group.comm.key)?;
        if what.location.is_empty() { Ok(()) } else { write!(f, ", {}", what.location) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::register_comm;

    #[test]
    fn a_record_says_what_runs_and_then_how_it_ended() {
        let comm = register_comm("recorder-test", 1, 0, 2);
        let mut site = Site::new(Op::Recv, comm);
        site.envelope.source = 1;
        site.location = "solver.py:81".into();
        let what = describe(&site, "mpi");
        assert!(std::ptr::eq(what, describe(&site, "mpi")), "equal sites share what is known of them");
        let call = Call {
            site: &site,
            send: None,
            recv: None,
            others: &[],
            envelope: site.envelope,
            received: None,
            status: 0,
            stream: crate::ops::Stream::NONE,
        };
        let mut first = begin(what, &call);
        let record = first.record().unwrap();
        assert_eq!(record.to_string(), "recv from 1, tag 0 on recorder-test, solver.py:81");
        assert_eq!((record.sequence, record.state), (1, State::Started));
        assert!(running().iter().any(|running| running.ticket == record.ticket));

        // However many operations follow, what runs stays visible.
        for _ in 0..2 * CAPACITY {
            drop(begin(what, &call));
        }
        assert!(running().iter().any(|running| running.ticket == record.ticket));
        first.fail();
        drop(first);
        let find = || records().into_iter().find(|other| other.ticket == record.ticket);
        assert_eq!(find().unwrap().state, State::Failed);
        assert!(!running().iter().any(|running| running.ticket == record.ticket));
        assert!(records().is_sorted_by_key(|record| record.ticket));
    }
}
