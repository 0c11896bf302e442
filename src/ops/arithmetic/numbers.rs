//! Types that are reduced as what they are.

use std::ops::{Add, Mul, Sub};

use super::{Bits, Element, Ordered, Ring};

impl<T: Ring> Element for T {
    type Value = T;

    #[inline(always)]
    fn load(self) -> T {
        self
    }

    #[inline(always)]
    fn store(value: T) -> T {
        value
    }
}

macro_rules! real {
    ($plus:ident $times:ident: $($t:ty)*) => {$(
        impl Ring for $t {
            #[inline(always)]
            fn plus(self, other: Self) -> Self {
                self.$plus(other)
            }

            #[inline(always)]
            fn times(self, other: Self) -> Self {
                self.$times(other)
            }
        }

        impl Ordered for $t {
            #[inline(always)]
            fn precedes(self, other: Self) -> bool {
                self < other
            }

            #[inline(always)]
            #[allow(clippy::eq_op)]
            fn is_nan(self) -> bool {
                self != self
            }
        }
    )*};
}

real! { wrapping_add wrapping_mul: i8 i16 i32 i64 u8 u16 u32 u64 }
real! { add mul: f32 f64 }

macro_rules! bits {
    ($($t:ty)*) => {$(
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

bits! { i8 i16 i32 i64 u8 u16 u32 u64 }

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

impl<T: Copy + Add<Output = T> + Sub<Output = T> + Mul<Output = T>> Ring for Complex<T> {
    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        Self { re: self.re + other.re, im: self.im + other.im }
    }

    #[inline(always)]
    fn times(self, other: Self) -> Self {
        Self { re: self.re * other.re - self.im * other.im, im: self.re * other.im + self.im * other.re }
    }
}
