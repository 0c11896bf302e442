//! Types that are reduced as what they are.

use super::{Bits, Element, Ordered, Ring};

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

/// A byte that is 0 or not.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Bool(u8);

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
pub struct Complex<T> {
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
