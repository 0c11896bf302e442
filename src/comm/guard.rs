//! What keeps a communicator for an operation that is under way on it.
//!
//! The program may free it meanwhile, in another thread. Open MPI tells us first, and we wait. Others, MPICH and what is
//! derived from it, only count what uses the communicator, which is each message of a collective by itself: between
//! two of them nothing does, and the communicator would be destroyed. A persistent request uses it too, though
//! it is never started.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::ptr::null;

use mpi::ffi::{self, MPI_Request};

use super::Comm;
use crate::error::Cause;
use crate::mpilib::check;

/// While there is one, MPI destroys the communicator at most when this is dropped, and calls back then: drop it within
/// a [`Calling`](super::Calling).
#[must_use]
pub struct CommGuard(Option<MPI_Request>);

// SAFETY: a handle of MPI's, which was initialized for calls from any thread where there is another one.
unsafe impl Send for CommGuard {}

impl Comm {
    /// Keeps it for an operation, if freeing it would not wait for that. Local.
    #[inline]
    pub fn guard(&self) -> Result<CommGuard, Cause> {
        if self.is_counted { self.count_one().map(Some).map(CommGuard) } else { Ok(CommGuard(None)) }
    }

    fn count_one(&self) -> Result<MPI_Request, Cause> {
        const TAG: c_int = 0;
        let mut request = MaybeUninit::uninit();
        // SAFETY: a registered communicator, and a message of nothing that is never sent. MPI writes the request if there is no
        // error. To this rank: MPI need not count what goes to MPI_PROC_NULL.
        unsafe {
            let (comm, byte) = (self.handle(), ffi::RSMPI_UINT8_T);
            let code = ffi::MPI_Send_init(null(), 0, byte, self.rank, TAG, comm, request.as_mut_ptr());
            check("MPI_Send_init", code)?;
            Ok(request.assume_init())
        }
    }
}

impl Drop for CommGuard {
    #[inline]
    fn drop(&mut self) {
        if let Some(request) = &mut self.0 {
            // SAFETY: made by `count_one`, and in no other place.
            unsafe { ffi::MPI_Request_free(request) };
        }
    }
}
