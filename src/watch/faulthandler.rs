//! Python's faulthandler, where no thread of Python's can say where the main thread is: see [`super::stacks`].
//!
//! What it does at a signal is a function that any thread can call: it reads the frames of all threads, without
//! Python's lock. So no signal is sent, which would end a `sleep` or a `poll` of the program's C code. Should frames change
//! meanwhile, it may read memory that is not there, so it is called [guarded](mpi4jax_guarded).

use std::ffi::c_int;
use std::fs::File;
use std::io::{Read, Seek};
use std::mem::ManuallyDrop;
use std::os::fd::{FromRawFd, RawFd};
use std::sync::{Mutex, PoisonError};

use super::signal::{self, Handler};
use super::waits;

unsafe extern "C" {
    // guard.c
    fn mpi4jax_guarded(
        call: Handler,
        signal: c_int,
        info: *mut libc::siginfo_t,
        context: *mut libc::c_void,
    ) -> c_int;
}

/// Faulthandler, as it has been registered.
struct Registered {
    signal: c_int,
    handler: Handler,
    /// What it writes to.
    file: RawFd,
    /// Python's number of the main thread.
    thread: u64,
}

static REGISTERED: Mutex<Option<Registered>> = Mutex::new(None);

/// Signals that programs seldom use.
#[cfg(target_os = "linux")]
fn candidates() -> impl Iterator<Item = c_int> {
    i32::midpoint(libc::SIGRTMIN(), libc::SIGRTMAX())..=libc::SIGRTMAX()
}

/// None: what faulthandler writes to is a file in memory, which only Linux has.
#[cfg(not(target_os = "linux"))]
fn candidates() -> impl Iterator<Item = c_int> {
    std::iter::empty()
}

/// A signal that nobody uses. `SIGUSR1` may be one that the program has faulthandler look at.
pub fn unused_signal() -> Option<c_int> {
    candidates().find(|&number| signal::action(number).sa_sigaction == libc::SIG_DFL)
}

/// Faulthandler has been registered for this signal, and writes to this file, which stays open. The signal does again
/// what it did before.
pub fn use_registered(signal: c_int, file: RawFd, thread: u64) {
    if let Some(handler) = signal::function(&signal::action(signal)) {
        signal::default(signal);
        let registered = Registered { signal, handler, file, thread };
        *REGISTERED.lock().unwrap_or_else(PoisonError::into_inner) = Some(registered);
    }
}

/// Python is about to end, and with it what faulthandler reads.
pub fn stop() {
    REGISTERED.lock().unwrap_or_else(PoisonError::into_inner).take();
}

/// Where the main thread is in Python, as faulthandler writes.
pub fn stack() -> Option<Vec<u8>> {
    let registered = REGISTERED.lock().unwrap_or_else(PoisonError::into_inner);
    let Registered { signal, handler, file, thread } =
        registered.as_ref().filter(|_| !waits::is_finished())?;
    // SAFETY: the file stays open, and is not closed here.
    let mut file = ManuallyDrop::new(unsafe { File::from_raw_fd(*file) });
    file.set_len(0).and_then(|()| file.rewind()).ok()?;
    // SAFETY: a handler of signals, called by one thread at a time, that does not look at where it is called from.
    unsafe { mpi4jax_guarded(*handler, *signal, std::ptr::null_mut(), std::ptr::null_mut()) };
    let mut text = Vec::new();
    file.rewind().and_then(|()| file.read_to_end(&mut text)).ok()?;
    Some(of_thread(&String::from_utf8_lossy(&text), *thread).into())
}

/// What is said of one thread.
fn of_thread(text: &str, thread: u64) -> String {
    let head = format!("hread 0x{thread:016x} ");
    let lines = text.lines().skip_while(|line| !line.contains(&head)).skip(1);
    lines.take_while(|line| line.starts_with("  ")).map(|line| format!("{line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    extern "C" fn reads_nothing(_: c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
        // SAFETY: none: this is what faulthandler does at a bad time. Address 8 is never mapped.
        unsafe { std::ptr::read_volatile(std::hint::black_box(8usize) as *const u8) };
    }

    extern "C" fn returns(_: c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

    #[test]
    fn a_handler_may_read_memory_that_is_not_there() {
        let null = std::ptr::null_mut::<libc::c_void>();
        let before = signal::action(libc::SIGSEGV).sa_sigaction;
        for _ in 0..3 {
            // SAFETY: handlers that take anything, called by this thread alone.
            unsafe {
                assert_eq!(mpi4jax_guarded(reads_nothing, libc::SIGUSR2, null.cast(), null), 0);
                assert_eq!(mpi4jax_guarded(returns, libc::SIGUSR2, null.cast(), null), 1);
            }
        }
        assert_eq!(signal::action(libc::SIGSEGV).sa_sigaction, before);
    }

    #[test]
    fn the_main_thread_is_one_of_several() {
        let text = "Thread 0x00007f0000000010 (most recent call first):\n  File \"a.py\", line 1 in f\n\n\
                    Current thread 0x00007f0000000020 [Main] (most recent call first):\n  File \"b.py\", line 2 in g\n\
                    \x20 File \"c.py\", line 3 in h\n\nThread 0x00007f0000000030 (most recent call first):\n  File \"d.py\"";
        let expected = "  File \"b.py\", line 2 in g\n  File \"c.py\", line 3 in h\n";
        assert_eq!(of_thread(text, 0x7f00_0000_0020), expected);
        assert_eq!(of_thread(text, 0x7f00_0000_0040), "");
    }
}
