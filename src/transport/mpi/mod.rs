//! Host memory through the MPI library.
//!
//! The raw C functions rather than rsmpi's safe layer, which drops return codes and knows neither
//! `MPI_IN_PLACE` on run-time types nor counts beyond 32 bits.

pub mod matching;
mod p2p;
mod reducer;
mod span;
mod start;
mod vectors;

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use mpi::ffi::{self, MPI_Comm, MPI_Status};

use self::p2p::P2pBatch;
use self::reducer::Reducer;
pub use self::reducer::is_ours;
pub use self::span::set_count_limit;
use self::span::{Span, count_limit};
pub use self::start::{Posted, start};
use super::{Arrived, Transport, arrive};
use crate::call::Call;
use crate::comm::{Comm, OwnedComm, hash};
use crate::error::{Cause, Error};
use crate::mpilib::{check, handle, in_place};
use crate::ops::{Buffer, Dtype, Ints, Op, Parts};

/// Host MPI.
#[derive(Clone, Copy, Debug)]
pub struct Mpi;

impl Transport for Mpi {
    fn name(&self) -> &'static str {
        "mpi"
    }

    #[inline]
    fn execute(&self, call: &Call) -> Result<(), Error> {
        run(call).map_err(|cause| Error { transport: Some(self.name()), ..call.site.error(cause) })
    }
}

/// The send argument of a collective whose send and receive buffers are equally large: where they are
/// one buffer, MPI wants to be told.
#[inline]
fn send_or_in_place(send: &Buffer, recv: &Buffer) -> *mut c_void {
    if send.data() == recv.data() && recv.count() > 0 { in_place() } else { send.data().cast() }
}

/// The send argument of a collective that puts this rank's block at its place in `recv`: if the two
/// overlap, the block is moved there first.
fn send_or_moved(send: &Buffer, recv: &Buffer, rank: i32) -> *mut c_void {
    if !send.overlaps(recv) {
        return send.data().cast();
    }
    // SAFETY: `recv` holds one block of `send`'s size per rank; memmove semantics.
    unsafe { std::ptr::copy(send.data(), recv.data().add(rank as usize * send.bytes()), send.bytes()) };
    in_place()
}

/// The ranks in reverse order, for suffix scans; made by the first one.
struct Reversed(OwnedComm);

fn reversed(comm: &Comm) -> Result<Arc<Reversed>, Cause> {
    comm.attach(|| comm.split(comm.size - comm.rank).map(Reversed))
}

/// What MPI says of a message that it has received.
fn finish_receive(call: &Call, status: &MPI_Status) -> Result<(), Cause> {
    call.status.write(status);
    let Some(recv) = &call.recv else { return Ok(()) };
    let mut count: c_int = 0;
    // SAFETY: `status` was filled by a receive of this type.
    unsafe { check("MPI_Get_count", ffi::MPI_Get_count(status, recv.dtype().mpi(), &mut count))? };
    let count = if count >= 0 && recv.count() <= c_int::MAX as usize {
        count as usize
    } else {
        // More than an int counts.
        let mut elements: ffi::MPI_Count = 0;
        // SAFETY: as above.
        let code = unsafe { ffi::MPI_Get_elements_x(status, recv.dtype().mpi(), &mut elements) };
        check("MPI_Get_elements_x", code)?;
        elements.max(0) as usize
    };
    arrive(call, &Arrived { source: status.MPI_SOURCE, tag: status.MPI_TAG, count })
}

fn parts_of<'a>(call: &Call<'a>) -> Result<&'a Parts, Cause> {
    call.site.parts.as_deref().ok_or_else(|| missing("parts"))
}

/// For an `allgatherv` whose counts MPI's function takes: those of all ranks are known, so all of them choose alike.
fn ints_of<'a>(call: &Call<'a>) -> Option<&'a Ints> {
    call.site.parts.as_ref()?.received_ints(count_limit())
}

/// This rank's part, the result, and what comes from each rank.
fn gathered<'a>(call: &Call<'a>) -> Result<(Buffer, Buffer, &'a Ints), Cause> {
    let send = call.send.as_ref().ok_or_else(|| missing("operand"))?;
    let own = parts_of(call)?.for_all(send).ok_or_else(|| missing("parts"))?;
    let recv = call.recv.ok_or_else(|| missing("result"))?;
    Ok((own, recv, ints_of(call).ok_or_else(|| missing("parts"))?))
}

/// Calls `step(root, from, to, items)` for the block of each rank, of a reduction of which every rank gets its block, and for
/// each piece of it: a piece is not beside the same piece of the next block.
///
/// # Safety
/// The call's buffers have passed `Call::check`.
unsafe fn in_blocks(
    call: &Call,
    by: &Reducer,
    mut step: impl FnMut(c_int, *mut c_void, *mut c_void, c_int) -> Result<(), Cause>,
) -> Result<(), Cause> {
    let send = call.send.as_ref().ok_or_else(|| missing("operand"))?;
    let recv = call.recv.as_ref().ok_or_else(|| missing("result"))?;
    (0..call.site.comm.size).try_for_each(|root| {
        let block = match &call.site.parts {
            Some(parts) => parts.sent_to(root as usize, send),
            None => send.part(root as usize * recv.count(), recv.count()),
        };
        let (from, to) = if root == call.site.comm.rank {
            // What lies before this rank's block has been reduced.
            (send_or_moved(&block, recv, 0), recv.data())
        } else {
            (block.data().cast(), std::ptr::null_mut())
        };
        // SAFETY: promised by the caller.
        unsafe { by.in_pieces(&block, (from, to), |from, to, n| step(root, from, to, n)) }
    })
}

#[cold]
fn missing(what: &'static str) -> Cause {
    Cause::Buffers { what, expected: 1, actual: 0 }
}

#[inline]
fn run(call: &Call) -> Result<(), Cause> {
    let Call { site, envelope, .. } = call;
    let send = || call.send.as_ref().ok_or_else(|| missing("operand"));
    let recv = || call.recv.as_ref().ok_or_else(|| missing("result"));
    let name = site.op.mpi_name();
    let ranks = site.comm.size as usize;
    // SAFETY (for all calls below): the handle is a registered communicator's, which is not freed; the
    // buffers were checked against the operation by `Call::new`; counts and types come from `Span`.
    unsafe {
        let comm: MPI_Comm = handle(site.comm.handle);
        match site.op {
            Op::Allgather => {
                let (send, recv) = (send()?, recv()?);
                let span = Span::new(send.count(), send.dtype())?;
                let from = send_or_moved(send, recv, site.comm.rank);
                let (n, t) = (span.count, span.datatype);
                check(name, ffi::MPI_Allgather(from, n, t, recv.data().cast(), n, t, comm))
            }
            Op::Allreduce => {
                let (send, recv) = (send()?, recv()?);
                let by = Reducer::new(site.reduction, send.dtype())?;
                let from = send_or_in_place(send, recv);
                by.in_pieces(recv, (from, recv.data()), |from, to, n| {
                    check(name, ffi::MPI_Allreduce(from, to, n, by.datatype, by.op, comm))
                })
            }
            Op::Allgatherv if ints_of(call).is_some() => {
                let (own, recv, ints) = gathered(call)?;
                let copy =
                    own.overlaps(&recv).then(|| std::slice::from_raw_parts(own.data(), own.bytes()).to_vec());
                let from = copy.as_ref().map_or(own.data().cast_const(), |copy| copy.as_ptr());
                parts_of(call)?.clear(&recv);
                let (t, counts, starts) = (recv.dtype().mpi(), ints.counts.as_ptr(), ints.starts.as_ptr());
                let (n, to) = (own.count() as c_int, recv.data().cast());
                check(name, ffi::MPI_Allgatherv(from.cast(), n, t, to, counts, starts, t, comm))
            }
            // MPI's functions count in int. A rank knows its own counts, and not whether those of the others are too large
            // for that: so they could not choose together. For gatherv and scatterv MPI sends the same messages.
            Op::Allgatherv | Op::Alltoallv | Op::Gatherv | Op::Permute | Op::Scatterv => {
                parts_of(call)?.exchange(call.send, call.recv, &mut P2pBatch::new(&site.comm)?)
            }
            Op::Alltoall => {
                let (send, recv) = (send()?, recv()?);
                let span = Span::new(send.count() / ranks, send.dtype())?;
                let from = send_or_in_place(send, recv);
                let (n, t) = (span.count, span.datatype);
                check(name, ffi::MPI_Alltoall(from, n, t, recv.data().cast(), n, t, comm))
            }
            Op::Barrier => check(name, ffi::MPI_Barrier(comm)),
            Op::Bcast => {
                let buffer = if site.is_root() { send()? } else { recv()? };
                let span = Span::new(buffer.count(), buffer.dtype())?;
                check(name, ffi::MPI_Bcast(buffer.data().cast(), span.count, span.datatype, site.root, comm))
            }
            Op::Gather => {
                let send = send()?;
                let span = Span::new(send.count(), send.dtype())?;
                let (from, to) = if site.is_root() {
                    let recv = recv()?;
                    (send_or_moved(send, recv, site.comm.rank), recv.data())
                } else {
                    (send.data().cast(), std::ptr::null_mut())
                };
                let (n, t) = (span.count, span.datatype);
                check(name, ffi::MPI_Gather(from, n, t, to.cast(), n, t, site.root, comm))
            }
            Op::HaloExchange => {
                let halo = site.halo.as_ref().ok_or_else(|| missing("halo"))?;
                halo.exchange(call.blocks(), site.comm.rank, &mut P2pBatch::new(&site.comm)?)
            }
            Op::RaggedAlltoall => {
                let ragged = site.ragged.as_ref().ok_or_else(|| missing("rows"))?;
                let (to, from) = ragged.agree(call.counts, |mine, theirs| {
                    let (n, t) = (1, Dtype::Int32.mpi());
                    let to = theirs.as_mut_ptr().cast();
                    check("MPI_Alltoall", ffi::MPI_Alltoall(mine.as_ptr().cast(), n, t, to, n, t, comm))
                })?;
                let parts = ragged.parts(&to, &from, &site.location)?;
                parts.check(call.send, call.recv)?;
                if let Some(counts) = call.received {
                    counts.data().copy_from(from.as_ptr().cast(), size_of_val(&from[..]).min(counts.bytes()));
                }
                parts.exchange(call.send, call.recv, &mut P2pBatch::new(&site.comm)?)
            }
            Op::Recv => {
                let recv = recv()?;
                let span = Span::new(recv.count(), recv.dtype())?;
                let status = matching::receive(name, &site.comm, envelope, span.of(recv.data()))?;
                finish_receive(call, &status)
            }
            Op::Reduce => {
                let send = send()?;
                let by = Reducer::new(site.reduction, send.dtype())?;
                let (from, to) = if site.is_root() {
                    let recv = recv()?;
                    (send_or_in_place(send, recv), recv.data())
                } else {
                    (send.data().cast(), std::ptr::null_mut())
                };
                by.in_pieces(send, (from, to), |from, to, n| {
                    check(name, ffi::MPI_Reduce(from, to, n, by.datatype, by.op, site.root, comm))
                })
            }
            Op::ReduceScatter => {
                let (send, recv) = (send()?, recv()?);
                let by = Reducer::new(site.reduction, send.dtype())?;
                if by.takes_whole(recv) {
                    let from = send_or_in_place(send, recv);
                    return by.in_pieces(recv, (from, recv.data()), |from, to, n| {
                        check(name, ffi::MPI_Reduce_scatter_block(from, to, n, by.datatype, by.op, comm))
                    });
                }
                in_blocks(call, &by, |root, from, to, n| {
                    check("MPI_Reduce", ffi::MPI_Reduce(from, to, n, by.datatype, by.op, root, comm))
                })
            }
            Op::ReduceScatterv => {
                let (send, recv) = (send()?, recv()?);
                let counts = parts_of(call)?.sent();
                // MPI would reduce what does not belong together, or wait.
                if !site.comm.agrees(hash(&counts))? {
                    return Err(Cause::Counts { counts });
                }
                let by = Reducer::new(site.reduction, send.dtype())?;
                if by.takes_whole(send) {
                    let (items, from) = (by.items(&counts)?, send_or_in_place(send, recv));
                    let (to, n) = (recv.data().cast(), items.as_ptr());
                    return check(name, ffi::MPI_Reduce_scatter(from, to, n, by.datatype, by.op, comm));
                }
                in_blocks(call, &by, |root, from, to, n| {
                    check("MPI_Reduce", ffi::MPI_Reduce(from, to, n, by.datatype, by.op, root, comm))
                })
            }
            Op::Exscan | Op::Scan => {
                let exclusive = site.op == Op::Exscan;
                let scan = if exclusive { ffi::MPI_Exscan } else { ffi::MPI_Scan };
                let (send, recv) = (send()?, recv()?);
                let by = Reducer::new(site.reduction, send.dtype())?;
                let from = send_or_in_place(send, recv);
                let reversed = site.reverse.then(|| reversed(&site.comm)).transpose()?;
                let comm = reversed.as_ref().map_or(comm, |reversed| reversed.0.handle());
                by.in_pieces(recv, (from, recv.data()), |from, to, n| {
                    check(name, scan(from, to, n, by.datatype, by.op, comm))
                })?;
                if exclusive && site.is_first() {
                    // MPI leaves its result undefined.
                    recv.data().write_bytes(0, recv.bytes());
                }
                Ok(())
            }
            Op::Scatter => {
                let recv = recv()?;
                let span = Span::new(recv.count(), recv.dtype())?;
                let (n, t) = (span.count, span.datatype);
                let from = if site.is_root() { send()?.data() } else { std::ptr::null_mut() };
                let aliased = site.is_root() && send()?.overlaps(recv);
                let to = if aliased { in_place() } else { recv.data().cast() };
                check(name, ffi::MPI_Scatter(from.cast(), n, t, to, n, t, site.root, comm))?;
                if aliased {
                    // The root's own block was left in its place.
                    std::ptr::copy(from.add(site.root as usize * recv.bytes()), recv.data(), recv.bytes());
                }
                Ok(())
            }
            Op::Send => {
                let send = send()?;
                let span = Span::new(send.count(), send.dtype())?;
                let (n, t) = (span.count, span.datatype);
                check(name, ffi::MPI_Send(send.data().cast(), n, t, envelope.dest, envelope.sendtag, comm))
            }
            Op::Sendrecv => {
                let (send, recv) = (send()?, recv()?);
                let (out, into) =
                    (Span::new(send.count(), send.dtype())?, Span::new(recv.count(), recv.dtype())?);
                // MPI forbids that the two share memory, and they may differ in size.
                let copy = send
                    .overlaps(recv)
                    .then(|| std::slice::from_raw_parts(send.data(), send.bytes()).to_vec());
                let from = copy.as_ref().map_or(send.data().cast_const(), |copy| copy.as_ptr());
                let (out, into) = (out.of(from.cast_mut()), into.of(recv.data()));
                let status = matching::exchange(name, &site.comm, envelope, out, into)?;
                finish_receive(call, &status)
            }
        }
    }
}
