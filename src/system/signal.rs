//! Signals that are passed on to the watchdog's thread, which waits at a pipe: a handler may do next to nothing.

use std::ffi::c_int;
use std::fs::File;
use std::io::{PipeReader, PipeWriter};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{ioctl_fionbio, read, write};
use signal_hook::low_level;

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

/// Where [`wake`] and the signal handler write. It is never closed.
static PIPE: OnceLock<PipeWriter> = OnceLock::new();

/// A pipe whose ends do not block, for a thread that calls [`wait`].
pub fn pipe() -> std::io::Result<(PipeReader, PipeWriter)> {
    let (reader, writer) = std::io::pipe()?;
    ioctl_fionbio(&reader, true)?;
    ioctl_fionbio(&writer, true)?;
    Ok((reader, writer))
}

/// A thread waits at the other end.
pub fn open(pipe: PipeWriter) {
    let _ = PIPE.set(pipe);
}

/// If the pipe is full, the thread wakes up anyway. Async-signal-safe: it makes a system call.
fn tell(byte: u8) {
    if let Some(pipe) = PIPE.get() {
        let _ = write(pipe, &[byte]);
    }
}

/// Wakes the thread in [`wait`].
pub fn wake() {
    tell(0);
}

/// From now on, [`wait`] returns a signal. Earlier handlers are called as well: Python handles `SIGINT`, and MPICH's launcher
/// tells ranks by `SIGUSR1` that one of them has ended. Once for each signal.
pub fn take(signal: c_int) {
    if PIPE.get().is_none() {
        return;
    }
    let (process, was_handled) = (std::process::id(), has_handler(signal));
    let on_signal = move || {
        if std::process::id() == process {
            tell(signal as u8);
        } else if !was_handled {
            // A forked child has the handler too, and must not write to its parent's pipe.
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

/// What has ended a wait.
#[derive(Debug, Default, PartialEq)]
pub struct Woken {
    /// The signals that have come, and 0 for each call of [`wake`].
    pub signals: Vec<u8>,
    /// What other ranks have written.
    pub messages: Vec<u8>,
}

/// Waits at most so many seconds for a signal or [`wake`], for another rank, whose messages come through the pipe `others`, or for
/// `ended`, which can be read when the launcher has ended.
pub fn wait(own: &PipeReader, others: Option<&File>, ended: Option<&OwnedFd>, seconds: f64) -> Woken {
    let files = [Some(own.as_fd()), others.map(AsFd::as_fd), ended.map(AsFd::as_fd)];
    let to_poll = |file| PollFd::from_borrowed_fd(file, PollFlags::IN);
    let mut polls: Vec<PollFd> = files.into_iter().flatten().map(to_poll).collect();
    let milliseconds = (1e3 * seconds).clamp(1.0, 1e9) as i64;
    let timeout = Timespec { tv_sec: milliseconds / 1000, tv_nsec: 1_000_000 * (milliseconds % 1000) };
    let _ = poll(&mut polls, Some(&timeout));
    let read = |file: Option<BorrowedFd>| {
        let mut bytes = [0u8; 1024];
        // The files do not block.
        let length = file.map_or(0, |file| read(file, &mut bytes).unwrap_or(0));
        bytes[..length].to_vec()
    };
    Woken { signals: read(files[0]), messages: read(files[1]) }
}
