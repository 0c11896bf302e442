//! Parts of an array that go from each rank to each other one, in one operation.

use std::ffi::c_int;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::OnceLock;

use serde::Deserialize;
use smallvec::SmallVec;

use super::{Buffer, Op};
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

/// Parts as a program gives them. Ranks that get nothing may be left out.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartsFields {
    /// Elements that go to ranks, in the order of the ranks.
    pub sends: Vec<Part>,
    /// Elements that come from ranks, in the order of the ranks.
    pub receives: Vec<Part>,
    /// The length of the root's array, if all ranks have the same number.
    #[serde(default)]
    pub whole: Option<usize>,
}

/// Elements of an operand that go to a rank, or of a result that come from it.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
pub struct Part {
    pub rank: usize,
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

/// The counts of no more ranks are listed in words.
const LISTED: usize = 16;

/// The parts of a buffer that have elements, in the order of the ranks.
pub type PerRank = SmallVec<[Part; 16]>;

/// What a rank sends to and receives from each rank. What goes to a rank has to be what comes from it there; nothing
/// is no message. Only ranks that get something take memory.
#[derive(Debug)]
pub struct Parts {
    rank: usize,
    size: usize,
    send: PerRank,
    recv: PerRank,
    whole: Option<usize>,
    /// See [`Parts::received_ints`].
    received_ints: OnceLock<Option<Ints>>,
    /// See [`Parts::ints_of_root`].
    ints_of_root: OnceLock<Ints>,
}

/// Counts and starts as MPI's functions take them.
#[derive(Debug)]
pub struct Ints {
    pub counts: Box<[c_int]>,
    pub starts: Box<[c_int]>,
}

impl Parts {
    pub fn new(rank: i32, size: i32, fields: &PartsFields) -> Result<Self, Cause> {
        let PartsFields { sends, receives, whole } = fields;
        let size = usize::try_from(size).unwrap_or(0);
        let limit = whole.unwrap_or(usize::MAX);
        let is_there = |parts: &[Part]| {
            parts.windows(2).all(|two| two[0].rank < two[1].rank)
                && parts.last().is_none_or(|part| part.rank < size)
                && parts.iter().all(|part| part.end().is_some_and(|end| end <= limit))
        };
        if !is_there(sends) || !is_there(receives) {
            let expected = "a rank, a start and a count for each rank that gets something";
            return Err(Cause::Attribute { name: "parts", expected, actual: format!("{fields:?}") });
        }
        Ok(Self { whole: *whole, ..Self::of(rank as usize, size, sends, receives) })
    }

    /// The same of parts that are known to lie in memory.
    pub fn of(rank: usize, size: usize, send: &[Part], recv: &[Part]) -> Self {
        let [send, recv] =
            [send, recv].map(|parts| parts.iter().copied().filter(|part| part.count > 0).collect());
        let (received_ints, ints_of_root) = Default::default();
        Self { rank, size, send, recv, whole: None, received_ints, ints_of_root }
    }

    /// Counts and starts for all ranks.
    fn ints(&self, parts: &[Part]) -> Ints {
        let mut ints = Ints { counts: vec![0; self.size].into(), starts: vec![0; self.size].into() };
        for part in parts {
            (ints.counts[part.rank], ints.starts[part.rank]) = (part.count as c_int, part.start as c_int);
        }
        ints
    }

    /// Whether an `int` counts the elements of the root's array: all ranks see the same answer.
    pub fn fits(&self, limit: usize) -> bool {
        self.whole.is_some_and(|whole| whole <= limit.min(c_int::MAX as usize))
    }

    /// The counts and starts of the root of a `gatherv`, or of a `scatterv`, where they fit.
    pub fn ints_of_root(&self, is_gather: bool) -> &Ints {
        self.ints_of_root.get_or_init(|| self.ints(if is_gather { &self.recv } else { &self.send }))
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
            Some(self.ints(&self.recv))
        };
        let total = self.recv.last().map_or(0, |part| part.start + part.count);
        self.received_ints.get_or_init(ints).as_ref().filter(|_| total <= limit)
    }

    /// The part that goes to all ranks, if it is the same.
    pub fn for_all(&self, send: &Buffer) -> Option<Buffer> {
        let Some(&first) = self.send.first() else { return Some(send.part(0, 0)) };
        let is_same = |part: &Part| (part.start, part.count) == (first.start, first.count);
        (self.send.len() == self.size && self.send.iter().all(is_same)).then(|| first.of(send))
    }

    /// The part that goes to a rank, or none of the buffer.
    pub fn sent_to(&self, rank: usize, send: &Buffer) -> Buffer {
        find(&self.send, rank).map_or_else(|| send.part(0, 0), |part| part.of(send))
    }

    /// The part that comes from a rank, or none of the buffer.
    pub fn received_from(&self, rank: usize, recv: &Buffer) -> Buffer {
        find(&self.recv, rank).map_or_else(|| recv.part(0, 0), |part| part.of(recv))
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The parts that go to each rank, and those that come from each.
    pub fn both(&self) -> [&[Part]; 2] {
        [&self.send, &self.recv]
    }

    /// How many elements go to each rank.
    pub fn sent(&self) -> Vec<u64> {
        self.counts_of(&self.send)
    }

    /// How many elements go to each rank, and how many come from each.
    pub fn counts(&self) -> [Vec<u64>; 2] {
        [self.sent(), self.counts_of(&self.recv)]
    }

    /// The counts of all ranks, or their sum, where all ranks have the same: in words, for comparisons. Many are a hash.
    pub fn same_on_all(&self, op: Op) -> Option<String> {
        let parts = match op {
            Op::Allgatherv => &self.recv,
            Op::ReduceScatterv => &self.send,
            _ => {
                let words = |whole| format!("with counts that add up to {whole} elements");
                return self.whole.map(words);
            }
        };
        let counts = self.counts_of(parts);
        Some(match counts.len() {
            ..=LISTED => format!("with counts {counts:?} (in elements)"),
            _ => {
                let mut hasher = DefaultHasher::new();
                counts.hash(&mut hasher);
                let (sum, hash) = (counts.iter().sum::<u64>(), hasher.finish());
                format!("with counts that add up to {sum} elements (hash {hash:x})")
            }
        })
    }

    fn counts_of(&self, parts: &[Part]) -> Vec<u64> {
        let mut counts = vec![0; self.size];
        for part in parts {
            counts[part.rank] = part.count as u64;
        }
        counts
    }

    /// An error unless the buffers have these parts, and this rank takes from itself what it gives itself.
    pub fn check(&self, send: Option<Buffer>, recv: Option<Buffer>) -> Result<(), Cause> {
        for (operand, parts, buffer) in [("operand", &self.send, send), ("result", &self.recv, recv)] {
            let count = buffer.map_or(0, |buffer| buffer.count());
            let needed = parts.iter().filter_map(|part| part.end()).max();
            if needed.is_some_and(|needed| needed > count) {
                return Err(Cause::TooFew { operand, expected: needed.unwrap_or(0), count });
            }
        }
        let own = [&self.recv, &self.send].map(|parts| find(parts, self.rank));
        let [expected, actual] = own.map(|part| part.map_or(0, |part| part.count));
        if expected != actual {
            return Err(Cause::Parts { source_rank: self.rank as i32, received: actual, expected });
        }
        Ok(())
    }

    /// Whether what comes from the ranks, one after the other, is all of a result.
    pub fn covers(&self, recv: Option<&Buffer>) -> bool {
        let mut end = 0;
        let follows = |part: &Part| {
            let is_next = part.start == end;
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
        self.messages(&self.send, send)
    }

    /// What comes from each rank, where anything does.
    pub fn receives(&self, recv: Option<Buffer>) -> impl Iterator<Item = (i32, Buffer)> {
        self.messages(&self.recv, recv)
    }

    /// The parts with the rank at the other end. They begin at the next rank, so that not all ranks send to the first one at the
    /// same time, and end with this rank itself.
    fn messages(&self, parts: &[Part], buffer: Option<Buffer>) -> impl Iterator<Item = (i32, Buffer)> {
        let (before, after) = parts.split_at(parts.partition_point(|part| part.rank <= self.rank));
        after.iter().chain(before).filter_map(move |part| Some((part.rank as i32, part.of(&buffer?))))
    }

    /// Copies the part from this rank to itself.
    ///
    /// # Safety
    /// As for [`Self::exchange`]; the buffers do not overlap.
    pub unsafe fn copy_own(&self, send: Option<Buffer>, recv: Option<Buffer>) {
        if let Some((send, recv)) = send.zip(recv) {
            let (from, to) = (self.sent_to(self.rank, &send), self.received_from(self.rank, &recv));
            // SAFETY: promised by the caller; `check` has compared their lengths.
            unsafe { to.data().copy_from_nonoverlapping(from.data(), from.bytes().min(to.bytes())) };
        }
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
            let is_other = |(peer, _): &(i32, Buffer)| *peer != self.rank as i32;
            for (peer, into) in self.receives(recv).filter(is_other) {
                wire.receive(peer, into.data(), into.bytes())?;
            }
            for (peer, from) in self.sends(send).filter(is_other) {
                wire.send(peer, from.data(), from.bytes())?;
            }
            self.copy_own(send, recv);
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

/// The part of a rank, if it has one.
fn find(parts: &[Part], rank: usize) -> Option<&Part> {
    parts.binary_search_by_key(&rank, |part| part.rank).ok().map(|at| &parts[at])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Dtype;

    fn part(rank: usize, start: usize, count: usize) -> Part {
        Part { rank, start, count }
    }

    fn of(send: &[Part], recv: &[Part]) -> Parts {
        Parts::of(1, 3, send, recv)
    }

    /// Of rank 1 of 3.
    fn made(sends: Vec<Part>, whole: Option<usize>) -> Result<Parts, Cause> {
        Parts::new(1, 3, &PartsFields { sends, receives: Vec::new(), whole })
    }

    fn buffer(data: &mut [u8]) -> Buffer {
        // SAFETY: only its length is read.
        unsafe { Buffer::new(data.as_mut_ptr(), Dtype::Uint8, data.len()) }
    }

    #[test]
    fn parts_are_of_different_ranks_in_order_and_within_the_array() {
        assert!(made(vec![part(0, 0, 2), part(2, 2, 3)], Some(5)).is_ok());
        assert!(made(vec![part(3, 0, 1)], None).is_err(), "there is no rank 3");
        assert!(made(vec![part(2, 0, 1), part(0, 1, 1)], None).is_err(), "out of order");
        assert!(made(vec![part(0, 0, 1), part(0, 1, 1)], None).is_err(), "twice");
        assert!(made(vec![part(0, 4, 2)], Some(5)).is_err(), "beyond the array");
        assert!(made(vec![part(0, usize::MAX, 2)], None).is_err(), "no such number");
    }

    #[test]
    fn counts_and_starts_are_mpis_up_to_a_limit() {
        let parts = made(Vec::new(), Some(5)).expect("parts");
        assert_eq!([4, 5].map(|limit| parts.fits(limit)), [false, true]);
        assert!(!made(Vec::new(), None).expect("parts").fits(usize::MAX), "of unknown length");
        let parts = of(&[], &[part(0, 0, 2), part(2, 2, 3)]);
        let ints = parts.received_ints(5).expect("counts");
        assert_eq!((&*ints.counts, &*ints.starts), (&[2, 0, 3][..], &[0, 0, 2][..]));
        assert!(parts.received_ints(4).is_none());
        assert!(of(&[], &[part(0, 1, 2)]).received_ints(9).is_none(), "there is a gap before");
    }

    #[test]
    fn one_part_for_all_ranks_is_recognized() {
        let mut data = [0; 4];
        let all =
            |parts: &[Part], data: &mut [u8]| of(parts, &[]).for_all(&buffer(data)).map(|it| it.count());
        let same: Vec<_> = (0..3).map(|rank| part(rank, 1, 2)).collect();
        assert_eq!(all(&same, &mut data), Some(2));
        assert_eq!(all(&same[..2], &mut data), None);
        assert_eq!(all(&[same[0], same[1], part(2, 0, 2)], &mut data), None);
        assert_eq!(all(&[], &mut data), Some(0));
    }

    #[test]
    fn buffers_have_their_parts_and_a_rank_takes_what_it_gives_itself() {
        let (mut from, mut to) = ([0; 4], [0; 3]);
        let check = |send: &[Part], recv: &[Part], from: &mut [u8], to: &mut [u8]| {
            of(send, recv).check(Some(buffer(from)), Some(buffer(to)))
        };
        let (sends, receives) = ([part(0, 0, 2), part(1, 2, 2)], [part(1, 1, 2)]);
        assert!(check(&sends, &receives, &mut from, &mut to).is_ok());
        let short = check(&sends, &receives, &mut from[..3], &mut to);
        assert!(matches!(short, Err(Cause::TooFew { operand: "operand", expected: 4, count: 3 })));
        let short = check(&sends, &receives, &mut from, &mut to[..2]);
        assert!(matches!(short, Err(Cause::TooFew { operand: "result", expected: 3, count: 2 })));
        let differs = check(&sends[..1], &receives, &mut from, &mut to);
        assert!(matches!(differs, Err(Cause::Parts { source_rank: 1, received: 0, expected: 2 })));
        assert!(of(&[], &[part(0, 0, 1), part(2, 1, 2)]).covers(Some(&buffer(&mut to))));
        assert!(!of(&[], &[part(0, 0, 1), part(2, 1, 1)]).covers(Some(&buffer(&mut to))), "the last is left");
        assert!(!of(&[], &[part(0, 1, 2)]).covers(Some(&buffer(&mut to))), "the first is left");
        for (last, cleared) in [(2, [7; 3]), (1, [0; 3])] {
            to.fill(7);
            // SAFETY: nothing else uses the result.
            unsafe { of(&[], &[part(0, 0, 1), part(2, 1, last)]).clear(&buffer(&mut to)) };
            assert_eq!(to, cleared, "zeros only where a part is left");
        }
    }

    #[test]
    fn messages_begin_with_the_next_rank_and_end_with_this_one() {
        let mut data = [0; 3];
        let parts: Vec<_> = (0..3).map(|rank| part(rank, rank, 1)).collect();
        let send = Some(buffer(&mut data));
        let order = of(&parts, &[]).sends(send).map(|(rank, _)| rank).collect::<Vec<_>>();
        assert_eq!(order, [2, 0, 1]);
        assert_eq!(of(&parts, &[]).sends(None).count(), 0);
    }
}
