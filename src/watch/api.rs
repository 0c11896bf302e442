//! What the rest of the package calls: the start of the watchdog, and the end of this rank.

use std::io::ErrorKind;
use std::sync::atomic::Ordering;

use super::settings::{self, Settings, watchdog};
use super::{default, end, python, watchdog};
use crate::board::slot::hash;
use crate::board::{self, Life, own};
use crate::comm;
use crate::finalize;
use crate::output::{self, print};
use crate::system::{os, signal};

/// Starts the watchdog, once per process.
#[cfg_attr(feature = "python", pyo3::pyfunction(name = "watch_start"))]
pub fn start(settings: Settings) {
    let Some(watchdog) = settings::make(settings) else { return };
    let settings = &watchdog.settings;
    output::keep(settings.stderr);
    let broken = board::open(&settings.job, settings.rank, settings.size, settings.on_one_host).err();
    let slot = own();
    let pid = std::process::id();
    slot.clear();
    slot.start.store(os::info(pid as i32).map_or(0, |info| info.start), Ordering::Relaxed);
    let space = os::space();
    slot.space.store(if space.is_empty() { 0 } else { hash(space).max(1) }, Ordering::Relaxed);
    settings::publish(settings);
    slot.set_life(Life::Runs);
    slot.pid.store(pid, Ordering::Release);
    // SAFETY: registers a function that touches nothing but its statics and the board.
    unsafe { libc::atexit(end::at_exit) };
    // All ranks of a host usually have the same reason, and one of them prints it, unless it is about one rank.
    if let Some(why) = &broken
        && settings.size > 1
        && (settings.is_first_here || why.kind() == ErrorKind::AlreadyExists)
    {
        let place = board::place();
        print(&format!(
            "r{} | mpi4jax: no board in {}: {why}; the job runs, but ranks do not know of each other: deadlocks and different \
             operations are not reported\n",
            settings.rank,
            place.display()
        ));
    }
    if settings.is_first_here {
        board::sweep(&board::place());
    }
    signal::open(&slot.bell);
    let thread = std::thread::Builder::new().name("mpi4jax-watchdog".into());
    // If no thread can be started, there is no watchdog, and everything else works.
    if thread.spawn(move || watchdog::run(watchdog)).is_ok() && settings.takes_signal {
        signal::take(libc::SIGUSR1);
    }
    let _ = finalize::first_at_finalize(Box::new(finish));
    // If this fails, communicators of the same ranks are not distinguished.
    let _ = comm::origin::start();
}

/// `MPI_Finalize` begins: this rank has done its last operation.
fn finish() {
    let Some(watchdog) = watchdog() else { return };
    for comm in comm::live() {
        if let Some((source, tag)) = comm.unreceived() {
            print(&format!(
                "r{} | mpi4jax: warning: a message from {source}, tag {tag}, on {} was never received\n",
                watchdog.settings.rank, comm.key
            ));
        }
    }
    own().set_life(Life::Finished);
    default::finish(watchdog);
}

/// The settings in which ranks of this host differ, in words. `None`: no difference is known.
#[cfg_attr(feature = "python", pyo3::pyfunction(name = "watch_difference"))]
pub fn settings_difference() -> Option<String> {
    settings::difference_among(0..watchdog()?.settings.size)
}

/// A thread of Python's that may start operations has begun to, or ends.
#[cfg_attr(feature = "python", pyo3::pyfunction)]
pub fn thread_communicates(begins: bool) {
    let threads = &own().threads;
    let _ = if begins {
        threads.fetch_add(1, Ordering::Relaxed)
    } else {
        threads.fetch_sub(1, Ordering::Relaxed)
    };
}

/// The version of this module, and a hash of the sources that it was built from.
#[cfg_attr(feature = "python", pyo3::pyfunction)]
pub fn build() -> String {
    format!("{} (build {})", env!("CARGO_PKG_VERSION"), env!("MPI4JAX_SOURCES"))
}

/// The frame of the user's program in Python's main thread, if it can be read.
pub fn user_frame() -> Option<String> {
    python::ask(|_| false, python::PATIENCE);
    Some(python::place_now(own()).at).filter(|at| !at.is_empty())
}
