//! Reductions of our own: for types that MPI has no word for, and for all types where there is no MPI.
//!
//! Floats of 16 bits are reduced in float32: it has more than twice their precision, so that a sum
//! or a product rounded twice is the one rounded once. MAX and MIN of floats propagate NaN, as JAX's do.

mod numbers;
mod small;
#[cfg(test)]
mod tests;

use std::ffi::{c_int, c_void};
use std::ops::{BitAnd, BitOr, BitXor};

use self::numbers::{Bool, Complex};
use self::small::{Brain, Half};
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
        Dtype::Float16 => float::<Half>(builtin),
        Dtype::Bfloat16 => float::<Brain>(builtin),
        Dtype::Float32 => float::<f32>(builtin),
        Dtype::Float64 => float::<f64>(builtin),
        Dtype::Complex64 => arithmetic::<Complex<f32>>(builtin),
        Dtype::Complex128 => arithmetic::<Complex<f64>>(builtin),
        Dtype::Float8E3m4
        | Dtype::Float8E4m3
        | Dtype::Float8E4m3b11fnuz
        | Dtype::Float8E4m3fn
        | Dtype::Float8E4m3fnuz
        | Dtype::Float8E5m2
        | Dtype::Float8E5m2fnuz
        | Dtype::Float8E8m0fnu => None,
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
