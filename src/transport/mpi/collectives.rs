//! MPI's functions that have a blocking and a nonblocking form with the same arguments.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use mpi::ffi::{self, MPI_Comm};

use super::posted::{Posted, either};
use super::reducer::Reducer;
use super::span::Span;
use super::{gathered, in_blocks, reversed, send_or_in_place, send_or_moved};
use crate::call::Call;
use crate::comm::hash;
use crate::error::Cause;
use crate::mpilib::{check, in_place};
use crate::ops::Op;

/// Carries out an operation, or initiates it if there is a list to add its requests to.
///
/// # Safety
/// The call's buffers were checked against the operation by `Call::check`. The buffers of a
/// nonblocking operation stay until it has completed.
#[inline(always)]
pub unsafe fn collective(call: &Call, mut posted: Option<&mut Posted>) -> Result<(), Cause> {
    let Call { site, envelope, .. } = call;
    let root = site.root;
    // SAFETY (for all calls below): the handle is a registered communicator's, which is not freed; the buffers are as
    // promised; counts and types come from `Span`.
    unsafe {
        let comm: MPI_Comm = site.comm.handle();
        match site.op {
            Op::Allgather => {
                let (send, recv) = (call.operand()?, call.result()?);
                let span = Span::of(send)?;
                let (n, t) = span.arguments();
                let (from, to) = (send_or_moved(send, recv, site.comm.rank), recv.data().cast());
                either!(posted, MPI_Allgather | MPI_Iallgather(from, n, t, to, n, t, comm))
            }
            Op::Allreduce => {
                let (send, recv) = (call.operand()?, call.result()?);
                let by = Reducer::of(site, send.dtype())?;
                by.in_pieces(recv, (send_or_in_place(send, recv), recv.data()), |from, to, n| {
                    either!(posted, MPI_Allreduce | MPI_Iallreduce(from, to, n, by.datatype, by.op, comm))
                })
            }
            Op::Allgatherv => {
                let (own, recv, ints) = gathered(call)?;
                let mut copy = Vec::new();
                let from = own.apart_from(&recv, &mut copy).data().cast();
                call.parts()?.clear(&recv);
                let (counts, starts) = (ints.counts.as_ptr(), ints.starts.as_ptr());
                let (n, t, to) = (own.count() as c_int, recv.dtype().mpi(), recv.data().cast());
                either!(posted, MPI_Allgatherv | MPI_Iallgatherv(from, n, t, to, counts, starts, t, comm))
            }
            Op::Alltoall => {
                let (send, recv) = (call.operand()?, call.result()?);
                let count = send.count() / site.comm.size as usize;
                let span = Span::new(count, send.dtype())?;
                let (n, t) = span.arguments();
                let (from, to) = (send_or_in_place(send, recv), recv.data().cast());
                either!(posted, MPI_Alltoall | MPI_Ialltoall(from, n, t, to, n, t, comm))
            }
            Op::Barrier => either!(posted, MPI_Barrier | MPI_Ibarrier(comm)),
            Op::Bcast => {
                let buffer = if site.is_root() { call.operand()? } else { call.result()? };
                let span = Span::of(buffer)?;
                let (n, t) = span.arguments();
                either!(posted, MPI_Bcast | MPI_Ibcast(buffer.data().cast(), n, t, root, comm))
            }
            Op::Gather => {
                let send = call.operand()?;
                let span = Span::of(send)?;
                let (n, t) = span.arguments();
                let (from, to) = if site.is_root() {
                    let recv = call.result()?;
                    (send_or_moved(send, recv, site.comm.rank), recv.data().cast())
                } else {
                    (send.data().cast(), null_mut())
                };
                either!(posted, MPI_Gather | MPI_Igather(from, n, t, to, n, t, root, comm))
            }
            Op::Reduce => {
                let send = call.operand()?;
                let by = Reducer::of(site, send.dtype())?;
                let (from, to) = if site.is_root() {
                    let recv = call.result()?;
                    (send_or_in_place(send, recv), recv.data())
                } else {
                    (send.data().cast(), null_mut())
                };
                by.in_pieces(send, (from, to), |from, to, n| {
                    let (t, op) = (by.datatype, by.op);
                    either!(posted, MPI_Reduce | MPI_Ireduce(from, to, n, t, op, root, comm))
                })
            }
            Op::ReduceScatter | Op::ReduceScatterv => {
                let (send, recv) = (call.operand()?, call.result()?);
                let by = Reducer::of(site, send.dtype())?;
                let (t, op) = (by.datatype, by.op);
                let from = || send_or_in_place(send, recv);
                if site.op == Op::ReduceScatter && by.takes_whole(recv) {
                    return by.in_pieces(recv, (from(), recv.data()), |from, to, n| {
                        either!(
                            posted,
                            MPI_Reduce_scatter_block | MPI_Ireduce_scatter_block(from, to, n, t, op, comm)
                        )
                    });
                }
                if site.op == Op::ReduceScatterv {
                    let counts = call.parts()?.sent();
                    // MPI would reduce what does not belong together, or wait.
                    match posted.as_deref_mut() {
                        Some(posted) => posted.agree(call, hash(&counts))?,
                        None if site.comm.agrees(hash(&counts))? => {}
                        None => return Err(Cause::Counts { counts }),
                    }
                    // A rank whose operand is short and one whose is not would start different operations.
                    if by.takes_whole(send) {
                        let (items, from) = (by.items(&counts)?, from());
                        let (n, to): (_, *mut c_void) = (items.as_ptr(), recv.data().cast());
                        either!(posted, MPI_Reduce_scatter | MPI_Ireduce_scatter(from, to, n, t, op, comm))?;
                        if let Some(posted) = posted {
                            posted.items = Some(items);
                        }
                        return Ok(());
                    }
                }
                in_blocks(call, &by, |root, from, to, n| {
                    either!(posted, MPI_Reduce | MPI_Ireduce(from, to, n, t, op, root, comm))
                })
            }
            Op::Exscan | Op::Scan => {
                let (send, recv) = (call.operand()?, call.result()?);
                let by = Reducer::of(site, send.dtype())?;
                let (t, op) = (by.datatype, by.op);
                let reversed = site.reverse.then(|| reversed(site)).transpose()?;
                let comm = reversed.as_ref().map_or(comm, |reversed| reversed.0.handle());
                by.in_pieces(recv, (send_or_in_place(send, recv), recv.data()), |from, to, n| match site.op {
                    Op::Scan => either!(posted, MPI_Scan | MPI_Iscan(from, to, n, t, op, comm)),
                    _ => either!(posted, MPI_Exscan | MPI_Iexscan(from, to, n, t, op, comm)),
                })
            }
            Op::Scatter => {
                let recv = call.result()?;
                let span = Span::of(recv)?;
                let (n, t) = span.arguments();
                let from = if site.is_root() { call.operand()?.data() } else { null_mut() };
                let aliased = site.is_root() && call.operand()?.overlaps(recv);
                let to = if aliased { in_place() } else { recv.data().cast() };
                either!(posted, MPI_Scatter | MPI_Iscatter(from.cast(), n, t, to, n, t, root, comm))?;
                if aliased {
                    // The root's own block was left in its place.
                    std::ptr::copy(from.add(root as usize * recv.bytes()), recv.data(), recv.bytes());
                }
                Ok(())
            }
            Op::Send => {
                let send = call.operand()?;
                let span = Span::of(send)?;
                let (n, t) = span.arguments();
                let (from, dest, tag) = (send.data().cast(), envelope.dest, envelope.sendtag);
                either!(posted, MPI_Send | MPI_Isend(from, n, t, dest, tag, comm))
            }
            // MPI has no such pair of functions, or mpi4jax uses others.
            Op::Alltoallv
            | Op::Gatherv
            | Op::HaloExchange
            | Op::Permute
            | Op::RaggedAlltoall
            | Op::Recv
            | Op::Scatterv
            | Op::Sendrecv => {
                let feature = format!("{} by one function of MPI", site.op);
                Err(Cause::Unsupported { feature, reason: "MPI has no such function" })
            }
        }
    }
}
