//! Boxes of cells within a block, and how they are packed.

use std::num::Wrapping;
use std::ops::{Add, Range};
use std::ptr::copy_nonoverlapping;

use half::{bf16, f16};

use super::Dtype;

/// A box of cells within a block, in bytes.
#[derive(Debug)]
pub struct Region {
    offset: usize,
    /// Extents and strides of what is not contiguous, outermost first.
    outer: Box<[(usize, usize)]>,
    /// Bytes that are contiguous.
    run: usize,
}

impl Region {
    pub fn new(itemsize: usize, shape: &[usize], ranges: &[Range<usize>]) -> Self {
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

    pub fn bytes(&self) -> usize {
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
    pub unsafe fn pack(&self, block: *const u8, packed: *mut u8) {
        let mut to = packed;
        self.rows(|offset, n, stride| {
            // SAFETY: promised by the caller.
            unsafe {
                copy_runs(block.add(offset), stride, to, self.run, self.run, n);
                to = to.add(n * self.run);
            }
        });
    }

    /// Adds packed values to the cells. Returns false if values of this dtype cannot be added.
    ///
    /// # Safety
    /// As for `pack`.
    pub unsafe fn add(&self, packed: *const u8, block: *mut u8, dtype: Dtype) -> bool {
        let add = match dtype {
            Dtype::Int8 | Dtype::Uint8 => Self::add_of::<Wrapping<u8>>,
            Dtype::Int16 | Dtype::Uint16 => Self::add_of::<Wrapping<u16>>,
            Dtype::Int32 | Dtype::Uint32 => Self::add_of::<Wrapping<u32>>,
            Dtype::Int64 | Dtype::Uint64 => Self::add_of::<Wrapping<u64>>,
            Dtype::Float16 => Self::add_of::<f16>,
            Dtype::Bfloat16 => Self::add_of::<bf16>,
            Dtype::Float32 | Dtype::Complex64 => Self::add_of::<f32>,
            Dtype::Float64 | Dtype::Complex128 => Self::add_of::<f64>,
            _ => return false,
        };
        // SAFETY: promised by the caller.
        unsafe { add(self, packed, block) };
        true
    }

    unsafe fn add_of<E: Add<Output = E>>(&self, mut from: *const u8, block: *mut u8) {
        self.rows(|offset, n, stride| {
            for i in 0..n {
                for at in (0..self.run).step_by(size_of::<E>()) {
                    // SAFETY: promised by the caller of `add`.
                    unsafe {
                        let to = block.add(offset + i * stride + at).cast::<E>();
                        to.write_unaligned(to.read_unaligned() + from.cast::<E>().read_unaligned());
                        from = from.add(size_of::<E>());
                    }
                }
            }
        });
    }

    /// # Safety
    /// As for `pack`.
    pub unsafe fn unpack(&self, packed: *const u8, block: *mut u8) {
        let mut from = packed;
        self.rows(|offset, n, stride| {
            // SAFETY: promised by the caller.
            unsafe {
                copy_runs(from, self.run, block.add(offset), stride, self.run, n);
                from = from.add(n * self.run);
            }
        });
    }
}

/// Copies `n` runs of `run` bytes.
///
/// # Safety
/// Both places hold them, at distances `from_stride` and `to_stride`, and do not overlap.
#[inline]
unsafe fn copy_runs(
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
                let mut sums = block.clone();
                assert!(region.add(packed.as_ptr(), sums.as_mut_ptr(), Dtype::Uint8));
                let added: Vec<u8> = sums.iter().zip(&block).map(|(sum, cell)| sum - cell).collect();
                assert_eq!(added, copy, "{ranges:?}");
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
        let edge = Region::new(4, &[3, 4, 5], &[0..3, 1..2, 4..5]);
        assert_eq!((edge.offset, edge.run, &*edge.outer), (36, 4, &[(3, 80)][..]));
    }
}
