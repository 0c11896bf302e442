//! Signals that are passed on to threads of ours, which wait at pipes: a handler may do next to nothing.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, IntoRawFd, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};

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

/// From now on a signal, as a byte, is written to this pipe, which is never closed. Earlier handlers are called as well: Python
/// handles `SIGINT`, and MPICH's launcher tells ranks by `SIGUSR1` that one of them has ended. Once for each signal.
pub fn take(signal: c_int, pipe: RawFd) {
    let (process, was_handled) = (std::process::id(), has_handler(signal));
    let on_signal = move || {
        // SAFETY: takes nothing.
        let is_child = unsafe { libc::getpid() } as u32 != process;
        if !is_child {
            let byte = signal as u8;
            // SAFETY: a byte of ours. If the pipe is full, the signal has been passed on before.
            unsafe { libc::write(pipe, (&raw const byte).cast(), 1) };
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

/// Where [`wake`] writes.
static WAKES: AtomicI32 = AtomicI32::new(-1);

/// The file at which [`wait`] waits for [`wake`], and for `SIGUSR1` unless the program has a use of its own for it.
pub fn install(takes_signal: bool) -> RawFd {
    let Ok((reader, writer)) = std::io::pipe() else { return -1 };
    for end in [reader.as_raw_fd(), writer.as_raw_fd()] {
        // SAFETY: a plain system call.
        unsafe { libc::fcntl(end, libc::F_SETFL, libc::O_NONBLOCK) };
    }
    let writer = writer.into_raw_fd();
    WAKES.store(writer, Ordering::Relaxed);
    if takes_signal {
        take(libc::SIGUSR1, writer);
    }
    reader.into_raw_fd()
}

/// Wakes the thread that waits at that file, without a report.
pub fn wake() {
    // SAFETY: a pipe that is never closed. If it is full, the thread wakes up anyway.
    unsafe { libc::write(WAKES.load(Ordering::Relaxed), c".".as_ptr().cast(), 1) };
}

/// What has ended a wait.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Woken {
    /// `SIGUSR1`.
    pub by_signal: bool,
    /// Another rank.
    pub by_rank: bool,
}

/// Waits at most so many seconds for something to read in one of these files, of which each may be missing: where [`wake`] and
/// the signal handler write, where other ranks do, and one that can be read when the launcher has ended.
pub fn wait(files: [RawFd; 3], seconds: f64) -> Woken {
    let mut polls = files.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
    // -1: without an end.
    let timeout = if seconds.is_finite() { (1e3 * seconds).clamp(1.0, 1e9) as libc::c_int } else { -1 };
    // SAFETY: the structs are ours.
    let count = unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, timeout) };
    let read = |poll: libc::pollfd| {
        let mut bytes = [0u8; 64];
        if count <= 0 || poll.revents == 0 {
            return Vec::new();
        }
        // SAFETY: the bytes are ours, and the files do not block.
        let length = unsafe { libc::read(poll.fd, bytes.as_mut_ptr().cast(), bytes.len()) };
        bytes[..length.max(0) as usize].to_vec()
    };
    Woken { by_signal: read(polls[0]).contains(&(libc::SIGUSR1 as u8)), by_rank: !read(polls[1]).is_empty() }
}
