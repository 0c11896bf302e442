//! What this process waits for: operations, and calls of Python's that are none.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::record::{clock, recorder};
use crate::transport;

static FINISHED: AtomicBool = AtomicBool::new(false);

/// This rank has done its last operation: Python is not looked at any more.
pub fn set_finished() {
    FINISHED.store(true, Ordering::Relaxed);
}

pub fn is_finished() -> bool {
    FINISHED.load(Ordering::Relaxed)
}

/// A collective call of Python's that is no operation, such as the duplication of a communicator.
pub struct Blocked {
    pub number: u64,
    pub what: String,
    pub started: u64,
}

static BLOCKED: Mutex<Option<Blocked>> = Mutex::new(None);

/// Numbers of [`Blocked`] calls, apart from those of records.
static CALLS: AtomicU64 = AtomicU64::new(1 << 63);

/// Python is about to wait for other ranks, in `what`.
pub fn enter(what: String) {
    let number = CALLS.fetch_add(1, Ordering::Relaxed);
    *blocked() = Some(Blocked { number, what, started: clock::ticks() });
}

/// What Python waited for has come.
pub fn leave() {
    *blocked() = None;
}

pub fn blocked() -> MutexGuard<'static, Option<Blocked>> {
    BLOCKED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What is under way: the numbers of the operations, or of a call of Python's.
pub fn under_way() -> Vec<u64> {
    let mut numbers: Vec<u64> = recorder::running().iter().map(|record| record.ticket).collect();
    numbers.extend(blocked().as_ref().map(|call| call.number));
    numbers.extend(transport::unfinished().iter().map(|op| op.number));
    numbers
}
