//! Communicators that compiled programs refer to by key.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// A communicator. It is never dropped: compiled programs point to it and may outlive its owner.
#[derive(Debug)]
pub struct Comm {
    pub key: Box<str>,
    /// Its number among all of this process, for operands. None is used twice.
    pub number: i32,
    /// The MPI handle: a pointer or a 32-bit integer, whichever the library uses.
    pub handle: usize,
    pub rank: i32,
    pub size: i32,
    /// The same ranks in reverse order, made by the first suffix scan.
    pub reversed: OnceLock<usize>,
    /// The same ranks, for messages that must not meet the user's; made by the first halo exchange.
    pub private: OnceLock<usize>,
    freed: AtomicBool,
}

impl Comm {
    pub fn new(key: &str, handle: usize, rank: i32, size: i32) -> Self {
        static COUNT: AtomicI32 = AtomicI32::new(0);
        Self {
            key: key.into(),
            number: COUNT.fetch_add(1, Ordering::Relaxed),
            handle,
            rank,
            size,
            reversed: OnceLock::new(),
            private: OnceLock::new(),
            freed: AtomicBool::new(false),
        }
    }

    pub fn is_freed(&self) -> bool {
        self.freed.load(Ordering::Relaxed)
    }
}

static COMMS: Mutex<BTreeMap<Box<str>, &'static Comm>> = Mutex::new(BTreeMap::new());

fn comms() -> MutexGuard<'static, BTreeMap<Box<str>, &'static Comm>> {
    COMMS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes `key` name this communicator. Programs compiled for an earlier one of that name keep the
/// earlier one, which counts as freed.
pub fn register(key: &str, handle: usize, rank: i32, size: i32) -> &'static Comm {
    let mut comms = comms();
    if let Some(&old) = comms.get(key) {
        if (old.handle, old.rank, old.size) == (handle, rank, size) && !old.is_freed() {
            return old;
        }
        old.freed.store(true, Ordering::Relaxed);
    }
    let comm: &'static Comm = Box::leak(Box::new(Comm::new(key, handle, rank, size)));
    comms.insert(comm.key.clone(), comm);
    comm
}

/// Marks a communicator: from now on executing an operation on it is an error. None if it was marked.
pub fn free(key: &str) -> Option<&'static Comm> {
    let comm = lookup(key)?;
    (!comm.freed.swap(true, Ordering::Relaxed)).then_some(comm)
}

pub fn lookup(key: &str) -> Option<&'static Comm> {
    comms().get(key).copied()
}

/// The communicator of a number, if it has not been freed.
pub fn numbered(number: i32) -> Option<&'static Comm> {
    comms().values().copied().find(|comm| comm.number == number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_is_used_again_names_the_new_communicator() {
        let first = register("comm-test", 1, 0, 2);
        assert!(std::ptr::eq(first, register("comm-test", 1, 0, 2)));
        assert!(std::ptr::eq(first, free("comm-test").unwrap()));
        assert!(first.is_freed() && free("comm-test").is_none());
        let second = register("comm-test", 1, 0, 2);
        assert!(!second.is_freed() && first.is_freed());
        assert!(std::ptr::eq(second, lookup("comm-test").unwrap()));
    }
}
