//! Starts of nonblocking operations: the functions `MPI_I...`.

use mpi::ffi::{self, MPI_Comm};

use super::collectives::collective;
use super::ints_of;
use super::matching;
use super::posted::Posted;
use super::rooted;
use super::span::Span;
use crate::call::Call;
use crate::error::Cause;
use crate::ops::Op;

/// Starts an operation.
///
/// # Safety
/// The call's buffers stay where they are, and are not used, until the operation has ended.
pub unsafe fn start(call: &Call) -> Result<Posted, Cause> {
    let Call { site, envelope, .. } = call;
    let mut posted = Posted::default();
    // SAFETY (for all calls below): the handle is a registered communicator's, which is not freed; the buffers were
    // checked against the operation by `Call::check`, and stay as promised; counts and types come from `Span`.
    unsafe {
        match site.op {
            Op::Recv => {
                let recv = call.result()?;
                posted.requests.push(matching::start(site.mpi_name(), &site.comm, envelope, recv)?);
            }
            Op::Exscan | Op::Scan if site.reverse => {
                // A communicator in which the ranks stand the other way round would have to be made first, by all
                // ranks together.
                let (send, recv) = (call.operand()?, call.result()?);
                // The address of an empty allocation may equal MPI_IN_PLACE.
                let operands = vec![0; (site.comm.size as usize * recv.bytes()).max(1)];
                let to = posted.operands.insert(operands).as_mut_ptr().cast();
                let span = Span::of(send)?;
                let (n, t) = span.arguments();
                let comm: MPI_Comm = site.comm.handle();
                posted.add("MPI_Iallgather", |request| {
                    ffi::MPI_Iallgather(send.data().cast(), n, t, to, n, t, comm, request)
                })?;
            }
            Op::Allgatherv if ints_of(call).is_some() => collective(call, Some(&mut posted))?,
            Op::Gatherv | Op::Scatterv if rooted::fits(call) => rooted::start(call, &mut posted)?,
            Op::Allgatherv | Op::Alltoallv | Op::Gatherv | Op::Permute | Op::Scatterv => {
                posted.start_parts(call, call.parts()?)?;
            }
            Op::RaggedAlltoall => {
                let ragged = site.ragged.as_ref().ok_or_else(|| Cause::missing("rows"))?;
                // Python has exchanged them before it starts it.
                let missing = || Cause::missing("counts");
                let (to, from) =
                    ragged.agree(call.counts, &site.location, |_, _| Err(missing()), |_| Err(missing()))?;
                let parts = ragged.parts(&to, &from, &site.location)?;
                parts.check(call.send, call.recv)?;
                posted.start_parts(call, &parts)?;
            }
            _ => collective(call, Some(&mut posted))?,
        }
    }
    Ok(posted)
}
