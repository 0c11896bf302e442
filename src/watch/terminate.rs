//! Signals that end this rank: `SIGTERM`, by which launchers end a job, and `SIGINT`, which Python cannot answer while the
//! rank waits in an operation. A line says where the rank was.
//!
//! A thread of its own does that: the watchdog's may be busy.

use std::io::{PipeReader, Read, Write};
use std::os::fd::IntoRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::{end, waits};
use crate::system::signal::{end_by, has_handler, is_default, take};

/// For how long Python has to answer an interrupt.
const PATIENCE: Duration = Duration::from_millis(500);

/// Python's main thread has run since the last interrupt, and so has seen it.
static PYTHON_RUNS: AtomicBool = AtomicBool::new(false);

/// Python's main thread runs.
pub fn python_runs() {
    PYTHON_RUNS.store(true, Ordering::Relaxed);
}

/// Takes `SIGTERM`, if nothing else handles it, and `SIGINT`, if Python's handler is its own. `ask` has
/// Python's main thread call [`python_runs`] when it can. `words` is what there is to be said before the process ends.
pub fn install(ask: Option<fn()>, words: fn(libc::c_int) -> Option<String>) {
    let Ok((reader, writer)) = std::io::pipe() else { return };
    let thread = std::thread::Builder::new().name("mpi4jax-signals".into());
    if thread.spawn(move || listen(reader, ask, words)).is_err() {
        return;
    }
    let writer = writer.into_raw_fd();
    if is_default(libc::SIGTERM) {
        take(libc::SIGTERM, writer);
    }
    if ask.is_some() && has_handler(libc::SIGINT) {
        take(libc::SIGINT, writer);
    }
}

fn listen(mut pipe: PipeReader, ask: Option<fn()>, words: fn(libc::c_int) -> Option<String>) {
    let mut byte = [0];
    while pipe.read_exact(&mut byte).is_ok() {
        let signal = libc::c_int::from(byte[0]);
        if signal == libc::SIGTERM || stays_in_operation(ask) {
            if let Some(words) = words(signal) {
                let _ = std::io::stderr().lock().write_all(words.as_bytes());
                end::let_launcher_read();
            }
            end_by(signal);
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
