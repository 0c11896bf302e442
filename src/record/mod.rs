//! What is remembered and written of operations.
//!
//! [`recorder`] remembers the last ones, [`timeline`] and [`log`] write them down as they end and start, and [`json`]
//! says what a record holds. [`samples`] are for the ranks to compare.

pub mod clock;
pub mod json;
pub mod log;
pub mod recorder;
pub mod samples;
pub mod timeline;

/// The name of this machine.
pub fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
