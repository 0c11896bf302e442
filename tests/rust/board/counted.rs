//! Atomics that note each access in a log of the thread.

use std::cell::RefCell;
use std::sync::atomic;
pub use std::sync::atomic::{Ordering, fence};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Load,
    Write,
}

thread_local!(static LOG: RefCell<Vec<(usize, Access)>> = const { RefCell::new(Vec::new()) });

/// The addresses that a function reads and writes, in order.
pub fn log(function: impl FnOnce()) -> Vec<(usize, Access)> {
    LOG.take();
    function();
    LOG.take()
}

macro_rules! counted {
    ($($name:ident of $number:ty),*) => {$(
        #[repr(transparent)]
        #[derive(Debug, Default)]
        pub struct $name(atomic::$name);

        #[allow(dead_code)]
        impl $name {
            fn note(&self, access: Access) -> &atomic::$name {
                LOG.with_borrow_mut(|log| log.push((&raw const *self as usize, access)));
                &self.0
            }

            pub fn load(&self, order: Ordering) -> $number {
                self.note(Access::Load).load(order)
            }

            pub fn store(&self, number: $number, order: Ordering) {
                self.note(Access::Write).store(number, order);
            }

            counted!(@writes $number: swap fetch_add fetch_sub fetch_or fetch_and fetch_max);
        }
    )*};
    (@writes $number:ty: $($method:ident)*) => {$(
        pub fn $method(&self, number: $number, order: Ordering) -> $number {
            self.note(Access::Write).$method(number, order)
        }
    )*};
}

counted!(AtomicI32 of i32, AtomicU8 of u8, AtomicU32 of u32, AtomicU64 of u64);
