//! What the operating system knows of this process and others: folders of this user's alone, processes, their launcher, threads, signals.

pub mod folder;
pub mod launcher;
pub mod process;
pub mod signal;
pub mod threads;
