//! Records of operations: the flight recorder, timelines and log lines.
//!
//! [`recorder`] keeps the last ones, [`timeline`] and [`log`] write them as they end and start, [`json`] is the format of a
//! record, [`messages`] counts and compares messages, and [`events`] writes what `MPI4JAX_LOG` selects.

pub mod clock;
pub mod events;
pub mod json;
pub mod log;
pub mod messages;
pub mod recorder;
pub mod timeline;
