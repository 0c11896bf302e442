//! How a job is ended, or this rank: where an operation hangs, by a signal, with the launcher, by a library.
//!
//! Launchers end a job with `SIGTERM`; Python cannot handle `SIGINT` while the rank waits in an operation. A message says where
//! the rank was.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::settings::watchdog;
use super::waits::{self, Waits};
use super::{python, report, this_rank};
use crate::finalize;
use crate::output::print;
use crate::record::{recorder, timeline};
use crate::system::launcher::Launcher;
use crate::system::signal;
use crate::watch::job::host::HostFolder;
use crate::watch::job::mail::QuestionKind;

/// The job's exit status where an operation hangs. Not 124, which is timeout(1)'s, nor what shells and signals use.
pub const HUNG: i32 = 97;
/// For how long Python has to answer an interrupt.
const PATIENCE: Duration = Duration::from_millis(500);

/// Tells the other ranks that this one has reported why the job ends, and removes the files that the job would leave.
pub fn ending() {
    timeline::flush();
    if let Some(watchdog) = watchdog() {
        watchdog.host.end();
    }
}

/// Launchers lose lines that are written just before the end.
fn let_launcher_read() {
    std::thread::sleep(Duration::from_millis(200));
}

/// Ends the job with this status unless the process has ended by itself after so many seconds.
#[cfg_attr(feature = "python", pyo3::pyfunction)]
pub fn abort_after(seconds: f64, code: i32) {
    ending();
    std::thread::spawn(move || {
        std::thread::sleep(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX));
        end_job(code);
    });
}

/// Ends the job, after a report of why.
pub fn end_job(code: i32) -> ! {
    // Whatever state MPI is in: launchers end a job of which a process dies.
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(5));
        exit_at_once(code);
    });
    let_launcher_read();
    ending();
    finalize::abort(code);
    exit_at_once(code)
}

/// Ends this process, without what exit handlers would wait for.
fn exit_at_once(code: i32) -> ! {
    // SAFETY: ends the process.
    unsafe { libc::_exit(code) }
}

/// Ends this process, whose launcher has ended before it.
pub fn end_with_launcher(launcher: &Launcher, rank: i32) -> ! {
    print(&format!("r{rank} | mpi4jax: {} has ended, and so does this rank\n", launcher.name()));
    ending();
    exit_at_once(HUNG)
}

/// Has Python's main thread call [`python_runs`] when it can.
static ASK_PYTHON: OnceLock<fn()> = OnceLock::new();
/// Python's main thread has run since the last interrupt, and so has seen it.
static PYTHON_RUNS: AtomicBool = AtomicBool::new(false);

/// Called by Python's main thread, as a sign that it runs.
pub fn python_runs() {
    PYTHON_RUNS.store(true, Ordering::Relaxed);
}

/// From now on `SIGTERM` ends this rank with a message, if nothing else handles it, and so does `SIGINT`, if its handler is
/// Python's default one: then `ask` is given, which schedules a call of [`python_runs`] in Python's main thread.
pub fn take_signals(ask: Option<fn()>) {
    if signal::is_default(libc::SIGTERM) {
        signal::take(libc::SIGTERM);
    }
    if let Some(ask) = ask
        && signal::has_handler(libc::SIGINT)
    {
        let _ = ASK_PYTHON.set(ask);
        signal::take(libc::SIGINT);
    }
}

/// A signal has come that may end this rank.
pub fn end_by_signal(signal: i32, host: &HostFolder) {
    if signal == libc::SIGINT && !stays_in_operation() {
        return;
    }
    timeline::flush();
    if !is_reported(host) {
        let name = if signal == libc::SIGINT { "SIGINT" } else { "SIGTERM" };
        let mut status = this_rank::status_now(host.size);
        if status.waits.is_empty() {
            status = this_rank::status(&Waits::default(), &python::python(), None);
        }
        let place = report::briefly(&status);
        print(&format!("r{} | mpi4jax: {name} ends this rank, which is {place}\n", host.rank));
        let_launcher_read();
    }
    signal::end_by(signal);
}

/// Whether a rank has reported why the job ends.
fn is_reported(host: &HostFolder) -> bool {
    host.is_ending() || host.question().is_some_and(|question| question.kind == QuestionKind::End)
}

/// Whether an operation that is under way stays so for a moment, in which Python's main thread cannot run.
fn stays_in_operation() -> bool {
    let Some(ask) = ASK_PYTHON.get() else { return false };
    PYTHON_RUNS.store(false, Ordering::Relaxed);
    ask();
    let before = waits::under_way();
    let start = Instant::now();
    let is_stuck = || waits::under_way().iter().any(|id| before.contains(id));
    while !PYTHON_RUNS.load(Ordering::Relaxed) && is_stuck() {
        if start.elapsed() > PATIENCE {
            return true;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    false
}

/// Called when this process exits: reports an operation in which a library has ended it, and leaves the folder of the job.
pub extern "C" fn at_exit() {
    let Some(watchdog) = watchdog() else { return };
    let host = &watchdog.host;
    let is_expected = waits::has_ended() || host.is_ending();
    if let (false, Some(record)) = (is_expected, recorder::running().first()) {
        // MPICH does so by itself after some errors, whatever is to be done with errors.
        let hint = if record.site.op.row().is_collective() {
            "; if ranks differ in what they do here, MPI4JAX_CHECK=1 reports it before it runs"
        } else {
            ""
        };
        print(&format!("r{} | mpi4jax: a library has ended this rank in {record}{hint}\n", host.rank));
        let_launcher_read();
    }
    if waits::has_ended() && finalize::are_others_deleted_last() {
        // The watchdog may not have seen it.
        let _ = this_rank::publish(host, &this_rank::status_now(host.size));
    }
    host.leave();
}
