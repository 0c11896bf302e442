//! How the ranks of a job exchange their states, apart from the operations of the program.
//!
//! A rank publishes its [`status`] to the ranks of its [`host`], by files in a folder; the leaders of the hosts ask each other
//! through MPI ([`mail`], carried by [`link`]). [`ranks`] are sets of ranks. [`default`] takes part in the creation of the
//! default communicator, which is collective, at the end of a rank that did not use it.

pub mod default;
pub mod host;
pub mod link;
pub mod mail;
pub mod ranks;
pub mod status;
