//! What Python tells the watchdog, and asks it.

use std::ffi::{c_int, c_void};
use std::os::fd::IntoRawFd;

use pyo3::prelude::*;

use crate::compare::{self, CheckLevel};
use crate::watch;

/// Starts the watchdog; `settings` is a dictionary of the fields of [`watch::Settings`].
#[pyfunction]
pub(super) fn watch_start(settings: watch::Settings) {
    watch::start(settings);
}

/// From now on, what this rank waits for counts as hung after so many seconds. A number to leave with.
#[pyfunction]
pub(super) fn limit_enter(seconds: f64) -> u64 {
    watch::enter_limit(seconds)
}

/// The limit of this number holds no longer.
#[pyfunction]
pub(super) fn limit_leave(number: u64) {
    watch::leave_limit(number);
}

/// A file for a thread of Python's, which calls [`watch_answer`] each time that there is something to read.
#[pyfunction]
pub(super) fn watch_questions() -> PyResult<i32> {
    Ok(watch::questions()?.into_raw_fd())
}

/// Tells where Python's threads are, but this one; `frames` is `sys._current_frames`.
#[pyfunction]
pub(super) fn watch_answer(frames: &Bound<'_, PyAny>, main: u64) {
    watch::answer(|| super::stack::threads(frames, main));
}

/// Has Python's main thread say that it runs, as soon as it does.
fn ask_python() {
    extern "C" fn answer(_: *mut c_void) -> c_int {
        watch::python_runs();
        0
    }
    // SAFETY: may be called by any thread; the function stays.
    unsafe { pyo3::ffi::Py_AddPendingCall(Some(answer), std::ptr::null_mut()) };
}

/// `SIGTERM`, and `SIGINT` if `takes_interrupt`, end this rank with a line.
#[pyfunction]
pub(super) fn watch_signals(takes_interrupt: bool) {
    watch::take_signals(takes_interrupt.then_some(ask_python as fn()));
}

/// The program of this rank is at its end.
#[pyfunction]
pub(super) fn watch_exit() {
    watch::exit();
}

/// How the default communicator is made, "clone" or "world": the first choice of a rank, `choice` being this one's.
#[pyfunction]
pub(super) fn watch_choose_default(choice: &str) -> String {
    watch::choose_default(choice)
}

/// This rank is about to wait for others in a call that is no operation.
#[pyfunction]
pub(super) fn watch_enter(words: String) {
    watch::enter(words);
}

/// The call has ended.
#[pyfunction]
pub(super) fn watch_leave() {
    watch::leave();
}

/// Lets hosts ask each other through MPI. Collective over a communicator with the ranks of `MPI_COMM_WORLD`.
#[pyfunction]
pub(super) fn watch_link(py: Python<'_>, handle: usize) -> PyResult<()> {
    // SAFETY: mpi4py gives handles of live communicators, and it has initialised MPI.
    Ok(py.detach(|| unsafe { watch::open_link(handle) })?)
}

/// Ends the job unless this process has ended by itself after some seconds.
#[pyfunction]
pub(super) fn abort_after(seconds: f64, code: i32) {
    watch::abort_after(seconds, code);
}

/// The program has the default communicator, and may communicate on it.
#[pyfunction]
pub(super) fn watch_share_default() {
    crate::record::samples::share_default();
}

/// 0: nothing is compared; 1: operations, before they run; else samples, afterwards. Holds for what is compiled later.
#[pyfunction]
pub(super) fn set_check(level: u8) {
    compare::set_check(match level {
        0 => CheckLevel::Off,
        1 => CheckLevel::Operations,
        _ => CheckLevel::Samples,
    });
}
