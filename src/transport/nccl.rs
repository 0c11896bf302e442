//! NCCL on XLA's stream, without waiting for anything on the host.
//!
//! A call only puts work on the stream, always the same for the same call, so that XLA may record it into a
//! CUDA graph and replay it without asking again. What NCCL cannot do is compiled to other targets, which
//! go through staging. Both ends of a message have to take the same way, and neither knows what the other
//! was given: so either all messages go through NCCL, and what needs matching is an error when it is compiled,
//! or all go through staging (see [`Messages`]).

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::{Arrived, Transport, Unfinished, write_status};
use crate::call::{Call, Envelope, Peers, Site, Stream};
use crate::comm::{self, Comm, Group};
use crate::device;
use crate::device::cuda::{self, Driver, Mark, Pointer};
use crate::device::nccl::{self, DataType, Library, RedOp, UniqueId};
use crate::error::{Cause, Error};
use crate::mpilib::wildcards;
use crate::ops::{Buffer, Builtin, Class, Dtype, Op, Reduction};

pub const NAME: &str = "nccl";

/// The tag of messages that go through NCCL, which has none.
const TAG: i32 = 0;

pub const MESSAGES: &str = "MPI4JAX_NCCL_MESSAGES";
pub const GRAPHS: &str = "MPI4JAX_NCCL_GRAPHS";

/// How `send`, `recv` and `sendrecv` go, on all ranks and all communicators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Messages {
    /// Through NCCL, which matches nothing: messages between two ranks arrive in the order in which they were
    /// sent. So all have tag 0, and sources are named.
    Nccl,
    /// Through staging, with all that MPI allows.
    Staged,
}

impl Messages {
    const ALL: [(&str, Self); 2] = [("nccl", Self::Nccl), ("staged", Self::Staged)];

    /// What a setting means; one that says nothing means `otherwise`.
    pub fn parse(setting: Option<&str>, otherwise: Self) -> Result<Self, Cause> {
        let Some(text) = setting else { return Ok(otherwise) };
        let found = Self::ALL.into_iter().find(|(name, _)| *name == text);
        found.map(|(_, messages)| messages).ok_or_else(|| {
            let valid = Self::ALL.map(|(name, _)| name).join(", ");
            Cause::Setting { message: format!("{MESSAGES}={text} is not understood: it takes {valid}") }
        })
    }

    pub fn name(self) -> &'static str {
        Self::ALL[self as usize].0
    }
}

/// Whether XLA may record calls into CUDA graphs. NCCL wants an operation to be recorded by all ranks that
/// take part or by none, and XLA decides by what else is in the program, and records again when addresses change.
/// So the user has to say that the ranks run alike.
pub fn parse_graphs(setting: Option<&str>) -> Result<bool, Cause> {
    match setting {
        None | Some("0") => Ok(false),
        Some("1") => Ok(true),
        Some(text) => {
            Err(Cause::Setting { message: format!("{GRAPHS}={text} is not understood: it takes 0, 1") })
        }
    }
}

/// What decides whether NCCL carries an operation: what is known when it is compiled.
#[derive(Clone, Copy, Debug)]
pub struct Features {
    pub op: Op,
    /// Of the operand; `None` without one.
    pub dtype: Option<Dtype>,
    pub reduction: Option<Reduction>,
    pub envelope: Envelope,
    /// Whether the program computes a part of the envelope.
    pub traced: bool,
}

impl Features {
    fn of(call: &Call) -> Self {
        let Site { op, reduction, envelope, .. } = *call.site;
        Self { op, dtype: call.send.map(|buffer| buffer.dtype), reduction, envelope, traced: false }
    }

    /// Whether NCCL carries it; else it goes through staging.
    pub fn carried(&self, messages: Messages) -> Result<bool, Cause> {
        match self.op {
            Op::Allgather | Op::Alltoall | Op::Barrier | Op::Bcast | Op::Gather | Op::Scatter => Ok(true),
            Op::Allreduce | Op::Reduce => {
                Ok(self.reduction.zip(self.dtype).is_some_and(|(r, dtype)| reduced(r, dtype).is_some()))
            }
            // It packs, which is done on the host.
            Op::HaloExchange | Op::Scan => Ok(false),
            Op::Recv | Op::Send | Op::Sendrecv if messages == Messages::Staged => Ok(false),
            Op::Recv | Op::Send | Op::Sendrecv if self.traced => {
                Err(needs_matching("a source, destination or tag that is traced".into()))
            }
            Op::Send => self.sends_in_order(),
            Op::Recv => self.receives_in_order(),
            Op::Sendrecv => Ok(self.sends_in_order()? && self.receives_in_order()?),
        }
    }

    /// An error where the receiver might have to look for what is sent.
    fn sends_in_order(&self) -> Result<bool, Cause> {
        let Envelope { dest, sendtag, .. } = self.envelope;
        if dest != wildcards().proc_null && sendtag != TAG {
            return Err(needs_matching(format!("sending with tag {sendtag}")));
        }
        Ok(true)
    }

    /// An error where a message would have to be looked for. With tag 0 alone, `ANY_TAG` is that.
    fn receives_in_order(&self) -> Result<bool, Cause> {
        let any = wildcards();
        let Envelope { source, recvtag, .. } = self.envelope;
        if source == any.proc_null {
            return Ok(true);
        }
        if source == any.source {
            return Err(needs_matching("receiving from ANY_SOURCE".into()));
        }
        if recvtag != TAG && recvtag != any.tag {
            return Err(needs_matching(format!("receiving with tag {recvtag}")));
        }
        Ok(true)
    }
}

fn needs_matching(what: String) -> Cause {
    Cause::Unsupported {
        what,
        reason: "messages go through NCCL, which knows no tags and no wildcards; set \
                 MPI4JAX_NCCL_MESSAGES=staged, so that messages go through MPI and all else through NCCL, \
                 or name the source and leave the tags at 0",
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
    messages: Messages,
    /// Why there is none: ranks without NCCL take part in joining, so that the others learn of it.
    parts: Result<Parts, String>,
}

#[derive(Clone, Copy, Debug)]
struct Parts {
    driver: &'static Driver,
    library: &'static Library,
}

impl Parts {
    fn communicator(self, context: cuda::Context, id: UniqueId, comm: &Comm) -> Result<Communicator, Cause> {
        let Self { driver, library } = self;
        // SAFETY: the context exists.
        let _entered = unsafe { driver.enter(context)? };
        let scratch = driver.allocate(size_of::<i32>())?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: every rank of the communicator comes here with the same identifier.
        let code = unsafe { (library.f.ncclCommInitRank)(&mut handle, comm.size, id, comm.rank) };
        library.check("ncclCommInitRank", code)?;
        let last = Last { op: None, number: 0, since: Instant::now(), end: driver.mark()? };
        Ok(Communicator { parts: self, handle, context, scratch, queue: Mutex::new(last) })
    }
}

/// What is attached to a communicator on which NCCL has met the other ranks.
struct Joined(Result<Communicator, String>);

/// NCCL's counterpart of an MPI communicator.
#[derive(Debug)]
struct Communicator {
    parts: Parts,
    handle: nccl::Handle,
    context: cuda::Context,
    /// What a barrier reduces.
    scratch: Pointer,
    /// Held while work is put on a stream.
    queue: Mutex<Last>,
}

/// What was put on a stream last.
#[derive(Debug)]
struct Last {
    /// `None` before, and for what is recorded.
    op: Option<Op>,
    number: u64,
    since: Instant,
    end: Mark,
}

/// Numbers of what is put on streams, apart from those of the watchdog's other cares.
static NUMBERS: AtomicU64 = AtomicU64::new(1 << 62);

// SAFETY: the handles are used under the lock.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

impl Communicator {
    /// An error that NCCL has found out meanwhile.
    fn failure(&self) -> Result<(), Cause> {
        let (library, mut broken) = (self.parts.library, 0);
        // SAFETY: the communicator is live; a place to write to. Any thread may ask.
        let code = unsafe { (library.f.ncclCommGetAsyncError)(self.handle, &mut broken) };
        library.check("ncclCommGetAsyncError", code)?;
        if broken == nccl::IN_PROGRESS { Ok(()) } else { library.check("an earlier operation", broken) }
    }
}

impl Drop for Communicator {
    /// As collective as the freeing of what it belongs to; after an error it waits for nobody.
    fn drop(&mut self) {
        let Parts { driver, library } = self.parts;
        // SAFETY: the context exists. Nobody else has the handle, and what is on streams has ended when NCCL returns.
        unsafe {
            let Ok(_entered) = driver.enter(self.context) else { return };
            let end =
                if self.failure().is_ok() { library.f.ncclCommDestroy } else { library.f.ncclCommAbort };
            end(self.handle);
            driver.free(self.scratch);
        }
    }
}

/// Whether NCCL could be used, apart from the question whether each rank has a GPU of its own.
pub(super) fn probe() -> Result<(), String> {
    device::support()?;
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

impl Nccl {
    /// Also where it cannot be used.
    pub fn new(messages: Messages) -> Self {
        let parts = probe().and_then(|()| {
            let driver = cuda::driver().map_err(|error| error.to_string())?;
            let library = nccl::library().map_err(|error| error.to_string())?;
            Ok(Parts { driver, library })
        });
        Self { messages, parts }
    }

    /// Every rank comes here, also one that has nothing to offer.
    fn connect(&self, comm: &Comm) -> Result<Result<Communicator, String>, Cause> {
        let group = Group::Of(comm);
        let mut ours = self.parts.clone().and_then(|parts| self.prepare(parts, comm));
        let our_bits = u64::from(ours.is_ok()) | 1 << (1 + self.messages as u32);
        let all_bits = group.common_bits(our_bits)?;
        if all_bits >> 1 == 0 {
            return Ok(Err(format!("{MESSAGES} differs between ranks, here it is {}", self.messages.name())));
        }
        if all_bits & 1 == 0 {
            ours = ours.and(Err("another rank has no NCCL or no GPU".into()));
        }
        let (parts, context, id) = match ours {
            Ok(ours) => ours,
            Err(reason) => return Ok(Err(reason)),
        };
        let all = group.all_bytes(id.as_ref().map_or(&[], |id| id.0.as_slice()))?;
        let mut id = UniqueId([0; 128]);
        id.0.copy_from_slice(&all[0]);
        // A rank that fails closes its connections, on which the others wait, so that they fail too. Then all
        // know, and none uses it.
        let made = parts.communicator(context, id, comm).map_err(|cause| cause.to_string());
        if group.common_bits(u64::from(made.is_ok()))? == 0 {
            return Ok(made.and(Err("another rank could not make it".into())));
        }
        Ok(made)
    }

    /// What this rank needs before the ranks come together: the device's context, and on rank 0 a name for
    /// NCCL's communicator.
    fn prepare(&self, parts: Parts, comm: &Comm) -> Result<(Parts, cuda::Context, Option<UniqueId>), String> {
        let Parts { driver, library } = parts;
        let device = device::device().ok_or("JAX does not compute on a GPU")?;
        let context = driver.primary_context(device).map_err(|cause| cause.to_string())?;
        if comm.rank != 0 {
            return Ok((parts, context, None));
        }
        let mut id = UniqueId([0; 128]);
        // SAFETY: a place to write to.
        let code = unsafe { (library.f.ncclGetUniqueId)(&mut id) };
        library.check("ncclGetUniqueId", code).map_err(|cause| cause.to_string())?;
        Ok((parts, context, Some(id)))
    }

    fn run(&self, call: &Call) -> Result<(), Cause> {
        let key = || call.site.comm.key.clone();
        let joined = call.site.comm.attached::<Joined>().ok_or_else(|| Cause::NotJoined { key: key() })?;
        let no_communicator = |reason: &String| Cause::NoCommunicator { key: key(), reason: reason.clone() };
        let communicator = joined.0.as_ref().map_err(no_communicator)?;
        let Parts { driver, library } = communicator.parts;
        let mut last = communicator.queue.lock().unwrap_or_else(PoisonError::into_inner);
        if driver.context_of(call.stream)? != communicator.context {
            return Err(Cause::Unsupported {
                what: "an array on this device".into(),
                reason: "NCCL's communicators were made for JAX's first local device",
            });
        }
        communicator.failure()?;
        let queue = Queue { library, handle: communicator.handle, stream: call.stream };
        self.put(call, &queue, communicator)?;
        self.message_arrives(call, driver)?;
        if !driver.is_capturing(call.stream)? {
            last.end.put(call.stream)?;
            (last.op, last.number) = (Some(call.site.op), NUMBERS.fetch_add(1, Ordering::Relaxed));
            last.since = Instant::now();
        }
        Ok(())
    }

    /// Puts an operation on the stream.
    fn put(&self, call: &Call, queue: &Queue, communicator: &Communicator) -> Result<(), Cause> {
        let site = call.site;
        let (root, rank, ranks) = (site.root, site.comm.rank, site.comm.size);
        let missing = |what| Cause::Buffers { what, expected: 1, actual: 0 };
        let send = || call.send.ok_or_else(|| missing("operand"));
        let recv = || call.recv.ok_or_else(|| missing("result"));
        let nobody = wildcards().proc_null;
        // What an operand says at run time is what the site says (see `read_peers`).
        let Envelope { source, dest, .. } = site.envelope;
        match site.op {
            Op::Allgather => queue.allgather(&send()?, &recv()?),
            Op::Allreduce | Op::Reduce => {
                let send = send()?;
                let reduction = site.reduction.ok_or(Cause::Reduction { expected: true })?;
                let kind = reduced(reduction, send.dtype).ok_or(Cause::UndefinedReduction {
                    reduction: "this reduction on NCCL",
                    dtype: send.dtype.name(),
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
            // It would wait for its other half, which comes later on the same stream.
            Op::Send if dest == rank => Err(to_itself("send")),
            Op::Recv if source == rank => Err(to_itself("recv")),
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
        let (true, Some(recv)) = (call.site.op.row().receives(), call.recv) else { return Ok(()) };
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
        if call.status == 0 { Ok(()) } else { write_status(call, &arrived) }
    }
}

fn to_itself(op: &str) -> Cause {
    Cause::Unsupported {
        what: format!("a {op} between a rank and itself"),
        reason: "messages go through NCCL: use sendrecv, or set MPI4JAX_NCCL_MESSAGES=staged",
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
        NAME
    }

    fn execute(&self, call: &Call) -> Result<(), Error> {
        let located = |cause| Error { transport: Some(self.name()), ..call.site.error(cause) };
        match Features::of(call).carried(self.messages) {
            Ok(true) => self.run(call).map_err(located),
            Ok(false) => Err(located(Cause::Unsupported {
                what: "this operation".into(),
                reason: "NCCL does not carry it, and it was not compiled for staging",
            })),
            Err(cause) => Err(located(cause)),
        }
    }

    /// Reading it would mean to wait, and it is what the site says: NCCL's messages have one tag, and their
    /// source is known when they are compiled.
    unsafe fn read_peers(&self, _peers: *const Peers, _stream: Stream) -> Result<Option<Peers>, Cause> {
        Ok(None)
    }

    /// NCCL's calls return before anything has happened. Nobody is waited for.
    fn unfinished(&self) -> Vec<Unfinished> {
        let Ok(parts) = &self.parts else { return Vec::new() };
        let waiting = |comm: Arc<Comm>| {
            let joined = comm.attached::<Joined>()?;
            let communicator = joined.0.as_ref().ok()?;
            let last = communicator.queue.try_lock().ok()?;
            let op = last.op?;
            let failure = communicator.failure().err().map(|cause| cause.to_string());
            if failure.is_none() && last.end.is_reached() {
                return None;
            }
            let (number, seconds) = (last.number, last.since.elapsed().as_secs_f64());
            drop(last);
            Some(Unfinished { number, op, comm, seconds, failure })
        };
        parts.driver.look_on();
        comm::live().into_iter().filter_map(waiting).collect()
    }

    fn joins_late(&self) -> bool {
        true
    }

    /// Makes NCCL's communicator.
    fn join(&self, comm: &Arc<Comm>) -> Result<(), Error> {
        let joined = comm.attach(|| self.connect(comm).map(Joined));
        let located = |cause: Cause| Error { transport: Some(NAME), rank: Some(comm.rank), ..cause.into() };
        joined.map(drop).map_err(located)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(messages: Messages, envelope: [i32; 4]) -> [Result<bool, Cause>; 3] {
        let [source, recvtag, dest, sendtag] = envelope;
        let envelope = Envelope { source, recvtag, dest, sendtag };
        [Op::Send, Op::Recv, Op::Sendrecv].map(|op| {
            Features { op, dtype: Some(Dtype::Float32), reduction: None, envelope, traced: false }
                .carried(messages)
        })
    }

    #[test]
    fn all_messages_go_one_way() {
        let any = wildcards();
        let nobody = any.proc_null;
        for (envelope, fit) in [
            ([0, 0, 1, 0], [true, true, true]),
            ([0, any.tag, 1, 0], [true, true, true]),
            ([0, 0, 1, 3], [false, true, false]),
            ([0, 3, 1, 0], [true, false, false]),
            ([any.source, 0, 1, 0], [true, false, false]),
            ([any.source, any.tag, nobody, 3], [true, false, false]),
            ([any.source, 3, 1, 3], [false, false, false]),
            ([nobody, 3, nobody, 3], [true, true, true]),
        ] {
            for (answer, fit) in message(Messages::Nccl, envelope).into_iter().zip(fit) {
                assert!(matches!((answer, fit), (Ok(true), true) | (Err(_), false)), "{envelope:?}");
            }
            let staged = message(Messages::Staged, envelope);
            assert!(staged.iter().all(|answer| matches!(answer, Ok(false))), "{envelope:?}");
        }
    }

    #[test]
    fn settings_of_messages() {
        assert_eq!(Messages::parse(None, Messages::Staged).unwrap(), Messages::Staged);
        for (name, messages) in Messages::ALL {
            assert_eq!(Messages::parse(Some(name), Messages::Nccl).unwrap(), messages);
            assert_eq!(messages.name(), name);
        }
        let error = Messages::parse(Some("pigeon"), Messages::Nccl).unwrap_err().to_string();
        assert!(error.contains("pigeon") && error.contains("nccl, staged"), "{error}");
        assert!(!parse_graphs(None).unwrap() && parse_graphs(Some("1")).unwrap());
        let error = parse_graphs(Some("perhaps")).unwrap_err().to_string();
        assert!(error.contains("MPI4JAX_NCCL_GRAPHS=perhaps") && error.contains("0, 1"), "{error}");
    }

    #[test]
    fn reductions_that_nccl_lacks_go_elsewhere() {
        let carried = |name, dtype| {
            let reduction = Reduction::from_name(name);
            let envelope = Envelope { source: -1, recvtag: -1, dest: -1, sendtag: -1 };
            let features =
                Features { op: Op::Allreduce, dtype: Some(dtype), reduction, envelope, traced: false };
            features.carried(Messages::Nccl).unwrap()
        };
        assert!(carried("SUM", Dtype::Bfloat16) && carried("MAX", Dtype::Int64));
        assert!(carried("LOR", Dtype::Bool) && carried("SUM", Dtype::Complex128));
        assert!(!carried("PROD", Dtype::Complex64) && !carried("LXOR", Dtype::Bool));
        assert!(!carried("SUM", Dtype::Int16) && !carried("BAND", Dtype::Int32));
        assert!(!carried("MAXLOC", Dtype::Float32) && !carried("MAX", Dtype::Float32));
    }
}
