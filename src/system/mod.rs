//! What the operating system knows of this process and others: folders of this user's alone, processes, their launcher, threads, signals, what networks carry.

#[cfg(target_os = "linux")]
#[path = "linux.rs"]
pub mod os;
#[cfg(target_os = "macos")]
#[path = "macos.rs"]
pub mod os;

pub mod folder;
pub mod launcher;
#[cfg(target_os = "linux")]
mod network;
pub mod process;
pub mod signal;
pub mod thread;
#[cfg(target_os = "linux")]
mod threads;

/// A variable of the environment, without the spaces around it; none if it is empty.
pub fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
}
