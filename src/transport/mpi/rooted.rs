//! `gatherv` and `scatterv` by MPI's functions, where an `int` counts the elements of the root's array: they need no derived
//! data types. MPI does not tell a receiver that a block was shorter than expected, so the lengths of the blocks go first.

use std::ffi::c_int;
use std::ptr::null_mut;

use mpi::ffi::{self, MPI_Comm};

use super::count_limit;
use super::lengths::Lengths;
use super::posted::{Posted, either};
use crate::call::Call;
use crate::error::Cause;
use crate::mpilib::{check, in_place};
use crate::ops::{Dtype, Op};

/// Whether MPI's functions take the counts. All ranks see the same answer.
pub fn fits(call: &Call) -> bool {
    call.site.parts.as_ref().is_some_and(|parts| parts.fits(count_limit()))
}

/// Carries out a `gatherv` or a `scatterv`.
///
/// # Safety
/// The call's buffers have passed `Call::check`, and its counts [`fits`].
pub unsafe fn execute(call: &Call) -> Result<(), Cause> {
    // SAFETY: promised by the caller.
    unsafe { run(call, None) }
}

/// Starts a `gatherv` or a `scatterv`.
///
/// # Safety
/// As for [`execute`]; the buffers stay until the operation has ended, and do not overlap.
pub unsafe fn start(call: &Call, posted: &mut Posted) -> Result<(), Cause> {
    // SAFETY: promised by the caller.
    unsafe { run(call, Some(posted)) }
}

unsafe fn run(call: &Call, mut posted: Option<&mut Posted>) -> Result<(), Cause> {
    let (site, parts) = (call.site, call.parts()?);
    let (root, is_root, is_gather) = (site.root, site.is_root(), site.op == Op::Gatherv);
    let (length, byte) = (size_of::<u64>() as c_int, Dtype::Uint8.mpi());
    let mut lengths = Lengths::new(call)?;
    let (own, all) = lengths.pointers();
    // SAFETY: the handle is a registered communicator's, which is not freed; the buffers are as promised; the counts fit.
    unsafe {
        let comm: MPI_Comm = site.comm.handle();
        if is_gather {
            either!(posted, MPI_Gather | MPI_Igather(own, length, byte, all, length, byte, root, comm))?;
        } else {
            either!(posted, MPI_Scatter | MPI_Iscatter(all, length, byte, own, length, byte, root, comm))?;
        }
        match posted.as_deref_mut() {
            Some(posted) => posted.lengths = Some(lengths),
            // A block of another length would not arrive, or not fit.
            None => lengths.check(call)?,
        }
        let mut copy = Vec::new();
        if let (Some(to), true) = (&call.recv, is_root) {
            let send = call.operand()?.apart_from(to, &mut copy);
            parts.clear(to);
            parts.copy_own(Some(send), call.recv);
            let ints = parts.ints_of_root(is_gather);
            let (counts, starts, t) = (ints.counts.as_ptr(), ints.starts.as_ptr(), to.dtype().mpi());
            if is_gather {
                let (from, to) = (in_place(), to.data().cast());
                return either!(
                    posted,
                    MPI_Gatherv | MPI_Igatherv(from, 0, t, to, counts, starts, t, root, comm)
                );
            }
            let (from, to) = (send.data().cast(), in_place());
            return either!(
                posted,
                MPI_Scatterv | MPI_Iscatterv(from, counts, starts, t, to, 0, t, root, comm)
            );
        }
        let (counts, starts) = (std::ptr::null(), std::ptr::null());
        if is_gather {
            let from = parts.sent_to(root as usize, call.operand()?);
            let (n, t, from) = (from.count() as c_int, from.dtype().mpi(), from.data().cast());
            let to = null_mut();
            return either!(
                posted,
                MPI_Gatherv | MPI_Igatherv(from, n, t, to, counts, starts, t, root, comm)
            );
        }
        let recv = call.result()?;
        parts.clear(recv);
        let to = parts.received_from(root as usize, recv);
        let (n, t, to) = (to.count() as c_int, to.dtype().mpi(), to.data().cast());
        let from = null_mut();
        either!(posted, MPI_Scatterv | MPI_Iscatterv(from, counts, starts, t, to, n, t, root, comm))
    }
}
