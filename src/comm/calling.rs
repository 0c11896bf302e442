//! What MPI calls back while this thread is in a call of ours.
//!
//! MPICH frees a communicator when the last request on it ends, within whatever function of MPI's ends it, in any thread.
//! No function of MPI's may be called there, and the locks of the request may be held. What was made from the communicator is
//! therefore dropped when the call has ended.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use super::Comm;

/// Set where something was freed meanwhile.
const ANY_FREED: u32 = 1 << 31;

thread_local! {
    /// How many [`Calling`] there are, and whether [`ANY_FREED`].
    static CALLS: Cell<u32> = const { Cell::new(0) };
    static FREED: RefCell<Vec<Arc<Comm>>> = const { RefCell::new(Vec::new()) };
}

/// While there is one, its thread is in a call that may call MPI.
pub struct Calling(());

impl Calling {
    #[inline]
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        CALLS.set(CALLS.get() + 1);
        Self(())
    }
}

impl Drop for Calling {
    #[inline]
    fn drop(&mut self) {
        let left = CALLS.get() - 1;
        CALLS.set(left);
        if left == ANY_FREED {
            detach_freed();
        }
    }
}

#[cold]
fn detach_freed() {
    CALLS.set(0);
    FREED.take().iter().for_each(|comm| comm.detach());
}

/// Whether this thread is in such a call: MPI has called what calls this.
#[cfg_attr(feature = "python", pyo3::pyfunction)]
pub fn is_calling() -> bool {
    CALLS.get() > 0
}

/// Detaches what was made from a communicator that has been freed: now, or when the call has ended that this
/// thread is in.
pub(super) fn detach(comm: Arc<Comm>) {
    if is_calling() {
        FREED.with_borrow_mut(|freed| freed.push(comm));
        CALLS.set(CALLS.get() | ANY_FREED);
    } else {
        comm.detach();
    }
}
