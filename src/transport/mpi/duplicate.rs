//! A duplicate of a communicator, for messages of ours: on the program's, its receives with wildcards would match them.

use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use mpi::ffi::{self, MPI_Comm, MPI_Request, MPI_Status};

use crate::comm::Comm;
use crate::error::Cause;
use crate::mpilib::{self, check, handle};

/// Tags of batches, beyond those of ghost cells, which are the numbers of directions.
const FIRST_TAG: u32 = 1 << 14;

/// Begun by the first operation that needs it, which all ranks take part in, and ready when MPI says so. Until then
/// messages are kept back: a non-blocking operation does not wait for other ranks when it is started.
pub struct Duplicate {
    /// Where MPI writes the handle, and holds its address until the communicator is ready.
    comm: Box<UnsafeCell<MaybeUninit<MPI_Comm>>>,
    pending: Mutex<Option<MPI_Request>>,
    is_ready: AtomicBool,
    /// How many batches there have been, which is the same on all ranks.
    batches: AtomicU32,
}

// SAFETY: handles of MPI's, which was initialised for calls from any thread where there is another one. The cell is
// read once `is_ready` is set, after which nobody writes it.
unsafe impl Send for Duplicate {}
// SAFETY: as above.
unsafe impl Sync for Duplicate {}

impl Duplicate {
    /// That of a communicator. Waits for nobody.
    pub fn of(comm: &Comm) -> Result<Arc<Self>, Cause> {
        comm.attach(|| {
            let new = Box::new(UnsafeCell::new(MaybeUninit::<MPI_Comm>::uninit()));
            let mut request = MaybeUninit::<MPI_Request>::uninit();
            // SAFETY: a registered communicator, which is not freed; both places live until the request has ended.
            unsafe {
                let code = ffi::MPI_Comm_idup(handle(comm.handle), new.get().cast(), request.as_mut_ptr());
                check("MPI_Comm_idup", code)?;
                let pending = Mutex::new(Some(request.assume_init()));
                let (is_ready, batches) = (AtomicBool::new(false), AtomicU32::new(0));
                Ok(Self { comm: new, pending, is_ready, batches })
            }
        })
    }

    /// Its handle, once it is ready. Each call lets MPI go on with that.
    pub fn handle(&self) -> Result<Option<MPI_Comm>, Cause> {
        if !self.is_ready.load(Ordering::Acquire) {
            let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(request) = pending.as_mut() {
                let (mut flag, mut status) = (0, MaybeUninit::<MPI_Status>::zeroed());
                // SAFETY: a request that nobody else uses while the lock is held; with its end the handle is there.
                unsafe {
                    check("MPI_Test", ffi::MPI_Test(request, &mut flag, status.as_mut_ptr()))?;
                    if flag == 0 {
                        return Ok(None);
                    }
                    let code = ffi::MPI_Comm_set_errhandler(
                        (*self.comm.get()).assume_init(),
                        ffi::RSMPI_ERRORS_RETURN,
                    );
                    check("MPI_Comm_set_errhandler", code)?;
                }
                *pending = None;
                self.is_ready.store(true, Ordering::Release);
            }
        }
        // SAFETY: written before `is_ready` was set.
        Ok(Some(unsafe { (*self.comm.get()).assume_init() }))
    }

    /// A tag for the messages of one operation, the same on all ranks, since all take part in each of them. They may be
    /// sent in another order than they were asked for in.
    pub fn next_tag(&self) -> c_int {
        (FIRST_TAG + self.batches.fetch_add(1, Ordering::Relaxed) % FIRST_TAG) as c_int
    }
}

impl Drop for Duplicate {
    fn drop(&mut self) {
        if !mpilib::is_running() || mpilib::is_ending() {
            return;
        }
        let pending = self.pending.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: nobody else has the handles. All ranks have begun the duplicate, and free it.
        unsafe {
            if let Some(request) = pending {
                ffi::MPI_Wait(request, MaybeUninit::<MPI_Status>::zeroed().as_mut_ptr());
            }
            ffi::MPI_Comm_free(self.comm.get().cast());
        }
    }
}
