//! Records of operations: the flight recorder, timelines, samples and log lines.
//!
//! [`recorder`] remembers the last ones, [`timeline`] and [`log`] write them down as they end and start, and [`json`]
//! says what a record holds. [`events`] writes what `MPI4JAX_LOG` asks for. [`samples`] are for the ranks to compare.

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
