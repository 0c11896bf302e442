//! Records of operations: the flight recorder, timelines, samples and log lines.
//!
//! [`recorder`] keeps the last ones, [`timeline`] and [`log`] write them as they end and start, [`json`] is the format of a
//! record, [`events`] writes what `MPI4JAX_LOG` selects, and ranks compare [`samples`].

pub mod clock;
pub mod events;
pub mod json;
pub mod log;
pub mod recorder;
pub mod samples;
pub mod timeline;

/// The name of this machine.
pub fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
