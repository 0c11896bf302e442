//! Operations in NCCL's words, put on a stream.

use smallvec::SmallVec;

use super::communicator::Communicator;
use super::messages::reduced;
use crate::call::{Call, Envelope, Stream};
use crate::device::nccl::{DataType, RedOp};
use crate::dynlib::checked;
use crate::error::Cause;
use crate::mpilib::wildcards;
use crate::ops::{Buffer, Op, Wire};

/// Messages of a rank, each with the rank at its other end.
type Messages = SmallVec<[(i32, Buffer); 8]>;

/// Puts a call on its stream. Data that are only moved are bytes.
pub fn put(call: &Call, communicator: &Communicator) -> Result<(), Cause> {
    let (site, stream) = (call.site, call.stream.handle());
    let (library, handle) = (communicator.gpu.library, communicator.handle);
    let bytes = DataType::Uint8 as i32;
    // SAFETY (for all calls below): memory of XLA's that stays valid until the work on the stream is done, and whose sizes
    // were checked against the operation by `Call::check`.
    unsafe {
        match site.op {
            Op::Allgather => {
                let (from, to) = (*call.operand()?, *call.result()?);
                let (n, from, to) = (from.bytes(), from.data().cast(), to.data().cast());
                checked!(library, ncclAllGather(from, to, n, bytes, handle, stream))
            }
            Op::Barrier => {
                let (data, kind) = (communicator.gpu.scratch as *mut _, DataType::Int32 as i32);
                checked!(library, ncclAllReduce(data, data, 1, kind, RedOp::Max as i32, handle, stream))
            }
            Op::Bcast => {
                let buffer = if site.is_root() { *call.operand()? } else { *call.result()? };
                let (n, data) = (buffer.bytes(), buffer.data().cast());
                checked!(library, ncclBroadcast(data, data, n, bytes, site.root, handle, stream))
            }
            Op::Allreduce | Op::Reduce | Op::ReduceScatter => {
                let send = *call.operand()?;
                let reduction = site.reduction.ok_or(Cause::Reduction { expected: true })?;
                let (kind, op, width) =
                    reduced(reduction, send.dtype()).ok_or_else(|| Cause::UndefinedReduction {
                        reduction: "this reduction on NCCL",
                        dtype: send.dtype().name(),
                    })?;
                let (kind, op, from) = (kind as i32, op as i32, send.data().cast());
                match (site.op, call.recv) {
                    (Op::Reduce, recv) => {
                        // Where there is no result, none is written.
                        let (n, to) = (send.count() * width, recv.unwrap_or(send).data().cast());
                        checked!(library, ncclReduce(from, to, n, kind, op, site.root, handle, stream))
                    }
                    (Op::ReduceScatter, Some(recv)) => {
                        let (n, to) = (recv.count() * width, recv.data().cast());
                        checked!(library, ncclReduceScatter(from, to, n, kind, op, handle, stream))
                    }
                    (_, Some(recv)) => {
                        let (n, to) = (send.count() * width, recv.data().cast());
                        checked!(library, ncclAllReduce(from, to, n, kind, op, handle, stream))
                    }
                    (_, None) => Err(Cause::missing("result")),
                }
            }
            Op::Allgatherv | Op::Alltoallv | Op::Gatherv | Op::Scatterv => {
                let parts = call.parts()?;
                if !parts.covers(call.recv.as_ref()) {
                    let reason = "NCCL writes nothing where no rank sends anything";
                    return Err(Cause::Unsupported { feature: "a result with gaps".into(), reason });
                }
                let mut group = Group { communicator, stream: call.stream };
                group.together(|group| parts.carry(call.send, call.recv, group))
            }
            Op::Alltoall | Op::Gather | Op::Recv | Op::Scatter | Op::Send | Op::Sendrecv => {
                let (sent, received) = messages(call)?;
                let mut group = Group { communicator, stream: call.stream };
                group.together(|group| {
                    for (peer, buffer) in sent {
                        group.send(peer, buffer.data(), buffer.bytes())?;
                    }
                    for (peer, buffer) in received {
                        group.receive(peer, buffer.data(), buffer.bytes())?;
                    }
                    Ok(())
                })
            }
            Op::Exscan
            | Op::HaloExchange
            | Op::Permute
            | Op::RaggedAlltoall
            | Op::ReduceScatterv
            | Op::Scan => {
                let feature = site.op.to_string();
                Err(Cause::Unsupported { feature, reason: "NCCL has no such operation" })
            }
        }
    }
}

/// What a rank sends and receives in an operation that consists of messages.
fn messages(call: &Call) -> Result<(Messages, Messages), Cause> {
    let (site, nobody) = (call.site, wildcards().proc_null);
    // What an operand says of peers at run time is what the site says (see `Transport::read_peers`).
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
        Op::Alltoall => (blocks(*call.operand()?), blocks(*call.result()?)),
        Op::Gather if site.is_root() => (one(site.root, *call.operand()?), blocks(*call.result()?)),
        Op::Gather => (one(site.root, *call.operand()?), Messages::new()),
        Op::Scatter if site.is_root() => (blocks(*call.operand()?), one(site.root, *call.result()?)),
        Op::Scatter => (Messages::new(), one(site.root, *call.result()?)),
        Op::Sendrecv => (one(dest, *call.operand()?), one(source, *call.result()?)),
        // Its other half comes later on the same stream, and it would wait for that.
        Op::Send if dest == rank => return Err(to_itself("send")),
        Op::Recv if source == rank => return Err(to_itself("recv")),
        Op::Recv => (Messages::new(), one(source, *call.result()?)),
        _ => (one(dest, *call.operand()?), Messages::new()),
    })
}

fn to_itself(operation: &str) -> Cause {
    Cause::Unsupported {
        feature: format!("a {operation} between a rank and itself"),
        reason: "messages go through NCCL: use sendrecv, or set MPI4JAX_NCCL_MESSAGES=staged",
    }
}

/// Messages that wait for one another, and start together.
struct Group<'a> {
    communicator: &'a Communicator,
    stream: Stream,
}

impl Group<'_> {
    fn together(&mut self, body: impl FnOnce(&mut Self) -> Result<(), Cause>) -> Result<(), Cause> {
        let library = self.communicator.gpu.library;
        // SAFETY: a group is ended on the thread that started it, also after an error.
        unsafe {
            checked!(library, ncclGroupStart())?;
            let done = body(self);
            let ended = checked!(library, ncclGroupEnd());
            done.and(ended)
        }
    }
}

impl Wire for Group<'_> {
    unsafe fn receive(&mut self, peer: i32, into: *mut u8, bytes: usize) -> Result<(), Cause> {
        let &mut Self { communicator, stream } = self;
        let (handle, kind) = (communicator.handle, DataType::Uint8 as i32);
        // SAFETY: promised by the caller.
        unsafe {
            checked!(
                communicator.gpu.library,
                ncclRecv(into.cast(), bytes, kind, peer, handle, stream.handle())
            )
        }
    }

    unsafe fn send(&mut self, peer: i32, from: *mut u8, bytes: usize) -> Result<(), Cause> {
        let &mut Self { communicator, stream } = self;
        let (handle, kind) = (communicator.handle, DataType::Uint8 as i32);
        // SAFETY: promised by the caller.
        unsafe {
            checked!(
                communicator.gpu.library,
                ncclSend(from.cast(), bytes, kind, peer, handle, stream.handle())
            )
        }
    }

    /// The stream waits, not the host.
    fn wait(&mut self) -> Result<(), Cause> {
        Ok(())
    }
}
