//! Ghost cells of blocks: which cells go where, and how they are packed into messages.
//!
//! A *direction* is a step of -1, 0 or 1 blocks along each exchanged axis. Directions are numbered with the
//! last axis fastest, so that the opposite of direction `i` of `n` is `n - 1 - i`. A message bears the number
//! of the direction that it is sent to as tag: two ranks may be neighbours in several directions.
//!
//! The cells of blocks in the memory of the host are packed here. Where the processor does not reach the blocks, XLA
//! packs them (`_grid/faces.py`): what is given and taken then is the messages, in the order of the directions.

use std::ops::Range;
use std::ptr::copy_nonoverlapping;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Buffer;
use super::region::Region;
use crate::error::Cause;

/// What a `halo_exchange` does to the blocks of its site.
#[derive(Debug)]
pub struct Halo {
    /// Bytes of each operand with those of its result.
    sizes: Box<[[usize; 2]]>,
    directions: Box<[Direction]>,
    /// Of the axes that are exchanged.
    widths: Box<[Width]>,
    /// Other ranks' ghost cells are added to this rank's cells, and its own are cleared.
    adjoint: bool,
    /// `None` where XLA packs the messages.
    scratch: Option<Spare>,
}

/// The two messages of one direction.
#[derive(Debug)]
struct Direction {
    peer: i32,
    sendtag: i32,
    recvtag: i32,
    send: Option<Parcel>,
    recv: Option<Parcel>,
    /// Where a message from this rank to itself arrives in the memory of what is received.
    to_self: Option<usize>,
}

/// The cells of a message: those of each block, and where they are in the memory of what is sent or received.
#[derive(Debug)]
struct Parcel {
    regions: Box<[Region]>,
    at: Range<usize>,
}

/// Memory that the messages of one call are packed in.
#[derive(Debug)]
struct Scratch {
    sent: Box<[u8]>,
    received: Box<[u8]>,
    /// Cells that others are added to.
    sums: Box<[u8]>,
}

/// Such memory that no call uses now: threads may exchange at the same time, on communicators of their own.
#[derive(Debug)]
struct Spare {
    sent: usize,
    received: usize,
    sums: usize,
    spare: Mutex<Vec<Scratch>>,
}

impl Spare {
    fn list(&self) -> MutexGuard<'_, Vec<Scratch>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> Scratch {
        let spare = self.list().pop();
        let zeros = |bytes| vec![0; bytes].into();
        spare.unwrap_or_else(|| Scratch {
            sent: zeros(self.sent),
            received: zeros(self.received),
            sums: zeros(self.sums),
        })
    }
}

/// Along an axis that is exchanged, a block has ghost cells, inner cells, ghost cells.
#[derive(Clone, Copy, Debug, Hash)]
pub struct Width {
    pub low: usize,
    pub high: usize,
}

impl Width {
    /// The cells along this axis of a message to (`outgoing`) or from the neighbour at `step`.
    fn cells(self, extent: usize, step: isize, outgoing: bool, owned: [bool; 2]) -> Range<usize> {
        let Self { low, high, .. } = self;
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
#[derive(Clone, Debug)]
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
            let needed = width.low + width.high + width.low.max(width.high);
            self.shape.get(axis).is_some_and(|&extent| extent >= needed)
        };
        is_possible && distinct && self.axes.len() == widths.len() && self.axes.iter().zip(widths).all(fits)
    }
}

/// How messages travel. `receive` and `send` start something, `wait` ends all of it.
pub trait Wire {
    /// # Safety
    /// So many bytes may be written until `wait` has returned.
    unsafe fn receive(&mut self, peer: i32, tag: i32, into: *mut u8, bytes: usize) -> Result<(), Cause>;

    /// # Safety
    /// So many bytes may be read until `wait` has returned.
    unsafe fn send(&mut self, peer: i32, tag: i32, from: *mut u8, bytes: usize) -> Result<(), Cause>;

    fn wait(&mut self) -> Result<(), Cause>;
}

/// The bytes of messages to or from each rank.
fn per_rank<'a>(ranks: usize, messages: impl Iterator<Item = (i32, &'a Option<Parcel>)>) -> Vec<u64> {
    let mut bytes = vec![0; ranks];
    for (peer, parcel) in messages {
        if let (Some(sum), Some(parcel)) = (bytes.get_mut(peer as usize), parcel) {
            *sum += parcel.at.len() as u64;
        }
    }
    bytes
}

fn wrong(expected: &'static str, actual: String) -> Cause {
    Cause::Attribute { name: "halo", expected, actual }
}

impl Halo {
    /// `packed`: by XLA.
    pub fn new(
        rank: i32,
        Around { widths, neighbours }: Around,
        blocks: &[Block],
        adjoint: bool,
        packed: bool,
    ) -> Result<Self, Cause> {
        let directions = 3usize.checked_pow(widths.len() as u32).unwrap_or(usize::MAX);
        if neighbours.len() != directions {
            return Err(wrong(
                "a neighbour for each direction",
                format!("{} of {directions}", neighbours.len()),
            ));
        }
        if let Some(block) = blocks.iter().find(|block| !block.has_room_for(widths)) {
            return Err(wrong("as many inner as ghost cells", format!("{block:?} with {widths:?}")));
        }
        let around = Around { widths, neighbours };
        let parcel = |direction: usize, outgoing: bool, end: &mut usize| {
            let start = *end;
            let region = |block: &Block| {
                let mut ranges: Vec<Range<usize>> = block.shape.iter().map(|&extent| 0..extent).collect();
                let extents: Vec<usize> = block.axes.iter().map(|&axis| block.shape[axis]).collect();
                for (&axis, cells) in block.axes.iter().zip(around.cells(&extents, direction, outgoing)) {
                    ranges[axis] = cells;
                }
                let region = Region::new(block.itemsize, &block.shape, &ranges);
                *end += region.bytes();
                region
            };
            let regions = blocks.iter().map(region).collect();
            // Whether there are cells at all depends on the widths, which are the same on all ranks.
            let nothing = |(k, width): (usize, &Width)| {
                let step = around.step(direction, k);
                step != 0 && width.cells(width.low + width.high, step, outgoing, [false; 2]).is_empty()
            };
            (!widths.iter().enumerate().any(nothing)).then_some(Parcel { regions, at: start..*end })
        };
        let (mut sent, mut received) = (0, 0);
        let mut messages = Vec::new();
        for (direction, peer) in around.somebody() {
            // The adjoint gives back what came from there.
            let send = parcel(direction, !adjoint, &mut sent);
            let recv = parcel(direction, adjoint, &mut received);
            let (sendtag, recvtag) = (direction as i32, (directions - 1 - direction) as i32);
            messages.push(Direction { peer, sendtag, recvtag, send, recv, to_self: None });
        }
        for i in 0..messages.len() {
            if messages[i].peer == rank {
                let arrives = messages.iter().find(|other| other.sendtag == messages[i].recvtag);
                messages[i].to_self = arrives.and_then(|other| Some(other.recv.as_ref()?.at.start));
            }
        }
        let regions = messages.iter().filter_map(|message| message.recv.as_ref()).flat_map(|it| &it.regions);
        let largest = regions.map(Region::bytes).max().unwrap_or(0);
        let sizes = if packed {
            [[sent, received]].into()
        } else {
            blocks.iter().map(|block| [block.bytes(); 2]).collect()
        };
        let sums = if adjoint { largest } else { 0 };
        let scratch = (!packed).then(|| Spare { sent, received, sums, spare: Mutex::default() });
        Ok(Self { sizes, directions: messages.into(), widths: widths.into(), adjoint, scratch })
    }

    /// Whether XLA packs the messages.
    pub fn is_packed(&self) -> bool {
        self.scratch.is_none()
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
        per_rank(ranks, self.directions.iter().map(|message| (message.peer, &message.send)))
    }

    /// An error unless so many bytes come from each rank.
    pub fn expect(&self, from_each: &[u64]) -> Result<(), Cause> {
        let expected = self.directions.iter().map(|message| (message.peer, &message.recv));
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

    /// Exchanges operands, each with its result.
    pub fn exchange(
        &self,
        blocks: impl Iterator<Item = (Buffer, Buffer)> + Clone,
        rank: i32,
        wire: &mut impl Wire,
    ) -> Result<(), Cause> {
        let blocks = || blocks.clone();
        let bytes = || blocks().map(|(from, to)| [from.bytes(), to.bytes()]);
        if !bytes().eq(self.sizes.iter().copied()) {
            let actual = format!("{:?}", bytes().collect::<Vec<_>>());
            return Err(wrong("blocks of the sizes that it was made for", actual));
        }
        let Some(spare) = &self.scratch else {
            // SAFETY: of the sizes just checked.
            return blocks().try_for_each(|(sent, received)| unsafe { self.carry(sent, received, wire) });
        };
        let mut scratch = spare.take();
        // SAFETY: the blocks have the sizes just checked, the scratch memory those of the messages.
        match unsafe { self.pack_and_carry(blocks, rank, wire, &mut scratch) } {
            Ok(()) => spare.list().push(scratch),
            Err(cause) => {
                // Messages may be under way.
                std::mem::forget(scratch);
                return Err(cause);
            }
        }
        Ok(())
    }

    /// # Safety
    /// The blocks have the sizes that this was made for, and so has the scratch memory, which nobody else uses. After an
    /// error messages may still be under way in it.
    unsafe fn pack_and_carry<I: Iterator<Item = (Buffer, Buffer)>>(
        &self,
        blocks: impl Fn() -> I,
        rank: i32,
        wire: &mut impl Wire,
        Scratch { sent, received, sums }: &mut Scratch,
    ) -> Result<(), Cause> {
        let (sent, received) = (sent.as_mut_ptr(), received.as_mut_ptr());
        let messages = || self.directions.iter();
        // SAFETY: promised by the caller; regions lie within the blocks, parcels within the scratch memory.
        unsafe {
            for Direction { peer, recvtag, recv, .. } in messages() {
                if let Some(parcel) = recv.as_ref().filter(|_| *peer != rank) {
                    wire.receive(*peer, *recvtag, received.add(parcel.at.start), parcel.at.len())?;
                }
            }
            for Direction { peer, sendtag, send, to_self, .. } in messages() {
                let Some(parcel) = send else { continue };
                let packed = to_self.map_or_else(|| sent.add(parcel.at.start), |at| received.add(at));
                let mut end = packed;
                for (region, (from, _)) in parcel.regions.iter().zip(blocks()) {
                    region.pack(from.data(), end);
                    end = end.add(region.bytes());
                }
                if to_self.is_none() {
                    wire.send(*peer, *sendtag, packed, parcel.at.len())?;
                }
            }
            for (from, to) in blocks().filter(|(from, to)| from.data() != to.data()) {
                copy_nonoverlapping(from.data(), to.data(), from.bytes());
            }
            if self.adjoint {
                for parcel in messages().filter_map(|message| message.send.as_ref()) {
                    for (region, (_, to)) in parcel.regions.iter().zip(blocks()) {
                        region.clear(to.data());
                    }
                }
            }
            wire.wait()?;
            for parcel in messages().filter_map(|message| message.recv.as_ref()) {
                let mut packed = received.add(parcel.at.start);
                for (region, (_, to)) in parcel.regions.iter().zip(blocks()) {
                    if self.adjoint {
                        region.add(packed, &to, sums.as_mut_ptr())?;
                    } else {
                        region.unpack(packed, to.data());
                    }
                    packed = packed.add(region.bytes());
                }
            }
        }
        Ok(())
    }

    /// Exchanges messages that are packed. The processor touches none: they may be in the memory of a device.
    ///
    /// # Safety
    /// The buffers are as large as all messages together.
    unsafe fn carry(&self, sent: Buffer, received: Buffer, wire: &mut impl Wire) -> Result<(), Cause> {
        let at = |side: &Buffer, parcel: &Parcel| side.data().wrapping_add(parcel.at.start);
        // SAFETY: promised by the caller; `wait` ends all messages.
        unsafe {
            // Backwards: so the messages of a rank are received in the order that it sends them in, for wires that
            // have no tags.
            for Direction { peer, recvtag, recv, .. } in self.directions.iter().rev() {
                let Some(parcel) = recv else { continue };
                wire.receive(*peer, *recvtag, at(&received, parcel), parcel.at.len())?;
            }
            for Direction { peer, sendtag, send, .. } in &self.directions {
                let Some(parcel) = send else { continue };
                wire.send(*peer, *sendtag, at(&sent, parcel), parcel.at.len())?;
            }
        }
        wire.wait()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_are_too_small_are_errors() {
        let width = Width { low: 2, high: 1 };
        let block = |extent| Block { itemsize: 4, shape: vec![7, extent], axes: vec![1] };
        let make = |neighbours: &[i32], block| {
            Halo::new(0, Around { widths: &[width], neighbours }, &[block], false, false)
        };
        assert!(make(&[0, 0, 0], block(4)).is_err());
        assert!(make(&[0, 0, 0], block(5)).is_ok());
        assert!(make(&[0, 0], block(9)).is_err());
        let elsewhere = Block { axes: vec![2], ..block(9) };
        assert!(make(&[0, 0, 0], elsewhere).is_err());
    }
}
