//! Pages for results that nobody has touched yet.
//!
//! XLA takes results from malloc, which asks the system for large ones anew at each call. Every page of such
//! a result is then a fault at its first write, and all of them together cost more than the message. The
//! handler sees a result before anything is written to it, so it asks for all pages at once, and for huge ones.

use crate::call::Call;

/// Smaller results come from memory that malloc has kept: nothing is to be gained.
const LEAST: usize = 1 << 20;

/// The smallest page that is called huge, on most machines.
#[cfg(target_os = "linux")]
const HUGE: usize = 2 << 20;

/// Into how many parts a large result is cut to see which of its pages are missing.
#[cfg(target_os = "linux")]
const STRETCHES: usize = 8;

/// Asks for the pages that a call is going to write. What the system does not grant, the write itself gets.
#[inline]
pub fn prepare(call: &Call) {
    if let Some(recv) = &call.recv
        && recv.bytes() >= LEAST
        && call.send.is_none_or(|send| send.data() != recv.data())
    {
        populate(recv.data() as usize, recv.bytes());
    }
}

#[cfg(not(target_os = "linux"))]
fn populate(_: usize, _: usize) {}

/// Only where pages are missing: to find that all are there takes the system as long as a sixth of a copy.
/// One page of each stretch tells of the others, since malloc gives memory back in long stretches.
#[cfg(target_os = "linux")]
#[cold]
fn populate(start: usize, bytes: usize) {
    // SAFETY: takes nothing.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    let first_of = |address: usize| address & !(page - 1);
    // Whole pages, also those that the result shares with its neighbours: no contents change.
    let (start, end) = (first_of(start), (start + bytes).next_multiple_of(page));
    let present = |address: usize| {
        let mut flags = [1u8];
        // SAFETY: asks about one page of a result, and writes one byte.
        unsafe { libc::mincore(address as *mut _, page, flags.as_mut_ptr()) != 0 || flags[0] & 1 != 0 }
    };
    let fill = |from: usize, to: usize| {
        for advice in [libc::MADV_HUGEPAGE, libc::MADV_POPULATE_WRITE] {
            if from < to {
                // SAFETY: about pages of a result. Neither changes what is in them.
                unsafe { libc::madvise(from as *mut _, to - from, advice) };
            }
        }
    };
    let stretch = (bytes / STRETCHES).next_multiple_of(HUGE);
    let (mut missing, mut at) = (start, start);
    while at < end {
        let next = (at + 1).next_multiple_of(stretch).min(end);
        if present(first_of(at.midpoint(next))) {
            fill(missing, at);
            missing = next;
        }
        at = next;
    }
    fill(missing, end);
}
