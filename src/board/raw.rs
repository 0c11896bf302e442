//! An operation in the flight recorder, as plain numbers.

use crate::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering, fence};

pub const FAILED: u64 = 1;
/// A nonblocking operation that has not been waited for.
pub const PENDING: u64 = 2;
/// In place of the time at which an operation ended.
pub const UNTIMED: u64 = 4;
/// The lowest bit of the time at which an operation began: the time at which it ends is wanted.
pub const TIMED: u64 = 1;

/// An operation on the board.
#[repr(C, align(64))]
#[derive(Default)]
pub struct Raw {
    /// Its number in the process, from 1; 0 while it is written.
    pub ticket: AtomicU64,
    /// The lowest bit is [`TIMED`].
    pub started: AtomicU64,
    /// The time at which it ended, or [`UNTIMED`]; 0 while it runs. The lowest bits are [`FAILED`] and [`PENDING`].
    pub ended: AtomicU64,
    count: AtomicU64,
    number: AtomicU32,
    kind: AtomicU32,
    comm: AtomicU32,
    line: AtomicU32,
    peers: [AtomicI32; 4],
}

/// The numbers of an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Plain {
    pub ticket: u64,
    pub started: u64,
    pub ended: u64,
    /// How many elements, and in the upper bits the thread.
    pub count: u64,
    /// The lower half of its number on the communicator.
    pub number: u32,
    pub kind: u32,
    /// The words of the communicator, and of the line.
    pub comm: u32,
    pub line: u32,
    /// Source (or root), tag, destination, tag. A collective has no tag; the upper half of its number is in place of the last one.
    pub peers: [i32; 4],
}

impl Plain {
    /// The rank that a message goes to, and its tag.
    pub fn destination(&self) -> (i32, i32) {
        (self.peers[2], self.peers[3])
    }
}

impl Raw {
    /// Writes an operation that runs. A reader sees all of it or nothing.
    #[inline(always)]
    pub fn write(&self, plain: &Plain) {
        self.ticket.store(0, Ordering::Relaxed);
        // Who reads a new number also reads that the operation is being written.
        fence(Ordering::Release);
        self.ended.store(0, Ordering::Relaxed);
        self.started.store(plain.started, Ordering::Relaxed);
        self.count.store(plain.count, Ordering::Relaxed);
        self.number.store(plain.number, Ordering::Relaxed);
        self.kind.store(plain.kind, Ordering::Relaxed);
        self.comm.store(plain.comm, Ordering::Relaxed);
        self.line.store(plain.line, Ordering::Relaxed);
        for (place, peer) in self.peers.iter().zip(plain.peers) {
            place.store(peer, Ordering::Relaxed);
        }
        self.ticket.store(plain.ticket, Ordering::Release);
    }

    /// From now on, the time is wanted at which the operation ends. If another operation takes its place meanwhile, that one is timed.
    pub fn time(&self) {
        self.started.fetch_or(TIMED, Ordering::Relaxed);
    }

    /// The operation; `None` if there is none, or another one takes its place.
    pub fn read(&self) -> Option<Plain> {
        let load = |number: &AtomicU64| number.load(Ordering::Acquire);
        let part = |number: &AtomicU32| number.load(Ordering::Acquire);
        let ticket = load(&self.ticket);
        let plain = Plain {
            ticket,
            started: load(&self.started),
            ended: load(&self.ended),
            count: load(&self.count),
            number: part(&self.number),
            kind: part(&self.kind),
            comm: part(&self.comm),
            line: part(&self.line),
            peers: self.peers.each_ref().map(|peer| peer.load(Ordering::Acquire)),
        };
        (ticket != 0 && self.ticket.load(Ordering::Relaxed) == ticket).then_some(plain)
    }
}
