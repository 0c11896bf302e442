//! What the operating system knows of this process and others: folders of this user's alone, processes, their launcher, threads, signals.

#[cfg(target_os = "linux")]
#[path = "linux.rs"]
pub mod os;
#[cfg(target_os = "macos")]
#[path = "macos.rs"]
pub mod os;

pub mod folder;
pub mod launcher;
pub mod process;
pub mod signal;
