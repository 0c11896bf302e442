//! Signals that are passed on to the watchdog's thread, which waits at its bell: a handler may do next to nothing.

use std::ffi::c_int;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use signal_hook::low_level;

use super::os;

/// What is done at a signal: `SIG_DFL`, `SIG_IGN`, or the address of a handler.
fn disposition(signal: c_int) -> libc::sighandler_t {
    // SAFETY: a plain system call, which fills the memory it is given.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut action);
        action.sa_sigaction
    }
}

/// Whether the program and its libraries leave a signal to the system.
pub fn is_default(signal: c_int) -> bool {
    disposition(signal) == libc::SIG_DFL
}

/// Whether a function handles a signal.
pub fn has_handler(signal: c_int) -> bool {
    ![libc::SIG_DFL, libc::SIG_IGN].contains(&disposition(signal))
}

/// Ends this process by a signal, as the system does where nothing handles it.
pub fn end_by(signal: c_int) {
    let _ = low_level::emulate_default_handler(signal);
}

/// The number that the watchdog's thread waits at.
static BELL: OnceLock<&AtomicU32> = OnceLock::new();
/// The signals that have come, a bit each.
static COME: AtomicU64 = AtomicU64::new(0);

/// A thread waits at this number.
pub fn open(bell: &'static AtomicU32) {
    let _ = BELL.set(bell);
}

/// Wakes the thread in [`wait`]. Async-signal-safe.
pub fn wake() {
    if let Some(bell) = BELL.get() {
        ring(bell);
    }
}

/// Wakes the thread that waits at a bell, in any process.
pub fn ring(bell: &AtomicU32) {
    bell.fetch_add(1, Ordering::Release);
    os::wake(bell);
}

/// From now on, [`wait`] returns a signal. Earlier handlers are called as well: Python handles `SIGINT`, and MPICH's launcher
/// tells ranks by `SIGUSR1` that one of them has ended. Once for each signal.
pub fn take(signal: c_int) {
    if BELL.get().is_none() {
        return;
    }
    let (process, was_handled) = (std::process::id(), has_handler(signal));
    let on_signal = move || {
        if std::process::id() == process {
            COME.fetch_or(1 << signal, Ordering::Relaxed);
            wake();
        } else if !was_handled {
            // A forked child has the handler too, and must not ring its parent's bell.
            end_by(signal);
        }
    };
    // SAFETY: the function is async-signal-safe: it makes system calls.
    let is_taken = unsafe { low_level::register(signal, on_signal) }.is_ok();
    if is_taken && signal == libc::SIGINT {
        // Calls that wait return to Python, which then handles the signal.
        restart_calls_no_more(signal);
    }
}

fn restart_calls_no_more(signal: c_int) {
    // SAFETY: plain system calls, with what the first one has filled in.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut action);
        action.sa_flags &= !libc::SA_RESTART;
        libc::sigaction(signal, &action, std::ptr::null_mut());
    }
}

/// Waits at most `seconds` until the bell has been rung since `seen`, and returns the signals that
/// have arrived.
pub fn wait(bell: &AtomicU32, seen: &mut u32, seconds: f64) -> Vec<i32> {
    if bell.load(Ordering::Acquire) == *seen {
        os::wait(bell, *seen, seconds.clamp(0.001, 1e6));
    }
    *seen = bell.load(Ordering::Acquire);
    let come = COME.swap(0, Ordering::Relaxed);
    (1..64).filter(|signal| come & (1 << signal) != 0).collect()
}
