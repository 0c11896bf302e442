//! The slot of a rank on the board: numbers, which the rank writes with plain stores, and a ring of words.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

use crate::sync::lock;
use crate::system::now;

/// How many operations are remembered.
pub const RECORDS: usize = 256;
/// How many communicators are compared, and how many entries each has for its last collectives. Many programs repeat a sequence of
/// 1, 2, 3, 4 or 6 collectives, whose lengths divide this number: then no entry changes.
pub const CELLS: usize = 32;
pub const PRINTS: usize = 12;
/// How many bits of an entry are the number of a collective: at 0.5 us each, they last for 4 years.
const SINCE: u32 = 48;
/// With how many ranks messages are counted, and how many of the last ones are compared.
pub const PEERS: usize = 64;
pub const MESSAGES: usize = 4;
/// Bytes of words.
const TEXT: usize = 12 << 10;
const LONGEST: usize = 3 << 10;

/// How far the process of a rank has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd)]
pub enum Life {
    /// It has not imported the package.
    #[default]
    Absent,
    Runs,
    /// `MPI_Finalize` has begun: it begins nothing any more.
    Finished,
}

/// An operation, in the flight recorder.
#[repr(C, align(64))]
pub struct Raw {
    /// Its number in the process, from 1; 0 while it is written.
    pub ticket: AtomicU64,
    pub started: AtomicU64,
    /// The time at which it ended; 0 while it runs. The lowest bits are [`FAILED`] and [`PENDING`].
    pub ended: AtomicU64,
    /// How many elements, and in the upper bits the thread.
    pub count: AtomicU64,
    /// Its number on the communicator.
    pub number: AtomicU32,
    pub kind: AtomicU32,
    /// Words of the communicator, and of the line.
    pub comm: AtomicU32,
    pub line: AtomicU32,
    /// Source (or root), tag, destination, tag.
    pub peers: [AtomicI32; 4],
}

pub const FAILED: u64 = 1;
/// A nonblocking operation that has not been waited for.
pub const PENDING: u64 = 2;

/// The collectives of a communicator.
///
/// Neighbors read all cache lines but the last one in each collective. A line that one core writes and another core reads is
/// transferred twice, which takes as long as a small collective if the cores share no cache. So a collective writes only to the last
/// line, and to an entry only if the entry changes: while a program repeats its collectives, no line is transferred. Neighbors read
/// the last line only if collectives differ.
#[repr(C, align(64))]
#[derive(Default)]
pub struct Cell {
    /// What its ranks know it by; 0: the cell is free.
    pub id: AtomicU64,
    pub class: AtomicU64,
    pub origin: AtomicU64,
    pub name: AtomicU64,
    /// [`FREED`], [`THREADS`], [`MIXED`].
    pub flags: AtomicU32,
    /// Entry n % PRINTS describes collective n. The first number is the hash of what must be equal on all ranks. The lower bits of the
    /// second one are the number of the collective since which the entry has not changed, and its upper bits are a hash of the names
    /// and shapes of the leaves. The second number is 0 while the entry is written.
    prints: [[AtomicU64; 2]; PRINTS],
    own: NewLine,
    /// How many collectives, and how many messages, this rank has begun.
    pub number: AtomicU64,
    pub messages: AtomicU64,
    /// Collectives that run now, in whichever thread.
    pub running: AtomicU32,
}

/// The next field begins a new cache line.
#[repr(C, align(64))]
#[derive(Default)]
struct NewLine;

pub const FREED: u32 = 1;
/// Several threads have used it at the same time: numbers say nothing.
pub const THREADS: u32 = 2;
/// Ranks take part by other means than this package: numbers say nothing.
pub const MIXED: u32 = 4;

/// What a rank has begun on a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Print {
    pub print: u64,
    pub form: u64,
}

/// Messages to and from a rank, on a communicator. For each message the receiver reads the first cache line, which is written only
/// if the type of the messages changes, as in a [`Cell`].
#[repr(C, align(64))]
pub struct Peer {
    /// A hash of the communicator and the rank; 0: the entry is free.
    pub key: AtomicU64,
    /// The communicator, as its ranks know it, and the rank in `MPI_COMM_WORLD`.
    pub comm: AtomicU64,
    pub rank: AtomicI32,
    /// The kind of all messages in `prints`, if they have the same kind; else 0.
    pub steady: AtomicU64,
    own: NewLine,
    pub sent: AtomicU64,
    pub received: AtomicU64,
    /// How many messages have been noted in `prints`; how many of the last ones have the same kind; and this kind.
    pub noted: AtomicU32,
    alike: AtomicU32,
    kind: AtomicU64,
    /// An entry for each of the last messages sent: the hash by which it is recognized, the meaning of its bits, and the hash of
    /// names and shapes of its leaves.
    pub prints: [[AtomicU64; 3]; MESSAGES],
}

/// Words that change atomically.
#[repr(C)]
pub struct Words<const N: usize> {
    /// Odd while they are written.
    turn: AtomicU32,
    length: AtomicU32,
    bytes: [AtomicU8; N],
}

#[repr(C, align(4096))]
pub struct Slot {
    /// Its process; 0: the rank has not come.
    pub pid: AtomicU32,
    /// The rank in `MPI_COMM_WORLD`.
    pub rank: AtomicU32,
    life: AtomicU32,
    /// When the process was started, and within what numbers of processes are unique.
    pub start: AtomicU64,
    pub space: AtomicU64,
    /// How often `MPI_COMM_WORLD` has been duplicated.
    pub copies: AtomicU64,
    /// Others wake this rank's watchdog by it.
    pub bell: AtomicU32,
    /// How often others have asked where its threads are, and which of that is answered.
    pub asked: AtomicU32,
    pub answered: AtomicU32,
    /// Whether a signal ends it, and who says so.
    pub terminated: AtomicU32,
    /// How many threads of Python's have communicated and live.
    pub threads: AtomicU32,
    /// Milliseconds: when its watchdog has looked last, and when a thread has used the processor that waits for nothing.
    pub looked: AtomicU64,
    pub busy: AtomicU64,
    /// What found no place in the tables: the largest number of collectives on one communicator; messages; pending requests.
    pub lost_number: AtomicU64,
    pub lost_sent: AtomicU64,
    pub lost_received: AtomicU64,
    pub lost_pending: AtomicU32,
    /// How many bytes of words have been written.
    text_end: AtomicU32,
    /// The number of the last operation.
    pub next: AtomicU64,
    pub settings: Words<1024>,
    /// Where Python is, in JSON.
    pub python: Words<4096>,
    /// What it waits for on streams of a GPU, and calls of Python's.
    pub waits: Words<2048>,
    pub cells: [Cell; CELLS],
    pub peers: [Peer; PEERS],
    pub records: [Raw; RECORDS],
    text: [AtomicU8; TEXT],
}

/// A hash of two numbers.
#[inline(always)]
pub fn mix(a: u64, b: u64) -> u64 {
    let product = u128::from(a ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(u128::from(b ^ 0xd1b5_4a32_d192_ed03));
    (product as u64) ^ (product >> 64) as u64
}

/// Milliseconds of the clock that all processes share.
pub fn milliseconds() -> u64 {
    (1e3 * now()) as u64
}

impl Slot {
    pub fn life(&self) -> Life {
        match self.life.load(Ordering::Acquire) {
            1 => Life::Runs,
            2 => Life::Finished,
            _ => Life::Absent,
        }
    }

    pub fn set_life(&self, life: Life) {
        self.life.store(life as u32, Ordering::Release);
    }

    /// Writes words, without control characters, which could forge lines of a report; where they are.
    pub fn write(&self, words: &str) -> u32 {
        static WRITING: Mutex<()> = Mutex::new(());
        let plain = printable(words);
        let bytes = &plain.as_bytes()[..plain.len().min(LONGEST)];
        let _writing = lock(&WRITING);
        // Position 0 stands for no words.
        let begin = self.text_end.load(Ordering::Relaxed).max(1);
        let end = begin + 2 + bytes.len() as u32;
        self.text_end.store(end, Ordering::Release);
        let length = (bytes.len() as u16).to_le_bytes();
        for (i, byte) in length.iter().chain(bytes).enumerate() {
            self.text[(begin as usize + i) % TEXT].store(*byte, Ordering::Relaxed);
        }
        begin
    }

    /// Whether words that begin there are still there, and stay for a while.
    #[inline]
    fn has(&self, at: u32) -> bool {
        at != 0 && self.text_end.load(Ordering::Relaxed).wrapping_sub(at) < (TEXT - LONGEST) as u32
    }

    /// The words that begin there; nothing where others have taken their place.
    pub fn read(&self, at: u32) -> String {
        let is_there = || at != 0 && self.text_end.load(Ordering::Acquire).wrapping_sub(at) <= TEXT as u32;
        if !is_there() {
            return String::new();
        }
        let byte = |i: usize| self.text[(at as usize + i) % TEXT].load(Ordering::Relaxed);
        let length = usize::from(u16::from_le_bytes([byte(0), byte(1)])).min(LONGEST);
        let bytes: Vec<u8> = (0..length).map(|i| byte(2 + i)).collect();
        if is_there() { String::from_utf8_lossy(&bytes).into_owned() } else { String::new() }
    }

    /// Forgets what an earlier process of this rank has left; words that have been handed out stay.
    pub fn clear(&self) {
        for words in [&self.asked, &self.answered, &self.terminated, &self.lost_pending] {
            words.store(0, Ordering::Relaxed);
        }
        for number in [&self.looked, &self.busy, &self.lost_number, &self.lost_sent, &self.lost_received] {
            number.store(0, Ordering::Relaxed);
        }
        self.set_life(Life::Absent);
    }

    /// The cell of a communicator that its ranks know by this.
    #[inline]
    pub fn cell(&self, id: u64) -> Option<&Cell> {
        self.cells.iter().find(|cell| cell.id.load(Ordering::Acquire) == id)
    }

    /// A cell for a new communicator: a free one, or that of one that was freed. None: there are too many.
    pub fn claim(&'static self) -> Option<&'static Cell> {
        static CLAIMING: Mutex<()> = Mutex::new(());
        let _claiming = lock(&CLAIMING);
        let is_free = |cell: &&Cell| cell.id.load(Ordering::Relaxed) == 0;
        let is_freed = |cell: &&Cell| cell.flags.load(Ordering::Relaxed) & FREED != 0;
        let cell = self.cells.iter().find(is_free).or_else(|| self.cells.iter().find(is_freed))?;
        self.lost_number.fetch_max(cell.number.load(Ordering::Relaxed), Ordering::Relaxed);
        cell.clear();
        cell.id.store(u64::MAX, Ordering::Relaxed);
        Some(cell)
    }

    /// The messages to and from a rank on a communicator. Where there is no place for more ranks, another one loses its own.
    pub fn peer(&self, comm: u64, rank: i32) -> &Peer {
        static CLAIMING: Mutex<()> = Mutex::new(());
        let key = mix(comm, rank as u64).max(1);
        let start = key as usize % PEERS;
        for step in 0..PEERS {
            let peer = &self.peers[(start + step) % PEERS];
            match peer.key.load(Ordering::Acquire) {
                found if found == key => return peer,
                0 => break,
                _ => {}
            }
        }
        let _claiming = lock(&CLAIMING);
        let mut free = (0..PEERS).map(|step| &self.peers[(start + step) % PEERS]);
        let peer = free
            .find(|peer| [0, key].contains(&peer.key.load(Ordering::Relaxed)))
            .unwrap_or(&self.peers[start]);
        if peer.key.load(Ordering::Relaxed) != key {
            self.lost_sent.fetch_add(peer.sent.swap(0, Ordering::Relaxed), Ordering::Relaxed);
            self.lost_received.fetch_add(peer.received.swap(0, Ordering::Relaxed), Ordering::Relaxed);
            peer.prints.as_flattened().iter().for_each(|print| print.store(0, Ordering::Relaxed));
            for number in [&peer.steady, &peer.kind] {
                number.store(0, Ordering::Relaxed);
            }
            peer.noted.store(0, Ordering::Relaxed);
            peer.alike.store(0, Ordering::Relaxed);
            peer.comm.store(comm, Ordering::Relaxed);
            peer.rank.store(rank, Ordering::Relaxed);
            peer.key.store(key, Ordering::Release);
        }
        peer
    }

    /// The messages to and from a rank on a communicator, if there have been any.
    pub fn known_peer(&self, comm: u64, rank: i32) -> Option<&Peer> {
        let key = mix(comm, rank as u64).max(1);
        let places = (0..PEERS).map(|step| &self.peers[(key as usize % PEERS + step) % PEERS]);
        let mut used =
            places.map(|peer| (peer.key.load(Ordering::Acquire), peer)).take_while(|(key, _)| *key != 0);
        used.find(|(found, _)| *found == key).map(|(_, peer)| peer)
    }
}

impl Cell {
    fn clear(&self) {
        for number in [&self.id, &self.number, &self.messages] {
            number.store(0, Ordering::Relaxed);
        }
        self.flags.store(0, Ordering::Relaxed);
        self.prints.as_flattened().iter().for_each(|number| number.store(0, Ordering::Relaxed));
    }

    /// Notes a collective before it runs, and returns its number. If two threads do so at a time, the numbers mean nothing.
    ///
    /// Two ranks note their collectives, and then each looks at the [`Self::print`] of the other. If the collectives differ, at least
    /// one of the ranks sees the difference, because the stores to entries and numbers, and the loads of both, are sequentially
    /// consistent.
    #[inline(always)]
    pub fn note(&self, print: u64, form: u64) -> u64 {
        let number = self.number.load(Ordering::Relaxed) + 1;
        let [its_print, its_since] = &self.prints[number as usize % PRINTS];
        let (since, form) = (its_since.load(Ordering::Relaxed), short(form));
        if since == 0 || since >> SINCE != form || its_print.load(Ordering::Relaxed) != print {
            its_since.store(0, Ordering::Relaxed);
            fence(Ordering::Release);
            its_print.store(print, Ordering::Relaxed);
            its_since.store(form << SINCE | number, Ordering::SeqCst);
        }
        self.number.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// The entry of a collective. If the rank has not come to the collective, the entry may still change. `None`: the rank is far
    /// ahead, and the entry describes a later collective, or is being written.
    #[inline(always)]
    fn entry(&self, number: u64) -> Option<Print> {
        let [print, since] = &self.prints[number as usize % PRINTS];
        let before = since.load(Ordering::SeqCst);
        let found = Print { print: print.load(Ordering::Acquire), form: before >> SINCE };
        let is_known = before != 0 && before & ((1 << SINCE) - 1) <= number;
        (is_known && since.load(Ordering::Relaxed) == before).then_some(found)
    }

    /// Whether the entry of a collective equals this print. If the entry changes later, the rank that changes it sees the difference.
    #[inline(always)]
    pub fn repeats(&self, number: u64, print: &Print) -> bool {
        self.entry(number) == Some(*print)
    }

    /// What was noted of a collective. `None`: the rank has not come to it, or is far ahead.
    pub fn print(&self, number: u64) -> Option<Print> {
        if self.number.load(Ordering::SeqCst) < number { None } else { self.entry(number) }
    }

    #[inline]
    pub fn has(&self, flag: u32) -> bool {
        self.flags.load(Ordering::Relaxed) & flag != 0
    }

    pub fn set(&self, flag: u32) {
        self.flags.fetch_or(flag, Ordering::Relaxed);
    }
}

/// The upper bits of a hash, as many as stand beside a number of `SINCE` bits; 0 only if the hash is 0.
fn short(hash: u64) -> u64 {
    if hash == 0 { 0 } else { (hash >> SINCE).max(1) }
}

impl Peer {
    /// Notes that a message of this kind is about to be sent, and returns its entry, which the caller writes.
    #[inline]
    pub fn note(&self, kind: u64) -> &[AtomicU64; 3] {
        let is_alike = self.kind.load(Ordering::Relaxed) == kind;
        let alike = if is_alike { self.alike.load(Ordering::Relaxed).saturating_add(1) } else { 1 };
        if !is_alike {
            self.kind.store(kind, Ordering::Relaxed);
            if self.steady.load(Ordering::Relaxed) != 0 {
                self.steady.store(0, Ordering::Release);
            }
        }
        self.alike.store(alike, Ordering::Relaxed);
        let number = self.noted.fetch_add(1, Ordering::AcqRel);
        if alike == MESSAGES as u32 {
            self.steady.store(kind, Ordering::Release);
        }
        &self.prints[number as usize % MESSAGES]
    }
}

impl<const N: usize> Words<N> {
    /// Writes words. Only one thread of the rank may write them at a time.
    pub fn write(&self, words: &str) {
        let mut length = words.len().min(N);
        while !words.is_char_boundary(length) {
            length -= 1;
        }
        self.turn.fetch_add(1, Ordering::AcqRel);
        self.length.store(length as u32, Ordering::Relaxed);
        for (place, byte) in self.bytes.iter().zip(&words.as_bytes()[..length]) {
            place.store(*byte, Ordering::Relaxed);
        }
        self.turn.fetch_add(1, Ordering::AcqRel);
    }

    pub fn read(&self) -> String {
        for _ in 0..100 {
            let before = self.turn.load(Ordering::Acquire);
            let length = (self.length.load(Ordering::Relaxed) as usize).min(N);
            let bytes: Vec<u8> =
                self.bytes[..length].iter().map(|byte| byte.load(Ordering::Acquire)).collect();
            if before % 2 == 0 && self.turn.load(Ordering::Acquire) == before {
                return String::from_utf8_lossy(&bytes).into_owned();
            }
            std::thread::yield_now();
        }
        String::new()
    }
}

/// Words without characters that a terminal acts on.
pub fn printable(words: &str) -> String {
    let of = |c: char| if c.is_control() { c.escape_default().collect::<String>() } else { c.to_string() };
    words.chars().map(of).collect()
}

/// Words of this rank that are on the board as long as they are used.
#[derive(Debug, Default)]
pub struct Entry(AtomicU32);

impl Entry {
    /// The position of the words, which are written if they are no longer there.
    #[inline]
    pub fn at(&self, slot: &Slot, words: impl FnOnce() -> String) -> u32 {
        let at = self.0.load(Ordering::Relaxed);
        if slot.has(at) {
            return at;
        }
        let at = slot.write(&words());
        self.0.store(at, Ordering::Relaxed);
        at
    }
}

/// A hash that is the same in all processes.
pub fn hash(of: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}
