//! The settings of the watchdog, and the state that its parts share.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Instant;

use super::shared::Shared;
use crate::watch::job::host::HostFolder;

/// The settings of the watchdog.
#[derive(Debug)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject), pyo3(from_item_all))]
pub struct Settings {
    /// Of this process, in `MPI_COMM_WORLD`.
    pub rank: i32,
    pub size: i32,
    pub directory: PathBuf,
    /// After how many seconds an operation counts as hung; infinity: never.
    pub timeout: f64,
    /// Seconds until a warning about an operation that waits; infinity: never.
    pub report_after: f64,
    /// Whether a hung operation ends the job.
    pub abort: bool,
    /// Whether the program has no use of its own for `SIGUSR1`.
    pub takes_signal: bool,
    /// Whether this is the first rank of its host.
    pub is_first_here: bool,
    /// The descriptor of standard error as the user sees it.
    pub stderr: i32,
    /// Whether the ranks certainly have one directory.
    pub one_directory: bool,
    /// What all ranks must have alike.
    pub shared: Shared,
    /// Names of programs that start ranks.
    pub launchers: Vec<String>,
    /// The folders of this package's code in Python, and of JAX's.
    pub packages: Vec<String>,
}

pub struct Watchdog {
    pub settings: Settings,
    pub host: HostFolder,
    pub started: Instant,
    /// The process that is watched: a forked child is no rank.
    process: u32,
}

static WATCHDOG: OnceLock<Watchdog> = OnceLock::new();

/// The watchdog, in the process that it was started in.
pub fn watchdog() -> Option<&'static Watchdog> {
    WATCHDOG.get().filter(|watchdog| watchdog.process == std::process::id())
}

/// Whether a file is this package's or JAX's, whose code waits for threads of JAX's alone.
pub fn is_ours_or_jax(file: &str) -> bool {
    watchdog()
        .is_some_and(|watchdog| watchdog.settings.packages.iter().any(|folder| file.starts_with(folder)))
}

/// The watchdog of this rank; none if there has been one before.
pub fn make(settings: Settings) -> Option<&'static Watchdog> {
    let host = HostFolder::new(settings.directory.clone(), settings.rank, settings.size);
    let (process, started) = (std::process::id(), Instant::now());
    WATCHDOG.set(Watchdog { settings, host, started, process }).ok()?;
    WATCHDOG.get()
}
