//! The slot of a rank on the board: numbers, which the rank writes with plain stores, and a ring of words.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Mutex;

use super::cell::{Cell, FREED, NewLine, mix};
use super::raw::Raw;
use super::words::{Text, Words};
use crate::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering, fence};
use crate::sync::lock;
use crate::system::now;

/// How many operations are remembered.
pub const RECORDS: usize = 256;
/// How many communicators are compared.
pub const CELLS: usize = 128;
/// With how many ranks messages are counted, each once per communicator, and how many of the last ones are compared.
pub const PEERS: usize = 64;
pub const MESSAGES: usize = 4;

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

/// Messages to and from a rank, on a communicator. For each message the receiver reads the first cache line, which is written only
/// if the type of the messages changes, as in a [`Cell`].
#[repr(C, align(64))]
#[derive(Default)]
pub struct Peer {
    /// A hash of the communicator and the rank; 0: the entry is free.
    pub key: AtomicU64,
    /// The communicator, as its ranks know it, and the rank in `MPI_COMM_WORLD`.
    pub comm: AtomicU64,
    pub rank: AtomicI32,
    /// The kind of all messages in `prints`, if they have the same kind; else 0.
    pub steady: AtomicU64,
    own: NewLine,
    /// The sums of the weights of messages; see `record::messages`.
    pub sent: AtomicU64,
    pub received: AtomicU64,
    /// How many messages have been noted in `prints`.
    pub noted: AtomicU64,
    /// The kind of the last one, and in its lowest bits how many of the last ones have this kind.
    last: AtomicU64,
    /// An entry for each of the last messages sent: the hash by which it is recognized, the meaning of its bits, and the hash of
    /// names and shapes of its leaves. The first number is 0 while the entry is written.
    prints: [[AtomicU64; 3]; MESSAGES],
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
    pub text: Text,
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
        let ids = self.places(id).map(|cell| (cell.id.load(Ordering::Acquire), cell));
        ids.take_while(|(found, _)| *found != 0).find(|(found, _)| *found == id).map(|(_, cell)| cell)
    }

    /// The cells that are searched for a communicator, in this order. They may belong to other
    /// communicators.
    #[inline]
    fn places(&self, id: u64) -> impl Iterator<Item = &Cell> {
        (0..CELLS).map(move |step| &self.cells[(id as usize % CELLS + step) % CELLS])
    }

    /// A cell for a new communicator of this class, origin and name: a free cell, or the cell of a
    /// freed communicator. None if all cells are taken.
    pub fn claim(&self, id: u64, [class, origin, name]: [u64; 3]) -> Option<&Cell> {
        static CLAIMING: Mutex<()> = Mutex::new(());
        let _claiming = lock(&CLAIMING);
        let is_free = |cell: &&Cell| cell.id.load(Ordering::Relaxed) == 0 || cell.has(FREED);
        let cell = self.places(id).find(is_free)?;
        self.lost_number.fetch_max(cell.number.load(Ordering::Relaxed), Ordering::Relaxed);
        cell.clear();
        for (place, number) in [(&cell.class, class), (&cell.origin, origin), (&cell.name, name)] {
            place.store(number, Ordering::Relaxed);
        }
        cell.id.store(id, Ordering::Release);
        Some(cell)
    }

    /// A place for the messages to and from a rank on a communicator, and whether it was the place of another rank, because none is free.
    pub fn claim_peer(&self, comm: u64, rank: i32) -> (&Peer, bool) {
        static CLAIMING: Mutex<()> = Mutex::new(());
        let key = Peer::key_of(comm, rank);
        let _claiming = lock(&CLAIMING);
        let peer = self
            .peer_places(key)
            .find(|peer| [0, key].contains(&peer.key.load(Ordering::Relaxed)))
            .unwrap_or(&self.peers[key as usize % PEERS]);
        let before = peer.key.load(Ordering::Relaxed);
        if before != key {
            self.lost_sent.fetch_add(peer.sent.swap(0, Ordering::Relaxed), Ordering::Relaxed);
            self.lost_received.fetch_add(peer.received.swap(0, Ordering::Relaxed), Ordering::Relaxed);
            peer.prints.as_flattened().iter().for_each(|print| print.store(0, Ordering::Relaxed));
            for number in [&peer.steady, &peer.noted, &peer.last] {
                number.store(0, Ordering::Relaxed);
            }
            peer.comm.store(comm, Ordering::Relaxed);
            peer.rank.store(rank, Ordering::Relaxed);
            peer.key.store(key, Ordering::Release);
        }
        (peer, ![0, key].contains(&before))
    }

    /// The messages to and from a rank on a communicator, if there have been any.
    pub fn known_peer(&self, comm: u64, rank: i32) -> Option<&Peer> {
        let key = Peer::key_of(comm, rank);
        let keys = self.peer_places(key).map(|peer| (peer.key.load(Ordering::Acquire), peer));
        keys.take_while(|(found, _)| *found != 0).find(|(found, _)| *found == key).map(|(_, peer)| peer)
    }

    /// The places that are searched for a peer, in this order. They may belong to other peers.
    fn peer_places(&self, key: u64) -> impl Iterator<Item = &Peer> {
        (0..PEERS).map(move |step| &self.peers[(key as usize % PEERS + step) % PEERS])
    }
}

impl Peer {
    /// The bits of a kind that are 0.
    pub const COUNT: u64 = 7;

    fn key_of(comm: u64, rank: i32) -> u64 {
        mix(comm, rank as u64).max(1)
    }

    /// Notes a message of this kind, which is about to be sent.
    #[inline]
    pub fn note(&self, kind: u64, [key, meaning, form]: [u64; 3]) {
        let last = self.last.load(Ordering::Relaxed);
        let is_alike = last & !Self::COUNT == kind;
        let alike = if is_alike { ((last & Self::COUNT) + 1).min(MESSAGES as u64 + 1) } else { 1 };
        if !is_alike && self.steady.load(Ordering::Relaxed) != 0 {
            self.steady.store(0, Ordering::Release);
        }
        self.last.store(kind | alike, Ordering::Relaxed);
        let number = self.noted.fetch_add(1, Ordering::Relaxed);
        if alike == MESSAGES as u64 {
            self.steady.store(kind, Ordering::Release);
        }
        let entry = &self.prints[number as usize % MESSAGES];
        entry[0].store(0, Ordering::Relaxed);
        // Who reads a new number also reads that the entry is being written, and that the message has been counted.
        fence(Ordering::Release);
        entry[1].store(meaning, Ordering::Relaxed);
        entry[2].store(form, Ordering::Relaxed);
        entry[0].store(key, Ordering::Release);
    }

    /// The entries of the last messages sent. The key of one that is being written is 0.
    pub fn sent_last(&self) -> [[u64; 3]; MESSAGES] {
        self.prints.each_ref().map(|entry| {
            let [key, meaning, form] = entry.each_ref().map(|number| number.load(Ordering::Acquire));
            [if entry[0].load(Ordering::Relaxed) == key { key } else { 0 }, meaning, form]
        })
    }
}

/// A hash that is the same in all processes.
pub fn hash(of: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}
