//! Ghost cells of blocks: which cells go where, and how they are packed into messages.
//!
//! A *direction* is a step of -1, 0 or 1 blocks along each exchanged axis. Directions are numbered with the
//! last axis fastest, so that the opposite of direction `i` of `n` is `n - 1 - i`. A message bears the number
//! of the direction that it is sent to as tag: two ranks may be neighbours in several directions.

use std::ops::Range;
use std::ptr::copy_nonoverlapping;
use std::sync::{Mutex, PoisonError};

use super::{Buffer, Builtin, Call, combine};
use crate::error::Cause;

/// What a `halo_exchange` does to the blocks of its site.
#[derive(Debug)]
pub struct Halo {
    /// Bytes of each block.
    blocks: Box<[usize]>,
    messages: Box<[Message]>,
    /// Other ranks' ghost cells are added to this rank's cells, and its own are cleared.
    adjoint: bool,
    scratch: Mutex<Scratch>,
}

/// The two messages of one direction.
#[derive(Debug)]
struct Message {
    peer: i32,
    sendtag: i32,
    recvtag: i32,
    send: Option<Parcel>,
    recv: Option<Parcel>,
    /// Where a message from this rank to itself arrives in the scratch memory.
    to_self: Option<usize>,
}

/// The cells of a message: those of each block, and where they are in the scratch memory.
#[derive(Debug)]
struct Parcel {
    regions: Box<[Region]>,
    at: Range<usize>,
}

/// Memory that the messages are packed in. It is as large as it has to be from the first call on.
#[derive(Debug, Default)]
struct Scratch {
    sent: Vec<u8>,
    received: Vec<u8>,
    /// Cells that others are added to.
    sums: Vec<u8>,
}

/// Along an axis that is exchanged, a block has ghost cells, inner cells, ghost cells.
#[derive(Clone, Copy, Debug)]
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

fn wrong(expected: &'static str, actual: String) -> Cause {
    Cause::Attribute { name: "halo", expected, actual }
}

impl Halo {
    /// `neighbours` has a rank for each direction, of which a negative one is nobody.
    pub fn new(
        rank: i32,
        widths: &[Width],
        neighbours: &[i32],
        blocks: &[Block],
        adjoint: bool,
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
        let step = |direction: usize, k: usize| {
            let weight = 3usize.pow((widths.len() - 1 - k) as u32);
            (direction / weight % 3) as isize - 1
        };
        let middle = directions / 2;
        let is_edge = |k: usize| {
            let weight = 3usize.pow((widths.len() - 1 - k) as u32);
            [neighbours[middle - weight] < 0, neighbours[middle + weight] < 0]
        };
        let parcel = |direction: usize, outgoing: bool, end: &mut usize| {
            let start = *end;
            let region = |block: &Block| {
                let mut ranges: Vec<Range<usize>> = block.shape.iter().map(|&extent| 0..extent).collect();
                for (k, (&axis, width)) in block.axes.iter().zip(widths).enumerate() {
                    let range = &mut ranges[axis];
                    *range = width.cells(range.end, step(direction, k), outgoing, is_edge(k));
                }
                let region = Region::new(block.itemsize, &block.shape, &ranges);
                *end += region.bytes();
                region
            };
            let regions = blocks.iter().map(region).collect();
            // Whether there are cells at all depends on the widths, which are the same on all ranks.
            let nothing = |(k, width): (usize, &Width)| {
                let step = step(direction, k);
                step != 0 && width.cells(width.low + width.high, step, outgoing, [false; 2]).is_empty()
            };
            (!widths.iter().enumerate().any(nothing)).then_some(Parcel { regions, at: start..*end })
        };
        let (mut sent, mut received) = (0, 0);
        let mut messages = Vec::new();
        for (direction, &peer) in neighbours.iter().enumerate() {
            if peer >= 0 && direction != middle {
                // The adjoint gives back what came from there.
                let send = parcel(direction, !adjoint, &mut sent);
                let recv = parcel(direction, adjoint, &mut received);
                let (sendtag, recvtag) = (direction as i32, (directions - 1 - direction) as i32);
                messages.push(Message { peer, sendtag, recvtag, send, recv, to_self: None });
            }
        }
        for i in 0..messages.len() {
            if messages[i].peer == rank {
                let arrives = messages.iter().find(|other| other.sendtag == messages[i].recvtag);
                messages[i].to_self = arrives.and_then(|other| Some(other.recv.as_ref()?.at.start));
            }
        }
        let regions = messages.iter().filter_map(|message| message.recv.as_ref()).flat_map(|it| &it.regions);
        let largest = regions.map(Region::bytes).max().unwrap_or(0);
        let scratch = Scratch {
            sent: vec![0; sent],
            received: vec![0; received],
            sums: vec![0; if adjoint { largest } else { 0 }],
        };
        let (blocks, messages) = (blocks.iter().map(Block::bytes).collect(), messages.into());
        Ok(Self { blocks, messages, adjoint, scratch: Mutex::new(scratch) })
    }

    /// How many blocks are exchanged together.
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// The cells of a block that an exchange in place reads, or those that it writes. Some may be there twice.
    pub fn cells(&self, block: usize, written: bool) -> Vec<Runs> {
        let parcels = self.messages.iter().flat_map(|message| {
            let [send, recv] = [!written, written].map(|of_one| of_one || self.adjoint);
            [message.send.as_ref().filter(|_| send), message.recv.as_ref().filter(|_| recv)]
        });
        let mut cells = Vec::new();
        for region in parcels.flatten().filter_map(|parcel| parcel.regions.get(block)) {
            region.rows(|offset, count, distance| {
                cells.push(Runs { offset, bytes: region.run, count, distance });
            });
        }
        cells
    }

    /// Carries out a call of the site that this belongs to.
    pub fn exchange(&self, call: &Call, rank: i32, wire: &mut impl Wire) -> Result<(), Cause> {
        let blocks = || call.blocks();
        let bytes = || blocks().flat_map(|(from, to)| [from.bytes(), to.bytes()]);
        if !bytes().eq(self.blocks.iter().flat_map(|&bytes| [bytes; 2])) {
            let actual = format!("{:?}", bytes().collect::<Vec<_>>());
            return Err(wrong("blocks of the sizes that it was made for", actual));
        }
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let Scratch { sent, received, sums } = &mut *scratch;
        let (sent, received) = (sent.as_mut_ptr(), received.as_mut_ptr());
        let messages = || self.messages.iter();
        // SAFETY: regions lie within blocks of the sizes just checked, parcels within the scratch memory, which
        // is this call's while it has the lock; only `wait` lets go of it, at the end of all messages.
        unsafe {
            for Message { peer, recvtag, recv, .. } in messages() {
                if let Some(parcel) = recv.as_ref().filter(|_| *peer != rank) {
                    wire.receive(*peer, *recvtag, received.add(parcel.at.start), parcel.at.len())?;
                }
            }
            for Message { peer, sendtag, send, to_self, .. } in messages() {
                let Some(parcel) = send else { continue };
                let packed = to_self.map_or_else(|| sent.add(parcel.at.start), |at| received.add(at));
                let mut end = packed;
                for (region, (from, _)) in parcel.regions.iter().zip(blocks()) {
                    region.pack(from.data, end);
                    end = end.add(region.bytes());
                }
                if to_self.is_none() {
                    wire.send(*peer, *sendtag, packed, parcel.at.len())?;
                }
            }
            for (from, to) in blocks().filter(|(from, to)| from.data != to.data) {
                copy_nonoverlapping(from.data, to.data, from.bytes());
            }
            if self.adjoint {
                for parcel in messages().filter_map(|message| message.send.as_ref()) {
                    for (region, (_, to)) in parcel.regions.iter().zip(blocks()) {
                        region.clear(to.data);
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
                        region.unpack(packed, to.data);
                    }
                    packed = packed.add(region.bytes());
                }
            }
        }
        Ok(())
    }
}

/// Equally spaced pieces of a block, all in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Runs {
    /// Of the first one.
    pub offset: usize,
    /// Of each.
    pub bytes: usize,
    pub count: usize,
    /// From one to the next.
    pub distance: usize,
}

impl Runs {
    /// All of a block, in one piece.
    pub fn whole(bytes: usize) -> Self {
        Self { offset: 0, bytes, count: 1, distance: 0 }
    }
}

/// A box of cells within a block, in bytes.
#[derive(Debug)]
struct Region {
    offset: usize,
    /// Extents and strides of what is not contiguous, outermost first.
    outer: Box<[(usize, usize)]>,
    /// Bytes that are contiguous.
    run: usize,
}

impl Region {
    fn new(itemsize: usize, shape: &[usize], ranges: &[Range<usize>]) -> Self {
        let (mut offset, mut run, mut stride) = (0, itemsize, itemsize);
        let mut outer: Vec<(usize, usize)> = Vec::new();
        for (&extent, range) in shape.iter().zip(ranges).rev() {
            offset += range.start * stride;
            match outer.last_mut() {
                // All inside is whole.
                None if run == stride => run *= range.len(),
                Some((inner, step)) if *inner * *step == stride => *inner *= range.len(),
                _ if range.len() == 1 => {}
                _ => outer.push((range.len(), stride)),
            }
            stride *= extent;
        }
        outer.reverse();
        Self { offset, outer: outer.into(), run }
    }

    fn bytes(&self) -> usize {
        self.run * self.outer.iter().map(|(extent, _)| extent).product::<usize>()
    }

    /// Calls `f` with the offset of the first of equally spaced runs, their number, and their distance.
    fn rows(&self, mut f: impl FnMut(usize, usize, usize)) {
        fn walk(outer: &[(usize, usize)], offset: usize, f: &mut impl FnMut(usize, usize, usize)) {
            match outer {
                [] => f(offset, 1, 0),
                [(extent, stride)] => f(offset, *extent, *stride),
                [(extent, stride), inner @ ..] => {
                    for i in 0..*extent {
                        walk(inner, offset + i * stride, f);
                    }
                }
            }
        }
        walk(&self.outer, self.offset, &mut f);
    }

    /// # Safety
    /// `block` holds the region, `packed` its bytes; they do not overlap.
    unsafe fn pack(&self, block: *const u8, packed: *mut u8) {
        let mut to = packed;
        self.rows(|offset, n, stride| {
            // SAFETY: promised by the caller.
            unsafe {
                copy_runs(block.add(offset), stride, to, self.run, self.run, n);
                to = to.add(n * self.run);
            }
        });
    }

    /// # Safety
    /// As for `pack`.
    unsafe fn unpack(&self, packed: *const u8, block: *mut u8) {
        let mut from = packed;
        self.rows(|offset, n, stride| {
            // SAFETY: promised by the caller.
            unsafe {
                copy_runs(from, self.run, block.add(offset), stride, self.run, n);
                from = from.add(n * self.run);
            }
        });
    }

    /// # Safety
    /// `block` holds the region.
    unsafe fn clear(&self, block: *mut u8) {
        self.rows(|offset, n, stride| {
            for i in 0..n {
                // SAFETY: promised by the caller.
                unsafe { block.add(offset + i * stride).write_bytes(0, self.run) };
            }
        });
    }

    /// Adds packed values to those of a block.
    ///
    /// # Safety
    /// As for `pack`; `sums` is as large as `packed`.
    unsafe fn add(&self, packed: *mut u8, block: &Buffer, sums: *mut u8) -> Result<(), Cause> {
        let dtype = block.dtype;
        let add =
            combine(Builtin::Sum, dtype).ok_or(Cause::UndefinedReduction { reduction: "SUM", dtype })?;
        // A piece at a time, because `combine` counts as MPI does.
        let pieces = self.bytes().div_ceil(PIECE);
        // SAFETY: promised by the caller.
        unsafe {
            self.pack(block.data, sums);
            for piece in 0..pieces {
                let at = piece * PIECE;
                let mut count = (PIECE.min(self.bytes() - at) / dtype.size()) as i32;
                add(packed.add(at).cast(), sums.add(at).cast(), &mut count, std::ptr::null_mut());
            }
            self.unpack(sums, block.data);
        }
        Ok(())
    }
}

/// A multiple of every element's size.
const PIECE: usize = 1 << 24;

/// Copies `n` runs of `run` bytes.
///
/// # Safety
/// Both places hold them, at distances `from_stride` and `to_stride`, and do not overlap.
#[inline]
pub unsafe fn copy_runs(
    from: *const u8,
    from_stride: usize,
    to: *mut u8,
    to_stride: usize,
    run: usize,
    n: usize,
) {
    /// Runs of a length that the compiler knows: a column of a block has one element to a run.
    #[inline]
    unsafe fn fixed<const RUN: usize>(
        from: *const u8,
        from_stride: usize,
        to: *mut u8,
        to_stride: usize,
        n: usize,
    ) {
        for i in 0..n {
            // SAFETY: promised by the caller.
            unsafe { copy_nonoverlapping(from.add(i * from_stride), to.add(i * to_stride), RUN) };
        }
    }
    // SAFETY: promised by the caller.
    unsafe {
        match run {
            2 => fixed::<2>(from, from_stride, to, to_stride, n),
            4 => fixed::<4>(from, from_stride, to, to_stride, n),
            8 => fixed::<8>(from, from_stride, to, to_stride, n),
            16 => fixed::<16>(from, from_stride, to, to_stride, n),
            _ => {
                for i in 0..n {
                    copy_nonoverlapping(from.add(i * from_stride), to.add(i * to_stride), run);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_are_the_cells_of_their_ranges() {
        let shape = [3, 4, 5];
        let block: Vec<u8> = (0..60).collect();
        for ranges in [
            [0..3, 0..4, 0..5],
            [0..3, 1..2, 0..5],
            [1..2, 0..4, 0..5],
            [0..3, 0..4, 4..5],
            [0..2, 1..3, 2..4],
            [0..0, 0..4, 0..5],
            [1..3, 0..4, 1..5],
        ] {
            let region = Region::new(1, &shape, &ranges);
            let mut expected = Vec::new();
            for i in ranges[0].clone() {
                for j in ranges[1].clone() {
                    for k in ranges[2].clone() {
                        expected.push(block[i * 20 + j * 5 + k]);
                    }
                }
            }
            assert_eq!(region.bytes(), expected.len(), "{ranges:?}");
            let mut packed = vec![0; expected.len()];
            let mut copy = vec![0; 60];
            // SAFETY: buffers of the sizes that are needed.
            unsafe {
                region.pack(block.as_ptr(), packed.as_mut_ptr());
                region.unpack(packed.as_ptr(), copy.as_mut_ptr());
            }
            assert_eq!(packed, expected, "{ranges:?}");
            let kept: Vec<u8> = copy.iter().copied().filter(|&cell| cell != 0).collect();
            let cells: Vec<u8> = expected.iter().copied().filter(|&cell| cell != 0).collect();
            assert_eq!(kept, cells, "in their places, in order");
        }
    }

    #[test]
    fn whole_blocks_are_one_run() {
        let region = Region::new(4, &[3, 4, 5], &[1..2, 0..4, 0..5]);
        assert_eq!((region.offset, region.run, region.outer.len()), (80, 80, 0));
        let column = Region::new(4, &[3, 4, 5], &[0..3, 0..4, 4..5]);
        assert_eq!((column.offset, column.run, &*column.outer), (16, 4, &[(12, 20)][..]));
    }

    #[test]
    fn blocks_that_are_too_small_are_errors() {
        let width = Width { low: 2, high: 1 };
        let block = |extent| Block { itemsize: 4, shape: vec![7, extent], axes: vec![1] };
        let make = |extent| Halo::new(0, &[width], &[0, 0, 0], &[block(extent)], false);
        assert!(make(4).is_err());
        assert!(make(5).is_ok());
        assert!(Halo::new(0, &[width], &[0, 0], &[block(9)], false).is_err());
        let elsewhere = Block { axes: vec![2], ..block(9) };
        assert!(Halo::new(0, &[width], &[0, 0, 0], &[elsewhere], false).is_err());
    }
}
