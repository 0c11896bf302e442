//! Locks that a panic of another thread does not poison, and atomics, which tests of the board replace.

pub use std::sync::atomic;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex, also after a panic of a thread that held it. A panic becomes an error of the operation in which it happens,
/// and what the mutexes of this crate guard is valid between any two statements.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
