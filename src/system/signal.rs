//! `SIGUSR1`, by which others ask for a report; and what handlers of signals have in common.

use std::ffi::c_int;
use std::os::fd::RawFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

/// Where a `SIGUSR1` is passed on to.
static SIGNALLED: AtomicI32 = AtomicI32::new(-1);
/// The process that reports. A forked child has the handler too.
static PROCESS: AtomicU32 = AtomicU32::new(0);

pub type Handler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut libc::c_void);

/// A handler of another library: MPICH's launcher tells ranks by `SIGUSR1` that one of them has ended.
static PREVIOUS: OnceLock<Handler> = OnceLock::new();

/// Async-signal-safe: atomics, system calls, and the handler that was there before.
extern "C" fn on_signal(signal: c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    keeping_error(|| {
        // SAFETY: takes nothing.
        let is_child = unsafe { libc::getpid() } as u32 != PROCESS.load(Ordering::Relaxed);
        if !is_child {
            // SAFETY: a pipe that is never closed. If it is full, a report is due anyway.
            unsafe { libc::write(SIGNALLED.load(Ordering::Relaxed), c"!".as_ptr().cast(), 1) };
        }
        match PREVIOUS.get() {
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

/// Makes a function that is async-signal-safe what is done at a signal.
fn handle(signal: c_int, handler: Handler) {
    let mut action = action(signal);
    action.sa_sigaction = handler as usize;
    // Any thread may be the one that is interrupted, also one with a small stack.
    action.sa_flags = libc::SA_RESTART | libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: a plain system call; the handler is async-signal-safe.
    unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) };
}

/// Makes the signal wake whoever waits at the file that is returned, unless the program has a use of its own for it.
pub fn install(takes_signal: bool) -> RawFd {
    let mut ends = [-1; 2];
    // SAFETY: plain system calls on memory of ours.
    unsafe {
        if libc::pipe(ends.as_mut_ptr()) != 0 {
            return -1;
        }
        for end in ends {
            libc::fcntl(end, libc::F_SETFD, libc::FD_CLOEXEC);
            libc::fcntl(end, libc::F_SETFL, libc::O_NONBLOCK);
        }
    }
    SIGNALLED.store(ends[1], Ordering::Relaxed);
    PROCESS.store(std::process::id(), Ordering::Relaxed);
    if takes_signal {
        if let Some(previous) = function(&action(libc::SIGUSR1)) {
            let _ = PREVIOUS.set(previous);
        }
        handle(libc::SIGUSR1, on_signal);
    }
    ends[0]
}

/// Wakes whoever waits at that file, without a report.
pub fn wake() {
    // SAFETY: a pipe that is never closed. If it is full, whoever waits there wakes up anyway.
    unsafe { libc::write(SIGNALLED.load(Ordering::Relaxed), c".".as_ptr().cast(), 1) };
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
            has_signal |= i == 0 && length > 0 && bytes[..length as usize].contains(&b'!');
        }
        has_signal
    }
}

/// Whether the program may have asked for a signal that comes by itself.
pub fn has_alarm() -> bool {
    function(&action(libc::SIGALRM)).is_some()
}
