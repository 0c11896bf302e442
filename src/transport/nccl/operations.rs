//! Operations as calls of NCCL, which put them on a stream.

use smallvec::SmallVec;

use super::communicator::Communicator;
use super::messages::reduced;
use crate::call::{Call, Envelope};
use crate::comm::Group;
use crate::device::Device;
use crate::device::nccl::{DataType, RedOp, nccl};
use crate::error::Cause;
use crate::mpilib::wildcards;
use crate::ops::{Buffer, Op, Parts};

/// Messages of a rank, each with the rank at its other end.
type Messages = SmallVec<[(i32, Buffer); 8]>;

/// Puts a call on its stream. Data that are only moved are bytes.
pub fn put(call: &Call, communicator: &Communicator) -> Result<(), Cause> {
    let (site, stream) = (call.site, call.stream.handle().cast());
    let (library, handle) = (communicator.gpu.library, communicator.handle);
    let bytes = DataType::ncclUint8;
    // SAFETY (for all calls below): memory of XLA's that stays valid until the work on the stream is done, and whose sizes
    // were checked against the operation by `Call::check`.
    unsafe {
        match site.op {
            Op::Allgather => {
                let (from, to) = (*call.operand()?, *call.result()?);
                let (n, from, to) = (from.bytes(), from.data().cast(), to.data().cast());
                nccl!(library, ncclAllGather(from, to, n, bytes, handle, stream))
            }
            Op::Barrier => {
                let (data, kind) = (communicator.gpu.scratch as *mut _, DataType::ncclInt32);
                nccl!(library, ncclAllReduce(data, data, 1, kind, RedOp::ncclMax, handle, stream))
            }
            Op::Bcast => {
                let buffer = if site.is_root() { *call.operand()? } else { *call.result()? };
                let (n, data) = (buffer.bytes(), buffer.data().cast());
                nccl!(library, ncclBroadcast(data, data, n, bytes, site.root, handle, stream))
            }
            Op::Allreduce | Op::Reduce | Op::ReduceScatter | Op::ReduceScatterv => {
                let send = *call.operand()?;
                let reduction = site.reduction.ok_or(Cause::Reduction { expected: true })?;
                let (kind, op, width) =
                    reduced(reduction, send.dtype()).ok_or_else(|| Cause::UndefinedReduction {
                        reduction: "this reduction on NCCL",
                        dtype: send.dtype().name(),
                    })?;
                let from = send.data().cast();
                match (site.op, call.recv) {
                    // A reduction to each rank of its part. All ranks know all parts.
                    (Op::ReduceScatterv, recv) => {
                        let to = recv.unwrap_or(send).data().cast();
                        nccl!(library, ncclGroupStart())?;
                        let [sent, _] = call.parts()?.both();
                        // In the order of the ranks, on all ranks.
                        let reduced = sent.iter().try_for_each(|part| {
                            let (n, from) = (part.count * width, send.part(part.start, part.count));
                            let (from, root) = (from.data().cast(), part.rank as i32);
                            nccl!(library, ncclReduce(from, to, n, kind, op, root, handle, stream))
                        });
                        reduced.and(nccl!(library, ncclGroupEnd()))
                    }
                    (Op::Reduce, recv) => {
                        // Where there is no result, none is written.
                        let (n, to) = (send.count() * width, recv.unwrap_or(send).data().cast());
                        nccl!(library, ncclReduce(from, to, n, kind, op, site.root, handle, stream))
                    }
                    (Op::ReduceScatter, Some(recv)) => {
                        let (n, to) = (recv.count() * width, recv.data().cast());
                        nccl!(library, ncclReduceScatter(from, to, n, kind, op, handle, stream))
                    }
                    (_, Some(recv)) => {
                        let (n, to) = (send.count() * width, recv.data().cast());
                        nccl!(library, ncclAllReduce(from, to, n, kind, op, handle, stream))
                    }
                    (_, None) => Err(Cause::missing("result")),
                }
            }
            // Messages that wait for one another, and start together; `messages` names the other operations.
            _ => {
                let (sent, received) = messages(call, Device::Gpu(communicator.gpu.driver))?;
                nccl!(library, ncclGroupStart())?;
                let sends = sent.iter().try_for_each(|(peer, from)| {
                    nccl!(library, ncclSend(from.data().cast(), from.bytes(), bytes, *peer, handle, stream))
                });
                let receives = received.iter().try_for_each(|(peer, to)| {
                    nccl!(library, ncclRecv(to.data().cast(), to.bytes(), bytes, *peer, handle, stream))
                });
                // A group is ended on the thread that started it, also after an error.
                let ended = nccl!(library, ncclGroupEnd());
                sends.and(receives).and(ended)
            }
        }
    }
}

/// What a rank sends and receives in an operation that consists of messages. Elements of the result that no message writes are
/// set to zero, and what the result says of the messages is written, both in the order of the stream.
fn messages(call: &Call, device: Device) -> Result<(Messages, Messages), Cause> {
    let (site, nobody) = (call.site, wildcards().proc_null);
    // What an operand says of peers at run time is what the site says (see `Transport::read_envelope`).
    let Envelope { source, dest, .. } = site.envelope;
    let (rank, size) = (site.comm.rank, site.comm.size);
    let one = |peer, buffer| {
        let message = (peer, buffer);
        if peer == nobody { Messages::new() } else { smallvec::smallvec![message] }
    };
    let blocks = |buffer: Buffer| -> Messages {
        let count = buffer.count() / size as usize;
        (0..size).map(|rank| (rank, buffer.part(rank as usize * count, count))).collect()
    };
    Ok(match site.op {
        Op::Allgatherv | Op::Alltoallv | Op::Gatherv | Op::Permute | Op::Scatterv => {
            in_parts(call, call.parts()?, device)?
        }
        Op::RaggedAlltoall => ragged(call, device)?,
        Op::Alltoall => (blocks(*call.operand()?), blocks(*call.result()?)),
        Op::Gather if site.is_root() => (one(site.root, *call.operand()?), blocks(*call.result()?)),
        Op::Gather => (one(site.root, *call.operand()?), Messages::new()),
        Op::Scatter if site.is_root() => (blocks(*call.operand()?), one(site.root, *call.result()?)),
        Op::Scatter => (Messages::new(), one(site.root, *call.result()?)),
        Op::Sendrecv => (one(dest, *call.operand()?), one(source, *call.result()?)),
        // Its other half comes later on the same stream, and it would wait for that.
        Op::Send if dest == rank => return Err(to_itself("send")),
        Op::Recv if source == rank => return Err(to_itself("recv")),
        Op::Send => (one(dest, *call.operand()?), Messages::new()),
        Op::Recv => (Messages::new(), one(source, *call.result()?)),
        // NCCL has a function of its own, or cannot do it.
        Op::Allgather
        | Op::Allreduce
        | Op::Barrier
        | Op::Bcast
        | Op::Exscan
        | Op::HaloExchange
        | Op::Reduce
        | Op::ReduceScatter
        | Op::ReduceScatterv
        | Op::Scan => {
            let feature = site.op.to_string();
            return Err(Cause::Unsupported { feature, reason: "NCCL has no such operation" });
        }
    })
}

fn in_parts(call: &Call, parts: &Parts, device: Device) -> Result<(Messages, Messages), Cause> {
    if let Some(recv) = call.recv.filter(|recv| !parts.covers(Some(recv))) {
        // SAFETY: a result of XLA's, in the memory of the device, that the operand does not overlap.
        unsafe { device.clear(&recv, call.stream)? };
    }
    Ok((parts.sends(call.send).collect(), parts.receives(call.recv).collect()))
}

/// The rows that counts name, which the host has read. The ranks exchange counts through MPI,
/// unless the call has the counts of both sides.
fn ragged(call: &Call, device: Device) -> Result<(Messages, Messages), Cause> {
    let site = call.site;
    let rows = site.ragged.as_ref().ok_or_else(|| Cause::missing("rows"))?;
    let group = Group::Of(&site.comm);
    let exchange = |ours: &[i32], theirs: &mut [i32]| group.exchange_counts(ours, theirs);
    let (to, from) = rows.agree(call.counts, &site.location, exchange, |own| group.largest(own))?;
    let parts = rows.parts(&to, &from, &site.location)?;
    parts.check(call.send, call.recv)?;
    if let Some(received) = &call.received {
        let words: SmallVec<[u32; 32]> = from.iter().map(|&count| count as u32).collect();
        // SAFETY: a result of one int32 for each rank, in the memory of the device.
        unsafe { device.write(&words, received, call.stream)? };
    }
    in_parts(call, &parts, device)
}

fn to_itself(operation: &str) -> Cause {
    Cause::Unsupported {
        feature: format!("a {operation} between a rank and itself"),
        reason: "messages go through NCCL: use sendrecv, or set MPI4JAX_NCCL_MESSAGES=staged",
    }
}
