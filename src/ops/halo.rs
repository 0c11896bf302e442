//! Ghost cells of blocks, packed into messages.
//!
//! One message goes to each rank that is a neighbor, however many sides it is on. `_grid/faces.py` defines which cells are in
//! it, and in which order: XLA packs the same messages where the processor does not reach the blocks.

use std::collections::BTreeMap;
use std::ops::Range;
use std::ptr::copy_nonoverlapping;
use std::sync::{Mutex, MutexGuard};

use serde::Deserialize;
use smallvec::SmallVec;

use super::region::Region;
use super::{Buffer, Wire};
use crate::error::Cause;
use crate::sync::lock;

/// What a program says of a `halo_exchange`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HaloFields {
    /// Bytes of an element, which is the same for all blocks.
    pub itemsize: usize,
    pub shapes: Vec<Vec<usize>>,
    /// Whether what is received is added, and what is sent is then zero.
    pub adjoint: bool,
    pub sends: Vec<Face>,
    pub receives: Vec<Face>,
}

/// A rank, the number of a block, and the cells of it that go to the rank or come from there: along each axis the first
/// one, and the one after the last.
pub type Face = (i32, usize, Vec<(usize, usize)>);

/// What a `halo_exchange` does to the blocks of its site.
#[derive(Debug)]
pub struct Halo {
    /// Bytes of an element, and of each block.
    itemsize: usize,
    sizes: Box<[usize]>,
    adjoint: bool,
    neighbours: Box<[Neighbour]>,
    /// Bytes of all messages that are sent, and of all that are received.
    scratch_bytes: [usize; 2],
    /// Memory for messages that no call uses now: threads may exchange at the same time, on communicators of their own.
    scratch: Mutex<Vec<Box<[u8]>>>,
}

/// A rank, and the message each way.
#[derive(Debug)]
struct Neighbour {
    rank: i32,
    sent: Message,
    received: Message,
}

/// The cells of a message: regions of blocks, each with the number of its block, and where they are in scratch memory.
#[derive(Debug, Default)]
struct Message {
    regions: Vec<(usize, Region)>,
    at: Range<usize>,
}

impl Message {
    /// Gives it the scratch memory that begins at `end`, and moves `end` behind it.
    fn place(&mut self, end: &mut usize) -> Result<(), Cause> {
        let start = *end;
        for (_, region) in &self.regions {
            *end = end.checked_add(region.bytes()).filter(|&end| isize::try_from(end).is_ok()).ok_or_else(
                || wrong("messages that fit into memory", format!("{} regions", self.regions.len())),
            )?;
        }
        self.at = start..*end;
        Ok(())
    }
}

fn wrong(expected: &'static str, actual: String) -> Cause {
    Cause::Attribute { name: "halo", expected, actual }
}

/// Bytes of a block, if that many can be in memory.
fn bytes(itemsize: usize, shape: &[usize]) -> Option<usize> {
    let bytes = shape.iter().try_fold(itemsize, |bytes, &extent| bytes.checked_mul(extent))?;
    isize::try_from(bytes).ok().map(|_| bytes)
}

impl Halo {
    pub fn new(rank: i32, ranks: i32, fields: &HaloFields) -> Result<Self, Cause> {
        let HaloFields { itemsize, shapes, adjoint, sends, receives } = fields;
        let sizes = shapes.iter().map(|shape| bytes(*itemsize, shape)).collect::<Option<Box<[usize]>>>();
        let sizes = sizes.ok_or_else(|| wrong("blocks that fit into memory", format!("{shapes:?}")))?;
        let region = |(peer, block, cells): &Face| {
            if !(0..ranks).contains(peer) {
                return Err(Cause::NoSuchRank { role: "neighbor", rank: *peer, size: ranks });
            }
            let shape = shapes.get(*block).filter(|shape| {
                let is_within =
                    |(&(start, end), &extent): (&(usize, usize), &usize)| start <= end && end <= extent;
                shape.len() == cells.len() && cells.iter().zip(*shape).all(is_within)
            });
            let shape = shape.ok_or_else(|| wrong("cells of a block", format!("{block}: {cells:?}")))?;
            let ranges: Vec<Range<usize>> = cells.iter().map(|&(start, end)| start..end).collect();
            Ok((*block, Region::new(*itemsize, shape, &ranges)))
        };
        let mut messages: BTreeMap<i32, [Message; 2]> = BTreeMap::new();
        for (way, faces) in [sends, receives].into_iter().enumerate() {
            for face in faces {
                messages.entry(face.0).or_default()[way].regions.push(region(face)?);
            }
        }
        let mut scratch_bytes = [0; 2];
        for both in messages.values_mut() {
            for (message, end) in both.iter_mut().zip(&mut scratch_bytes) {
                message.place(end)?;
            }
        }
        let neighbour = |(rank, [sent, received]): (i32, [Message; 2])| Neighbour { rank, sent, received };
        let neighbours: Box<[Neighbour]> = messages.into_iter().map(neighbour).collect();
        if neighbours.iter().any(|it| it.rank == rank && it.sent.at.len() != it.received.at.len()) {
            return Err(wrong("neighbors on both sides", format!("rank {rank} beside itself on one")));
        }
        let itemsize = (*itemsize).max(1);
        Ok(Self { itemsize, sizes, adjoint: *adjoint, neighbours, scratch_bytes, scratch: Mutex::default() })
    }

    /// The number of elements that go to each of `ranks` ranks, and the number that comes from each.
    pub fn counts(&self, ranks: usize) -> [Vec<u64>; 2] {
        let mut counts = [vec![0; ranks], vec![0; ranks]];
        for it in &self.neighbours {
            for (counts, message) in counts.iter_mut().zip([&it.sent, &it.received]) {
                counts[it.rank as usize] = (message.at.len() / self.itemsize) as u64;
            }
        }
        counts
    }

    /// How many operands it takes.
    pub fn operands(&self) -> usize {
        self.sizes.len()
    }

    fn scratch(&self) -> MutexGuard<'_, Vec<Box<[u8]>>> {
        lock(&self.scratch)
    }

    /// Exchanges operands, each with its result.
    pub fn exchange(
        &self,
        blocks: impl Iterator<Item = (Buffer, Buffer)>,
        rank: i32,
        wire: &mut impl Wire,
    ) -> Result<(), Cause> {
        let blocks: SmallVec<[(Buffer, Buffer); 4]> = blocks.collect();
        let bytes = || blocks.iter().map(|(from, to)| [from.bytes(), to.bytes()]);
        if !bytes().eq(self.sizes.iter().map(|&size| [size; 2])) {
            let actual = format!("{:?}", bytes().collect::<Vec<_>>());
            return Err(wrong("blocks of the sizes that it was made for", actual));
        }
        let spare = self.scratch().pop();
        let mut scratch = spare.unwrap_or_else(|| vec![0; self.scratch_bytes.iter().sum()].into());
        // SAFETY: the blocks have the sizes just checked, and the scratch memory has the size of
        // the messages.
        let result = unsafe { self.exchange_with(&blocks, rank, wire, scratch.as_mut_ptr()) };
        if result.is_ok() {
            self.scratch().push(scratch);
        } else {
            // Messages may be under way.
            std::mem::forget(scratch);
        }
        result
    }

    /// # Safety
    /// The blocks have the sizes that this was made for, and so has the scratch memory, which nothing else uses. After an
    /// error messages may still be under way in it.
    unsafe fn exchange_with(
        &self,
        blocks: &[(Buffer, Buffer)],
        rank: i32,
        wire: &mut impl Wire,
        scratch: *mut u8,
    ) -> Result<(), Cause> {
        // SAFETY: promised by the caller; regions lie within the blocks, messages within the scratch memory.
        unsafe {
            let (sent, received) = (scratch, scratch.add(self.scratch_bytes[0]));
            for Neighbour { rank: peer, received: message, .. } in &self.neighbours {
                if *peer != rank && !message.at.is_empty() {
                    wire.receive(*peer, received.add(message.at.start), message.at.len())?;
                }
            }
            for Neighbour { rank: peer, sent: message, received: own } in &self.neighbours {
                let is_own = *peer == rank;
                let packed = if is_own { received.add(own.at.start) } else { sent.add(message.at.start) };
                let mut end = packed;
                for (block, region) in &message.regions {
                    region.pack(blocks[*block].0.data(), end);
                    end = end.add(region.bytes());
                }
                if !is_own && !message.at.is_empty() {
                    wire.send(*peer, packed, message.at.len())?;
                }
            }
            for (from, to) in blocks.iter().filter(|(from, to)| from.data() != to.data()) {
                copy_nonoverlapping(from.data(), to.data(), from.bytes());
            }
            wire.wait()?;
            if self.adjoint {
                sent.write_bytes(0, self.scratch_bytes[0]);
                for (block, region) in self.neighbours.iter().flat_map(|it| &it.sent.regions) {
                    region.unpack(sent, blocks[*block].1.data());
                }
            }
            for Neighbour { received: message, .. } in &self.neighbours {
                let mut packed = received.add(message.at.start);
                for (block, region) in &message.regions {
                    let block = blocks[*block].1;
                    if !self.adjoint {
                        region.unpack(packed, block.data());
                    } else if !region.add(packed, block.data(), block.dtype()) {
                        return Err(wrong("values that can be added", block.dtype().name().into()));
                    }
                    packed = packed.add(region.bytes());
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Dtype;

    #[test]
    fn cells_that_a_block_does_not_have_are_errors() {
        let make = |sends: Vec<Face>, receives: Vec<Face>| {
            let fields =
                HaloFields { itemsize: 4, shapes: vec![vec![7, 5]], adjoint: false, sends, receives };
            Halo::new(0, 2, &fields)
        };
        let face = |peer, block, end| vec![(peer, block, vec![(0, 7), (1, end)])];
        assert!(make(face(0, 0, 2), face(0, 0, 2)).is_ok());
        assert!(make(face(1, 0, 2), vec![]).is_ok());
        assert!(make(face(0, 0, 2), face(0, 0, 3)).is_err());
        for wrong in [face(2, 0, 2), face(-1, 0, 2), face(1, 1, 2), face(1, 0, 6), face(1, 0, 0)] {
            assert!(make(vec![], wrong).is_err());
        }
        assert!(make(vec![(1, 0, vec![(0, 7)])], vec![]).is_err());
    }

    /// The messages that were asked for: of each, the peer and the bytes, which are negative if it is sent. Nines are received.
    #[derive(Default)]
    struct Asked(Vec<(i32, isize)>);

    impl Wire for Asked {
        unsafe fn receive(&mut self, peer: i32, into: *mut u8, bytes: usize) -> Result<(), Cause> {
            // SAFETY: promised by the caller.
            unsafe { into.write_bytes(9, bytes) };
            self.0.push((peer, bytes as isize));
            Ok(())
        }

        unsafe fn send(&mut self, peer: i32, _: *mut u8, bytes: usize) -> Result<(), Cause> {
            self.0.push((peer, -(bytes as isize)));
            Ok(())
        }

        fn wait(&mut self) -> Result<(), Cause> {
            Ok(())
        }
    }

    #[test]
    fn a_message_goes_only_where_cells_go() {
        // Cell 4 goes to cell 0 of the same block, cell 1 goes to rank 1, and cell 5 comes from rank 2.
        let face = |peer, cell| (peer, 0, vec![(cell, cell + 1)]);
        let (sends, receives) = (vec![face(0, 4), face(1, 1)], vec![face(0, 0), face(2, 5)]);
        for (adjoint, expected) in [(false, [5, 2, 3, 4, 5, 9]), (true, [6, 0, 3, 4, 0, 15])] {
            let (sends, receives) = (sends.clone(), receives.clone());
            let fields = HaloFields { itemsize: 1, shapes: vec![vec![6]], adjoint, sends, receives };
            let (mut from, mut to, mut wire) = ([1, 2, 3, 4, 5, 6], [0; 6], Asked::default());
            // SAFETY: both have six elements, and nothing else uses them.
            let buffer = |data: &mut [u8; 6]| unsafe { Buffer::new(data.as_mut_ptr(), Dtype::Uint8, 6) };
            let blocks = [(buffer(&mut from), buffer(&mut to))].into_iter();
            Halo::new(0, 3, &fields).unwrap().exchange(blocks, 0, &mut wire).unwrap();
            assert_eq!((to, wire.0), (expected, vec![(2, 1), (1, -1)]), "adjoint: {adjoint}");
        }
    }
}
