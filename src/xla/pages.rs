//! Pages for results that have not been written to yet.
//!
//! XLA takes results from malloc, which asks the system for large ones anew at each call. Every page of such
//! a result is then a fault at its first write, and all of them together cost more than the message. The
//! handler sees a result before anything is written to it, so it asks for all pages at once, and for huge ones.

use crate::ops::Buffer;

/// Smaller results come from memory that malloc has kept: nothing is to be gained.
const LEAST: usize = 1 << 20;

/// Asks for the pages of a result that is about to be written. What the system does not grant, the write itself gets.
#[inline]
pub fn prepare(result: &Buffer) {
    if result.bytes() >= LEAST {
        populate(result.data() as usize, result.bytes());
    }
}

#[cfg(not(target_os = "linux"))]
fn populate(_: usize, _: usize) {}

/// Only where pages are missing: to find that all are there takes the system as long as a sixth of a copy. The one in the
/// middle stands for the others, since malloc gives memory back in long stretches.
#[cfg(target_os = "linux")]
#[cold]
fn populate(start: usize, bytes: usize) {
    // SAFETY: takes nothing.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    // Whole pages, also those that the result shares with its neighbors: no contents change.
    let (first, end) = (start & !(page - 1), (start + bytes).next_multiple_of(page));
    let middle = first.midpoint(end) & !(page - 1);
    let mut flags = [1u8];
    // SAFETY: asks about one page of a result, and writes one byte; then advises on pages of it, which changes nothing that
    // is in them.
    unsafe {
        let is_missing = libc::mincore(middle as *mut _, page, flags.as_mut_ptr()) == 0 && flags[0] & 1 == 0;
        for advice in [libc::MADV_HUGEPAGE, libc::MADV_POPULATE_WRITE] {
            if is_missing {
                libc::madvise(first as *mut _, end - first, advice);
            }
        }
    }
}
