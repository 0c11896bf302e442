//! Reductions that mpi4jax computes itself: MPI does not define them, or MPI libraries give other values than JAX.
//!
//! - Sums and products of 16-bit floats are computed in float32. It has more than twice their precision, so that a sum or a
//!   product rounded twice is the one rounded once.
//! - Sums and products of 8- and 16-bit integers wrap around. Open MPI's saturate in whole vectors (its issue 8045).
//! - MAX and MIN of floats are `jax.lax.max` and `min`: NaN if either value is NaN, and -0 is less than 0.
//! - MAXLOC and MINLOC are of arrays.
//!
//! Floats are compared by their bits, as integers: on XLA's threads the processor takes denormals for zeros. The order is total,
//! so the bits of a result do not depend on the order in which MPI reduces.

#[cfg(test)]
mod tests;

use std::ffi::{c_int, c_void};
use std::ptr::copy_nonoverlapping;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::{Builtin, Dtype};

/// `inout[i] = input[i] op inout[i]`, with the signature of an `MPI_User_function`: input, inout, number
/// of elements (of pairs, for MINLOC and MAXLOC), and the data type, which is not looked at.
///
/// # Safety
/// Both arrays have that many elements (or pairs) of the type that the function was made for, and they
/// share no memory. Any alignment will do.
pub type Combine = unsafe extern "C" fn(*mut c_void, *mut c_void, *mut c_int, *mut c_void);

/// The function that reduces values of a type; `None` where that makes no sense, or MPI does it.
pub fn combine(builtin: Builtin, dtype: Dtype) -> Option<Combine> {
    match dtype {
        Dtype::Bool => locations::<u8>(builtin),
        Dtype::Int8 => sums::<i8>(builtin).or(locations::<i8>(builtin)),
        Dtype::Int16 => sums::<i16>(builtin).or(locations::<i16>(builtin)),
        Dtype::Int32 => locations::<i32>(builtin),
        Dtype::Int64 => locations::<i64>(builtin),
        Dtype::Uint8 => sums::<u8>(builtin).or(locations::<u8>(builtin)),
        Dtype::Uint16 => sums::<u16>(builtin).or(locations::<u16>(builtin)),
        Dtype::Uint32 => locations::<u32>(builtin),
        Dtype::Uint64 => locations::<u64>(builtin),
        Dtype::Float16 => sums::<f16>(builtin).or(extrema::<f16>(builtin)),
        Dtype::Bfloat16 => sums::<bf16>(builtin).or(extrema::<bf16>(builtin)),
        Dtype::Float32 => extrema::<f32>(builtin),
        Dtype::Float64 => extrema::<f64>(builtin),
        _ => None,
    }
}

fn sums<E: Number>(builtin: Builtin) -> Option<Combine> {
    match builtin {
        Builtin::Sum => Some(accumulated::<E, SUM>),
        Builtin::Prod => Some(accumulated::<E, PROD>),
        _ => None,
    }
}

fn extrema<E: Ordered>(builtin: Builtin) -> Option<Combine> {
    match builtin {
        Builtin::Max => Some(extremum::<E, MAX>),
        Builtin::Min => Some(extremum::<E, MIN>),
        _ => locations::<E>(builtin),
    }
}

fn locations<E: Ordered>(builtin: Builtin) -> Option<Combine> {
    match builtin {
        Builtin::Maxloc => Some(pairs::<E, MAX>),
        Builtin::Minloc => Some(pairs::<E, MIN>),
        _ => None,
    }
}

const SUM: u8 = Builtin::Sum as u8;
const PROD: u8 = Builtin::Prod as u8;
const MAX: u8 = Builtin::Max as u8;
const MIN: u8 = Builtin::Min as u8;

/// The number of values that are computed at a time, so that they stay in the processor's cache.
const CHUNK: usize = 512;

/// Calls `step` with copies of the values of both arrays, [`CHUNK`] at a time, and stores the second ones.
///
/// # Safety
/// Both places have `count` elements, for which any bits are a value. They share no memory.
unsafe fn chunks<E: Copy + Default>(
    input: *mut c_void,
    inout: *mut c_void,
    count: usize,
    step: impl Fn(&[E], &mut [E]),
) {
    let (mut a, mut b) = ([E::default(); CHUNK], [E::default(); CHUNK]);
    for start in (0..count).step_by(CHUNK) {
        let n = CHUNK.min(count - start);
        let (a, b) = (&mut a[..n], &mut b[..n]);
        // SAFETY: promised by the caller; by bytes, whose alignment is any.
        unsafe {
            let (input, inout) = (input.cast::<E>().add(start), inout.cast::<E>().add(start));
            copy_nonoverlapping(input.cast::<u8>(), a.as_mut_ptr().cast(), size_of_val(a));
            copy_nonoverlapping(inout.cast::<u8>(), b.as_mut_ptr().cast(), size_of_val(b));
            step(a, b);
            copy_nonoverlapping(b.as_ptr().cast::<u8>(), inout.cast(), size_of_val(b));
        }
    }
}

/// # Safety
/// See [`Combine`].
unsafe extern "C" fn accumulated<E: Number, const OP: u8>(
    input: *mut c_void,
    inout: *mut c_void,
    count: *mut c_int,
    _: *mut c_void,
) {
    // SAFETY: promised by the caller.
    unsafe { chunks(input, inout, *count as usize, E::accumulate::<OP>) }
}

/// # Safety
/// See [`Combine`].
unsafe extern "C" fn extremum<E: Ordered, const OP: u8>(
    input: *mut c_void,
    inout: *mut c_void,
    count: *mut c_int,
    _: *mut c_void,
) {
    // SAFETY: promised by the caller.
    unsafe {
        chunks::<E>(input, inout, *count as usize, |a, b| {
            a.iter().zip(b).for_each(|(a, b)| *b = if a.key::<OP>() > b.key::<OP>() { *a } else { *b });
        });
    }
}

/// MAXLOC and MINLOC: pairs of a value and an index, which both have the array's type. Of equal values
/// the one with the lower index wins.
///
/// # Safety
/// See [`Combine`].
unsafe extern "C" fn pairs<E: Ordered, const OP: u8>(
    input: *mut c_void,
    inout: *mut c_void,
    count: *mut c_int,
    _: *mut c_void,
) {
    let rank = |pair: &[E]| (pair[0].located::<OP>(), pair[1].located::<MIN>());
    // SAFETY: promised by the caller.
    unsafe {
        chunks::<E>(input, inout, 2 * *count as usize, |a, b| {
            for (a, b) in a.chunks_exact(2).zip(b.chunks_exact_mut(2)) {
                if rank(a) > rank(b) {
                    b.copy_from_slice(a);
                }
            }
        });
    }
}

/// A type that has sums and products here.
trait Number: Copy + Default {
    /// The sums, or the products, of the elements of two arrays, in the second one.
    fn accumulate<const OP: u8>(a: &[Self], b: &mut [Self]);
}

macro_rules! integers {
    ($($t:ty)*) => {$(
        impl Number for $t {
            fn accumulate<const OP: u8>(a: &[Self], b: &mut [Self]) {
                for (a, b) in a.iter().zip(b) {
                    *b = if OP == SUM { a.wrapping_add(*b) } else { a.wrapping_mul(*b) };
                }
            }
        }
    )*};
}

integers! { i8 i16 u8 u16 }

macro_rules! halves {
    ($($t:ty)*) => {$(
        impl Number for $t {
            fn accumulate<const OP: u8>(a: &[Self], b: &mut [Self]) {
                let (mut wide, mut other) = ([0f32; CHUNK], [0f32; CHUNK]);
                let (wide, other) = (&mut wide[..a.len()], &mut other[..a.len()]);
                a.convert_to_f32_slice(wide);
                b.convert_to_f32_slice(other);
                for (wide, other) in wide.iter_mut().zip(other) {
                    *wide = if OP == SUM { *wide + *other } else { *wide * *other };
                }
                b.convert_from_f32_slice(wide);
            }
        }
    )*};
}

halves! { f16 bf16 }

/// A type with a total order of its values.
trait Ordered: Copy + Default {
    type Key: Ord;

    /// Of two values, the one with the larger key is the result of MAX, or of MIN if `OP` says so. Different bits have different
    /// keys.
    fn key<const OP: u8>(self) -> Self::Key;

    /// As `key`, but zeros of both signs are equal, and all NaN.
    fn located<const OP: u8>(self) -> Self::Key {
        self.key::<OP>()
    }
}

macro_rules! ordered_integers {
    ($($t:ty)*) => {$(
        impl Ordered for $t {
            type Key = Self;

            fn key<const OP: u8>(self) -> Self {
                if OP == MAX { self } else { !self }
            }
        }
    )*};
}

ordered_integers! { i8 i16 i32 i64 u8 u16 u32 u64 }

macro_rules! ordered_floats {
    ($($t:ty: $bits:ty, $signed:ty;)*) => {$(
        impl Ordered for $t {
            type Key = $bits;

            fn key<const OP: u8>(self) -> $bits {
                const SIGN: $bits = 1 << (<$bits>::BITS - 1);
                // The number of NaN of one sign.
                let nans = SIGN - 1 - <$t>::INFINITY.to_bits();
                let bits = self.to_bits();
                // From the NaN with a sign over the negative numbers and the positive ones to the NaN without a sign.
                let ascending = bits ^ ((bits as $signed >> (<$bits>::BITS - 1)) as $bits | SIGN);
                // The NaN at the lower end come above all others.
                (if OP == MAX { ascending } else { !ascending }).wrapping_sub(nans)
            }

            fn located<const OP: u8>(self) -> $bits {
                match self.to_bits() << 1 {
                    0 => <$t>::from_bits(0).key::<OP>(),
                    magnitude if magnitude > <$t>::INFINITY.to_bits() << 1 => <$bits>::MAX,
                    _ => self.key::<OP>(),
                }
            }
        }
    )*};
}

ordered_floats! {
    f16: u16, i16;
    bf16: u16, i16;
    f32: u32, i32;
    f64: u64, i64;
}
