//! Operations as calls of the MPI library.
//!
//! The raw C functions rather than rsmpi's safe layer, which drops return codes and knows neither
//! `MPI_IN_PLACE` on run-time types nor counts beyond 32 bits.

mod collectives;
mod lengths;
mod matching;
mod p2p;
mod posted;
mod reducer;
mod rooted;
mod span;
mod start;
mod vectors;
mod waiting;

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use mpi::ffi::{self, MPI_Status};

use self::collectives::collective;
use self::p2p::P2pBatch;
pub use self::posted::Posted;
use self::reducer::Reducer;
pub use self::reducer::is_ours;
use self::span::count_limit;
pub use self::span::set_count_limit;
pub use self::start::start;
pub use self::waiting::{read_setting, set_sleeps};
use super::message::{Arrived, arrive};
use crate::call::{Call, Site};
use crate::comm::{Group, OwnedComm};
use crate::device;
use crate::error::Cause;
use crate::mpilib::{check, gpu_support, in_place};
use crate::ops::{Buffer, Dtype, Ints, Op, Private};

/// Whether the MPI library may take such pointers. One that cannot say is trusted, as the user has named it.
pub fn probe_device_pointers() -> Result<(), String> {
    device::support()?;
    if gpu_support(device::is_rocm()) == Some(false) && !device::is_reached_from_cpu() {
        let gpus = device::vendor().software;
        return Err(format!("the MPI library reports that it is not {gpus}-aware: use staged or nccl"));
    }
    Ok(())
}

/// The send argument of a collective whose send and receive buffers are equally large: where they are
/// one buffer, MPI requires `MPI_IN_PLACE`.
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

/// An error unless the row of the operation says that it needs this communicator: Python has to know.
fn allow(site: &Site, private: Private) -> Result<(), Cause> {
    if site.op.row().private == Some(private) {
        return Ok(());
    }
    let feature = format!("{} on a private communicator", site.op);
    Err(Cause::Unsupported { feature, reason: "the table of operations says that it has none" })
}

/// See [`Private::Reversed`].
struct Reversed(OwnedComm);

fn reversed(site: &Site) -> Result<Arc<Reversed>, Cause> {
    allow(site, Private::Reversed)?;
    let comm = &site.comm;
    comm.attach(|| comm.split(comm.size - comm.rank).map(Reversed))
}

/// How many elements have been received.
fn elements(status: &MPI_Status, dtype: Dtype) -> Result<usize, Cause> {
    let mut count: ffi::MPI_Count = 0;
    // SAFETY: the status was filled by a receive of this type.
    check("MPI_Get_elements_x", unsafe { ffi::MPI_Get_elements_x(status, dtype.mpi(), &mut count) })?;
    Ok(count.max(0) as usize)
}

/// What MPI says of a message that it has received.
fn finish_receive(call: &Call, status: &MPI_Status) -> Result<(), Cause> {
    call.status.write(status);
    let Some(recv) = &call.recv else { return Ok(()) };
    let count = elements(status, recv.dtype())?;
    arrive(call, &Arrived { source: status.MPI_SOURCE, tag: status.MPI_TAG, count })
}

/// For an `allgatherv` whose counts MPI's function takes: each rank knows the counts of all ranks,
/// so all ranks choose alike.
fn ints_of<'a>(call: &Call<'a>) -> Option<&'a Ints> {
    call.site.parts.as_ref()?.received_ints(count_limit())
}

/// Whether the messages of an operation begin with their lengths, which are in the memory of the host.
pub fn has_lengths(call: &Call) -> bool {
    match call.site.op {
        Op::Allgatherv => ints_of(call).is_none(),
        op => matches!(op, Op::Gatherv | Op::Scatterv),
    }
}

/// The part of this rank, the result, and the parts that come from each rank.
fn gathered<'a>(call: &Call<'a>) -> Result<(Buffer, Buffer, &'a Ints), Cause> {
    let send = call.operand()?;
    let own = call.parts()?.for_all(send).ok_or_else(|| Cause::missing("parts"))?;
    let recv = *call.result()?;
    Ok((own, recv, ints_of(call).ok_or_else(|| Cause::missing("parts"))?))
}

/// Calls `step(root, from, to, items)` for the block of each rank in a `reduce_scatter`, and for
/// each piece of the block, because a piece is not beside the same piece of the next block.
///
/// # Safety
/// The call's buffers have passed `Call::check`.
unsafe fn in_blocks(
    call: &Call,
    by: &Reducer,
    mut step: impl FnMut(c_int, *mut c_void, *mut c_void, c_int) -> Result<(), Cause>,
) -> Result<(), Cause> {
    let send = call.operand()?;
    let recv = call.result()?;
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

/// Carries out an operation as its nonblocking form and a wait.
///
/// # Safety
/// The call's buffers have passed `Call::check`.
unsafe fn start_and_wait(call: &Call) -> Result<(), Cause> {
    let (mut call, mut copy) = (call.clone(), Vec::new());
    if let (Some(send), Some(recv)) = (call.send, &call.recv) {
        call.send = Some(send.apart_from(recv, &mut copy));
    }
    // SAFETY: promised by the caller; the copy is dropped after the wait.
    unsafe { start(&call)?.wait(&call) }
}

/// Carries out an operation. Blocks until its buffers hold the result and may be reused.
#[inline]
pub fn execute(call: &Call) -> Result<(), Cause> {
    let Call { site, envelope, .. } = call;
    let name = site.op.mpi_name();
    // SAFETY (for all calls below): the handle is a registered communicator's, which is not freed; the
    // buffers were checked against the operation by `Call::new`; counts and types come from `Span`.
    unsafe {
        match site.op {
            // As their nonblocking forms: what is often the only operation on a communicator that a program has just made
            // needs no other one, which Open MPI cannot make while Python makes a third. Nor does an `allgatherv` with counts
            // beyond `int`, which is rare.
            Op::Gatherv | Op::Scatterv if rooted::fits(call) && !waiting::sleeps() => rooted::execute(call),
            Op::Allgatherv | Op::Gatherv | Op::Scatterv if has_lengths(call) => start_and_wait(call),
            // MPI's functions count in int. A rank knows its own counts, but not whether the counts
            // of the others are too large for that, so the ranks could not choose together.
            Op::Alltoallv | Op::Permute => {
                call.parts()?.exchange(call.send, call.recv, &mut P2pBatch::new(site)?)
            }
            Op::HaloExchange => {
                let halo = site.halo.as_ref().ok_or_else(|| Cause::missing("halo"))?;
                halo.exchange(call.blocks(), site.comm.rank, &mut P2pBatch::new(site)?)
            }
            Op::RaggedAlltoall => {
                let ragged = site.ragged.as_ref().ok_or_else(|| Cause::missing("rows"))?;
                let group = Group::Of(&site.comm);
                let exchange = |ours: &[i32], theirs: &mut [i32]| group.exchange_counts(ours, theirs);
                let (to, from) =
                    ragged.agree(call.counts, &site.location, exchange, |own| group.largest(own))?;
                let parts = ragged.parts(&to, &from, &site.location)?;
                parts.check(call.send, call.recv)?;
                if let Some(counts) = call.received {
                    counts.data().copy_from(from.as_ptr().cast(), size_of_val(&from[..]).min(counts.bytes()));
                }
                parts.exchange(call.send, call.recv, &mut P2pBatch::new(site)?)
            }
            Op::Recv => {
                let recv = call.result()?;
                finish_receive(call, &matching::receive(name, &site.comm, envelope, recv)?)
            }
            Op::Sendrecv => {
                let (send, recv) = (call.operand()?, call.result()?);
                // MPI forbids that the two share memory, and they may differ in size.
                let mut copy = Vec::new();
                let send = send.apart_from(recv, &mut copy);
                finish_receive(call, &matching::exchange(name, &site.comm, envelope, &send, recv)?)
            }
            // MPI has no way to sleep in a blocking function.
            _ if waiting::sleeps() => start_and_wait(call),
            Op::Exscan if site.is_first() => {
                collective(call, None)?;
                // MPI leaves its result undefined.
                let recv = call.result()?;
                recv.data().write_bytes(0, recv.bytes());
                Ok(())
            }
            _ => collective(call, None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::Comm;

    #[test]
    fn only_ops_whose_row_says_so_get_a_private_communicator() {
        let comm = Arc::new(Comm::new("private-test", 0, 2));
        for row in Op::TABLE {
            let site = Site::new(row.op, &comm);
            let refused = |result: Result<(), Cause>| matches!(result, Err(Cause::Unsupported { .. }));
            if row.private != Some(Private::Messages) {
                assert!(refused(P2pBatch::new(&site).map(|_| ())), "{}", row.name);
            }
            if row.private != Some(Private::Reversed) {
                assert!(refused(reversed(&site).map(|_| ())), "{}", row.name);
            }
        }
    }
}
