//! Decides which thread writes a record that others read without a lock. `tests/rust/gate.rs` tries the orders that processors allow.

use super::atomics::{AtomicU64, Ordering, fence};

/// The ticket of a record that is being written.
const WRITING: u64 = u64::MAX;

/// Guards the fields of a record, which are atomics and are written and read `Relaxed`.
pub struct Gate {
    /// The record's number, from 1; 0: there is none yet.
    pub ticket: AtomicU64,
    /// 0 while the operation runs, and something else at first.
    pub ended: AtomicU64,
}

impl Gate {
    /// Makes this thread the one that writes the record, unless its operation runs or another thread has been faster.
    #[inline(always)]
    pub fn claim(&self) -> bool {
        // Acquire, here and below: this thread sees what the thread that wrote the last record has begun.
        let last = self.ticket.load(Ordering::Acquire);
        if last == WRITING || self.ended.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let claimed = self.ticket.compare_exchange(last, WRITING, Ordering::Acquire, Ordering::Relaxed);
        // A reader that sees any of the writes below sees that the ticket is no longer the last one.
        fence(Ordering::Release);
        if claimed.is_ok() {
            self.ended.store(0, Ordering::Relaxed);
        }
        claimed.is_ok()
    }

    /// The record is written, under a number that no other has.
    #[inline(always)]
    pub fn publish(&self, ticket: u64) {
        self.ticket.store(ticket, Ordering::Release);
    }

    /// The operation has ended; `how` is not 0.
    #[inline]
    pub fn end(&self, how: u64) {
        self.ended.store(how, Ordering::Release);
    }

    /// The number of the record, how it has ended, and what `copy`, which gets the number, reads of its fields; None while
    /// it is being written.
    pub fn read<T>(&self, copy: impl FnOnce(u64) -> T) -> Option<(u64, u64, T)> {
        let ticket = self.ticket.load(Ordering::Acquire);
        let ended = self.ended.load(Ordering::Relaxed);
        let fields = copy(ticket);
        fence(Ordering::Acquire);
        let is_whole = ![0, WRITING].contains(&ticket) && self.ticket.load(Ordering::Relaxed) == ticket;
        is_whole.then_some((ticket, ended, fields))
    }
}
