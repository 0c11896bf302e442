//! The core of mpi4jax; `python/mpi4jax` is its user.
//!
//! Layers, from the bottom to the top. A file uses those below its own; `tests/rust/layers.rs` holds this list against
//! what the files use.

pub mod sync;

pub mod error;

pub mod output;

pub mod system;

pub mod board;

pub mod dynlib;

pub mod mpilib;

pub mod finalize;

pub mod ops;

pub mod comm;

pub mod call;

pub mod device;

pub mod record;

pub mod transport;

pub mod watch;

pub mod xla;

#[cfg(feature = "python")]
mod python;
