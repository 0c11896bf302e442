//! Parts of an array that go from each rank to each other one, in one operation.

use std::ffi::c_int;
use std::sync::OnceLock;

use smallvec::SmallVec;

use super::{Buffer, Wire};
use crate::error::Cause;

/// Elements of an operand that go to a rank, or of a result that come from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    pub start: usize,
    pub count: usize,
}

impl Part {
    fn end(self) -> Option<usize> {
        self.start.checked_add(self.count)
    }

    /// These elements of a buffer that has them.
    fn of(self, buffer: &Buffer) -> Buffer {
        buffer.part(self.start, self.count)
    }
}

/// One for each rank.
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

/// The tag of the messages, beyond those of ghost cells, which go through the same communicator.
const TAG: i32 = 1 << 14;

impl Parts {
    /// `numbers` are four for each rank: start and count of what goes there, and of what comes from there.
    pub fn new(rank: i32, size: i32, numbers: &[i64]) -> Result<Self, Cause> {
        let wrong = || Cause::Attribute {
            name: "parts",
            expected: "starts and counts for each rank",
            actual: format!("{numbers:?}"),
        };
        let (groups, rest) = numbers.as_chunks::<4>();
        if !rest.is_empty() || usize::try_from(size) != Ok(groups.len()) {
            return Err(wrong());
        }
        let part = |start: i64, count: i64| {
            let part = Part { start: usize::try_from(start).ok()?, count: usize::try_from(count).ok()? };
            part.end().map(|_| part)
        };
        let all = |at: usize| groups.iter().map(|group| part(group[at], group[at + 1])).collect();
        let (send, recv): (Option<_>, Option<_>) = (all(0), all(2));
        Ok(Self::of(rank as usize, send.ok_or_else(wrong)?, recv.ok_or_else(wrong)?))
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

    /// What goes to a rank.
    pub fn sent_to(&self, rank: usize, send: &Buffer) -> Buffer {
        self.send[rank].of(send)
    }

    /// What goes to each rank, and what comes from each.
    pub fn both(&self) -> [&[Part]; 2] {
        [&self.send, &self.recv]
    }

    /// How many elements go to each rank.
    pub fn sent(&self) -> Vec<u64> {
        self.send.iter().map(|part| part.count as u64).collect()
    }

    /// An error unless so many elements come from each rank.
    pub fn expect(&self, from_each: &[u64]) -> Result<(), Cause> {
        let ranks = self.recv.iter().zip(from_each).enumerate();
        match ranks.into_iter().find(|(_, (part, sent))| part.count as u64 != **sent) {
            None => Ok(()),
            Some((source, (part, &sent))) => Err(Cause::Parts {
                source_rank: source as i32,
                received: sent as usize,
                expected: part.count,
            }),
        }
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

    /// Writes zeros where nobody sends anything; or everywhere, if parts do not follow one another.
    ///
    /// # Safety
    /// The result is memory that nobody else uses, and has passed `check`.
    pub unsafe fn clear(&self, recv: &Buffer) {
        let mut end = 0;
        let zeros = |from: usize, to: usize| {
            let gap = Part { start: from, count: to - from }.of(recv);
            // SAFETY: promised by the caller.
            unsafe { gap.data().write_bytes(0, gap.bytes()) };
        };
        for part in self.recv.iter().filter(|part| part.count > 0) {
            if part.start < end {
                zeros(0, recv.count());
                return;
            }
            zeros(end, part.start);
            end = part.start + part.count;
        }
        zeros(end, recv.count());
    }

    /// Exchanges the parts. What nobody sends is zeros.
    ///
    /// # Safety
    /// The buffers are memory that nobody else uses, and have passed `check`.
    pub unsafe fn exchange(
        &self,
        send: Option<Buffer>,
        recv: Option<Buffer>,
        wire: &mut impl Wire,
    ) -> Result<(), Cause> {
        let mut send = send;
        let mut copy = Vec::new();
        if let (Some(from), Some(to)) = (&mut send, &recv)
            && from.overlaps(to)
        {
            // SAFETY: promised by the caller; the copy outlives the exchange.
            unsafe {
                copy.extend_from_slice(std::slice::from_raw_parts(from.data(), from.bytes()));
                *from = from.moved_to(copy.as_mut_ptr());
            }
        }
        let at = |buffer: &Option<Buffer>, part: &Part| {
            buffer.as_ref().filter(|_| part.count > 0).map(|buffer| part.of(buffer))
        };
        if let Some(recv) = recv {
            // SAFETY: promised by the caller.
            unsafe { self.clear(&recv) };
        }
        for (peer, part) in self.recv.iter().enumerate().filter(|(peer, _)| *peer != self.rank) {
            let Some(into) = at(&recv, part) else { continue };
            // SAFETY: promised by the caller.
            unsafe { wire.receive(peer as i32, TAG, into.data(), into.bytes())? };
        }
        for (peer, part) in self.send.iter().enumerate() {
            let Some(from) = at(&send, part) else { continue };
            if peer != self.rank {
                // SAFETY: promised by the caller.
                unsafe { wire.send(peer as i32, TAG, from.data(), from.bytes())? };
            } else if let Some(into) = self.recv.get(peer).and_then(|part| at(&recv, part)) {
                // SAFETY: of one size, by `check`; the two do not overlap.
                unsafe { into.data().copy_from_nonoverlapping(from.data(), from.bytes()) };
            }
        }
        let size = recv.or(send).map_or(1, |buffer| buffer.dtype().size());
        wire.wait().map_err(|cause| match cause {
            Cause::Ghosts { received, source_rank, expected } => {
                Cause::Parts { source_rank, received: received / size, expected: expected / size }
            }
            cause => cause,
        })
    }
}
