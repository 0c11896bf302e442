//! How operations are carried out.
//!
//! `select.rs` chooses a [`Transport`] for the arrays of each platform; `dispatch.rs` says which way a call goes on it. To add
//! one: a kind in `select.rs`, and a way in `dispatch.rs`.

mod dispatch;
mod message;
mod mpi;
mod nccl;
mod pool;
mod progress;
mod request;
mod request_memory;
mod requests;
mod select;
mod staged;
mod ucx;

pub use self::dispatch::Transport;
pub use self::mpi::set_count_limit;
pub use self::nccl::Unfinished;
pub use self::request::Request;
pub use self::request_memory::{RequestLayout, RequestMemory};
pub use self::requests::{HANDLE, Handle, freeing, keep, outstanding, start, take};
pub use self::select::{
    Overview, attach, messages_apart, overview, select, selected, stop, takes_packed, unfinished,
};
