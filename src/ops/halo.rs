//! Ghost cells of blocks: which cells go where, and how they are packed into messages.
//!
//! A *direction* is a step of -1, 0 or 1 blocks along each exchanged axis. Directions are numbered with the
//! last axis fastest, so that the opposite of direction `i` of `n` is `n - 1 - i`.
//!
//! One message goes to each rank that is a neighbour, in however many directions. It has the cells for one direction
//! after those for another, in the order of the directions that they are sent to, and all blocks' cells for each. Where
//! XLA packs messages (`_grid/faces.py`, and an `alltoallv` carries them), they look the same.

use std::collections::BTreeMap;
use std::ops::Range;
use std::ptr::copy_nonoverlapping;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::Deserialize;
use smallvec::SmallVec;

use super::region::Region;
use super::{Buffer, Wire};
use crate::error::Cause;

/// What a program says of a `halo_exchange`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HaloFields {
    /// Of the axes that are exchanged.
    pub widths: Vec<Width>,
    /// The rank in each direction; a negative one is nobody.
    pub neighbours: Vec<i32>,
    pub blocks: Vec<Block>,
}

/// What a `halo_exchange` does to the blocks of its site.
#[derive(Debug)]
pub struct Halo {
    /// Bytes of each block.
    sizes: Box<[usize]>,
    widths: Box<[Width]>,
    /// Other ranks' ghost cells are added to this rank's cells, and its own are cleared.
    adjoint: bool,
    neighbours: Box<[Neighbour]>,
    /// Bytes of all messages that are sent, of all that are received, and of the largest region that is added to.
    scratch_bytes: [usize; 3],
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
#[derive(Debug)]
struct Message {
    regions: Regions,
    at: Range<usize>,
}

type Regions = Vec<(usize, Region)>;

impl Message {
    /// After the messages that end there.
    fn new(regions: Regions, end: &mut usize) -> Self {
        let start = *end;
        *end += regions.iter().map(|(_, region)| region.bytes()).sum::<usize>();
        Self { regions, at: start..*end }
    }
}

/// Along an axis that is exchanged, a block has ghost cells, inner cells, ghost cells.
#[derive(Clone, Copy, Debug, Deserialize, Hash)]
pub struct Width {
    pub low: usize,
    pub high: usize,
}

impl Width {
    /// The cells along this axis of a message to (`outgoing`) or from the neighbour at `step`.
    fn cells(self, extent: usize, step: isize, outgoing: bool, owned: [bool; 2]) -> Range<usize> {
        let Self { low, high } = self;
        match (step, outgoing) {
            // Ghost cells at an edge of the grid belong to the block: there is nobody else's to fill them.
            (0, _) => (if owned[0] { 0 } else { low })..(if owned[1] { extent } else { extent - high }),
            (-1, true) => low..low + high,
            (-1, false) => 0..low,
            (_, true) => extent - high - low..extent - high,
            (_, false) => extent - high..extent,
        }
    }
}

/// Who is around a block, and the ghost cells between them.
#[derive(Clone, Copy, Debug)]
pub struct Around<'a> {
    pub widths: &'a [Width],
    /// A rank for each direction, of which a negative one is nobody.
    pub neighbours: &'a [i32],
}

impl Around<'_> {
    /// The directions where there is somebody, and who.
    pub fn somebody(&self) -> impl Iterator<Item = (usize, i32)> {
        let middle = self.neighbours.len() / 2;
        let all = self.neighbours.iter().copied().enumerate();
        all.filter(move |&(direction, peer)| peer >= 0 && direction != middle)
    }

    fn weight(&self, k: usize) -> usize {
        3usize.pow((self.widths.len() - 1 - k) as u32)
    }

    fn step(&self, direction: usize, k: usize) -> isize {
        (direction / self.weight(k) % 3) as isize - 1
    }

    /// The cells of a block of these extents along the exchanged axes, of the message to or from a direction.
    pub fn cells(&self, extents: &[usize], direction: usize, outgoing: bool) -> Vec<Range<usize>> {
        let middle = self.neighbours.len() / 2;
        let along = |(k, (&extent, width)): (usize, (&usize, &Width))| {
            let beside = [middle - self.weight(k), middle + self.weight(k)];
            let owned = beside.map(|direction| self.neighbours[direction] < 0);
            width.cells(extent, self.step(direction, k), outgoing, owned)
        };
        extents.iter().zip(self.widths).enumerate().map(along).collect()
    }
}

/// What a block looks like.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Block {
    /// Bytes of an element.
    pub itemsize: usize,
    pub shape: Vec<usize>,
    /// The axes that are exchanged.
    pub axes: Vec<usize>,
}

impl Block {
    fn bytes(&self) -> usize {
        self.itemsize * self.shape.iter().product::<usize>()
    }

    fn has_room_for(&self, widths: &[Width]) -> bool {
        // Nothing in memory is larger than isize::MAX.
        let bytes = self.shape.iter().try_fold(self.itemsize, |bytes, &extent| bytes.checked_mul(extent));
        let is_possible = bytes.is_some_and(|bytes| isize::try_from(bytes).is_ok());
        let distinct = (1..self.axes.len()).all(|k| !self.axes[..k].contains(&self.axes[k]));
        let fits = |(&axis, width): (&usize, &Width)| {
            let needed =
                [width.high, width.low.max(width.high)].into_iter().try_fold(width.low, usize::checked_add);
            self.shape.get(axis).is_some_and(|&extent| needed.is_some_and(|needed| extent >= needed))
        };
        is_possible && distinct && self.axes.len() == widths.len() && self.axes.iter().zip(widths).all(fits)
    }
}

fn wrong(expected: &'static str, actual: String) -> Cause {
    Cause::Attribute { name: "halo", expected, actual }
}

/// The bytes of messages to or from each rank.
fn per_rank<'a>(ranks: usize, messages: impl Iterator<Item = (i32, &'a Message)>) -> Vec<u64> {
    let mut bytes = vec![0; ranks];
    for (rank, message) in messages {
        bytes[rank as usize] = message.at.len() as u64;
    }
    bytes
}

impl Halo {
    pub fn new(rank: i32, ranks: i32, fields: &HaloFields, adjoint: bool) -> Result<Self, Cause> {
        let HaloFields { widths, neighbours, blocks } = fields;
        let directions = 3usize.checked_pow(widths.len() as u32).unwrap_or(usize::MAX);
        if neighbours.len() != directions {
            let actual = format!("{} of {directions}", neighbours.len());
            return Err(wrong("a neighbour for each direction", actual));
        }
        if let Some(&rank) = neighbours.iter().find(|&&rank| rank >= ranks) {
            return Err(Cause::NoSuchRank { role: "neighbour", rank, size: ranks });
        }
        if let Some(block) = blocks.iter().find(|block| !block.has_room_for(widths)) {
            return Err(wrong("as many inner as ghost cells", format!("{block:?} with {widths:?}")));
        }
        let around = Around { widths, neighbours };
        let regions = |direction: usize, outgoing: bool| {
            let region = |block: &Block| {
                let mut ranges: Vec<Range<usize>> = block.shape.iter().map(|&extent| 0..extent).collect();
                let extents: Vec<usize> = block.axes.iter().map(|&axis| block.shape[axis]).collect();
                for (&axis, cells) in block.axes.iter().zip(around.cells(&extents, direction, outgoing)) {
                    ranges[axis] = cells;
                }
                Region::new(block.itemsize, &block.shape, &ranges)
            };
            blocks.iter().map(region).enumerate().collect::<Regions>()
        };
        // This rank's own cells, and its ghost cells, for each neighbour. What comes from there was sent to the opposite
        // directions.
        let mut cells: BTreeMap<i32, [Regions; 2]> = BTreeMap::new();
        let somebody: Vec<(usize, i32)> = around.somebody().collect();
        for &(direction, peer) in &somebody {
            cells.entry(peer).or_default()[0].extend(regions(direction, true));
        }
        for &(direction, peer) in somebody.iter().rev() {
            cells.entry(peer).or_default()[1].extend(regions(direction, false));
        }
        let (mut sent, mut received) = (0, 0);
        let neighbour = |(rank, [owned, ghosts]): (i32, [Regions; 2])| {
            // The adjoint gives back what came from there.
            let (goes, comes) = if adjoint { (ghosts, owned) } else { (owned, ghosts) };
            Neighbour {
                rank,
                sent: Message::new(goes, &mut sent),
                received: Message::new(comes, &mut received),
            }
        };
        let neighbours: Box<[Neighbour]> = cells.into_iter().map(neighbour).collect();
        if neighbours.iter().any(|it| it.rank == rank && it.sent.at.len() != it.received.at.len()) {
            return Err(wrong("neighbours on both sides", format!("rank {rank} beside itself on one")));
        }
        let added = neighbours.iter().flat_map(|neighbour| &neighbour.received.regions);
        let largest = added.map(|(_, region)| region.bytes()).max().filter(|_| adjoint);
        Ok(Self {
            sizes: blocks.iter().map(Block::bytes).collect(),
            widths: widths[..].into(),
            adjoint,
            neighbours,
            scratch_bytes: [sent, received, largest.unwrap_or(0)],
            scratch: Mutex::default(),
        })
    }

    /// What all ranks have to agree on.
    pub fn agreed(&self) -> (&[Width], bool) {
        (&self.widths, self.adjoint)
    }

    /// How many operands it takes.
    pub fn operands(&self) -> usize {
        self.sizes.len()
    }

    /// The bytes that go to each of so many ranks.
    pub fn sent(&self, ranks: usize) -> Vec<u64> {
        per_rank(ranks, self.neighbours.iter().map(|neighbour| (neighbour.rank, &neighbour.sent)))
    }

    /// An error unless so many bytes come from each rank.
    pub fn expect(&self, from_each: &[u64]) -> Result<(), Cause> {
        let expected = self.neighbours.iter().map(|neighbour| (neighbour.rank, &neighbour.received));
        let expected = per_rank(from_each.len(), expected);
        match (0..from_each.len()).find(|&source| from_each[source] != expected[source]) {
            None => Ok(()),
            Some(source) => Err(Cause::Ghosts {
                received: from_each[source] as usize,
                source_rank: source as i32,
                expected: expected[source] as usize,
            }),
        }
    }

    fn scratch(&self) -> MutexGuard<'_, Vec<Box<[u8]>>> {
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner)
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
        // SAFETY: the blocks have the sizes just checked, the scratch memory that of the messages.
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
    /// The blocks have the sizes that this was made for, and so has the scratch memory, which nobody else uses. After an
    /// error messages may still be under way in it.
    unsafe fn exchange_with(
        &self,
        blocks: &[(Buffer, Buffer)],
        rank: i32,
        wire: &mut impl Wire,
        scratch: *mut u8,
    ) -> Result<(), Cause> {
        let [all_sent, all_received, _] = self.scratch_bytes;
        // SAFETY: promised by the caller; regions lie within the blocks, messages within the scratch memory.
        unsafe {
            let (sent, received) = (scratch, scratch.add(all_sent));
            let sums = received.add(all_received);
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
            if self.adjoint {
                for (block, region) in self.neighbours.iter().flat_map(|neighbour| &neighbour.sent.regions) {
                    region.clear(blocks[*block].1.data());
                }
            }
            wire.wait()?;
            for Neighbour { received: message, .. } in &self.neighbours {
                let mut packed = received.add(message.at.start);
                for (block, region) in &message.regions {
                    let to = &blocks[*block].1;
                    if self.adjoint {
                        region.add(packed, to, sums)?;
                    } else {
                        region.unpack(packed, to.data());
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

    #[test]
    fn blocks_that_are_too_small_are_errors() {
        let block = |extent| Block { itemsize: 4, shape: vec![7, extent], axes: vec![1] };
        let make = |neighbours: &[i32], block| {
            let (widths, neighbours) = (vec![Width { low: 2, high: 1 }], neighbours.to_vec());
            Halo::new(0, 1, &HaloFields { widths, neighbours, blocks: vec![block] }, false)
        };
        assert!(make(&[0, 0, 0], block(4)).is_err());
        assert!(make(&[0, 0, 0], block(5)).is_ok());
        assert!(make(&[0, 0, -1], block(5)).is_err());
        assert!(make(&[0, 0, 1], block(5)).is_err());
        assert!(make(&[0, 0], block(9)).is_err());
        let elsewhere = Block { axes: vec![2], ..block(9) };
        assert!(make(&[0, 0, 0], elsewhere).is_err());
    }
}
