//! A thread that notices operations that do not end, says so, and ends the job.

use std::io::Write as _;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::peers::{Answer, Peers};
use super::report::{GRACE, Reporter, python};
use super::waits::{self, blocked, under_way};
use super::{end, frames, link, signal};
use crate::comm;
use crate::error::Error;
use crate::record::recorder;
use crate::transport::{self, Unfinished};

/// How the watchdog was told to behave.
#[derive(Debug)]
pub struct Settings {
    /// Of this process, in `MPI_COMM_WORLD`.
    pub rank: i32,
    pub size: i32,
    pub directory: PathBuf,
    /// After how many seconds an operation counts as hung; 0: never.
    pub timeout: f64,
    /// Whether a hung operation ends the job.
    pub abort: bool,
    /// Whether the program has no use of its own for `SIGUSR1`.
    pub takes_signal: bool,
}

struct Watchdog {
    settings: Settings,
    reporter: Reporter,
    /// The process that this is about.
    process: u32,
    /// Where the signal handler writes.
    wake: RawFd,
}

static WATCHDOG: OnceLock<Watchdog> = OnceLock::new();

/// How often the watchdog looks.
const TICK: Duration = Duration::from_millis(500);
/// After how long an operation is held against ranks that are gone: messages may be under way.
const PATIENCE: Duration = Duration::from_secs(3);
/// For how long at least a rank that has finished waits for the others before it says so.
const END_PATIENCE: Duration = Duration::from_secs(10);
/// The job's exit status after a time-out, as that of timeout(1).
const TIMED_OUT: i32 = 124;

extern "C" fn at_exit() {
    // A forked child is no rank.
    if let Some(watchdog) = WATCHDOG.get()
        && watchdog.process == std::process::id()
    {
        watchdog.reporter.peers.leave();
    }
}

/// Starts the watchdog, once per process. Returns whether `SIGUSR1` makes it report.
pub fn start(settings: Settings) -> bool {
    let (wake, has_signal) = signal::install(settings.takes_signal);
    // SAFETY: registers a function that touches nothing but its statics and files.
    unsafe { libc::atexit(at_exit) };
    let reporter = Reporter::new(Peers::new(settings.directory.clone(), settings.rank, settings.size));
    let process = std::process::id();
    let watchdog = Watchdog { settings, reporter, process, wake };
    if WATCHDOG.set(watchdog).is_ok() {
        let thread = std::thread::Builder::new().name("mpi4jax-watchdog".into());
        // Without a thread there is no watchdog, and all else works.
        let _ = thread.spawn(|| WATCHDOG.get().map(Watchdog::run));
    }
    has_signal
}

/// Lets the ranks ask each other through MPI, if all of them want that. Collective.
///
/// # Safety
/// `comm` is the handle of a live communicator, with the ranks of `MPI_COMM_WORLD`.
pub unsafe fn open_link(comm: usize, wanted: bool) -> Result<(), Error> {
    let respond = |word: &str| match WATCHDOG.get() {
        Some(watchdog) => watchdog.reporter.answer(word, "another rank asked").0,
        None => Answer { seconds: 0.0, state: "not watched".into() },
    };
    if WATCHDOG.get().is_some_and(|watchdog| watchdog.settings.size > 1) {
        // SAFETY: promised by the caller.
        unsafe { link::open(comm, wanted, respond)? };
    }
    Ok(())
}

/// Tells the other ranks that this one has done its last operation.
pub fn finish() {
    waits::set_finished();
    let Some(watchdog) = WATCHDOG.get() else { return };
    for comm in comm::live() {
        if let Some((source, tag)) = comm.unreceived() {
            print(&format!(
                "r{} | mpi4jax: warning: a message from {source}, tag {tag}, on {} was never received\n",
                watchdog.settings.rank, comm.key
            ));
        }
    }
    watchdog.reporter.peers.finish();
}

/// The report that `SIGUSR1` prints, for tests and for the curious.
pub fn report() -> Option<String> {
    WATCHDOG.get().and_then(|watchdog| watchdog.reporter.report("report", "asked for", false).ok())
}

/// Where the user's program is, as far as Python can tell.
pub fn user_frame() -> Option<String> {
    frames::user_frame(&python()).map(|frame| frame.to_string())
}

/// Ends the job with this status unless the process has ended by itself after so many seconds.
pub fn abort_after(seconds: f64, code: i32) {
    end::abort_after(seconds, code, clean);
}

/// Removes the job's files when the job is about to be ended, unless they are needed to find out why.
fn clean() {
    if let Some(Watchdog { reporter, .. }) = WATCHDOG.get()
        && !reporter.peers.has_dump()
    {
        reporter.peers.clean();
    }
}

fn print(text: &str) {
    let mut stderr = std::io::stderr().lock();
    // One write, so that ranks do not mix their lines.
    let _ = stderr.write_all(text.as_bytes());
    let _ = stderr.flush();
}

fn is_debugged() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    status.lines().any(|line| line.strip_prefix("TracerPid:").is_some_and(|pid| pid.trim() != "0"))
}

/// An operation that is watched.
struct Wait {
    number: u64,
    /// For how long it has run while this process ran: a stopped process does not count.
    waited: Duration,
    reported: bool,
}

impl Watchdog {
    fn run(&'static self) {
        let timeout = (self.settings.timeout > 0.0).then(|| Duration::from_secs_f64(self.settings.timeout));
        let tick = timeout.map_or(TICK, |timeout| (timeout / 4).clamp(Duration::from_millis(20), TICK));
        let mut waits: Vec<Wait> = Vec::new();
        let mut finished = None;
        let mut last = Instant::now();
        loop {
            if signal::wait(self.wake, tick) {
                print(&self.reporter.report("report (SIGUSR1)", "SIGUSR1", false).unwrap_or_default());
            }
            if let Some(word) = self.reporter.peers.asked()
                && word != *self.reporter.answered()
            {
                let _ = self.reporter.answer(&word, "another rank asked");
            }
            let numbers = under_way();
            let passed = last.elapsed().min(2 * tick);
            last = Instant::now();
            waits.retain(|wait| numbers.contains(&wait.number));
            for number in numbers {
                match waits.iter_mut().find(|wait| wait.number == number) {
                    Some(wait) => wait.waited += passed,
                    None => waits.push(Wait { number, waited: Duration::ZERO, reported: false }),
                }
            }
            let Some(timeout) = timeout else { continue };
            if waits::is_finished() {
                let (since, told) = finished.get_or_insert((Instant::now(), false));
                if !*told && since.elapsed() > timeout.max(END_PATIENCE) {
                    *told = true;
                    self.waits_at_end(since.elapsed());
                }
            }
            for wait in waits.iter_mut().filter(|wait| !wait.reported) {
                let record = recorder::running().into_iter().find(|record| record.ticket == wait.number);
                let unfinished = transport::unfinished().into_iter().find(|op| op.number == wait.number);
                let hopeless = match (&record, &unfinished) {
                    (_, Some(Unfinished { failure: Some(failure), .. })) => {
                        Some(format!("failed: {failure}"))
                    }
                    _ if wait.waited <= PATIENCE.min(timeout) => None,
                    (Some(record), _) => self.reporter.peers.hopeless(record),
                    (None, Some(op)) => self.reporter.peers.missing(&op.comm),
                    _ => None,
                };
                let reason = match hopeless {
                    Some(reason) => reason,
                    None if wait.waited > timeout => {
                        format!("has not ended after MPI4JAX_TIMEOUT={} s", self.settings.timeout)
                    }
                    None => continue,
                };
                if is_debugged() {
                    wait.waited = Duration::ZERO;
                    continue;
                }
                let name = match (record, unfinished) {
                    (Some(record), _) => record.to_string(),
                    (None, Some(op)) => op.to_string(),
                    (None, None) => match &*blocked() {
                        Some(call) => call.what.clone(),
                        None => continue,
                    },
                };
                wait.reported = true;
                self.hung(wait.number, &name, &reason);
                last = Instant::now();
            }
        }
    }

    /// This rank has finished, and MPI_Finalize waits for the others: one rank says what they do. That may be
    /// right, so the job goes on.
    fn waits_at_end(&self, since: Duration) {
        let has_finished = |rank| rank == self.settings.rank || self.reporter.peers.has_finished(rank);
        if is_debugged() || (0..self.settings.size).all(has_finished) {
            return;
        }
        let reason =
            format!("has finished, and has waited for the other ranks for {:.0} s", since.as_secs_f64());
        if self.reporter.peers.become_reporter().is_ok() {
            let report = self.reporter.report(&format!("this rank {reason}"), &reason, false);
            print(&(report.unwrap_or_default() + "  the job goes on\n"));
            self.reporter.peers.resign_as_reporter();
        }
    }

    /// An operation hangs: one rank reports for all.
    fn hung(&self, number: u64, name: &str, reason: &str) {
        let rank = self.settings.rank;
        let headline = format!("{name} {reason}");
        let reporter = match link::reporter(2 * GRACE) {
            Some(other) => Err(other),
            None => self.reporter.peers.become_reporter(),
        };
        match reporter.and_then(|()| self.reporter.report(&headline, reason, true)) {
            Ok(mut report) => {
                report += if self.settings.abort {
                    "  the job is aborted (MPI4JAX_ON_TIMEOUT=continue: it goes on; MPI4JAX_TIMEOUT sets the time)\n"
                } else {
                    "  the job goes on (MPI4JAX_ON_TIMEOUT=continue)\n"
                };
                print(&report);
            }
            Err(other) => {
                print(&format!("r{rank} | mpi4jax: {headline}; see the report of rank {other}\n"));
                if let Some(word) = self.reporter.peers.asked() {
                    let _ = self.reporter.answer(&word, reason);
                }
                if self.settings.abort {
                    // The other rank ends the job when it has reported.
                    std::thread::sleep(2 * GRACE);
                    if !under_way().contains(&number) {
                        return;
                    }
                    print(&self.reporter.report(&headline, reason, false).unwrap_or_default());
                }
            }
        }
        if self.settings.abort {
            end::end_job(TIMED_OUT, clean);
        }
        self.reporter.peers.resign_as_reporter();
    }
}
