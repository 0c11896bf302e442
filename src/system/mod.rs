//! The operating system: private directories, processes, signals, and the processor time of threads.

#[cfg(target_os = "linux")]
#[path = "linux.rs"]
pub mod os;
#[cfg(target_os = "macos")]
#[path = "macos.rs"]
pub mod os;

pub mod folder;
pub mod process;
pub mod signal;

/// A variable of the environment, without the spaces around it; none if it is empty.
pub fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
}

/// The name of this machine.
pub fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// This thread, as the system numbers it; 0 where that is not needed.
#[inline]
pub fn this_thread() -> i32 {
    #[cfg(target_os = "linux")]
    {
        thread_local!(static NUMBER: i32 = rustix::thread::gettid().as_raw_pid());
        NUMBER.try_with(|number| *number).unwrap_or(0)
    }
    #[cfg(not(target_os = "linux"))]
    0
}

/// Seconds of a monotonic clock that all processes of this machine share.
pub fn now() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec as f64 + 1e-9 * time.tv_nsec as f64
}
