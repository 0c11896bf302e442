//! Reductions that MPI does not define: sums and products of 16-bit floats, MAX and MIN of floats with NaN, and MAXLOC and
//! MINLOC of arrays.
//!
//! Floats of 16 bits are reduced in float32: it has more than twice their precision, so that a sum
//! or a product rounded twice is the one rounded once. MAX and MIN of floats propagate NaN, as JAX's do.

#[cfg(test)]
mod tests;

use std::ffi::{c_int, c_void};
use std::ops::{Add, Mul};
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
        Dtype::Int8 => locations::<i8>(builtin),
        Dtype::Int16 => locations::<i16>(builtin),
        Dtype::Int32 => locations::<i32>(builtin),
        Dtype::Int64 => locations::<i64>(builtin),
        Dtype::Uint8 => locations::<u8>(builtin),
        Dtype::Uint16 => locations::<u16>(builtin),
        Dtype::Uint32 => locations::<u32>(builtin),
        Dtype::Uint64 => locations::<u64>(builtin),
        Dtype::Float16 => floats::<f16>(builtin),
        Dtype::Bfloat16 => floats::<bf16>(builtin),
        Dtype::Float32 => floats::<f32>(builtin),
        Dtype::Float64 => floats::<f64>(builtin),
        _ => None,
    }
}

fn floats<E: Element>(builtin: Builtin) -> Option<Combine> {
    match builtin {
        Builtin::Sum => Some(elements::<E, SUM>),
        Builtin::Prod => Some(elements::<E, PROD>),
        Builtin::Max => Some(elements::<E, MAX>),
        Builtin::Min => Some(elements::<E, MIN>),
        _ => locations::<E>(builtin),
    }
}

fn locations<E: Element>(builtin: Builtin) -> Option<Combine> {
    match builtin {
        Builtin::Maxloc => Some(pairs::<E, MAX>),
        Builtin::Minloc => Some(pairs::<E, MIN>),
        _ => None,
    }
}

/// The number of values that are computed at a time, so that they stay in the processor's cache.
const CHUNK: usize = 512;

/// Calls `step` with the values of both arrays, so many at a time, and stores the second ones.
///
/// # Safety
/// Both places have so many elements. They share no memory.
unsafe fn chunks<E: Element>(
    input: *mut c_void,
    inout: *mut c_void,
    count: usize,
    step: impl Fn(&[E::Value], &mut [E::Value]),
) {
    let (mut a, mut b) = ([E::Value::default(); CHUNK], [E::Value::default(); CHUNK]);
    for start in (0..count).step_by(CHUNK) {
        let n = CHUNK.min(count - start);
        let (a, b) = (&mut a[..n], &mut b[..n]);
        // SAFETY: promised by the caller.
        unsafe {
            let (input, inout) = (input.cast::<E>().add(start), inout.cast::<E>().add(start));
            E::load(input, a);
            E::load(inout, b);
            step(a, b);
            E::store(b, inout);
        }
    }
}

/// # Safety
/// See [`Combine`].
unsafe extern "C" fn elements<E: Element, const OP: u8>(
    input: *mut c_void,
    inout: *mut c_void,
    count: *mut c_int,
    _: *mut c_void,
) {
    // SAFETY: promised by the caller.
    unsafe {
        chunks::<E>(input, inout, *count as usize, |a, b| {
            a.iter().zip(b).for_each(|(a, b)| *b = reduced::<E::Value, OP>(*a, *b));
        });
    }
}

/// MAXLOC and MINLOC: pairs of a value and an index, which both have the array's type. Of equal values
/// the one with the lower index wins.
///
/// # Safety
/// See [`Combine`].
unsafe extern "C" fn pairs<E: Element, const OP: u8>(
    input: *mut c_void,
    inout: *mut c_void,
    count: *mut c_int,
    _: *mut c_void,
) {
    let is_same = |x: E::Value, y: E::Value| x == y || is_nan(x) && is_nan(y);
    let wins = |a: &[E::Value], b: &[E::Value]| {
        if is_same(a[0], b[0]) { a[1] < b[1] } else { is_same(a[0], reduced::<E::Value, OP>(a[0], b[0])) }
    };
    // SAFETY: promised by the caller.
    unsafe {
        chunks::<E>(input, inout, 2 * *count as usize, |a, b| {
            for (a, b) in a.chunks_exact(2).zip(b.chunks_exact_mut(2)) {
                if wins(a, b) {
                    b.copy_from_slice(a);
                }
            }
        });
    }
}

const SUM: u8 = Builtin::Sum as u8;
const PROD: u8 = Builtin::Prod as u8;
const MAX: u8 = Builtin::Max as u8;
const MIN: u8 = Builtin::Min as u8;

/// A reduction of two values.
#[inline]
fn reduced<V: Value, const OP: u8>(a: V, b: V) -> V {
    match OP {
        SUM => a + b,
        PROD => a * b,
        MAX if a > b || is_nan(a) => a,
        MIN if a < b || is_nan(a) => a,
        _ => b,
    }
}

/// The type that values are computed in.
trait Value: Copy + Default + PartialOrd + Add<Output = Self> + Mul<Output = Self> {}

impl<V: Copy + Default + PartialOrd + Add<Output = V> + Mul<Output = V>> Value for V {}

#[allow(clippy::eq_op)]
fn is_nan<V: PartialEq>(value: V) -> bool {
    value != value
}

/// A type of array elements.
trait Element: Copy {
    /// What it is computed in.
    type Value: Value;

    /// # Safety
    /// There are as many elements. Any alignment will do.
    unsafe fn load(from: *const Self, to: &mut [Self::Value]);

    /// # Safety
    /// There is room for as many elements. Any alignment will do.
    unsafe fn store(from: &[Self::Value], to: *mut Self);
}

macro_rules! elements_as_they_are {
    ($($t:ty)*) => {$(
        impl Element for $t {
            type Value = Self;

            unsafe fn load(from: *const Self, to: &mut [Self]) {
                // SAFETY: promised by the caller; by bytes, whose alignment is any.
                unsafe { copy_nonoverlapping(from.cast::<u8>(), to.as_mut_ptr().cast(), size_of_val(to)) };
            }

            unsafe fn store(from: &[Self], to: *mut Self) {
                // SAFETY: as above.
                unsafe { copy_nonoverlapping(from.as_ptr().cast::<u8>(), to.cast(), size_of_val(from)) };
            }
        }
    )*};
}

elements_as_they_are! { f32 f64 i8 i16 i32 i64 u8 u16 u32 u64 }

macro_rules! elements_as_float32 {
    ($($t:ty)*) => {$(
        impl Element for $t {
            type Value = f32;

            unsafe fn load(from: *const Self, to: &mut [f32]) {
                let mut narrow = [<$t>::ZERO; CHUNK];
                let narrow = &mut narrow[..to.len()];
                // SAFETY: promised by the caller; by bytes, whose alignment is any.
                unsafe {
                    copy_nonoverlapping(from.cast::<u8>(), narrow.as_mut_ptr().cast(), size_of_val(narrow));
                }
                narrow.convert_to_f32_slice(to);
            }

            unsafe fn store(from: &[f32], to: *mut Self) {
                let mut narrow = [<$t>::ZERO; CHUNK];
                let narrow = &mut narrow[..from.len()];
                narrow.convert_from_f32_slice(from);
                // SAFETY: as above.
                unsafe { copy_nonoverlapping(narrow.as_ptr().cast::<u8>(), to.cast(), size_of_val(narrow)) };
            }
        }
    )*};
}

elements_as_float32! { f16 bf16 }
