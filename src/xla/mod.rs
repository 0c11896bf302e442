//! The XLA side: its FFI's C interface, and the one handler behind every custom-call target.

pub mod c_api;
pub mod description;
mod empty;
mod errors;
pub mod frame;
mod handler;
mod leaves;
mod pages;
mod requests;
mod state;
pub mod statuses;
mod targets;
mod watched;

pub use c_api::{CallFrame, FfiError, Handler};
pub use handler::{execute, instantiate};
pub use targets::{Target, targets};
