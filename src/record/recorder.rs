//! The flight recorder: the last operations of this process, as plain numbers on the [board](crate::board).
//!
//! An operation writes its record when it begins, and marks it as ended: no lock, no allocation and no system call. Other ranks
//! read it while it runs, and when its process has been killed.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::Serialize;

use super::clock;
pub use crate::board::raw::Plain;
use crate::board::raw::{FAILED, PENDING, Raw, TIMED, UNTIMED};
use crate::board::slot::RECORDS;
use crate::board::{Cell, Entry, Slot, own};
use crate::call::{Call, Phase, Site};
use crate::comm::CommWords;
use crate::mpilib::{Tag, wildcards};
use crate::ops::{Builtin, Dtype, Forms, Op, Reduction};
use crate::system::this_thread;

/// How far an operation has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RecordState {
    Started,
    Done,
    Failed,
}

/// A record of an operation of any rank, as it is read.
#[derive(Clone, Debug)]
pub struct Record {
    pub ticket: u64,
    pub op: Op,
    pub phase: Phase,
    pub reduction: Option<String>,
    pub dtype: Option<Dtype>,
    pub comm: CommWords,
    /// The user's source line; for a wait, also the line of the initiation.
    pub line: String,
    /// Names and shapes of what is sent, and what the operation belongs to, in words.
    pub forms: String,
    /// Number of the operation among the collectives, or the messages, of its communicator; from 1.
    pub sequence: u64,
    pub count: u64,
    pub root: i32,
    pub source: i32,
    pub dest: i32,
    pub recvtag: i32,
    pub sendtag: i32,
    pub started: u64,
    /// Equal to `started` while the operation runs, and of a short one, whose end was not timed.
    pub ended: u64,
    pub state: RecordState,
    /// A nonblocking operation that has not been waited for.
    pub is_pending: bool,
}

/// The kind of an operation: op, phase, data type and reduction.
fn kind(site: &Site, phase: Phase, dtype: Option<Dtype>) -> u32 {
    let reduction = match site.reduction {
        None => 0,
        Some(Reduction::User(_)) => 1,
        Some(Reduction::Builtin(builtin)) => 2 + builtin as u32,
    };
    // XLA's codes of data types are small.
    let dtype = dtype.map_or(0, |dtype| dtype.xla_code() as u32 + 1);
    site.op as u32 | (phase as u32) << 8 | (dtype & 0xff) << 16 | reduction << 24
}

/// An operation under way, which ends when this is dropped.
pub struct Running {
    /// `None` if as many operations run at the same time as there are records.
    raw: Option<&'static Raw>,
    cell: Option<&'static Cell>,
    sequence: u64,
    failed: bool,
    is_kept: AtomicBool,
}

/// Of how many completed operations the words are kept on the board.
pub const LAST: u64 = 8;
/// Bits of a count; the others are the thread's number.
const COUNT: u32 = 40;

fn count_and_thread(count: u64) -> u64 {
    count.min((1 << COUNT) - 1) | (this_thread() as u64) << COUNT
}

/// Records that an operation of a site starts; `print` and `form` are what its collectives are compared by.
#[inline]
pub fn begin(site: &Arc<Site>, call: &Call, print: impl FnOnce(usize) -> (u64, u64)) -> Running {
    let (slot, comm, row) = (own(), &*site.comm, site.op.row());
    let (count, dtype) = (call.items(), call.send.or(call.recv).map(|buffer| buffer.dtype()));
    let (sequence, cell) = if row.is_collective() {
        let (print, form) = print(count);
        (comm.cell().note(print, form), Some(comm.cell()))
    } else {
        (comm.cell().messages.fetch_add(1, Ordering::Relaxed) + 1, None)
    };
    let envelope = call.envelope;
    let plain = Plain {
        count: count_and_thread(count as u64),
        number: sequence as u32,
        kind: kind(site, site.phase, dtype),
        comm: comm.words(slot),
        line: site.line(slot),
        peers: if row.is_collective() {
            [site.root, 0, 0, (sequence >> 32) as i32]
        } else {
            [envelope.source, envelope.recvtag, envelope.dest, envelope.sendtag]
        },
        ..Plain::default()
    };
    Running { raw: claim(slot, plain), cell, sequence, failed: false, is_kept: AtomicBool::new(false) }
}

/// Records that a wait begins, at a line, for what these numbers say was started there.
pub fn begin_wait(of: &Plain, site: &Site, line: &str) -> Running {
    let slot = own();
    let words = match (&*site.location, line) {
        ("", line) => line.into(),
        (started, "") => format!("started at {started}"),
        (started, line) => format!("started at {started}, {line}"),
    };
    let phase = (Phase::Wait as u32) << 8;
    let kind = (of.kind & !0xff00) | phase;
    let count = count_and_thread(of.count & ((1 << COUNT) - 1));
    let line = Entry::default().number(&slot.text, || words);
    let raw = claim(slot, Plain { kind, count, comm: site.comm.words(slot), line, ..*of });
    Running { raw, cell: None, sequence: of.number.into(), failed: false, is_kept: AtomicBool::new(false) }
}

/// Writes a record in the next place whose operation has ended.
#[inline(always)]
fn claim(slot: &'static Slot, mut plain: Plain) -> Option<&'static Raw> {
    for _ in 0..RECORDS {
        let ticket = slot.next.fetch_add(1, Ordering::Relaxed) + 1;
        let raw = &slot.records[ticket as usize % RECORDS];
        let (before, ended) = (raw.ticket.load(Ordering::Relaxed), raw.ended.load(Ordering::Relaxed));
        // An operation that runs for long keeps its record while others, of other threads, come and go.
        if before != 0 && (ended == 0 || ended & PENDING != 0) {
            continue;
        }
        plain.ticket = ticket;
        plain.started = clock::ticks() & !TIMED;
        raw.write(&plain);
        return Some(raw);
    }
    None
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

    /// A copy of the numbers, of an operation that is waited for later: its record stays until then.
    pub fn keep(&self) -> Option<Plain> {
        let plain = self.raw.and_then(Raw::read)?;
        let slot = own();
        let kept = slot.records.iter().filter(|raw| raw.ended.load(Ordering::Relaxed) & PENDING != 0);
        if kept.count() < RECORDS / 2 {
            self.is_kept.store(true, Ordering::Relaxed);
        } else {
            slot.lost_pending.fetch_add(1, Ordering::Relaxed);
        }
        Some(plain)
    }

    /// A copy of the record.
    pub fn record(&self) -> Option<Record> {
        self.raw.and_then(|raw| record_of(&raw.read()?, own()))
    }

    /// Ends the operation; a copy of its record, with the time at which it has ended.
    pub fn end(self) -> Option<Record> {
        let raw = self.raw.inspect(|raw| raw.time());
        drop(self);
        raw.and_then(|raw| record_of(&raw.read()?, own()))
    }
}

impl Drop for Running {
    #[inline]
    fn drop(&mut self) {
        let flags = if self.failed { FAILED } else { 0 };
        let kept = if self.is_kept.load(Ordering::Relaxed) { PENDING } else { 0 };
        if let Some(raw) = self.raw {
            // Reading the clock takes as long as all the rest of a record, and few want to know how long a short operation took.
            let is_timed = raw.started.load(Ordering::Relaxed) & TIMED != 0;
            let time = if is_timed { clock::ticks() & !3 } else { UNTIMED };
            raw.ended.store(time | flags | kept, Ordering::Release);
        }
        if let Some(cell) = self.cell {
            cell.end(self.sequence);
        }
    }
}

/// The wait for what was kept begins, or it never does.
pub fn release(plain: &Plain) {
    let slot = own();
    let raw = &slot.records[plain.ticket as usize % RECORDS];
    if raw.ticket.load(Ordering::Relaxed) == plain.ticket {
        raw.ended.fetch_and(!PENDING, Ordering::Relaxed);
    }
}

/// The threads that are in operations.
pub fn waiting() -> Vec<i32> {
    let plain =
        own().records.iter().filter(|raw| raw.ended.load(Ordering::Relaxed) == 0).filter_map(Raw::read);
    plain.map(|plain| (plain.count >> COUNT) as i32).collect()
}

/// A record with the words of a rank's slot.
pub fn record_of(plain: &Plain, slot: &Slot) -> Option<Record> {
    let op = Op::TABLE.get(plain.kind as usize & 0xff)?;
    let phase = match plain.kind >> 8 & 0xff {
        0 => Phase::Whole,
        1 => Phase::Start,
        _ => Phase::Wait,
    };
    let reduction = match plain.kind >> 24 {
        0 => None,
        1 => Some("user-defined reduction".into()),
        builtin => Builtin::ALL.get(builtin as usize - 2).map(|builtin| builtin.name().into()),
    };
    let dtype = (plain.kind >> 16 & 0xff).checked_sub(1).and_then(|code| Dtype::from_xla(code as i32));
    let [source, recvtag, dest, sendtag] = plain.peers;
    let (number, is_collective) = (u64::from(plain.number), op.is_collective());
    let words = slot.text.read(plain.line);
    let (line, forms) = Forms::split(&words);
    let state = match plain.ended {
        0 => RecordState::Started,
        ended if ended & FAILED == 0 => RecordState::Done,
        _ => RecordState::Failed,
    };
    Some(Record {
        ticket: plain.ticket,
        op: op.op,
        phase,
        reduction,
        dtype,
        comm: CommWords::decode(&slot.text.read(plain.comm)),
        line: line.into(),
        forms: forms.into(),
        sequence: if is_collective { number | u64::from(sendtag as u32) << 32 } else { number },
        count: plain.count & ((1 << COUNT) - 1),
        root: source,
        source: if is_collective { -1 } else { source },
        dest: if is_collective { -1 } else { dest },
        recvtag,
        sendtag: if is_collective { 0 } else { sendtag },
        started: plain.started,
        ended: plain.ended.max(plain.started),
        state,
        is_pending: plain.ended != 0 && plain.ended & PENDING != 0,
    })
}

/// The last `most` records of a rank that are wanted, the oldest first.
fn wanted(slot: &Slot, most: usize, is_wanted: impl Fn(u64) -> bool) -> Vec<Record> {
    let raws = slot.records.iter().filter(|raw| is_wanted(raw.ended.load(Ordering::Relaxed)));
    let mut found: Vec<Plain> = raws.filter_map(Raw::read).filter(|plain| is_wanted(plain.ended)).collect();
    found.sort_by_key(|plain| plain.ticket);
    found[found.len().saturating_sub(most)..].iter().filter_map(|plain| record_of(plain, slot)).collect()
}

/// All records of a rank.
pub fn records(slot: &Slot) -> Vec<Record> {
    last(slot, RECORDS)
}

/// The last records of a rank.
pub fn last(slot: &Slot, count: usize) -> Vec<Record> {
    wanted(slot, count, |_| true)
}

/// The operations that are running.
pub fn running(slot: &Slot) -> Vec<Record> {
    wanted(slot, RECORDS, |ended| ended == 0)
}

/// Keeps the words on the board of operations that have not completed, and of the last ones. The former take so long that their end
/// is timed.
pub fn keep_words() {
    let (slot, last) = (own(), count());
    for (raw, plain) in slot.records.iter().filter_map(|raw| Some((raw, raw.read()?))) {
        if plain.ended == 0 {
            raw.time();
        }
        if plain.ended == 0 || plain.ended & PENDING != 0 || plain.ticket + LAST > last {
            slot.text.keep(plain.comm);
            slot.text.keep(plain.line);
        }
    }
}

/// The nonblocking operations that have not been waited for.
pub fn pending(slot: &Slot) -> Vec<Record> {
    wanted(slot, RECORDS, |ended| ended != 0 && ended & PENDING != 0)
}

/// The tags with which a rank has sent lately, each once.
pub fn tags(slot: &Slot) -> Vec<i32> {
    let sent = slot.records.iter().filter_map(Raw::read);
    let sent = sent.filter(|plain| Op::TABLE.get(plain.kind as usize & 0xff).is_some_and(|row| row.sends()));
    let mut tags: Vec<i32> = sent.map(|plain| plain.destination().1).collect();
    tags.sort_unstable();
    tags.dedup();
    tags
}

/// How many operations have begun.
pub fn count() -> u64 {
    own().next.load(Ordering::Acquire)
}

/// Waits until the operations that are running now have ended.
pub fn wait() {
    let (slot, last) = (own(), count());
    let runs = |raw: &Raw| {
        let ticket = raw.ticket.load(Ordering::Acquire);
        ticket != 0 && ticket <= last && raw.ended.load(Ordering::Acquire) == 0
    };
    while slot.records.iter().any(runs) {
        std::thread::sleep(Duration::from_micros(20));
    }
}

impl Record {
    /// The name of the operation in Python, or of the wait for it.
    pub fn name(&self) -> &'static str {
        self.op.name_of(self.phase)
    }

    /// Seconds that the operation took, or has taken so far. `None`: it was short.
    pub fn seconds(&self) -> Option<f64> {
        let is_timed = self.ended > self.started;
        match self.state {
            RecordState::Started => Some(clock::seconds_since(self.started)),
            _ => is_timed.then(|| clock::seconds(self.started, self.ended)),
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
        let row = self.op.row();
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
        details.extend(row.has_root.then(|| format!("root {}", self.root)));
        details.extend(self.reduction.clone());
        details.extend(self.dtype.map(|dtype| format!("{} x {}", self.count, dtype.name())));
        if !details.is_empty() {
            write!(f, " ({})", details.join(", "))?;
        }
        write!(f, " on {}", self.comm.key)?;
        if self.line.is_empty() { Ok(()) } else { write!(f, ", {}", self.line) }
    }
}

/// The record of an operation of a site that a test begins.
#[cfg(test)]
pub fn record_in_test(site: Site) -> Record {
    let site = Arc::new(site);
    begin(&site, &Call::of(&site, crate::call::Stream::NONE), |_| (1, 0)).record().unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::Stream;
    use crate::comm::{self, Comm};

    fn begin(site: &Arc<Site>, call: &Call) -> Running {
        super::begin(site, call, |_| (1, 0))
    }

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
        assert!(running(own()).iter().any(|running| running.ticket == record.ticket));

        // However many operations follow, what runs stays visible, and what has not been waited for.
        let kept = begin(&site, &call);
        let plain = kept.keep().unwrap();
        drop(kept);
        for _ in 0..2 * RECORDS {
            drop(begin(&site, &call));
        }
        assert!(running(own()).iter().any(|running| running.ticket == record.ticket));
        assert!(pending(own()).iter().any(|kept| kept.ticket == plain.ticket));
        release(&plain);
        assert!(pending(own()).iter().all(|kept| kept.ticket != plain.ticket));
        let wait = begin_wait(&plain, &site, "solver.py:90");
        let words = wait.record().unwrap().to_string();
        assert!(words.ends_with("on recorder-test, started at solver.py:81, solver.py:90"), "{words}");
        drop(wait);
        // One operation more than there are records, so that one of them is not recorded.
        let others: Vec<Running> = (0..RECORDS).map(|_| begin(&site, &call)).collect();
        assert!(others.iter().filter_map(Running::record).count() < RECORDS);
        assert_eq!(first.record().unwrap().ticket, record.ticket);
        drop(others);
        first.fail();
        let short = begin(&site, &call);
        let ticket = short.record().unwrap().ticket;
        drop(short);
        keep_words(); // as the watchdog does, which sees it running
        drop(first);
        let find = |ticket| records(own()).into_iter().find(|other| other.ticket == ticket).unwrap();
        let (long, short) = (find(record.ticket), find(ticket));
        assert_eq!((long.state, long.seconds().is_some()), (RecordState::Failed, true));
        assert_eq!((short.state, short.seconds()), (RecordState::Done, None));
        assert!(records(own()).is_sorted_by_key(|record| record.ticket));
        assert_eq!(last(own(), 3).len(), 3);
    }
}
