//! Signals that end this rank: `SIGTERM`, by which launchers end a job, and `SIGINT`, which Python cannot answer while the
//! rank waits in an operation. A line says where the rank was.
//!
//! The handler writes to a pipe, and a thread of its own does the rest: the watchdog's may be busy.

use std::io::Write;
use std::os::fd::RawFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::{end, waits};
use crate::system::signal::{Handler, action, default, function, keeping_error};

/// For how long Python has to answer an interrupt.
const PATIENCE: Duration = Duration::from_millis(500);

struct Installed {
    /// A forked child has the handlers too, and must not write to its parent's pipe.
    process: u32,
    pipe: [RawFd; 2],
    /// Python's handler of `SIGINT`.
    interrupt: Option<Handler>,
}

static INSTALLED: OnceLock<Installed> = OnceLock::new();
/// Python's main thread has run since the last interrupt, and so has seen it.
static PYTHON_RUNS: AtomicBool = AtomicBool::new(false);

/// Python's main thread runs.
pub fn python_runs() {
    PYTHON_RUNS.store(true, Ordering::Relaxed);
}

/// Async-signal-safe: reads memory that is not written any more, and makes system calls.
extern "C" fn on_signal(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let Some(Installed { process, pipe, interrupt }) = INSTALLED.get() else { return };
    // SAFETY: plain system calls; the pipe is never closed.
    keeping_error(|| unsafe {
        if libc::getpid() as u32 == *process {
            libc::write(pipe[1], (&raw const signal).cast(), size_of::<i32>());
        } else if signal == libc::SIGTERM {
            default(signal);
            libc::raise(signal); // comes when this handler has returned
        }
    });
    if signal == libc::SIGINT
        && let Some(interrupt) = interrupt
    {
        interrupt(signal, info, context);
    }
}

/// Takes `SIGTERM`, if nobody else has, and `SIGINT`, if Python's handler is its own. `ask` has
/// Python's main thread call [`python_runs`] when it can. `words` is what there is to be said before the process ends.
pub fn install(ask: Option<fn()>, words: fn(libc::c_int) -> Option<String>) {
    let mut pipe = [-1; 2];
    // SAFETY: plain system calls on memory of ours.
    unsafe {
        if libc::pipe(pipe.as_mut_ptr()) != 0 {
            return;
        }
        for end in pipe {
            libc::fcntl(end, libc::F_SETFD, libc::FD_CLOEXEC);
        }
    }
    let interrupt = ask.and_then(|_| function(&action(libc::SIGINT)));
    let is_free = action(libc::SIGTERM).sa_sigaction == libc::SIG_DFL;
    let installed = Installed { process: std::process::id(), pipe, interrupt };
    let thread = std::thread::Builder::new().name("mpi4jax-signals".into());
    if INSTALLED.set(installed).is_err() || thread.spawn(move || listen(pipe[0], ask, words)).is_err() {
        return;
    }
    let signals = [(libc::SIGTERM, is_free), (libc::SIGINT, interrupt.is_some())];
    for (signal, _) in signals.into_iter().filter(|(_, takes)| *takes) {
        // SAFETY: the handler is async-signal-safe. Without SA_RESTART for SIGINT, as Python has it: calls that wait
        // return to Python, which looks at its signals.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_signal as Handler as usize;
            let restart = if signal == libc::SIGTERM { libc::SA_RESTART } else { 0 };
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | restart;
            libc::sigaction(signal, &action, std::ptr::null_mut());
        }
    }
}

fn listen(pipe: RawFd, ask: Option<fn()>, words: fn(libc::c_int) -> Option<String>) {
    loop {
        let mut signal: i32 = 0;
        // SAFETY: as many bytes of ours as are written at once.
        let count = unsafe { libc::read(pipe, (&raw mut signal).cast(), size_of::<i32>()) };
        if count == size_of::<i32>() as isize && (signal == libc::SIGTERM || stays_in_operation(ask)) {
            if let Some(words) = words(signal) {
                let _ = std::io::stderr().lock().write_all(words.as_bytes());
                end::let_launcher_read();
            }
            // SAFETY: ends this process by the signal, as it would have without us. It may be blocked in this thread.
            unsafe {
                default(signal);
                let mut set = std::mem::zeroed::<libc::sigset_t>();
                libc::sigaddset(&mut set, signal);
                libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, std::ptr::null_mut());
                libc::kill(libc::getpid(), signal);
            }
        }
    }
}

/// Whether what is under way now is so after a moment too, and Python has not been able to run.
fn stays_in_operation(ask: Option<fn()>) -> bool {
    let Some(ask) = ask else { return false };
    PYTHON_RUNS.store(false, Ordering::Relaxed);
    ask();
    let before = waits::under_way();
    let start = Instant::now();
    let is_stuck = || waits::under_way().iter().any(|number| before.contains(number));
    while !PYTHON_RUNS.load(Ordering::Relaxed) && is_stuck() {
        if start.elapsed() > PATIENCE {
            return true;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    false
}
