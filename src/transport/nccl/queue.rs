//! Operations in NCCL's words, put on a stream.

use std::ffi::c_void;

use crate::call::{Call, Stream};
use crate::device::cuda::Pointer;
use crate::device::nccl::{self, DataType, Library, RedOp};
use crate::error::Cause;
use crate::mpilib::wildcards;
use crate::ops::{Buffer, Builtin, Class, Dtype, Op, Reduction, Wire};

/// Puts an operation on a stream.
type Work = fn(&Put) -> Result<(), Cause>;

/// What does that; `None` for an operation that NCCL has not.
pub fn put(op: Op) -> Option<Work> {
    Some(match op {
        Op::Allgather => |put| put.queue.allgather(&put.send()?, &put.recv()?),
        Op::Allreduce => |put| put.queue.reduce(&put.send()?, put.recv()?.data(), put.reduction()?, None),
        Op::Allgatherv | Op::Alltoallv | Op::Gatherv | Op::Scatterv => |put| {
            let Call { site, send, recv, .. } = put.call;
            let missing = Cause::Buffers { operand: "parts", expected: 1, actual: 0 };
            let parts = site.parts.as_ref().ok_or(missing)?;
            if !parts.covers(recv.as_ref()) {
                let reason = "NCCL writes nothing where no rank sends anything";
                return Err(Cause::Unsupported { feature: "a result with gaps".into(), reason });
            }
            // SAFETY: the buffers have passed `check`, and stay as they are until the work on the stream is done.
            put.queue.group(|| unsafe { parts.carry(*send, *recv, &mut &put.queue) })
        },
        Op::Alltoall => |put| {
            let (send, recv) = (put.send()?, put.recv()?);
            put.queue.group(|| {
                (0..put.ranks()).try_for_each(|peer| {
                    put.queue.send(&put.block(&send, peer), peer)?;
                    put.queue.recv(&put.block(&recv, peer), peer)
                })
            })
        },
        Op::Barrier => |put| {
            // SAFETY: memory of one integer on the GPU, which is the communicator's.
            let scratch = unsafe { Buffer::new(put.scratch as *mut u8, Dtype::Int32, 1) };
            put.queue.reduce(&scratch, scratch.data(), (DataType::Int32, RedOp::Max, 1), None)
        },
        Op::Bcast => |put| {
            let buffer = if put.call.site.is_root() { put.send()? } else { put.recv()? };
            put.queue.bcast(&buffer, put.call.site.root)
        },
        Op::Gather => |put| {
            put.queue.group(|| {
                put.queue.send(&put.send()?, put.call.site.root)?;
                if put.call.site.is_root() {
                    let recv = put.recv()?;
                    (0..put.ranks()).try_for_each(|peer| put.queue.recv(&put.block(&recv, peer), peer))?;
                }
                Ok(())
            })
        },
        Op::Recv => |put| put.alone("recv", put.source(), |peer| put.queue.recv(&put.recv()?, peer)),
        Op::Reduce => |put| {
            let send = put.send()?;
            let to = if put.call.site.is_root() { put.recv()?.data() } else { send.data() };
            put.queue.reduce(&send, to, put.reduction()?, Some(put.call.site.root))
        },
        Op::ReduceScatter => |put| put.queue.reduce_scatter(&put.send()?, &put.recv()?, put.reduction()?),
        Op::Scatter => |put| {
            put.queue.group(|| {
                if put.call.site.is_root() {
                    let send = put.send()?;
                    (0..put.ranks()).try_for_each(|peer| put.queue.send(&put.block(&send, peer), peer))?;
                }
                put.queue.recv(&put.recv()?, put.call.site.root)
            })
        },
        Op::Send => |put| put.alone("send", put.dest(), |peer| put.queue.send(&put.send()?, peer)),
        Op::Sendrecv => |put| {
            put.queue.group(|| {
                put.dest().map_or(Ok(()), |peer| put.queue.send(&put.send()?, peer))?;
                put.source().map_or(Ok(()), |peer| put.queue.recv(&put.recv()?, peer))
            })
        },
        // Ranks that a permutation leaves out get zeros.
        Op::Exscan | Op::HaloExchange | Op::Permute | Op::RaggedAlltoall | Op::ReduceScatterv | Op::Scan => {
            return None;
        }
    })
}

/// A call, and where it is put.
pub struct Put<'a> {
    pub call: &'a Call<'a>,
    pub queue: Queue,
    /// What a barrier reduces.
    pub scratch: Pointer,
}

impl Put<'_> {
    fn send(&self) -> Result<Buffer, Cause> {
        self.call.send.ok_or(Cause::Buffers { operand: "operand", expected: 1, actual: 0 })
    }

    fn recv(&self) -> Result<Buffer, Cause> {
        self.call.recv.ok_or(Cause::Buffers { operand: "result", expected: 1, actual: 0 })
    }

    fn ranks(&self) -> i32 {
        self.call.site.comm.size
    }

    fn reduction(&self) -> Result<(DataType, RedOp, usize), Cause> {
        let reduction = self.call.site.reduction.ok_or(Cause::Reduction { expected: true })?;
        let dtype = self.send()?.dtype();
        let undefined =
            Cause::UndefinedReduction { reduction: "this reduction on NCCL", dtype: dtype.name() };
        reduced(reduction, dtype).ok_or(undefined)
    }

    // What an operand says of peers at run time is what the site says (see `Transport::knows_peers`).

    fn dest(&self) -> Option<i32> {
        Some(self.call.site.envelope.dest).filter(|&peer| peer != wildcards().proc_null)
    }

    fn source(&self) -> Option<i32> {
        Some(self.call.site.envelope.source).filter(|&peer| peer != wildcards().proc_null)
    }

    /// A message that is no half of a `sendrecv`. One of a rank to itself would wait for its other half, which comes
    /// later on the same stream.
    fn alone(
        &self,
        operand: &str,
        peer: Option<i32>,
        start: impl FnOnce(i32) -> Result<(), Cause>,
    ) -> Result<(), Cause> {
        match peer {
            None => Ok(()),
            Some(peer) if peer == self.call.site.comm.rank => Err(Cause::Unsupported {
                feature: format!("a {operand} between a rank and itself"),
                reason: "messages go through NCCL: use sendrecv, or set MPI4JAX_NCCL_MESSAGES=staged",
            }),
            Some(peer) => start(peer),
        }
    }

    /// One rank's block of a buffer that holds one for each.
    fn block(&self, buffer: &Buffer, rank: i32) -> Buffer {
        let count = buffer.count() / self.ranks() as usize;
        buffer.part(rank as usize * count, count)
    }
}

/// NCCL's type and operation for a reduction, and how many of its elements one of ours is.
pub fn reduced(reduction: Reduction, dtype: Dtype) -> Option<(DataType, RedOp, usize)> {
    let Reduction::Builtin(builtin) = reduction else { return None };
    let op = match builtin {
        Builtin::Sum => RedOp::Sum,
        Builtin::Prod => RedOp::Prod,
        Builtin::Max => RedOp::Max,
        Builtin::Min => RedOp::Min,
        // On values 0 and 1.
        Builtin::Lor | Builtin::Bor if dtype == Dtype::Bool => RedOp::Max,
        Builtin::Land | Builtin::Band if dtype == Dtype::Bool => RedOp::Min,
        _ => return None,
    };
    // NCCL's MAX and MIN of floats pass over NaN, which those of the other transports do not.
    if dtype.class() == Class::Float && matches!(op, RedOp::Max | RedOp::Min) {
        return None;
    }
    let data = match dtype {
        Dtype::Bool if matches!(op, RedOp::Max | RedOp::Min) => DataType::Uint8,
        Dtype::Int8 => DataType::Int8,
        Dtype::Uint8 => DataType::Uint8,
        Dtype::Int32 => DataType::Int32,
        Dtype::Uint32 => DataType::Uint32,
        Dtype::Int64 => DataType::Int64,
        Dtype::Uint64 => DataType::Uint64,
        Dtype::Float16 => DataType::Float16,
        Dtype::Bfloat16 => DataType::Bfloat16,
        Dtype::Float32 => DataType::Float32,
        Dtype::Float64 => DataType::Float64,
        Dtype::Complex64 if op == RedOp::Sum => return Some((DataType::Float32, op, 2)),
        Dtype::Complex128 if op == RedOp::Sum => return Some((DataType::Float64, op, 2)),
        _ => return None,
    };
    Some((data, op, 1))
}

/// Where work is put. Data that are only moved are bytes.
pub struct Queue {
    pub library: &'static Library,
    pub handle: nccl::Handle,
    pub stream: Stream,
}

// Each function below passes on memory of XLA's that stays valid until the work on the stream is done.
impl Queue {
    fn allgather(&self, send: &Buffer, recv: &Buffer) -> Result<(), Cause> {
        let (from, to, kind) = (send.data().cast(), recv.data().cast(), DataType::Uint8 as i32);
        // SAFETY: `recv` holds a block of `send`'s size for each rank.
        let code = unsafe {
            (self.library.f.ncclAllGather)(from, to, send.bytes(), kind, self.handle, self.stream.0)
        };
        self.library.check("ncclAllGather", code)
    }

    fn bcast(&self, buffer: &Buffer, root: i32) -> Result<(), Cause> {
        let (data, kind) = (buffer.data().cast::<c_void>(), DataType::Uint8 as i32);
        let f = &self.library.f;
        // SAFETY: in place.
        let code =
            unsafe { (f.ncclBroadcast)(data, data, buffer.bytes(), kind, root, self.handle, self.stream.0) };
        self.library.check("ncclBroadcast", code)
    }

    fn reduce(
        &self,
        send: &Buffer,
        to: *mut u8,
        (kind, op, width): (DataType, RedOp, usize),
        root: Option<i32>,
    ) -> Result<(), Cause> {
        let (from, to, count) = (send.data().cast(), to.cast(), send.count() * width);
        let (kind, op, f) = (kind as i32, op as i32, &self.library.f);
        // SAFETY: both hold so many elements; where the result is not wanted, it is not written.
        unsafe {
            match root {
                Some(root) => self.library.check(
                    "ncclReduce",
                    (f.ncclReduce)(from, to, count, kind, op, root, self.handle, self.stream.0),
                ),
                None => self.library.check(
                    "ncclAllReduce",
                    (f.ncclAllReduce)(from, to, count, kind, op, self.handle, self.stream.0),
                ),
            }
        }
    }

    fn reduce_scatter(
        &self,
        send: &Buffer,
        recv: &Buffer,
        (kind, op, width): (DataType, RedOp, usize),
    ) -> Result<(), Cause> {
        let (from, to, count) = (send.data().cast(), recv.data().cast(), recv.count() * width);
        let (kind, op, f) = (kind as i32, op as i32, &self.library.f);
        // SAFETY: `send` holds a block of `recv`'s size for each rank.
        let code = unsafe { (f.ncclReduceScatter)(from, to, count, kind, op, self.handle, self.stream.0) };
        self.library.check("ncclReduceScatter", code)
    }

    fn send(&self, buffer: &Buffer, to: i32) -> Result<(), Cause> {
        let (data, kind) = (buffer.data().cast(), DataType::Uint8 as i32);
        // SAFETY: the buffer's own size.
        let code =
            unsafe { (self.library.f.ncclSend)(data, buffer.bytes(), kind, to, self.handle, self.stream.0) };
        self.library.check("ncclSend", code)
    }

    fn recv(&self, buffer: &Buffer, from: i32) -> Result<(), Cause> {
        let (data, kind) = (buffer.data().cast(), DataType::Uint8 as i32);
        // SAFETY: the buffer's own size.
        let code = unsafe {
            (self.library.f.ncclRecv)(data, buffer.bytes(), kind, from, self.handle, self.stream.0)
        };
        self.library.check("ncclRecv", code)
    }

    /// Messages that wait for one another start together.
    fn group(&self, body: impl FnOnce() -> Result<(), Cause>) -> Result<(), Cause> {
        // SAFETY: a group is ended on the thread that started it, also after an error.
        unsafe {
            self.library.check("ncclGroupStart", (self.library.f.ncclGroupStart)())?;
            let done = body();
            let ended = self.library.check("ncclGroupEnd", (self.library.f.ncclGroupEnd)());
            done.and(ended)
        }
    }
}

/// Messages of a group: nothing has to be waited for.
impl Wire for &Queue {
    unsafe fn receive(&mut self, peer: i32, into: *mut u8, bytes: usize) -> Result<(), Cause> {
        // SAFETY: promised by the caller.
        self.recv(&unsafe { Buffer::new(into, Dtype::Uint8, bytes) }, peer)
    }

    unsafe fn send(&mut self, peer: i32, from: *mut u8, bytes: usize) -> Result<(), Cause> {
        // SAFETY: promised by the caller.
        Queue::send(self, &unsafe { Buffer::new(from, Dtype::Uint8, bytes) }, peer)
    }

    fn wait(&mut self) -> Result<(), Cause> {
        Ok(())
    }
}
