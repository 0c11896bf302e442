//! `SIGUSR1`: others send it for a report, and we to ourselves, for Python's faulthandler to say where a thread is.

use std::os::fd::RawFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::{Duration, Instant};

/// Where a `SIGUSR1` is passed on to.
static SIGNALLED: AtomicI32 = AtomicI32::new(-1);
/// Whether the next `SIGUSR1` is our own, to see where Python is.
static LOOKING: AtomicBool = AtomicBool::new(false);
/// Whether that has been answered.
static LOOKED: AtomicBool = AtomicBool::new(false);
/// The file that Python's faulthandler writes to, and its handler.
static STACKS: OnceLock<(RawFd, SignalAction)> = OnceLock::new();

/// For how long the main thread is waited for to take the signal.
const LOOK: Duration = Duration::from_millis(500);

type SignalAction = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);

/// A handler of another library: MPICH's launcher tells ranks by `SIGUSR1` that one of them has ended.
static PREVIOUS: OnceLock<SignalAction> = OnceLock::new();

/// Async-signal-safe: atomics, a write, Python's faulthandler, and the handler that was there before.
extern "C" fn on_signal(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    if LOOKING.swap(false, Ordering::Relaxed) {
        if let Some((_, write)) = STACKS.get() {
            write(signal, info, context);
        }
        LOOKED.store(true, Ordering::Release);
        return;
    }
    // SAFETY: a pipe that is never closed. If it is full, a report is due anyway.
    unsafe { libc::write(SIGNALLED.load(Ordering::Relaxed), c"!".as_ptr().cast(), 1) };
    if let Some(previous) = PREVIOUS.get() {
        previous(signal, info, context);
    }
}

/// Sends `SIGUSR1` to the main thread, whose number is that of the process.
#[cfg(target_os = "linux")]
fn signal_main_thread() {
    // SAFETY: a plain system call.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), libc::getpid(), libc::SIGUSR1) };
}

/// Nobody asks: [`STACKS`] is a file in memory, which only Linux has.
#[cfg(not(target_os = "linux"))]
fn signal_main_thread() {}

/// What is done at a `SIGUSR1` now.
fn signal_action() -> libc::sigaction {
    // SAFETY: a plain system call, which fills the memory it is given.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGUSR1, std::ptr::null(), &mut action);
        action
    }
}

/// Python's faulthandler is now the handler of `SIGUSR1`; it writes to `file`, which stays open. Ours is again after
/// this, and calls Python's where that is safe.
pub fn use_stacks(file: RawFd) {
    let theirs = signal_action().sa_sigaction;
    // SAFETY: a handler of signals; it does not notice arguments that it does not take.
    let _ = STACKS.set((file, unsafe { std::mem::transmute::<usize, SignalAction>(theirs) }));
    handle();
}

/// Makes [`on_signal`] the handler.
fn handle() {
    let mut action = signal_action();
    action.sa_sigaction = on_signal as SignalAction as usize;
    action.sa_flags = libc::SA_RESTART | libc::SA_SIGINFO;
    // SAFETY: a plain system call; the handler is async-signal-safe.
    unsafe { libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut()) };
}

/// Makes the signal wake whoever waits at the file that is returned; whether it does: not if the program has a use
/// of its own for the signal.
pub fn install(takes_signal: bool) -> (RawFd, bool) {
    let mut ends = [-1; 2];
    // SAFETY: plain system calls on memory of ours.
    let free = unsafe {
        if libc::pipe(ends.as_mut_ptr()) != 0 {
            ends = [-1; 2];
        }
        for end in ends {
            libc::fcntl(end, libc::F_SETFD, libc::FD_CLOEXEC);
            libc::fcntl(end, libc::F_SETFL, libc::O_NONBLOCK);
        }
        SIGNALLED.store(ends[1], Ordering::Relaxed);
        let action = signal_action();
        let free = takes_signal && ends[0] >= 0;
        if free {
            if ![libc::SIG_DFL, libc::SIG_IGN].contains(&action.sa_sigaction) {
                // A handler that takes the number alone does not notice the other arguments.
                let _ = PREVIOUS.set(std::mem::transmute::<usize, SignalAction>(action.sa_sigaction));
            }
            handle();
        }
        free
    };
    (ends[0], free)
}

/// Waits for so long; whether a signal came.
pub fn wait(wake: RawFd, tick: Duration) -> bool {
    let mut poll = libc::pollfd { fd: wake, events: libc::POLLIN, revents: 0 };
    // SAFETY: the structs are ours; the pipe does not block.
    unsafe {
        if libc::poll(&mut poll, 1, tick.as_millis() as libc::c_int) <= 0 {
            return false;
        }
        let mut bytes = [0u8; 64];
        libc::read(wake, bytes.as_mut_ptr().cast(), bytes.len()) > 0
    }
}

/// Where the main thread is in Python, as its faulthandler writes on a signal to that thread alone. Only for a thread
/// whose frames do not change now: see [`super::stacks`].
pub fn stack() -> Option<Vec<u8>> {
    let &(file, _) = STACKS.get()?;
    if signal_action().sa_sigaction != on_signal as SignalAction as usize {
        return None; // the program has taken the signal for itself since
    }
    // SAFETY: the file is ours.
    unsafe {
        libc::ftruncate(file, 0);
        libc::lseek(file, 0, libc::SEEK_SET);
    }
    LOOKED.store(false, Ordering::Relaxed);
    LOOKING.store(true, Ordering::Relaxed);
    signal_main_thread();
    let start = Instant::now();
    while !LOOKED.load(Ordering::Acquire) {
        if start.elapsed() > LOOK {
            LOOKING.store(false, Ordering::Relaxed);
            return None; // it does not run, or does not take signals
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut text = vec![0u8; 1 << 16];
    // SAFETY: as above, and a buffer of the length that is given.
    let length = unsafe { libc::pread(file, text.as_mut_ptr().cast(), text.len(), 0) };
    text.truncate(usize::try_from(length).unwrap_or(0));
    Some(text)
}
