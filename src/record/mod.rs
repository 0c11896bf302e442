//! What is remembered and written of operations.
//!
//! [`recorder`] remembers the last ones, [`timeline`] and [`log`] write them down as they end and start, and [`json`]
//! says what a record holds. [`samples`] are for the ranks to compare.

pub mod clock;
mod gate;
pub mod json;
pub mod log;
pub mod recorder;
pub mod samples;
pub mod timeline;

/// What [`gate`] is made of, for which its test has loom's.
mod atomics {
    pub use std::sync::atomic::{AtomicU64, Ordering, fence};
}

/// The name of this machine.
pub fn host() -> String {
    let mut name = [0u8; 256];
    // SAFETY: the buffer has the length that is given, and one byte more than is written.
    unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1) };
    String::from_utf8_lossy(name.split(|&byte| byte == 0).next().unwrap_or_default()).into_owned()
}
