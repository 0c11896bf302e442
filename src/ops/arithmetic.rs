//! Reductions of our own: for types that MPI has no word for, and for all types where there is no MPI.
//!
//! Floats of 16 and 8 bits are reduced in float32: it has more than twice their precision, so that a sum
//! or a product rounded twice is the one rounded once. MAX and MIN of floats propagate NaN, as JAX's do.

use std::ffi::{c_int, c_void};
use std::ops::{BitAnd, BitOr, BitXor};

use half::f16;

use super::{Builtin, Dtype};

/// `inout[i] = input[i] op inout[i]`, with the signature of an `MPI_User_function`: input, inout, number
/// of elements (of pairs, for MINLOC and MAXLOC), and the data type, which is not looked at.
///
/// # Safety
/// Both arrays have that many elements (or pairs) of the type that the function was made for, and they
/// share no memory. Any alignment will do.
pub type Combine = unsafe extern "C" fn(*mut c_void, *mut c_void, *mut c_int, *mut c_void);

/// The function that reduces values of a type, `None` where that makes no sense.
pub fn combine(builtin: Builtin, dtype: Dtype) -> Option<Combine> {
    match dtype {
        Dtype::Bool => {
            logical::<Bool>(builtin).or_else(|| bits::<Bool>(builtin)).or_else(|| ordered::<Bool>(builtin))
        }
        Dtype::Int8 => integer::<i8>(builtin),
        Dtype::Int16 => integer::<i16>(builtin),
        Dtype::Int32 => integer::<i32>(builtin),
        Dtype::Int64 => integer::<i64>(builtin),
        Dtype::Uint8 => integer::<u8>(builtin),
        Dtype::Uint16 => integer::<u16>(builtin),
        Dtype::Uint32 => integer::<u32>(builtin),
        Dtype::Uint64 => integer::<u64>(builtin),
        Dtype::Float8E3m4 => float::<Float8<3, 4, 3, IEEE>>(builtin),
        Dtype::Float8E4m3 => float::<Float8<4, 3, 7, IEEE>>(builtin),
        Dtype::Float8E4m3b11fnuz => float::<Float8<4, 3, 11, FNUZ>>(builtin),
        Dtype::Float8E4m3fn => float::<Float8<4, 3, 7, FN>>(builtin),
        Dtype::Float8E4m3fnuz => float::<Float8<4, 3, 8, FNUZ>>(builtin),
        Dtype::Float8E5m2 => float::<Float8<5, 2, 15, IEEE>>(builtin),
        Dtype::Float8E5m2fnuz => float::<Float8<5, 2, 16, FNUZ>>(builtin),
        Dtype::Float8E8m0fnu => float::<Exponent>(builtin),
        Dtype::Float16 => float::<Half>(builtin),
        Dtype::Bfloat16 => float::<Brain>(builtin),
        Dtype::Float32 => float::<f32>(builtin),
        Dtype::Float64 => float::<f64>(builtin),
        Dtype::Complex64 => arithmetic::<Complex<f32>>(builtin),
        Dtype::Complex128 => arithmetic::<Complex<f64>>(builtin),
    }
}

fn float<E: Element<Value: Ring + Ordered>>(builtin: Builtin) -> Option<Combine> {
    arithmetic::<E>(builtin).or_else(|| ordered::<E>(builtin))
}

fn integer<E: Element<Value: Ring + Ordered + Bits>>(builtin: Builtin) -> Option<Combine> {
    float::<E>(builtin).or_else(|| bits::<E>(builtin)).or_else(|| logical::<E>(builtin))
}

fn arithmetic<E: Element<Value: Ring>>(builtin: Builtin) -> Option<Combine> {
    match builtin {
        Builtin::Sum => Some(elements::<E, Sum>),
        Builtin::Prod => Some(elements::<E, Prod>),
        _ => None,
    }
}

fn ordered<E: Element<Value: Ordered>>(builtin: Builtin) -> Option<Combine> {
    match builtin {
        Builtin::Max => Some(elements::<E, Max>),
        Builtin::Min => Some(elements::<E, Min>),
        Builtin::Maxloc => Some(pairs::<E, Max>),
        Builtin::Minloc => Some(pairs::<E, Min>),
        _ => None,
    }
}

fn bits<E: Element<Value: Bits>>(builtin: Builtin) -> Option<Combine> {
    match builtin {
        Builtin::Band => Some(elements::<E, Band>),
        Builtin::Bor => Some(elements::<E, Bor>),
        Builtin::Bxor => Some(elements::<E, Bxor>),
        _ => None,
    }
}

fn logical<E: Element<Value: Bits>>(builtin: Builtin) -> Option<Combine> {
    match builtin {
        Builtin::Land => Some(elements::<E, Land>),
        Builtin::Lor => Some(elements::<E, Lor>),
        Builtin::Lxor => Some(elements::<E, Lxor>),
        _ => None,
    }
}

// ---- The loops

/// # Safety
/// See [`Combine`].
unsafe extern "C" fn elements<E: Element, O: Operator<E::Value>>(
    input: *mut c_void,
    inout: *mut c_void,
    count: *mut c_int,
    _: *mut c_void,
) {
    // SAFETY: promised by the caller.
    unsafe { fastest::<E, O>(input.cast(), inout.cast(), *count as usize) }
}

/// Runs the loop in the instructions that this processor has.
///
/// # Safety
/// See [`Combine`].
unsafe fn fastest<E: Element, O: Operator<E::Value>>(input: *const E, inout: *mut E, count: usize) {
    // SAFETY: promised by the caller; the instructions are there.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx2,f16c")]
            unsafe fn avx2<E: Element, O: Operator<E::Value>>(input: *const E, inout: *mut E, count: usize) {
                // SAFETY: promised by the caller.
                unsafe { E::reduce_with_avx2::<O>(input, inout, count) }
            }
            if std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("f16c") {
                return avx2::<E, O>(input, inout, count);
            }
        }
        E::reduce::<O>(input, inout, count);
    }
}

/// MAXLOC and MINLOC: pairs of a value and an index, which both have the array's type. Of equal values
/// the one with the lower index wins.
///
/// # Safety
/// See [`Combine`].
unsafe extern "C" fn pairs<E: Element<Value: Ordered>, O: Operator<E::Value>>(
    input: *mut c_void,
    inout: *mut c_void,
    count: *mut c_int,
    _: *mut c_void,
) {
    let (input, inout) = (input.cast::<[E; 2]>(), inout.cast::<[E; 2]>());
    // SAFETY: promised by the caller.
    unsafe {
        for i in 0..*count as usize {
            let (a, b) = (input.add(i).read_unaligned(), inout.add(i).read_unaligned());
            let (value_a, value_b) = (a[0].load(), b[0].load());
            let is_lower = a[1].load().precedes(b[1].load());
            let a_wins = if value_a == value_b || (value_a.is_nan() && value_b.is_nan()) {
                is_lower
            } else {
                let winner = O::apply(value_a, value_b);
                winner == value_a || (winner.is_nan() && value_a.is_nan())
            };
            if a_wins {
                inout.add(i).write_unaligned(a);
            }
        }
    }
}

// ---- Operators

/// A reduction of values that are computed with.
trait Operator<V> {
    fn apply(a: V, b: V) -> V;
}

macro_rules! operators {
    ($($name:ident: $needs:ident, $a:ident $b:ident $result:expr;)*) => {$(
        struct $name;

        impl<V: $needs> Operator<V> for $name {
            #[inline(always)]
            fn apply($a: V, $b: V) -> V {
                $result
            }
        }
    )*};
}

operators! {
    Sum: Ring, a b a.plus(b);
    Prod: Ring, a b a.times(b);
    // In the form that is one instruction of most processors, and then a NaN.
    Max: Ordered, a b { let max = if b.precedes(a) { a } else { b }; if a.is_nan() { a } else { max } };
    Min: Ordered, a b { let min = if a.precedes(b) { a } else { b }; if a.is_nan() { a } else { min } };
    Band: Bits, a b a & b;
    Bor: Bits, a b a | b;
    Bxor: Bits, a b a ^ b;
    Land: Bits, a b V::from_bool(a.is_true() & b.is_true());
    Lor: Bits, a b V::from_bool(a.is_true() | b.is_true());
    Lxor: Bits, a b V::from_bool(a.is_true() ^ b.is_true());
}

/// What SUM and PROD need.
trait Ring: Copy {
    fn plus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
}

/// What MAX and MIN need.
trait Ordered: Copy + PartialEq {
    fn precedes(self, other: Self) -> bool;
    fn is_nan(self) -> bool;
}

/// What the bitwise and the logical reductions need.
trait Bits: Copy + BitAnd<Output = Self> + BitOr<Output = Self> + BitXor<Output = Self> {
    fn is_true(self) -> bool;
    fn from_bool(value: bool) -> Self;
}

macro_rules! integers {
    ($($t:ty)*) => {$(
        impl Element for $t {
            type Value = $t;

            #[inline(always)]
            fn load(self) -> $t {
                self
            }

            #[inline(always)]
            fn store(value: $t) -> $t {
                value
            }
        }

        impl Ring for $t {
            #[inline(always)]
            fn plus(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            #[inline(always)]
            fn times(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
        }

        impl Ordered for $t {
            #[inline(always)]
            fn precedes(self, other: Self) -> bool {
                self < other
            }

            #[inline(always)]
            fn is_nan(self) -> bool {
                false
            }
        }

        impl Bits for $t {
            #[inline(always)]
            fn is_true(self) -> bool {
                self != 0
            }

            #[inline(always)]
            fn from_bool(value: bool) -> Self {
                value.into()
            }
        }
    )*};
}

integers! { i8 i16 i32 i64 u8 u16 u32 u64 }

macro_rules! floats {
    ($($t:ty)*) => {$(
        impl Element for $t {
            type Value = $t;

            #[inline(always)]
            fn load(self) -> $t {
                self
            }

            #[inline(always)]
            fn store(value: $t) -> $t {
                value
            }
        }

        impl Ring for $t {
            #[inline(always)]
            fn plus(self, other: Self) -> Self {
                self + other
            }

            #[inline(always)]
            fn times(self, other: Self) -> Self {
                self * other
            }
        }

        impl Ordered for $t {
            #[inline(always)]
            fn precedes(self, other: Self) -> bool {
                self < other
            }

            #[inline(always)]
            fn is_nan(self) -> bool {
                self != self
            }
        }
    )*};
}

floats! { f32 f64 }

// ---- Elements

/// A type of array elements, and the type that it is computed in.
trait Element: Copy {
    type Value: Copy;

    fn load(self) -> Self::Value;
    fn store(value: Self::Value) -> Self;

    /// # Safety
    /// See [`Combine`].
    #[inline(always)]
    unsafe fn reduce<O: Operator<Self::Value>>(input: *const Self, inout: *mut Self, count: usize) {
        for i in 0..count {
            // SAFETY: promised by the caller.
            unsafe {
                let (a, b) = (input.add(i).read_unaligned().load(), inout.add(i).read_unaligned().load());
                inout.add(i).write_unaligned(Self::store(O::apply(a, b)));
            }
        }
    }

    /// The same, compiled where there are AVX2 and F16C.
    ///
    /// # Safety
    /// See [`Combine`]; the processor has both.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn reduce_with_avx2<O: Operator<Self::Value>>(input: *const Self, inout: *mut Self, count: usize) {
        // SAFETY: promised by the caller.
        unsafe { Self::reduce::<O>(input, inout, count) }
    }
}

/// A byte that is 0 or not.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Bool(u8);

impl Element for Bool {
    type Value = u8;

    #[inline(always)]
    fn load(self) -> u8 {
        u8::from(self.0 != 0)
    }

    #[inline(always)]
    fn store(value: u8) -> Self {
        Self(value)
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Complex<T> {
    re: T,
    im: T,
}

macro_rules! complex {
    ($($t:ty)*) => {$(
        impl Element for Complex<$t> {
            type Value = Self;

            #[inline(always)]
            fn load(self) -> Self {
                self
            }

            #[inline(always)]
            fn store(value: Self) -> Self {
                value
            }
        }

        impl Ring for Complex<$t> {
            #[inline(always)]
            fn plus(self, other: Self) -> Self {
                Self { re: self.re + other.re, im: self.im + other.im }
            }

            #[inline(always)]
            fn times(self, other: Self) -> Self {
                Self {
                    re: self.re * other.re - self.im * other.im,
                    im: self.re * other.im + self.im * other.re,
                }
            }
        }
    )*};
}

complex! { f32 f64 }

/// bfloat16: the upper half of a float32. Written out rather than taken from `half`, so that the loop
/// has no branches and becomes vector instructions.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Brain(u16);

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
struct Half(f16);

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
const IEEE: u8 = 0;
/// Finite, and one NaN of either sign.
const FN: u8 = 1;
/// Finite, one NaN in the place of a negative zero.
const FNUZ: u8 = 2;

/// A float of 8 bits with so many bits for exponent and mantissa.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Float8<const EXPONENT: u32, const MANTISSA: u32, const BIAS: i32, const KIND: u8>(u8);

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
struct Exponent(u8);

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

#[cfg(test)]
mod tests {
    use super::*;

    /// Applies a function to two arrays; the result.
    fn apply<E: Copy>(builtin: Builtin, dtype: Dtype, input: &[E], inout: &[E]) -> Vec<E> {
        let mut result = inout.to_vec();
        let per_item = if matches!(builtin, Builtin::Maxloc | Builtin::Minloc) { 2 } else { 1 };
        let mut count = (input.len() / per_item) as c_int;
        let function = combine(builtin, dtype).unwrap();
        // SAFETY: two arrays of `count` items.
        unsafe {
            let input = input.as_ptr().cast_mut().cast();
            function(input, result.as_mut_ptr().cast(), &mut count, std::ptr::null_mut());
        }
        result
    }

    #[test]
    fn there_is_a_function_exactly_where_the_tables_say_so() {
        for &dtype in Dtype::ALL {
            for &builtin in Builtin::ALL {
                assert_eq!(
                    combine(builtin, dtype).is_some(),
                    builtin.allows(dtype),
                    "{} of {}",
                    builtin.name(),
                    dtype.name()
                );
            }
        }
    }

    /// Pairs of all values of a 16-bit type with some that hit its corners.
    fn grid16(some: &[u16]) -> (Vec<u16>, Vec<u16>) {
        let mut grid = (Vec::new(), Vec::new());
        for &a in some {
            for b in 0..=u16::MAX {
                grid.0.push(a);
                grid.1.push(b);
            }
        }
        grid
    }

    /// What an operation on floats should give, in float32.
    fn scalar(builtin: Builtin, a: f32, b: f32) -> f32 {
        match builtin {
            Builtin::Sum => a + b,
            Builtin::Prod => a * b,
            Builtin::Max | Builtin::Min if a.is_nan() || b.is_nan() => f32::NAN,
            Builtin::Max => a.max(b),
            Builtin::Min => a.min(b),
            _ => unreachable!(),
        }
    }

    const FLOAT_OPS: [Builtin; 4] = [Builtin::Sum, Builtin::Prod, Builtin::Max, Builtin::Min];

    #[test]
    fn bfloat16_equals_half() {
        let (a, b) =
            grid16(&[0, 1, 0x3f80, 0x3f81, 0x4049, 0x7f7f, 0x7f80, 0x7fc0, 0x7f81, 0x8000, 0xbf80, 0xff7f]);
        for builtin in FLOAT_OPS {
            let got = apply(builtin, Dtype::Bfloat16, &a, &b);
            for (i, got) in got.into_iter().enumerate() {
                let (x, y) = (half::bf16::from_bits(a[i]).to_f32(), half::bf16::from_bits(b[i]).to_f32());
                let want = half::bf16::from_f32(scalar(builtin, x, y));
                let got = half::bf16::from_bits(got);
                assert!(got == want || (got.is_nan() && want.is_nan()), "{builtin:?} {x} {y}: {got} {want}");
            }
        }
    }

    #[test]
    fn float16_equals_half() {
        let (a, b) =
            grid16(&[0, 1, 0x3c00, 0x3c01, 0x0400, 0x03ff, 0x7bff, 0x7c00, 0x7e00, 0x8001, 0xbc00, 0xfbff]);
        for builtin in FLOAT_OPS {
            let got = apply(builtin, Dtype::Float16, &a, &b);
            for (i, got) in got.into_iter().enumerate() {
                let (x, y) = (f16::from_bits(a[i]).to_f32(), f16::from_bits(b[i]).to_f32());
                let want = f16::from_f32(scalar(builtin, x, y));
                let got = f16::from_bits(got);
                assert!(got == want || (got.is_nan() && want.is_nan()), "{builtin:?} {x} {y}: {got} {want}");
            }
        }
    }

    #[test]
    fn odd_lengths_and_addresses() {
        for n in [0, 1, 7, 511, 512, 513, 1025] {
            for (dtype, one, two) in
                [(Dtype::Float16, 0x3c00u16, 0x4000u16), (Dtype::Bfloat16, 0x3f80, 0x4000)]
            {
                let mut input = vec![0u8; 2 * n + 1];
                let mut inout = vec![0u8; 2 * n + 1];
                for i in 0..n {
                    input[1 + 2 * i..3 + 2 * i].copy_from_slice(&one.to_ne_bytes());
                    inout[1 + 2 * i..3 + 2 * i].copy_from_slice(&one.to_ne_bytes());
                }
                let mut count = n as c_int;
                // SAFETY: `n` elements from the second byte on.
                unsafe {
                    let (input, inout) = (input.as_mut_ptr().add(1).cast(), inout.as_mut_ptr().add(1).cast());
                    combine(Builtin::Sum, dtype).unwrap()(input, inout, &mut count, std::ptr::null_mut());
                }
                assert!(inout[1..].chunks(2).all(|bytes| bytes == two.to_ne_bytes()), "{n} {dtype:?}");
            }
        }
    }

    /// The value of a code, computed with powers: independent of the table under test.
    fn decode8(exponent_bits: u32, mantissa_bits: u32, bias: i32, kind: u8, code: u8) -> f64 {
        let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
        let exponent = i32::from(code & 0x7f) >> mantissa_bits;
        let fraction = f64::from(code & ((1 << mantissa_bits) - 1)) / f64::from(1 << mantissa_bits);
        if kind == IEEE && exponent == (1 << exponent_bits) - 1 {
            return if fraction == 0.0 { sign * f64::INFINITY } else { f64::NAN };
        }
        if (kind == FN && code & 0x7f == 0x7f) || (kind == FNUZ && code == 0x80) {
            return f64::NAN;
        }
        if exponent == 0 {
            sign * fraction * 2f64.powi(1 - bias)
        } else {
            sign * (1.0 + fraction) * 2f64.powi(exponent - bias)
        }
    }

    /// The nearest of all codes, ties to the even one; beyond the largest as the next one would round.
    fn encode8(codes: &[f64], step: f64, value: f64, overflow: f64) -> f64 {
        if value.is_nan() {
            return f64::NAN;
        }
        let finite = codes.iter().enumerate().filter(|(_, v)| v.is_finite());
        let (code, max) = finite.fold((0, 0.0), |best, (code, &v)| if v > best.1 { (code, v) } else { best });
        let beyond = value.abs() - (max + step / 2.0);
        if beyond > 0.0 || (beyond == 0.0 && code % 2 == 1) {
            return if overflow.is_nan() { overflow } else { overflow.copysign(value) };
        }
        let mut best = (f64::INFINITY, 1, 0.0);
        for (code, &candidate) in codes.iter().enumerate().filter(|(_, v)| v.is_finite()) {
            let rank = ((candidate - value).abs(), code & 1, candidate);
            if (rank.0, rank.1) < (best.0, best.1) {
                best = rank;
            }
        }
        best.2
    }

    #[test]
    fn float8_is_the_nearest_of_all_codes() {
        let formats = [
            (Dtype::Float8E3m4, 3, 4, 3, IEEE),
            (Dtype::Float8E4m3, 4, 3, 7, IEEE),
            (Dtype::Float8E4m3b11fnuz, 4, 3, 11, FNUZ),
            (Dtype::Float8E4m3fn, 4, 3, 7, FN),
            (Dtype::Float8E4m3fnuz, 4, 3, 8, FNUZ),
            (Dtype::Float8E5m2, 5, 2, 15, IEEE),
            (Dtype::Float8E5m2fnuz, 5, 2, 16, FNUZ),
        ];
        for (dtype, exponent, mantissa, bias, kind) in formats {
            let codes: Vec<f64> =
                (0..=255).map(|code| decode8(exponent, mantissa, bias, kind, code)).collect();
            let mut finite: Vec<f64> = codes.iter().copied().filter(|v| v.is_finite()).collect();
            finite.sort_by(f64::total_cmp);
            let step = finite[finite.len() - 1] - finite[finite.len() - 2];
            let overflow = if kind == IEEE { f64::INFINITY } else { f64::NAN };
            let a: Vec<u8> = (0..=255).flat_map(|a| [a; 256]).collect();
            let b: Vec<u8> = (0..=255).flat_map(|_| 0..=255).collect();
            for builtin in FLOAT_OPS {
                let got = apply(builtin, dtype, &a, &b);
                for i in 0..a.len() {
                    let (x, y) = (codes[a[i] as usize], codes[b[i] as usize]);
                    let exact = match builtin {
                        Builtin::Sum => x + y,
                        Builtin::Prod => x * y,
                        Builtin::Max if !x.is_nan() && !y.is_nan() => x.max(y),
                        Builtin::Min if !x.is_nan() && !y.is_nan() => x.min(y),
                        _ => f64::NAN,
                    };
                    let want = encode8(&codes, step, exact, overflow);
                    let got = codes[got[i] as usize];
                    assert!(
                        got == want || (got.is_nan() && want.is_nan()),
                        "{dtype:?} {builtin:?} {x} {y}: {got}, expected {want}"
                    );
                }
            }
        }
    }

    #[test]
    fn exponents() {
        let code = |value: f64| Exponent::store(value).0;
        assert_eq!(code(1.0), 127);
        assert_eq!([code(1.4999), code(1.5), code(3.0)], [127, 128, 129]);
        assert_eq!([code(0.0), code(-1.0), code(f64::NAN), code(f64::INFINITY)], [0xff; 4]);
        assert_eq!(code(2f64.powi(-127)), 0);
        assert_eq!(code(2f64.powi(128)), 0xff);
        assert_eq!(apply(Builtin::Sum, Dtype::Float8E8m0fnu, &[127u8, 0xff], &[127, 127]), [128, 0xff]);
    }

    #[test]
    fn floats_propagate_nan() {
        for (a, b) in [(f32::NAN, 1.0), (1.0, f32::NAN)] {
            for builtin in [Builtin::Max, Builtin::Min] {
                assert!(apply(builtin, Dtype::Float32, &[a], &[b])[0].is_nan());
            }
        }
    }

    #[test]
    fn locations() {
        let (a, b) = ([3.0f32, 4.0, 5.0, 1.0, 2.0, 0.0], [3.0f32, 2.0, 7.0, 0.0, 1.0, 9.0]);
        assert_eq!(apply(Builtin::Maxloc, Dtype::Float32, &a, &b), [3.0, 2.0, 7.0, 0.0, 2.0, 0.0]);
        assert_eq!(apply(Builtin::Minloc, Dtype::Float32, &a, &b), [3.0, 2.0, 5.0, 1.0, 1.0, 9.0]);
        let nan = apply(Builtin::Maxloc, Dtype::Float32, &[f32::NAN, 4.0], &[1.0, 0.0]);
        assert!(nan[0].is_nan() && nan[1] == 4.0);
    }

    #[test]
    fn logical_values_are_zero_and_one() {
        assert_eq!(apply(Builtin::Land, Dtype::Bool, &[2u8, 0, 1], &[1u8, 1, 1]), [1, 0, 1]);
        assert_eq!(apply(Builtin::Lxor, Dtype::Int32, &[5, 0, 7], &[0, 0, 3]), [1, 0, 0]);
        assert_eq!(apply(Builtin::Sum, Dtype::Int8, &[127i8], &[1]), [-128]);
    }

    #[test]
    fn complex_products() {
        let product = apply(Builtin::Prod, Dtype::Complex64, &[[1f32, 2.0]], &[[3f32, -1.0]]);
        assert_eq!(product, [[5.0, 5.0]]);
    }
}
