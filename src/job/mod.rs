//! What the ranks of a job tell each other of how they fare, beside the operations of the program.
//!
//! A rank says its [`status`] to the ranks of its [`host`], by files in a folder; the leaders of the hosts ask each other through
//! MPI ([`mail`], carried by [`link`]). [`ranks`] are sets of ranks. [`default`] is about the default
//! communicator, which takes all ranks, where a rank ends without it.

pub mod default;
pub mod host;
pub mod link;
pub mod mail;
pub mod ranks;
pub mod status;
