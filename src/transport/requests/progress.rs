//! The progress thread: it calls MPI for nonblocking operations while the program computes.
//!
//! MPI moves data when it is called: if nothing calls it, a large message that was started waits for the wait. The thread
//! sleeps while nothing is under way, and while another thread waits in MPI, which does the same.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::comm::Calling;
use crate::error::Cause;
use crate::finalize;
use crate::mpilib;
use crate::sync::lock;
use crate::system::variable;

const PROGRESS: &str = "MPI4JAX_PROGRESS";

/// How long the thread sleeps between two calls of MPI, at least and at most.
const PAUSES: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(50));
/// Which part of the time in which nothing has happened it sleeps: what is late is late by that.
const PART: u32 = 8;

/// A call of MPI that moves data takes longer than this, one that does not takes less.
const LONG: Duration = Duration::from_micros(10);

/// Calls MPI for an operation, which makes progress on all others too; whether the operation has ended.
pub type Test = Box<dyn Fn() -> bool>;

/// The next operation in turn after the one of a number, which is called from time to time until it has ended; None: nothing is
/// under way.
type Next = fn(u64) -> Option<(u64, Test)>;

#[derive(Default)]
struct Shared {
    thread: Option<JoinHandle<()>>,
    /// Whether the thread sleeps for longer than the shortest pause.
    is_asleep: bool,
    /// Whether an operation was started since the thread has last looked.
    is_new: bool,
    ended: bool,
}

static SHARED: Mutex<Shared> =
    Mutex::new(Shared { thread: None, is_asleep: false, is_new: false, ended: false });
static CHANGED: Condvar = Condvar::new();
static WAITING: AtomicUsize = AtomicUsize::new(0);

fn shared() -> MutexGuard<'static, Shared> {
    lock(&SHARED)
}

/// While there is one, its thread waits in MPI.
pub struct Pause(());

impl Pause {
    pub fn new() -> Self {
        WAITING.fetch_add(1, Ordering::Relaxed);
        Self(())
    }
}

impl Drop for Pause {
    fn drop(&mut self) {
        WAITING.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whether there is to be a thread, by the environment's setting and whether MPI `may` be called by it.
fn is_wanted(setting: &str, may: bool) -> Result<bool, String> {
    match setting.to_ascii_lowercase().as_str() {
        "" => Ok(may),
        "0" | "false" | "off" | "no" => Ok(false),
        "1" | "true" | "on" | "yes" if may => Ok(true),
        "1" | "true" | "on" | "yes" => Err(format!(
            "{PROGRESS}={setting}, but MPI was not initialized for calls from any thread \
             (MPI_THREAD_MULTIPLE): set mpi4py.rc.thread_level, or leave {PROGRESS} out"
        )),
        _ => Err(format!("{PROGRESS}={setting} is not understood: expected 1 or 0")),
    }
}

/// Whether the environment's setting is one that there is.
pub fn check_setting() -> Result<(), Cause> {
    let setting = variable(PROGRESS).unwrap_or_default();
    is_wanted(&setting, true).map(drop).map_err(|message| Cause::Setting { message })
}

/// Starts the thread, where there is to be one, for what `next` names.
pub fn prepare(next: Next) -> Result<(), Cause> {
    static PREPARED: OnceLock<Result<(), String>> = OnceLock::new();
    let prepared = PREPARED.get_or_init(|| {
        let setting = variable(PROGRESS).unwrap_or_default();
        if is_wanted(&setting, mpilib::any_thread_may_call())? {
            finalize::at_finalize(stop).map_err(|cause| cause.to_string())?;
            let thread = std::thread::Builder::new().name("mpi4jax-progress".into()).spawn(move || run(next));
            shared().thread = Some(thread.map_err(|error| format!("{PROGRESS}: {error}"))?);
        }
        Ok(())
    });
    prepared.clone().map_err(|message| Cause::Setting { message })
}

/// Called when an operation has been started.
pub fn notify() {
    let mut shared = shared();
    shared.is_new = true;
    if shared.is_asleep {
        CHANGED.notify_one();
    }
}

/// `MPI_Finalize` begins.
fn stop() {
    let thread = {
        let mut shared = shared();
        shared.ended = true;
        CHANGED.notify_one();
        shared.thread.take()
    };
    if let Some(thread) = thread {
        let _ = thread.join();
    }
}

/// Whether an operation has ended, and whether MPI has moved any data meanwhile.
fn timed(test: &Test) -> (bool, bool) {
    let _calling = Calling::new();
    let once = || {
        let began = Instant::now();
        (test(), began.elapsed() >= LONG)
    };
    match once() {
        (true, _) => (true, true),
        (false, false) => (false, false),
        // After a sleep, a call takes long by itself. The next one does if it moves data.
        (false, true) => {
            let (ended, was_long) = once();
            (ended, ended || was_long)
        }
    }
}

fn run(next: Next) {
    let (mut since, mut last, mut is_idle) = (Instant::now(), 0, true);
    let mut shared = shared();
    loop {
        if !shared.is_new && !shared.ended {
            let pause = (since.elapsed() / PART).clamp(PAUSES.0, PAUSES.1);
            shared.is_asleep = is_idle || pause > PAUSES.0;
            shared = if is_idle {
                CHANGED.wait(shared).unwrap_or_else(PoisonError::into_inner)
            } else {
                CHANGED.wait_timeout(shared, pause).unwrap_or_else(PoisonError::into_inner).0
            };
            shared.is_asleep = false;
        }
        if shared.ended {
            return;
        }
        if std::mem::take(&mut shared.is_new) {
            since = Instant::now();
        }
        if WAITING.load(Ordering::Relaxed) > 0 {
            is_idle = false;
            continue;
        }
        drop(shared);
        // One call lets MPI go on with all: the next one is called only if this one has ended.
        is_idle = loop {
            let Some((number, test)) = next(last) else { break true };
            last = number;
            let (ended, has_happened) = timed(&test);
            if has_happened {
                since = Instant::now();
            }
            if !ended {
                break false;
            }
            if self::shared().ended {
                return;
            }
        };
        shared = self::shared();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_setting_is_a_word() {
        for may in [true, false] {
            assert_eq!([is_wanted("", may), is_wanted("0", may)], [Ok(may), Ok(false)]);
            assert!(is_wanted("2", may).unwrap_err().contains(PROGRESS));
        }
        assert_eq!(is_wanted("on", true), Ok(true));
        assert!(is_wanted("on", false).unwrap_err().contains("MPI_THREAD_MULTIPLE"));
    }
}
