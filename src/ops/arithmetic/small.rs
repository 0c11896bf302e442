//! Floats of 16 and 8 bits: reduced in a wider type.

use half::f16;

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

    /// Eight at a time where the processor converts float16.
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

/// With infinities and NaNs, as in IEEE 754.
pub const IEEE: u8 = 0;
/// Finite, and one NaN of either sign.
pub const FN: u8 = 1;
/// Finite, one NaN in the place of a negative zero.
pub const FNUZ: u8 = 2;

/// A float of 8 bits with so many bits for exponent and mantissa.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Float8<const EXPONENT: u32, const MANTISSA: u32, const BIAS: i32, const KIND: u8>(u8);

impl<const EXPONENT: u32, const MANTISSA: u32, const BIAS: i32, const KIND: u8>
    Float8<EXPONENT, MANTISSA, BIAS, KIND>
{
    /// The code of the largest finite value.
    const MAX: u32 = match KIND {
        IEEE => (((1 << EXPONENT) - 1) << MANTISSA) - 1,
        FN => 0x7e,
        _ => 0x7f,
    };

    const NAN: u32 = match KIND {
        IEEE => Self::MAX + 1 + (1 << (MANTISSA - 1)),
        FN => 0x7f,
        _ => 0x80,
    };

    /// What is too large becomes.
    const OVERFLOW: u32 = if KIND == IEEE { Self::MAX + 1 } else { Self::NAN };

    /// The values of all codes. A table, because the loop runs where XLA has subnormals flushed to zero.
    const VALUES: [f32; 256] = {
        let mut values = [0.0; 256];
        let mut code = 0;
        while code < 256 {
            values[code as usize] = Self::value(code);
            code += 1;
        }
        values
    };

    const fn value(code: u32) -> f32 {
        let (sign, magnitude) = (code & 0x80, code & 0x7f);
        let is_nan = if KIND == FNUZ { code == 0x80 } else { magnitude > Self::MAX + (KIND == IEEE) as u32 };
        if is_nan {
            return f32::from_bits(0x7fc0_0000 | sign << 24);
        }
        if KIND == IEEE && magnitude == Self::MAX + 1 {
            return f32::from_bits(0x7f80_0000 | sign << 24);
        }
        let (exponent, fraction) = (magnitude >> MANTISSA, magnitude & ((1 << MANTISSA) - 1));
        let bits = if exponent > 0 {
            // 127 is the bias of float32, and all these exponents are among its own.
            ((exponent as i32 - BIAS + 127) as u32) << 23 | fraction << (23 - MANTISSA)
        } else if fraction == 0 {
            0
        } else {
            // Subnormal: shift its first bit to where float32 leaves it out.
            let shift = fraction.leading_zeros() - (31 - MANTISSA);
            ((1 - BIAS - shift as i32 + 127) as u32) << 23
                | ((fraction << shift) & ((1 << MANTISSA) - 1)) << (23 - MANTISSA)
        };
        f32::from_bits(bits | sign << 24)
    }
}

impl<const EXPONENT: u32, const MANTISSA: u32, const BIAS: i32, const KIND: u8> Element
    for Float8<EXPONENT, MANTISSA, BIAS, KIND>
{
    type Value = f32;

    #[inline(always)]
    fn load(self) -> f32 {
        Self::VALUES[self.0 as usize]
    }

    #[inline(always)]
    fn store(value: f32) -> Self {
        let bits = value.to_bits();
        let (sign, magnitude) = (bits >> 24 & 0x80, bits & 0x7fff_ffff);
        // Normal results: round the bits that are dropped, to the nearest and ties to even.
        let dropped = 23 - MANTISSA;
        let half = (1 << (dropped - 1)) - 1 + (magnitude >> dropped & 1);
        let normal =
            (magnitude.wrapping_add(half) >> dropped).wrapping_sub(((127 - BIAS) as u32) << MANTISSA);
        // Subnormal ones: adding a number whose last bit is their last bit makes the addition round.
        let magic = ((1 - BIAS - MANTISSA as i32 + 23 + 127) as u32) << 23;
        let sum = (f32::from_bits(magnitude) + f32::from_bits(magic)).to_bits();
        let subnormal = sum.wrapping_sub(magic);
        let is_subnormal = magnitude < ((1 - BIAS + 127) as u32) << 23;
        let code = if is_subnormal { subnormal } else { normal };
        let code = if code > Self::MAX { Self::OVERFLOW } else { code };
        let code = if value.is_nan() { Self::NAN } else { code };
        // There is no negative zero where its code is the NaN.
        let sign = if KIND == FNUZ && (code == 0 || code == Self::NAN) { 0 } else { sign };
        Self((code | sign) as u8)
    }
}

/// float8_e8m0fnu: powers of two, and a NaN. Computed in float64, among whose normal numbers they are.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Exponent(pub u8);

impl Element for Exponent {
    type Value = f64;

    #[inline(always)]
    fn load(self) -> f64 {
        if self.0 == 0xff { f64::NAN } else { f64::from_bits((u64::from(self.0) + 1023 - 127) << 52) }
    }

    #[inline(always)]
    fn store(value: f64) -> Self {
        // To the nearer power of two, from the middle upwards. Negative numbers land beyond the largest.
        let exponent = (value.to_bits().wrapping_add(1 << 51) >> 52) as i64 - (1023 - 127);
        let is_out = value.is_nan() || value == 0.0 || !(-2..0xff).contains(&exponent);
        Self(if is_out { 0xff } else { exponent.max(0) as u8 })
    }
}
