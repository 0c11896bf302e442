//! What the rest of the package asks of the watchdog: that it starts, and that it is told of this rank's end.

use std::os::fd::RawFd;
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Instant;

use super::python;
use super::waits::{self, Waits};
use super::watchdog::{self, print};
use super::{end, own, report, terminate};
use crate::comm;
use crate::error::Error;
use crate::job::host::Host;
use crate::job::mail::Kind;
use crate::job::status::{Life, RankStatus};
use crate::job::{default, link};
use crate::mpilib;
use crate::record::recorder;
use crate::record::timeline;
use crate::system::signal;

/// How the watchdog was told to behave.
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

pub(super) struct Watchdog {
    pub settings: Settings,
    pub host: Host,
    /// The process that this is about: a forked child is no rank.
    process: u32,
    /// Where the signal handler writes, and an operation that begins while the watchdog sleeps.
    pub wake: RawFd,
    started: Instant,
}

static WATCHDOG: OnceLock<Watchdog> = OnceLock::new();

/// The watchdog, in the process that it was started in.
fn watchdog() -> Option<&'static Watchdog> {
    WATCHDOG.get().filter(|watchdog| watchdog.process == std::process::id())
}

extern "C" fn at_exit() {
    if let Some(Watchdog { host, .. }) = watchdog() {
        let is_expected = waits::life() == Life::Finished || host.is_ending();
        if let (false, Some(record)) = (is_expected, recorder::running().first()) {
            // MPICH does so by itself after some errors, whatever is to be done with errors.
            print(&format!("r{} | mpi4jax: a library has ended this rank in {record}\n", host.rank));
            end::let_launcher_read();
        }
        host.leave();
    }
}

/// Starts the watchdog, once per process.
pub fn start(settings: Settings) {
    let wake = signal::install(settings.takes_signal);
    // SAFETY: registers a function that touches nothing but its statics and files.
    unsafe { libc::atexit(at_exit) };
    let host = Host::new(settings.directory.clone(), settings.rank, settings.size);
    if let Some(why) = host.broken()
        && settings.size > 1
    {
        print(&format!(
            "r{} | mpi4jax: {why}; this rank exchanges no states with other ranks, and writes no dumps \
             (MPI4JAX_DUMP_DIR names another directory)\n",
            settings.rank
        ));
    }
    let (process, started) = (std::process::id(), Instant::now());
    if WATCHDOG.set(Watchdog { settings, host, process, wake, started }).is_ok() {
        let thread = std::thread::Builder::new().name("mpi4jax-watchdog".into());
        // Without a thread there is no watchdog, and all else works.
        let _ = thread.spawn(|| WATCHDOG.get().map(watchdog::run));
    }
    let _ = mpilib::first_at_finalize(Box::new(finish));
    // Without it, communicators of the same ranks are not told apart.
    let _ = comm::origin::start();
}

/// Lets the leaders of several hosts ask each other through MPI. Collective.
///
/// # Safety
/// `comm` is the handle of a live communicator, with the ranks of `MPI_COMM_WORLD`.
pub unsafe fn open_link(comm: usize) -> Result<(), Error> {
    if let Some(Watchdog { settings, host, .. }) = WATCHDOG.get()
        && settings.size > 1
    {
        let ranks = (settings.rank, settings.size);
        // SAFETY: promised by the caller.
        unsafe { link::open(comm, host.place(), ranks, signal::wake)? };
    }
    Ok(())
}

/// Tells the other ranks how this one fares. Its end, of which it tells too, is never taken back.
pub(super) fn say(host: &Host, status: &RankStatus) -> std::io::Result<()> {
    static SAYING: Mutex<()> = Mutex::new(());
    let _saying = SAYING.lock().unwrap_or_else(PoisonError::into_inner);
    if waits::life() == status.life { host.say(status) } else { Ok(()) }
}

/// Tells the other ranks that the program of this one is at its end: what is called then may still communicate. Or that
/// `MPI_Finalize` has begun.
fn come_to(host: &Host, life: Life) {
    waits::come_to(life);
    let _ = say(host, &own::status_now(host.size));
    signal::wake();
}

/// Python ends.
pub fn exit() {
    if let Some(Watchdog { host, .. }) = watchdog() {
        come_to(host, Life::Exits);
    }
}

/// `MPI_Finalize` begins: this rank has done its last operation.
fn finish() {
    let Some(Watchdog { host, settings, started, .. }) = watchdog() else { return };
    for comm in comm::live() {
        if let Some((source, tag)) = comm.unreceived() {
            print(&format!(
                "r{} | mpi4jax: warning: a message from {source}, tag {tag}, on {} was never received\n",
                host.rank, comm.key
            ));
        }
    }
    come_to(host, Life::Finished);
    watchdog::compare(host);
    let made = |handle| {
        // SAFETY: it has just been made, of all ranks. Without a link, hosts ask each other nothing.
        let _ = unsafe { open_link(handle) };
    };
    let _ = default::join(host, *started, settings.one_directory, made);
}

/// How the default communicator is made: as the first rank has chosen, which this one is if it is the first.
pub fn choose_default(choice: &str) -> String {
    WATCHDOG.get().map_or_else(|| choice.into(), |watchdog| default::choose(&watchdog.host, choice))
}

/// Where the user's program is, as far as Python can tell.
pub fn user_frame() -> Option<String> {
    python::user_frame(python::python().main()).map(|frame| frame.to_string())
}

/// Ends the job with this status unless the process has ended by itself after so many seconds.
pub fn abort_after(seconds: f64, code: i32) {
    end::abort_after(seconds, code, ending);
}

/// Lets `SIGTERM` and `SIGINT` end this rank with a line, unless the program has a use of its own for them. `ask`: see
/// [`terminate::install`].
pub fn take_signals(ask: Option<fn()>) {
    terminate::install(ask, last_words);
}

/// What there is to be said where a signal ends this rank; nothing if who ends the job has said why.
fn last_words(signal: i32) -> Option<String> {
    timeline::flush();
    let host = &watchdog()?.host;
    host.look();
    let is_hung = host.asked().is_some_and(|word| word.kind == Kind::End);
    if host.is_ending() || is_hung || link::heard(Kind::End).is_some() {
        return None;
    }
    let name = if signal == libc::SIGINT { "SIGINT" } else { "SIGTERM" };
    let mut status = own::status_now(host.size);
    if status.waits.is_empty() {
        status = own::status(&Waits::default(), &python::python(), None);
    }
    let place = report::briefly(&status);
    Some(format!("r{} | mpi4jax: {name} ends this rank, which is {place}\n", host.rank))
}

/// The job is about to be ended, by this rank, which has said why.
pub fn ending() {
    if let Some(Watchdog { host, .. }) = WATCHDOG.get() {
        host.end();
    }
}
