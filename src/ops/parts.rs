//! Parts of an array that go from each rank to each other one, in one operation.

use std::ffi::c_int;
use std::sync::OnceLock;

use serde::Deserialize;
use smallvec::SmallVec;

use super::Buffer;
use crate::error::Cause;

/// How messages travel, one each way between two ranks. `receive` and `send` start one, `wait` ends all of them.
pub trait Wire {
    /// # Safety
    /// This many bytes may be written until `wait` has returned.
    unsafe fn receive(&mut self, peer: i32, into: *mut u8, bytes: usize) -> Result<(), Cause>;

    /// # Safety
    /// This many bytes may be read until `wait` has returned.
    unsafe fn send(&mut self, peer: i32, from: *mut u8, bytes: usize) -> Result<(), Cause>;

    fn wait(&mut self) -> Result<(), Cause>;
}

/// Parts as a program gives them.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartsFields {
    /// Elements that go to each rank.
    pub sends: Vec<Part>,
    /// Elements that come from each rank.
    pub receives: Vec<Part>,
}

/// Elements of an operand that go to a rank, or of a result that come from it.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
pub struct Part {
    pub start: usize,
    pub count: usize,
}

impl Part {
    fn end(self) -> Option<usize> {
        self.start.checked_add(self.count)
    }

    /// This part of a buffer, which is known to contain it.
    fn of(self, buffer: &Buffer) -> Buffer {
        buffer.part(self.start, self.count)
    }
}

/// The parts of a buffer, one for each rank.
pub type PerRank = SmallVec<[Part; 16]>;

/// What a rank sends to and receives from each rank. What goes to a rank has to be what comes from it there; nothing
/// is no message.
#[derive(Debug)]
pub struct Parts {
    rank: usize,
    send: PerRank,
    recv: PerRank,
    /// See [`Parts::received_ints`].
    received_ints: OnceLock<Option<Ints>>,
}

/// Counts and starts as MPI's functions take them.
#[derive(Debug)]
pub struct Ints {
    pub counts: Box<[c_int]>,
    pub starts: Box<[c_int]>,
}

impl Parts {
    pub fn new(rank: i32, size: i32, fields: &PartsFields) -> Result<Self, Cause> {
        let PartsFields { sends, receives } = fields;
        let is_there = |parts: &[Part]| {
            usize::try_from(size) == Ok(parts.len()) && parts.iter().all(|part| part.end().is_some())
        };
        if !is_there(sends) || !is_there(receives) {
            let (expected, actual) = ("a start and a count for each rank", format!("{fields:?}"));
            return Err(Cause::Attribute { name: "parts", expected, actual });
        }
        Ok(Self::of(rank as usize, sends[..].into(), receives[..].into()))
    }

    /// The same of parts that are known to lie in memory.
    pub fn of(rank: usize, send: PerRank, recv: PerRank) -> Self {
        Self { rank, send, recv, received_ints: OnceLock::new() }
    }

    /// What comes from each rank, if it is the same on all of them: one after the other, and not beyond `limit`, so that all
    /// ranks see the same answer.
    pub fn received_ints(&self, limit: usize) -> Option<&Ints> {
        let ints = || {
            let mut end = 0;
            for part in &self.recv {
                if part.start != end {
                    return None;
                }
                end = part.end()?;
            }
            c_int::try_from(end).ok()?;
            let all = |of: fn(&Part) -> usize| self.recv.iter().map(|part| of(part) as c_int).collect();
            Some(Ints { counts: all(|part| part.count), starts: all(|part| part.start) })
        };
        let total = self.recv.last().map_or(0, |part| part.start + part.count);
        self.received_ints.get_or_init(ints).as_ref().filter(|_| total <= limit)
    }

    /// The part that goes to all ranks, if it is the same.
    pub fn for_all(&self, send: &Buffer) -> Option<Buffer> {
        let own = self.send.get(self.rank)?;
        self.send.iter().all(|part| part == own).then(|| own.of(send))
    }

    /// The part that goes to a rank.
    pub fn sent_to(&self, rank: usize, send: &Buffer) -> Buffer {
        self.send[rank].of(send)
    }

    /// The parts that go to each rank, and those that come from each.
    pub fn both(&self) -> [&[Part]; 2] {
        [&self.send, &self.recv]
    }

    /// How many elements go to each rank.
    pub fn sent(&self) -> Vec<u64> {
        self.send.iter().map(|part| part.count as u64).collect()
    }

    /// How many elements go to each rank, and how many come from each.
    pub fn counts(&self) -> [Vec<u64>; 2] {
        [self.sent(), self.recv.iter().map(|part| part.count as u64).collect()]
    }

    /// An error unless the buffers have these parts, and this rank takes from itself what it gives itself.
    pub fn check(&self, send: Option<Buffer>, recv: Option<Buffer>) -> Result<(), Cause> {
        for (operand, parts, buffer) in [("operand", &self.send, send), ("result", &self.recv, recv)] {
            let count = buffer.map_or(0, |buffer| buffer.count());
            let needed = parts.iter().filter(|part| part.count > 0).filter_map(|part| part.end()).max();
            if needed.is_some_and(|needed| needed > count) {
                return Err(Cause::TooFew { operand, expected: needed.unwrap_or(0), count });
            }
        }
        let (to, from) = (self.send.get(self.rank), self.recv.get(self.rank));
        let [expected, actual] = [from, to].map(|part| part.map_or(0, |part| part.count));
        if expected != actual {
            return Err(Cause::Parts { source_rank: self.rank as i32, received: actual, expected });
        }
        Ok(())
    }

    /// Whether what comes from the ranks, one after the other, is all of a result.
    pub fn covers(&self, recv: Option<&Buffer>) -> bool {
        let mut end = 0;
        let follows = |part: &Part| {
            let is_next = part.count == 0 || part.start == end;
            end += part.count;
            is_next
        };
        self.recv.iter().all(follows) && end == recv.map_or(0, |recv| recv.count())
    }

    /// Writes zeros, unless messages write all of it.
    ///
    /// # Safety
    /// The result is memory of the host that nothing else uses.
    pub unsafe fn clear(&self, recv: &Buffer) {
        if !self.covers(Some(recv)) {
            // SAFETY: promised by the caller.
            unsafe { recv.data().write_bytes(0, recv.bytes()) };
        }
    }

    /// What goes to each rank, where anything does.
    pub fn sends(&self, send: Option<Buffer>) -> impl Iterator<Item = (i32, Buffer)> {
        messages(&self.send, send)
    }

    /// What comes from each rank, where anything does.
    pub fn receives(&self, recv: Option<Buffer>) -> impl Iterator<Item = (i32, Buffer)> {
        messages(&self.recv, recv)
    }

    /// Exchanges the parts, the one from this rank to itself too. What no rank sends is zeros.
    ///
    /// # Safety
    /// The buffers are memory of the host that nothing else uses, and have passed `check`.
    pub unsafe fn exchange(
        &self,
        mut send: Option<Buffer>,
        recv: Option<Buffer>,
        wire: &mut impl Wire,
    ) -> Result<(), Cause> {
        let mut copy = Vec::new();
        // SAFETY: promised by the caller; the copy outlives the exchange.
        unsafe {
            if let Some(to) = &recv {
                send = send.map(|from| from.apart_from(to, &mut copy));
                self.clear(to);
            }
            for (peer, into) in self.receives(recv) {
                wire.receive(peer, into.data(), into.bytes())?;
            }
            for (peer, from) in self.sends(send) {
                wire.send(peer, from.data(), from.bytes())?;
            }
        }
        let size = recv.or(send).map_or(1, |buffer| buffer.dtype().size());
        wire.wait().map_err(|cause| match cause {
            Cause::MessageLength { received, source_rank, expected } => {
                Cause::Parts { source_rank, received: received / size, expected: expected / size }
            }
            cause => cause,
        })
    }
}

/// The parts of a buffer that have elements, with the rank at the other end.
fn messages(parts: &[Part], buffer: Option<Buffer>) -> impl Iterator<Item = (i32, Buffer)> {
    let some = parts.iter().enumerate().filter(|(_, part)| part.count > 0);
    some.filter_map(move |(peer, part)| Some((peer as i32, part.of(&buffer?))))
}
