//! The few things that watching needs of MPI itself.

use std::mem::MaybeUninit;

use mpi::ffi::{self, MPI_Comm};

use crate::transport::handle;

/// The ranks in `MPI_COMM_WORLD` of a communicator's members: local, not collective.
///
/// # Safety
/// `comm` is the handle of a live communicator of `size` ranks.
pub unsafe fn world_ranks(comm: usize, size: i32) -> Box<[i32]> {
    let ranks: Vec<i32> = (0..size).collect();
    let mut world = ranks.clone();
    // SAFETY: promised by the caller; groups are freed. The communicator returns codes, and where a call
    // fails (which none of these has a reason to) the ranks stay what they are.
    unsafe {
        let mut ours = MaybeUninit::uninit();
        let mut all = MaybeUninit::uninit();
        if ffi::MPI_Comm_group(handle::<MPI_Comm>(comm), ours.as_mut_ptr()) != 0
            || ffi::MPI_Comm_group(ffi::RSMPI_COMM_WORLD, all.as_mut_ptr()) != 0
        {
            return world.into();
        }
        let (mut ours, mut all) = (ours.assume_init(), all.assume_init());
        ffi::MPI_Group_translate_ranks(ours, size, ranks.as_ptr(), all, world.as_mut_ptr());
        ffi::MPI_Group_free(&mut ours);
        ffi::MPI_Group_free(&mut all);
    }
    world.into()
}

/// Whether this thread may call MPI while another one does.
pub fn any_thread_may_call() -> bool {
    let (mut initialized, mut finalized, mut level) = (0, 0, 0);
    // SAFETY: may be called at any time, the last between MPI_Init and MPI_Finalize.
    unsafe {
        ffi::MPI_Initialized(&mut initialized);
        ffi::MPI_Finalized(&mut finalized);
        if initialized == 0 || finalized != 0 {
            return false;
        }
        ffi::MPI_Query_thread(&mut level);
        level >= ffi::RSMPI_THREAD_MULTIPLE
    }
}

/// Ends the job through MPI, if MPI can be asked from here.
pub fn abort(code: i32) {
    if any_thread_may_call() {
        // SAFETY: MPI is initialised, and any thread may call it.
        unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, code) };
    }
}
