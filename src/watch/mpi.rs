//! The few things that watching needs of MPI itself.

use std::mem::MaybeUninit;

use mpi::ffi::{self, MPI_Comm, MPI_Status};

use crate::ops::Comm;
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

/// Source and tag of a message that has arrived on a communicator, and that nobody has received.
pub fn unreceived(comm: &Comm) -> Option<(i32, i32)> {
    if comm.is_freed() || !is_running() {
        return None;
    }
    let mut status = MaybeUninit::<MPI_Status>::zeroed();
    let mut found = 0;
    // SAFETY: a registered communicator, which is not freed, between MPI_Init and MPI_Finalize; the status
    // is written where a message is found.
    unsafe {
        let (source, tag) = (ffi::RSMPI_ANY_SOURCE, ffi::RSMPI_ANY_TAG);
        // MPI may need a few calls to take in what has arrived.
        for _ in 0..10 {
            let code = ffi::MPI_Iprobe(source, tag, handle(comm.handle), &mut found, status.as_mut_ptr());
            if code != 0 || found != 0 {
                break;
            }
        }
        let status = status.assume_init();
        (found != 0).then_some((status.MPI_SOURCE, status.MPI_TAG))
    }
}

/// Whether MPI is between its initialisation and its end.
fn is_running() -> bool {
    let (mut initialized, mut finalized) = (0, 0);
    // SAFETY: may be called at any time.
    unsafe {
        ffi::MPI_Initialized(&mut initialized);
        ffi::MPI_Finalized(&mut finalized);
    }
    initialized != 0 && finalized == 0
}

/// Whether this thread may call MPI while another one does.
pub fn any_thread_may_call() -> bool {
    let mut level = 0;
    // SAFETY: between MPI_Init and MPI_Finalize.
    is_running() && unsafe { ffi::MPI_Query_thread(&mut level) == 0 && level >= ffi::RSMPI_THREAD_MULTIPLE }
}

/// Ends the job through MPI, if MPI can be asked from here.
pub fn abort(code: i32) {
    if any_thread_may_call() {
        // SAFETY: MPI is initialised, and any thread may call it.
        unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, code) };
    }
}
