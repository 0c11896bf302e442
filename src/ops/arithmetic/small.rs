//! Floats of 16 bits: reduced in a wider type.

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::{Element, Operator};

/// bfloat16: the upper half of a float32. Written out rather than taken from `half`, so that the loop
/// has no branches and becomes vector instructions.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Brain(u16);

impl Brain {
    /// A float32 whose upper half is this one's, rounded to the nearest and ties to even; the lower half is
    /// noise. A NaN stays one: those that come of bfloat16 values have nothing in the lower half, from where
    /// rounding could carry into the upper one.
    #[inline(always)]
    fn round(value: f32) -> u32 {
        let bits = value.to_bits();
        bits.wrapping_add(0x7fff + (bits >> 16 & 1))
    }
}

impl Element for Brain {
    type Value = f32;

    #[inline(always)]
    fn load(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    #[inline(always)]
    fn store(value: f32) -> Self {
        Self((Self::round(value) >> 16) as u16)
    }

    /// Two at a time, in the halves of a word: the lanes of vectors need not be widened and narrowed.
    #[inline(always)]
    unsafe fn reduce<O: Operator<f32>>(input: *const Self, inout: *mut Self, count: usize) {
        const UPPER: u32 = 0xffff_0000;
        let (words_in, words) = (input.cast::<u32>(), inout.cast::<u32>());
        // SAFETY: promised by the caller; an odd element is left to the end.
        unsafe {
            for i in 0..count / 2 {
                let (a, b) = (words_in.add(i).read_unaligned(), words.add(i).read_unaligned());
                let one = O::apply(f32::from_bits(a << 16), f32::from_bits(b << 16));
                let other = O::apply(f32::from_bits(a & UPPER), f32::from_bits(b & UPPER));
                words.add(i).write_unaligned(Self::round(one) >> 16 | Self::round(other) & UPPER);
            }
            if let Some(last) = count.checked_sub(1).filter(|last| last % 2 == 0) {
                let (a, b) = (input.add(last).read_unaligned(), inout.add(last).read_unaligned());
                inout.add(last).write_unaligned(Self::store(O::apply(a.load(), b.load())));
            }
        }
    }
}

/// float16.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Half(f16);

impl Element for Half {
    type Value = f32;

    #[inline(always)]
    fn load(self) -> f32 {
        self.0.to_f32()
    }

    #[inline(always)]
    fn store(value: f32) -> Self {
        Self(f16::from_f32(value))
    }

    /// As many at a time as fit into registers or nearly so: `half` converts slices by the processor's vectors, Arm's
    /// among them.
    #[inline(always)]
    unsafe fn reduce<O: Operator<f32>>(input: *const Self, inout: *mut Self, count: usize) {
        const MOST: usize = 64;
        let (mut halves, mut a, mut b) = ([f16::ZERO; MOST], [0f32; MOST], [0f32; MOST]);
        for at in (0..count).step_by(MOST) {
            let n = MOST.min(count - at);
            let mut load = |from: *const Self, to: &mut [f32]| {
                // SAFETY: promised by the caller; by bytes, since the addresses may be odd.
                unsafe { halves.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(from.cast(), 2 * n) };
                halves[..n].convert_to_f32_slice(to);
            };
            // SAFETY: promised by the caller.
            let (from, to) = unsafe { (input.add(at), inout.add(at)) };
            load(from, &mut a[..n]);
            load(to, &mut b[..n]);
            for (a, b) in a.iter().zip(&mut b).take(n) {
                *b = O::apply(*a, *b);
            }
            halves[..n].convert_from_f32_slice(&b[..n]);
            // SAFETY: as above.
            unsafe { to.cast::<u8>().copy_from_nonoverlapping(halves.as_ptr().cast(), 2 * n) };
        }
    }

    /// Eight at a time, inlined: on x86, `half` takes eight times as long for arrays that are in the cache.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn reduce_with_avx2<O: Operator<f32>>(input: *const Self, inout: *mut Self, count: usize) {
        use std::arch::x86_64::{
            __m256, _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128, _mm_storeu_si128, _mm256_cvtph_ps,
            _mm256_cvtps_ph,
        };
        let whole = count & !7;
        // SAFETY: promised by the caller.
        unsafe {
            for i in (0..whole).step_by(8) {
                let load = |from: *const Self| -> [f32; 8] {
                    std::mem::transmute(_mm256_cvtph_ps(_mm_loadu_si128(from.cast())))
                };
                let (a, mut b) = (load(input.add(i)), load(inout.add(i)));
                for lane in 0..8 {
                    b[lane] = O::apply(a[lane], b[lane]);
                }
                let halves =
                    _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(std::mem::transmute::<[f32; 8], __m256>(b));
                _mm_storeu_si128(inout.add(i).cast(), halves);
            }
            Self::reduce::<O>(input.add(whole), inout.add(whole), count - whole);
        }
    }
}
