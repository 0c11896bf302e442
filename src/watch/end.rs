//! How a job, or this rank, is aborted: because an operation hangs, by a signal, with the launcher,
//! or by a library.
//!
//! Launchers stop a job with `SIGTERM`; Python cannot handle `SIGINT` while the rank waits in an
//! operation. A message says where the ranks were.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, getppid};

use super::settings::watchdog;
use super::{groups, python, read, report, waits};
use crate::board::ranks::Ranks;
use crate::board::{Life, Once, Slot, board, own};
use crate::finalize;
use crate::output::print;
use crate::record::{recorder, timeline};
use crate::system::{os, signal};

/// The job's exit status where an operation hangs. Not 124, which is timeout(1)'s, nor what shells and signals use.
pub const HUNG: i32 = 97;
/// For how long Python has to answer an interrupt.
const PATIENCE: Duration = Duration::from_millis(500);
/// For how long the first rank that is terminated waits for the others of its host.
const TOGETHER: Duration = Duration::from_millis(700);
/// How a rank is terminated: the first of its host says where it is, or it says so itself.
const FIRST_SAYS_SO: u32 = 1;
const SAYS_SO_ITSELF: u32 = 2;
/// After this many seconds the process ends, even if MPI or standard error blocks.
const LAST_RESORT: u64 = 8;

/// Tells the other ranks that this one has reported why the job ends.
pub fn ending() {
    timeline::flush();
    let _ = board().is_first_to(Once::Ending);
}

/// Launchers lose lines that are written just before the end.
fn let_launcher_read() {
    std::thread::sleep(Duration::from_millis(200));
}

/// Aborts the job with this status, unless the process has exited by itself after this number of
/// seconds.
#[cfg_attr(feature = "python", pyo3::pyfunction)]
pub fn abort_after(seconds: f64, code: i32) {
    ending();
    end_job_after(seconds, code);
}

/// As [`abort_after`], where Python says that this rank is interrupted: ranks that the interrupt has reached in operations
/// still say where they are.
#[cfg_attr(feature = "python", pyo3::pyfunction)]
pub fn abort_after_interrupt(seconds: f64, code: i32) {
    timeline::flush();
    own().terminated.store(SAYS_SO_ITSELF, Ordering::Release);
    end_job_after(seconds, code);
}

fn end_job_after(seconds: f64, code: i32) {
    std::thread::spawn(move || {
        std::thread::sleep(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX));
        end_job(code);
    });
}

/// Whatever happens from now on, this process exits, and the launcher therefore stops its job.
pub fn arm(code: i32) {
    static ARMED: AtomicBool = AtomicBool::new(false);
    if !ARMED.swap(true, Ordering::Relaxed) {
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_secs(LAST_RESORT));
            exit_at_once(code);
        });
    }
}

/// Ends the job, after a report of why.
pub fn end_job(code: i32) -> ! {
    arm(code);
    ending();
    let_launcher_read();
    finalize::abort(code);
    exit_at_once(code)
}

/// Ends this process, without what exit handlers would wait for. The board stays, for `python -m mpi4jax.report`.
fn exit_at_once(code: i32) -> ! {
    // SAFETY: ends the process.
    unsafe { libc::_exit(code) }
}

/// The launcher of this process, if it is its parent and has one of these names: its number, and its name.
pub fn launcher(names: &[String]) -> Option<(Pid, String)> {
    let parent = getppid()?;
    let name = os::info(parent.as_raw_pid())?.name;
    names.contains(&name).then_some((parent, name))
}

/// Ends this process if its launcher has ended. Then nothing else ends it where the job ends, and MPI cannot be asked.
pub fn end_with_launcher((launcher, name): &(Pid, String), rank: i32) {
    if getppid() != Some(*launcher) {
        print(&format!(
            "r{rank} | mpi4jax: the launcher ({name}, process {launcher}) has ended, and so does this rank\n"
        ));
        ending();
        exit_at_once(HUNG)
    }
}

/// From now on `SIGTERM` ends this rank with a message, if nothing else handles it, and `SIGINT` does so in an operation, if it
/// `takes_interrupt`: its handler is Python's default one.
#[cfg_attr(feature = "python", pyo3::pyfunction(name = "watch_signals"))]
pub fn take_signals(takes_interrupt: bool) {
    if signal::is_default(libc::SIGTERM) {
        signal::take(libc::SIGTERM);
    }
    if takes_interrupt && signal::has_handler(libc::SIGINT) {
        signal::take(libc::SIGINT);
    }
}

/// A signal has come that may end this rank. Of the ranks of a host that are ended together, one says where they are.
pub fn end_by_signal(signal: i32) {
    if signal == libc::SIGINT && !stays_in_operation() {
        return;
    }
    timeline::flush();
    let board = board();
    if !board.has_been_done(Once::Ending) {
        python::ask(|_| false, PATIENCE);
        own().terminated.store(FIRST_SAYS_SO, Ordering::Release);
        let start = Instant::now();
        if board.is_first_to(Once::Terminated) {
            // Launchers terminate all ranks if one has died, and kill the others soon afterwards.
            let is_over = |slot: &Slot| {
                slot.terminated.load(Ordering::Acquire) != 0
                    || slot.life() == Life::Finished
                    || read::is_gone(slot)
            };
            while start.elapsed() < TOGETHER && !board.here().all(|(_, slot)| is_over(slot)) {
                std::thread::sleep(Duration::from_millis(20));
            }
            say_terminated(if signal == libc::SIGINT { "SIGINT" } else { "SIGTERM" });
            let_launcher_read();
        } else {
            // The first rank reads from the board where this rank is. A process that has ended would be reported as gone.
            std::thread::sleep(TOGETHER);
        }
    }
    signal::end_by(signal);
}

fn say_terminated(name: &str) {
    let board = board();
    let is_one = |slot: &Slot| slot.terminated.load(Ordering::Acquire) == FIRST_SAYS_SO;
    let ranks: Ranks = board.here().filter(|(_, slot)| is_one(slot)).map(|(rank, _)| rank).collect();
    // Ranks that have died may be the reason.
    let places: Vec<(String, i32)> = board
        .here()
        .filter(|(_, slot)| is_one(slot) || read::is_gone(slot))
        .map(|(rank, slot)| (report::doing(&read::status(slot)), rank))
        .collect();
    let rank = board.rank;
    let text = match &places[..] {
        [(place, _)] => format!("{name} ends this rank, which is {place}"),
        _ => format!("{name} ends {}: {}", groups::ranks_in_words(&ranks), groups::in_words(places)),
    };
    print(&format!("r{rank} | mpi4jax: {text}\n"));
}

/// Whether an operation that is under way stays so for a moment, in which Python does not say that it is interrupted.
fn stays_in_operation() -> bool {
    let (before, start) = (waits::under_way(), Instant::now());
    let is_stuck = || waits::under_way().iter().any(|id| before.contains(id));
    while own().terminated.load(Ordering::Acquire) == 0 && is_stuck() {
        if start.elapsed() > PATIENCE {
            return true;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    false
}

/// Called when this process exits: reports an operation in which a library has ended it, and leaves the board.
pub extern "C" fn at_exit() {
    if watchdog().is_none() {
        return;
    }
    let (board, slot) = (board(), own());
    let is_expected = slot.life() == Life::Finished || board.has_been_done(Once::Ending);
    if let (false, Some(record)) = (is_expected, recorder::running(slot).first()) {
        // MPICH does so by itself after some errors, whatever is to be done with errors.
        let hint = if record.op.row().is_collective() {
            "; if ranks differ in what they do here, MPI4JAX_CHECK=1 reports it before it runs"
        } else {
            ""
        };
        print(&format!("r{} | mpi4jax: a library has ended this rank in {record}{hint}\n", board.rank));
        let_launcher_read();
    }
    if slot.life() == Life::Finished && board.here().all(|(_, slot)| slot.life() == Life::Finished) {
        board.remove();
    }
}
