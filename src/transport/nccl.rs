//! NCCL on XLA's stream, without waiting for anything on the host.
//!
//! A call only puts work on the stream, always the same for the same call, so that XLA may record it into a
//! CUDA graph and replay it without asking again. What NCCL cannot do is compiled to other targets, which
//! go through staging; both ends of a message come to the same decision, because it depends on nothing but
//! what they have in common.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use super::world::Group;
use super::{Arrived, Transport, wildcards, write_status};
use crate::error::{Cause, Error};
use crate::gpu::cuda::{self, Driver, Pointer};
use crate::gpu::nccl::{self, DataType, Library, RedOp, UniqueId};
use crate::gpu::{self};
use crate::ops::{Buffer, Builtin, Call, Class, Comm, Dtype, Envelope, Op, Reduction, Site, Stream};

/// The tag of messages that go through NCCL, which has none.
const TAG: i32 = 0;

/// What decides whether NCCL carries an operation: what is known when it is compiled, and of a message what
/// its two ends have in common.
#[derive(Clone, Copy, Debug)]
pub struct Features {
    pub op: Op,
    /// Of the operand; `None` without one.
    pub dtype: Option<Dtype>,
    pub reduction: Option<Reduction>,
    pub envelope: Envelope,
}

impl Features {
    fn of(call: &Call) -> Self {
        let Site { op, reduction, envelope, .. } = *call.site;
        Self { op, dtype: call.send.map(|buffer| buffer.dtype), reduction, envelope }
    }

    /// Whether NCCL carries it; else it goes through staging.
    pub fn carried(&self) -> Result<bool, Cause> {
        match self.op {
            Op::Allgather | Op::Alltoall | Op::Barrier | Op::Bcast | Op::Gather | Op::Scatter => Ok(true),
            Op::Allreduce | Op::Reduce => {
                Ok(self.reduction.zip(self.dtype).is_some_and(|(r, dtype)| reduced(r, dtype).is_some()))
            }
            // It packs, which is done on the host.
            Op::HaloExchange | Op::Scan => Ok(false),
            Op::Send => Ok(self.sent().unwrap_or(true)),
            Op::Recv => Ok(self.received()?.unwrap_or(true)),
            Op::Sendrecv => match (self.sent(), self.received()?) {
                (Some(sent), Some(received)) if sent != received => Err(Cause::Unsupported {
                    what: "a sendrecv of which one tag is 0 and the other is not".into(),
                    reason: "NCCL carries messages of tag 0, and the others go through staging",
                }),
                (sent, received) => Ok(sent.or(received).unwrap_or(true)),
            },
        }
    }

    /// Whether NCCL carries what is sent, if anything is.
    fn sent(&self) -> Option<bool> {
        (self.envelope.dest != wildcards().proc_null).then_some(self.envelope.sendtag == TAG)
    }

    /// Whether NCCL carries what is received, if anything is.
    fn received(&self) -> Result<Option<bool>, Cause> {
        let any = wildcards();
        let Envelope { source, recvtag, .. } = self.envelope;
        let without_tag = recvtag == TAG || recvtag == any.tag;
        if source == any.source && without_tag {
            // The sender of such a message would not know that it must not send it through NCCL.
            return Err(Cause::Unsupported {
                what: "receiving from ANY_SOURCE with ANY_TAG or tag 0".into(),
                reason: "NCCL carries messages of tag 0 and has no wildcards; name the source, give both \
                         sides a tag other than 0, or choose MPI4JAX_TRANSPORT=staged",
            });
        }
        Ok((source != any.proc_null).then_some(without_tag))
    }
}

/// NCCL's type and operation for a reduction, and how many of its elements one of ours is.
fn reduced(reduction: Reduction, dtype: Dtype) -> Option<(DataType, RedOp, usize)> {
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

/// NCCL.
#[derive(Debug)]
pub struct Nccl {
    /// Why there is none: ranks without NCCL take part in joining, so that the others learn of it.
    parts: Result<Parts, String>,
    /// By address of the `Comm`.
    joined: Mutex<BTreeMap<usize, Joined>>,
}

#[derive(Clone, Copy, Debug)]
struct Parts {
    driver: &'static Driver,
    library: &'static Library,
}

type Joined = Result<&'static Communicator, String>;

/// NCCL's counterpart of an MPI communicator.
#[derive(Debug)]
struct Communicator {
    handle: nccl::Handle,
    context: cuda::Context,
    /// What a barrier reduces.
    scratch: Pointer,
    /// Held while work is put on a stream.
    queue: Mutex<()>,
}

// SAFETY: the handles are used under the lock.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

/// Whether NCCL could be used, apart from the question whether each rank has a GPU of its own.
pub(super) fn probe() -> Result<(), String> {
    gpu::support()?;
    nccl::library().map(|_| ()).map_err(|error| error.to_string())
}

/// For `auto`: whether each rank has a GPU of its own, or the launcher has shown it one that no other rank
/// has. Collective.
pub(super) fn one_gpu_each() -> Result<bool, Cause> {
    let (_, ranks) = Group::World.local()?;
    let driver = cuda::driver().ok();
    let devices = driver.and_then(|driver| driver.devices().ok()).unwrap_or(0);
    let only = driver.filter(|_| devices == 1).and_then(|driver| driver.uuid(0).ok());
    let mut all = Group::World.all_bytes(only.as_ref().map_or(&[], |uuid| uuid.as_slice()))?;
    let known = all.iter().all(|uuid| !uuid.is_empty());
    all.sort_unstable();
    let distinct = known && all.windows(2).all(|two| two[0] != two[1]);
    Ok(devices as usize >= ranks || distinct)
}

impl Default for Nccl {
    fn default() -> Self {
        Self::new()
    }
}

impl Nccl {
    /// Also where it cannot be used.
    pub fn new() -> Self {
        let parts = probe().and_then(|()| {
            let driver = cuda::driver().map_err(|error| error.to_string())?;
            let library = nccl::library().map_err(|error| error.to_string())?;
            Ok(Parts { driver, library })
        });
        Self { parts, joined: Mutex::default() }
    }

    fn joined(&self, comm: &Comm) -> Result<&'static Communicator, Cause> {
        let joined = self.joined.lock().unwrap_or_else(PoisonError::into_inner);
        match joined.get(&(std::ptr::from_ref(comm) as usize)) {
            Some(Ok(communicator)) => Ok(communicator),
            Some(Err(reason)) => Err(Cause::NoCommunicator { key: comm.key.clone(), reason: reason.clone() }),
            None => Err(Cause::NotJoined { key: comm.key.clone() }),
        }
    }

    /// Every rank comes here, also one that has nothing to offer.
    fn connect(&self, comm: &Comm) -> Result<Joined, Cause> {
        let group = Group::Of(comm);
        let ours = self.parts.clone().and_then(|parts| {
            let device = gpu::device().ok_or("JAX does not compute on a GPU")?;
            let context = parts.driver.primary_context(device).map_err(|cause| cause.to_string())?;
            Ok((parts, context))
        });
        if group.common_bits(u64::from(ours.is_ok()))? == 0 {
            return Ok(Err(ours.err().unwrap_or_else(|| "another rank has no NCCL or no GPU".into())));
        }
        let (parts, context) = match ours {
            Ok(ours) => ours,
            Err(reason) => return Ok(Err(reason)),
        };
        let Parts { driver, library } = parts;
        // SAFETY: the context exists; places to write to.
        let _entered = unsafe { driver.enter(context)? };
        let mut id = UniqueId([0; 128]);
        if comm.rank == 0 {
            // SAFETY: a place to write to.
            let code = unsafe { (library.f.ncclGetUniqueId)(&mut id) };
            library.check("ncclGetUniqueId", code)?;
        }
        let all = group.all_bytes(if comm.rank == 0 { &id.0 } else { &[] })?;
        id.0.copy_from_slice(&all[0]);
        let mut handle = std::ptr::null_mut();
        // SAFETY: every rank of the communicator comes here with the same identifier.
        let code = unsafe { (library.f.ncclCommInitRank)(&mut handle, comm.size, id, comm.rank) };
        library.check("ncclCommInitRank", code)?;
        let scratch = driver.allocate(size_of::<i32>())?;
        let communicator = Communicator { handle, context, scratch, queue: Mutex::default() };
        Ok(Ok(Box::leak(Box::new(communicator))))
    }

    fn run(&self, call: &Call) -> Result<(), Cause> {
        let Ok(Parts { driver, library }) = self.parts.clone() else {
            return self.joined(call.site.comm).map(|_| ());
        };
        let communicator = self.joined(call.site.comm)?;
        let _queue = communicator.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let mut broken = 0;
        // SAFETY: the stream is XLA's, the communicator is live; a place to write to.
        unsafe {
            if driver.context_of(call.stream)? != communicator.context {
                return Err(Cause::Unsupported {
                    what: "an array on this device".into(),
                    reason: "NCCL's communicators were made for JAX's first local device",
                });
            }
            let code = (library.f.ncclCommGetAsyncError)(communicator.handle, &mut broken);
            library.check("ncclCommGetAsyncError", code)?;
            if broken != nccl::IN_PROGRESS {
                library.check("an earlier operation", broken)?;
            }
        }
        let queue = Queue { library, handle: communicator.handle, stream: call.stream };
        self.put(call, &queue, communicator)?;
        self.message_arrives(call, driver)
    }

    /// Puts an operation on the stream.
    fn put(&self, call: &Call, queue: &Queue, communicator: &Communicator) -> Result<(), Cause> {
        let site = call.site;
        let (root, rank, ranks) = (site.root, site.comm.rank, site.comm.size);
        let missing = |what| Cause::Buffers { what, expected: 1, actual: 0 };
        let send = || call.send.ok_or_else(|| missing("operand"));
        let recv = || call.recv.ok_or_else(|| missing("result"));
        let nobody = wildcards().proc_null;
        // What an operand says at run time is what the site says (see `Features`).
        let Envelope { source, dest, .. } = site.envelope;
        match site.op {
            Op::Allgather => queue.allgather(&send()?, &recv()?),
            Op::Allreduce | Op::Reduce => {
                let send = send()?;
                let reduction = site.reduction.ok_or(Cause::Reduction { expected: true })?;
                let kind = reduced(reduction, send.dtype).ok_or(Cause::UndefinedReduction {
                    reduction: "this reduction on NCCL",
                    dtype: send.dtype,
                })?;
                let root = (site.op == Op::Reduce).then_some(root);
                let to = if root.is_none() || root == Some(rank) { recv()?.data } else { send.data };
                queue.reduce(&send, to, kind, root)
            }
            Op::Alltoall => {
                let (send, recv) = (send()?, recv()?);
                queue.group(|| {
                    (0..ranks).try_for_each(|peer| {
                        queue.send(&block(&send, peer, ranks), peer)?;
                        queue.recv(&block(&recv, peer, ranks), peer)
                    })
                })
            }
            Op::Barrier => {
                let scratch = Buffer { data: communicator.scratch as *mut u8, dtype: Dtype::Int32, count: 1 };
                queue.reduce(&scratch, scratch.data, (DataType::Int32, RedOp::Max, 1), None)
            }
            Op::Bcast => queue.bcast(&if site.is_root() { send()? } else { recv()? }, root),
            Op::Gather => queue.group(|| {
                queue.send(&send()?, root)?;
                if site.is_root() {
                    let recv = recv()?;
                    (0..ranks).try_for_each(|peer| queue.recv(&block(&recv, peer, ranks), peer))?;
                }
                Ok(())
            }),
            Op::Scatter => queue.group(|| {
                if site.is_root() {
                    let send = send()?;
                    (0..ranks).try_for_each(|peer| queue.send(&block(&send, peer, ranks), peer))?;
                }
                queue.recv(&recv()?, root)
            }),
            Op::Send if dest == nobody => Ok(()),
            Op::Recv if source == nobody => Ok(()),
            Op::Send => queue.send(&send()?, dest),
            Op::Recv => queue.recv(&recv()?, source),
            Op::Sendrecv => {
                let (send, recv) = (send()?, recv()?);
                queue.group(|| {
                    if dest != nobody {
                        queue.send(&send, dest)?;
                    }
                    if source != nobody {
                        queue.recv(&recv, source)?;
                    }
                    Ok(())
                })
            }
            Op::HaloExchange | Op::Scan => {
                Err(Cause::Unsupported { what: site.op.to_string(), reason: "NCCL has no such operation" })
            }
        }
    }

    /// NCCL's messages are as long as the receiver says, and their sender and tag are known beforehand.
    fn message_arrives(&self, call: &Call, driver: &Driver) -> Result<(), Cause> {
        let (Op::Recv | Op::Sendrecv, Some(recv)) = (call.site.op, call.recv) else { return Ok(()) };
        let (any, source) = (wildcards(), call.site.envelope.source);
        let arrived = if source == any.proc_null {
            Arrived { source, tag: any.tag, count: 0 }
        } else {
            Arrived { source, tag: TAG, count: recv.count }
        };
        if let Some(pair) = call.received {
            let words = pair as Pointer;
            // SAFETY: a result of two int32 in the memory of the GPU.
            unsafe {
                driver.fill(words, arrived.source, call.stream)?;
                driver.fill(words + size_of::<i32>() as Pointer, arrived.tag, call.stream)?;
            }
        }
        if call.site.status == 0 { Ok(()) } else { write_status(call, &arrived) }
    }
}

/// One rank's block of a buffer that holds one for each.
fn block(buffer: &Buffer, rank: i32, ranks: i32) -> Buffer {
    let count = buffer.count / ranks as usize;
    let offset = rank as usize * count * buffer.dtype.size();
    Buffer { data: buffer.data.wrapping_add(offset), count, ..*buffer }
}

/// Where work is put. Data that are only moved are bytes.
struct Queue {
    library: &'static Library,
    handle: nccl::Handle,
    stream: Stream,
}

// Each function below passes on memory of XLA's that stays valid until the work on the stream is done.
impl Queue {
    fn allgather(&self, send: &Buffer, recv: &Buffer) -> Result<(), Cause> {
        let (from, to, kind) = (send.data.cast(), recv.data.cast(), DataType::Uint8 as i32);
        // SAFETY: `recv` holds a block of `send`'s size for each rank.
        let code = unsafe {
            (self.library.f.ncclAllGather)(from, to, send.bytes(), kind, self.handle, self.stream.0)
        };
        self.library.check("ncclAllGather", code)
    }

    fn bcast(&self, buffer: &Buffer, root: i32) -> Result<(), Cause> {
        let (data, kind) = (buffer.data.cast::<c_void>(), DataType::Uint8 as i32);
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
        let (from, to, count) = (send.data.cast(), to.cast(), send.count * width);
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

    fn send(&self, buffer: &Buffer, to: i32) -> Result<(), Cause> {
        let (data, kind) = (buffer.data.cast(), DataType::Uint8 as i32);
        // SAFETY: the buffer's own size.
        let code =
            unsafe { (self.library.f.ncclSend)(data, buffer.bytes(), kind, to, self.handle, self.stream.0) };
        self.library.check("ncclSend", code)
    }

    fn recv(&self, buffer: &Buffer, from: i32) -> Result<(), Cause> {
        let (data, kind) = (buffer.data.cast(), DataType::Uint8 as i32);
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

impl Transport for Nccl {
    fn name(&self) -> &'static str {
        "nccl"
    }

    fn execute(&self, call: &Call) -> Result<(), Error> {
        let located = |cause| Error { transport: Some(self.name()), ..call.site.error(cause) };
        match Features::of(call).carried() {
            Ok(true) => self.run(call).map_err(located),
            Ok(false) => Err(located(Cause::Unsupported {
                what: "this operation".into(),
                reason: "NCCL does not carry it, and it was not compiled for staging",
            })),
            Err(cause) => Err(located(cause)),
        }
    }

    /// Reading it would mean to wait, and a call that NCCL carries does not need it.
    unsafe fn read_pair(&self, _pair: *const [i32; 2], _stream: Stream) -> Result<[i32; 2], Cause> {
        Ok([0; 2])
    }

    /// Makes NCCL's communicator.
    fn join(&self, comm: &'static Comm) -> Result<(), Error> {
        let key = std::ptr::from_ref(comm) as usize;
        if self.joined.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&key) {
            return Ok(());
        }
        let joined = self.connect(comm).map_err(|cause| Error {
            transport: Some(self.name()),
            rank: Some(comm.rank),
            ..cause.into()
        })?;
        self.joined.lock().unwrap_or_else(PoisonError::into_inner).insert(key, joined);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(op: Op, source: i32, recvtag: i32, dest: i32, sendtag: i32) -> Result<bool, Cause> {
        let envelope = Envelope { source, recvtag, dest, sendtag };
        Features { op, dtype: Some(Dtype::Float32), reduction: None, envelope }.carried()
    }

    #[test]
    fn both_ends_of_a_message_decide_alike() {
        let any = wildcards();
        for tag in [0, 1, 7] {
            let sent = message(Op::Send, -1, -1, 1, tag).unwrap();
            assert_eq!(sent, message(Op::Recv, 0, tag, -1, -1).unwrap());
            assert_eq!(sent, message(Op::Sendrecv, 0, tag, 1, tag).unwrap());
        }
        assert!(message(Op::Recv, 0, any.tag, -1, -1).unwrap());
        assert!(!message(Op::Recv, any.source, 3, -1, -1).unwrap());
        assert!(message(Op::Recv, any.source, any.tag, -1, -1).is_err());
        assert!(message(Op::Recv, any.source, 0, -1, -1).is_err());
        assert!(message(Op::Sendrecv, 0, any.tag, 1, 3).is_err());
        assert!(!message(Op::Sendrecv, any.proc_null, any.tag, 1, 3).unwrap(), "only one side counts");
        assert!(message(Op::Sendrecv, 0, any.tag, any.proc_null, 3).unwrap());
    }

    #[test]
    fn reductions_that_nccl_lacks_go_elsewhere() {
        let carried = |name, dtype| {
            let reduction = Reduction::from_name(name);
            let envelope = Envelope { source: -1, recvtag: -1, dest: -1, sendtag: -1 };
            Features { op: Op::Allreduce, dtype: Some(dtype), reduction, envelope }.carried().unwrap()
        };
        assert!(carried("SUM", Dtype::Bfloat16) && carried("MAX", Dtype::Int64));
        assert!(carried("LOR", Dtype::Bool) && carried("SUM", Dtype::Complex128));
        assert!(!carried("PROD", Dtype::Complex64) && !carried("LXOR", Dtype::Bool));
        assert!(!carried("SUM", Dtype::Int16) && !carried("BAND", Dtype::Int32));
        assert!(!carried("MAXLOC", Dtype::Float32) && !carried("MAX", Dtype::Float32));
    }
}
