//! What the rest of the package calls: the start of the watchdog, and the end of this rank.

use super::end;
use super::python;
use super::settings::{self, Settings, Watchdog, watchdog};
use super::shared;
use super::this_rank;
use super::waits;
use super::watchdog;
use crate::comm;
use crate::error::Error;
use crate::finalize;
use crate::output::{self, print};
use crate::system::signal;
use crate::watch::job::ranks::Ranks;
use crate::watch::job::{self, default, link};

/// Starts the watchdog, once per process.
#[cfg_attr(feature = "python", pyo3::pyfunction(name = "watch_start"))]
pub fn start(settings: Settings) {
    let Some(Watchdog { settings, host, .. }) = settings::make(settings) else { return };
    output::keep(settings.stderr);
    host.publish_settings(&settings.shared);
    // SAFETY: registers a function that touches nothing but its statics and files.
    unsafe { libc::atexit(end::at_exit) };
    // Mostly all ranks of a host have the same reason, and one of them prints it.
    if let Some(why) = host.broken()
        && settings.size > 1
        && (settings.is_first_here || why.contains(job::host::ALREADY))
    {
        print(&format!(
            "r{} | mpi4jax: no files in {}: {why}; ranks do not exchange their states, and write no dumps \
             (MPI4JAX_DUMP_DIR names another directory)\n",
            settings.rank,
            host.directory.display()
        ));
    }
    // Without a pipe and a thread there is no watchdog, and all else works.
    let thread = std::thread::Builder::new().name("mpi4jax-watchdog".into());
    if let Ok((reader, writer)) = signal::pipe()
        && thread.spawn(move || watchdog().map(|watchdog| watchdog::run(watchdog, &reader))).is_ok()
    {
        signal::open(writer);
        if settings.takes_signal {
            signal::take(libc::SIGUSR1);
        }
    }
    let _ = finalize::first_at_finalize(Box::new(finish));
    // Without it, communicators of the same ranks are not distinguished.
    let _ = comm::origin::start();
}

/// Compares settings of all ranks, and lets the leaders of several hosts ask each other through MPI. Collective.
///
/// # Safety
/// `comm` is the handle of a live communicator, with the ranks of `MPI_COMM_WORLD`.
pub unsafe fn open_link(comm: usize) -> Result<(), Error> {
    if let Some(Watchdog { settings, host, .. }) = watchdog()
        && settings.size > 1
    {
        let compared = shared::compare(&settings.shared, settings.size);
        // SAFETY: promised by the caller.
        unsafe { link::open(comm, host.place(), (settings.rank, settings.size))? };
        compared?;
    }
    Ok(())
}

/// `MPI_Finalize` begins: this rank has done its last operation.
fn finish() {
    let Some(Watchdog { host, settings, started, .. }) = watchdog() else { return };
    for comm in comm::live() {
        // What is called later may receive it.
        if !finalize::are_others_deleted_last()
            && let Some((source, tag)) = comm.unreceived()
        {
            print(&format!(
                "r{} | mpi4jax: warning: a message from {source}, tag {tag}, on {} was never received\n",
                host.rank, comm.key
            ));
        }
    }
    host.wait_if_gone();
    if let Some(words) = host.mend(false) {
        print(&format!("r{} | mpi4jax: {words}\n", host.rank));
    }
    waits::end();
    let _ = this_rank::publish(host, &this_rank::status_now(host.size));
    signal::wake();
    watchdog::compare(host);
    let made = |handle| {
        // SAFETY: it has just been made, of all ranks. Without a link, hosts ask each other nothing.
        let _ = unsafe { open_link(handle) };
    };
    let _ = default::join(host, *started, settings.one_directory, made);
}

/// How the default communicator is made: as the first rank has chosen, which this one is if it is the first.
#[cfg_attr(feature = "python", pyo3::pyfunction(name = "watch_choose_default"))]
pub fn choose_default(choice: &str) -> String {
    watchdog().map_or_else(|| choice.into(), |watchdog| default::choose(&watchdog.host, choice))
}

/// Whether all ranks make the default communicator. Collective over `MPI_COMM_WORLD`; a rank may answer in `MPI_Finalize`.
pub fn agree() -> Result<bool, Error> {
    Ok(default::agree()?)
}

/// In which settings ranks of this host differ, in words; None: in none, as far as is known.
#[cfg_attr(feature = "python", pyo3::pyfunction(name = "watch_difference"))]
pub fn settings_difference() -> Option<String> {
    let Watchdog { host, settings, .. } = watchdog()?;
    shared::difference_among(host, settings, &Ranks::all(host.size))
}

/// The frame of the user's program in Python's main thread, if it can be read.
pub fn user_frame() -> Option<String> {
    python::user_frame(python::python().main()).map(|frame| frame.to_string())
}
