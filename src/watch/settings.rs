//! The settings of the watchdog, and the state that its parts share.

use std::io::Write as _;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Instant;

use crate::job::host::Host;

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
    /// After how many seconds a line says what an operation waits for; infinity: never.
    pub report_after: f64,
    /// Whether a hung operation ends the job.
    pub abort: bool,
    /// Whether the program has no use of its own for `SIGUSR1`.
    pub takes_signal: bool,
    /// Whether the ranks certainly have one directory.
    pub one_directory: bool,
    /// Names of programs that start ranks.
    pub launchers: Vec<String>,
}

pub struct Watchdog {
    pub settings: Settings,
    pub host: Host,
    pub started: Instant,
    /// The process that is watched: a forked child is no rank.
    process: u32,
}

static WATCHDOG: OnceLock<Watchdog> = OnceLock::new();

/// The watchdog, in the process that it was started in.
pub fn watchdog() -> Option<&'static Watchdog> {
    WATCHDOG.get().filter(|watchdog| watchdog.process == std::process::id())
}

/// The watchdog of this rank; none if there has been one before.
pub fn make(settings: Settings) -> Option<&'static Watchdog> {
    let host = Host::new(settings.directory.clone(), settings.rank, settings.size);
    let (process, started) = (std::process::id(), Instant::now());
    WATCHDOG.set(Watchdog { settings, host, started, process }).ok()?;
    WATCHDOG.get()
}

/// Prints in one write, so that ranks do not mix their lines.
pub fn print(text: &str) {
    let mut stderr = std::io::stderr().lock();
    let _ = stderr.write_all(text.as_bytes());
    let _ = stderr.flush();
}
