//! Signals that are passed on to threads of ours, which wait at pipes: a handler may do next to nothing.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, IntoRawFd, RawFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};

pub type Handler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut libc::c_void);

struct Taken {
    /// A forked child has the handler too, and must not write to its parent's pipe.
    process: u32,
    pipe: RawFd,
    /// Of another library: MPICH's launcher tells ranks by `SIGUSR1` that one of them has ended, and Python handles `SIGINT`.
    previous: Option<Handler>,
}

/// By number.
static TAKEN: [OnceLock<Taken>; 32] = [const { OnceLock::new() }; 32];

/// Async-signal-safe: memory that is not written any more, system calls, and the handler that was there before.
extern "C" fn on_signal(signal: c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let Some(Taken { process, pipe, previous }) = TAKEN[signal as usize].get() else { return };
    keeping_error(|| {
        // SAFETY: takes nothing.
        let is_child = unsafe { libc::getpid() } as u32 != *process;
        if !is_child {
            let byte = signal as u8;
            // SAFETY: a byte of ours, into a pipe that is never closed. If it is full, it has been said.
            unsafe { libc::write(*pipe, (&raw const byte).cast(), 1) };
        }
        match previous {
            Some(previous) => previous(signal, info, context),
            None if is_child => {
                default(signal);
                // SAFETY: a plain system call. The signal comes when this handler has returned.
                unsafe { libc::raise(signal) };
            }
            None => {}
        }
    });
}

/// What is interrupted by a handler may be about to read `errno`.
pub fn keeping_error(f: impl FnOnce()) {
    let location = super::os::error_location();
    // SAFETY: the address of this thread's `errno`.
    let error = unsafe { location.read() };
    f();
    // SAFETY: as above.
    unsafe { location.write(error) };
}

/// What a signal does without anybody's handler is what it does from now on. Async-signal-safe.
pub fn default(signal: c_int) {
    // SAFETY: all-zero is a value of it, and stands for the default action.
    unsafe { libc::sigaction(signal, &std::mem::zeroed(), std::ptr::null_mut()) };
}

/// What is done at a signal now.
pub fn action(signal: c_int) -> libc::sigaction {
    // SAFETY: a plain system call, which fills the memory it is given.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut action);
        action
    }
}

/// The function that an action calls, if it does. One that takes the number alone does not notice the other arguments.
pub fn function(action: &libc::sigaction) -> Option<Handler> {
    let is_function = ![libc::SIG_DFL, libc::SIG_IGN].contains(&action.sa_sigaction);
    // SAFETY: a handler of signals.
    is_function.then(|| unsafe { std::mem::transmute::<usize, Handler>(action.sa_sigaction) })
}

/// From now on a signal, as a byte, is written to this pipe, which is never closed. Once for each signal.
pub fn take(signal: c_int, pipe: RawFd) {
    let taken = Taken { process: std::process::id(), pipe, previous: function(&action(signal)) };
    if TAKEN[signal as usize].set(taken).is_err() {
        return;
    }
    // After SIGINT, calls that wait return to Python, which looks at its signals.
    let restart = if signal == libc::SIGINT { 0 } else { libc::SA_RESTART };
    // SAFETY: all-zero is a value of it; the handler is async-signal-safe.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_signal as Handler as usize;
        // Any thread may be the one that is interrupted, also one with a small stack.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | restart;
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

/// Wakes whoever waits at that file, without a report.
pub fn wake() {
    // SAFETY: a pipe that is never closed. If it is full, whoever waits there wakes up anyway.
    unsafe { libc::write(WAKES.load(Ordering::Relaxed), c".".as_ptr().cast(), 1) };
}

/// Waits until there is something to read in one of these files, of which each may be missing, at most so many seconds. What
/// there is is taken; whether the first one has had a signal.
pub fn wait(files: [RawFd; 3], seconds: f64) -> bool {
    let mut polls = files.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
    // -1: without an end.
    let timeout = if seconds.is_finite() { (1e3 * seconds).clamp(1.0, 1e9) as libc::c_int } else { -1 };
    // SAFETY: the structs and the bytes are ours, and the files do not block.
    unsafe {
        if libc::poll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, timeout) <= 0 {
            return false;
        }
        let mut has_signal = false;
        for (i, poll) in polls[..2].iter().enumerate().filter(|(_, poll)| poll.revents != 0) {
            let mut bytes = [0u8; 64];
            let length = libc::read(poll.fd, bytes.as_mut_ptr().cast(), bytes.len());
            has_signal |= i == 0 && length > 0 && bytes[..length as usize].contains(&(libc::SIGUSR1 as u8));
        }
        has_signal
    }
}

/// Whether the program may have asked for a signal that comes by itself.
pub fn has_alarm() -> bool {
    function(&action(libc::SIGALRM)).is_some()
}
