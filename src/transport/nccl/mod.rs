//! NCCL on XLA's stream, without waiting for anything on the host.
//!
//! A call only puts work on the stream. What NCCL cannot do goes through staging. Both ends of a message have to take
//! the same way, and neither rank has the other one's arguments: so either all messages go through
//! NCCL, and an operation that needs matching fails, or all go through staging (see
//! [`MessagePath`]).

mod communicator;
mod messages;
mod operations;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use self::communicator::{Communicator, Gpu};
pub use self::messages::MessagePath;
use self::messages::{TAG, is_auto};
use super::host_mpi::HostMpi;
use super::message::{Arrived, write_status};
use super::staged_mpi::StagedMpi;
use super::{Base, Descriptor, TARGET, Transport, UnderWay};
use crate::call::{Call, Envelope, Stream};
use crate::comm::{self, Comm, Group};
use crate::device::cuda::{Driver, Event};
use crate::device::{self, Device, Platform, nccl};
use crate::error::{Cause, Error};
use crate::mpilib::wildcards;
use crate::ops::{Buffer, Op};

pub const DESCRIPTOR: Descriptor = Descriptor {
    name: "nccl",
    takes: |platform| platform == Platform::Gpu,
    settings: |is_auto| Ok(Some(format!("messages: {}", MessagePath::read(is_auto)?.name()))),
    probe: |_| probe(),
    start: |_| {
        device::support()?;
        Ok(Nccl::new(Driver::get()?).into())
    },
    suits: Some(one_gpu_each),
    meets_mpi: false,
    messages_apart: || {
        (MessagePath::setting() == MessagePath::Nccl).then_some(
            "send and recv go through NCCL, and do not meet the messages of MPI; MPI4JAX_NCCL_MESSAGES=staged \
             lets all messages go through MPI",
        )
    },
    ..Descriptor::DEFAULT
};

/// NCCL, which puts calls on their stream. What it cannot do is staged.
#[derive(Debug)]
pub struct Nccl {
    messages: MessagePath,
    staged: StagedMpi,
    driver: &'static Driver,
    /// NCCL on this rank's GPU, or why it cannot be used. A rank without NCCL takes part in connecting all the same, so that the
    /// other ranks learn of it.
    gpu: OnceLock<Result<Gpu, String>>,
    own: OnceLock<OwnStream>,
}

/// A stream of ours, for operations that are started.
#[derive(Debug)]
struct OwnStream {
    stream: Stream,
    /// Recorded after the last operation on it.
    end: Event,
}

// SAFETY: CUDA's handles may be used by any thread.
unsafe impl Send for OwnStream {}
// SAFETY: as above.
unsafe impl Sync for OwnStream {}

/// The attachment of an MPI communicator: the NCCL communicator of the same ranks, or why there is none.
type Connected = Result<Communicator, String>;

/// An operation that the GPU has begun and not completed: the oldest one of its communicator.
#[derive(Debug)]
pub struct Unfinished {
    /// Its number among the operations that this process has put on streams.
    pub number: u64,
    pub op: Op,
    pub comm: Arc<Comm>,
    pub seconds: f64,
    /// Why it can never complete, if NCCL reports an error.
    pub failure: Option<String>,
}

impl fmt::Display for Unfinished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {}, which is on the GPU,", self.op, self.comm.key)
    }
}

/// Whether NCCL could be used, apart from the question whether each rank has a GPU of its own.
fn probe() -> Result<(), String> {
    device::support()?;
    nccl::Library::get().map(|_| ())
}

/// For `auto`: whether each rank computes on a GPU of its own. Collective.
fn one_gpu_each() -> Result<bool, Cause> {
    let ours = device::device().and_then(|ordinal| device::uuids().get(ordinal as usize).copied());
    let mut all = Group::World.all_bytes(ours.as_ref().map_or(&[], |uuid| uuid.as_slice()))?;
    all.sort_unstable();
    Ok(all.iter().all(|uuid| !uuid.is_empty()) && all.windows(2).all(|two| two[0] != two[1]))
}

impl Nccl {
    pub fn new(driver: &'static Driver) -> Self {
        let staged = StagedMpi::new(DESCRIPTOR.name, HostMpi::default(), Device::Gpu(driver));
        Self { messages: MessagePath::setting(), staged, driver, gpu: OnceLock::new(), own: OnceLock::new() }
    }

    fn gpu(&self) -> Result<Gpu, String> {
        let new = || Gpu::new(self.driver, nccl::Library::get()?).map_err(|cause| cause.to_string());
        self.gpu.get_or_init(new).clone()
    }

    /// Meets the other ranks.
    #[cold]
    fn connect(&self, comm: &Comm) -> Result<Connected, Cause> {
        let began = Instant::now();
        let connected = Communicator::connect(self.gpu(), self.messages, comm)?;
        let (key, rank, size, seconds) = (&*comm.key, comm.rank, comm.size, began.elapsed().as_secs_f64());
        match &connected {
            Ok(_) => tracing::info!(target: TARGET, comm = key, rank, size, seconds, "NCCL has connected"),
            Err(reason) => {
                tracing::warn!(target: TARGET, comm = key, rank, size, reason, "NCCL cannot connect")
            }
        }
        Ok(connected)
    }

    /// Puts a call on its stream.
    fn put(&self, call: &Call) -> Result<(), Cause> {
        static CALLS: AtomicU64 = AtomicU64::new(0);
        let comm = &call.site.comm;
        // The communicator's first operation makes its counterpart, together with the other ranks.
        let connected: Arc<Connected> = comm.attach(|| self.connect(comm))?;
        let no_communicator =
            |reason: &String| Cause::NoCommunicator { key: comm.key.clone(), reason: reason.clone() };
        let communicator = connected.as_ref().as_ref().map_err(no_communicator)?;
        let mut pending = communicator.lock();
        if self.driver.context_of(call.stream)? != communicator.gpu.context {
            return Err(Cause::Unsupported {
                feature: "an array on this device".into(),
                reason: "NCCL's communicators were made for JAX's first local device",
            });
        }
        communicator.failure()?;
        // What NCCL does, on whichever communicators, it does in one order on all ranks.
        let own = self.own.get();
        if let Some(own) = own.filter(|own| own.stream != call.stream) {
            own.end.hold(call.stream)?;
        }
        let events = pending.events(&communicator.gpu)?;
        events[0].record(call.stream)?;
        // NCCL may wait for other ranks here, for which other threads with other communicators may be needed.
        operations::put(call, communicator)?;
        if let Some(own) = own.filter(|own| own.stream == call.stream) {
            own.end.record(own.stream)?;
        }
        self.message_arrives(call)?;
        events[1].record(call.stream)?;
        pending.add(call.site.op, CALLS.fetch_add(1, Ordering::Relaxed), events);
        Ok(())
    }

    /// Writes source, tag and length of a received message. All three are known beforehand: NCCL
    /// matches neither, and a message is as long as its result.
    fn message_arrives(&self, call: &Call) -> Result<(), Cause> {
        let (true, Some(recv)) = (call.site.op.row().receives(), call.recv) else { return Ok(()) };
        let (any, source) = (wildcards(), call.site.envelope.source);
        let arrived = if source == any.proc_null {
            Arrived { source, tag: any.tag, count: 0 }
        } else {
            Arrived { source, tag: TAG, count: recv.count() }
        };
        if let Some(received) = call.received {
            let length = i32::try_from(arrived.count).unwrap_or(i32::MAX);
            let words = [arrived.source, arrived.tag, length].map(|word| word as u32);
            // SAFETY: a result of three int32 in the memory of the GPU.
            unsafe { Device::Gpu(self.driver).write(&words, &received, call.stream)? };
        }
        if call.status.is_some() { write_status(call, &arrived) } else { Ok(()) }
    }

    /// The stream for nonblocking operations, if NCCL carries this one; created by the first.
    ///
    /// The operations of all communicators share it, in the order in which each rank starts them.
    /// MPI lets ranks initiate operations on two communicators in different orders, so under `auto`
    /// they go through MPI.
    fn stream_for(&self, call: &Call) -> Result<Option<Stream>, Cause> {
        if is_auto() || call.site.op.row().has_peer || !self.messages.carries(call)? {
            return Ok(None);
        }
        if let Some(own) = self.own.get() {
            return Ok(Some(own.stream));
        }
        let new = OwnStream { stream: self.driver.stream()?, end: self.driver.event()? };
        Ok(Some(self.own.get_or_init(|| new).stream))
    }
}

impl Transport for Nccl {
    fn base(&self) -> &Base {
        self.staged.base()
    }

    #[inline(never)]
    fn execute(&self, call: &Call) -> Result<(), Error> {
        let failed = |cause| call.site.error(cause);
        if !self.messages.carries(call).map_err(failed)? {
            return self.staged.execute(call);
        }
        self.put(call).map_err(failed)
    }

    fn own_stream(&self, call: &Call) -> Result<Option<Stream>, Error> {
        self.stream_for(call).map_err(|cause| call.site.error(cause))
    }

    unsafe fn start(&self, call: &Call, own: Option<Stream>) -> Result<UnderWay, Error> {
        // SAFETY: promised by the caller.
        let Some(own) = own else { return unsafe { self.staged.start(call, own) } };
        let event_on = |stream| {
            let event = self.driver.event()?;
            event.record(stream).map(|()| event)
        };
        let located = |cause| call.site.error(cause);
        event_on(call.stream).and_then(|here| here.hold(own)).map_err(located)?;
        self.execute(&Call { stream: own, ..call.clone() })?;
        event_on(own).map(UnderWay::OnStream).map_err(located)
    }

    /// NCCL's messages have one tag, and a source that the program names. To read it would mean to wait.
    fn read_envelope(&self, from: &Buffer, stream: Stream) -> Result<Option<Envelope>, Cause> {
        if self.messages == MessagePath::Nccl { Ok(None) } else { self.staged.read_envelope(from, stream) }
    }

    /// Waits for nothing.
    fn unfinished(&self) -> Vec<Unfinished> {
        let unfinished = |comm: &Arc<Comm>, connected: &Connected| {
            let communicator = connected.as_ref().ok()?;
            let mut pending = communicator.try_lock()?;
            let failure = communicator.failure().err().map(|cause| cause.to_string());
            let last = || pending.last.map(|(op, number)| (op, number, Instant::now()));
            let (op, number, begun) = match &failure {
                Some(_) => last()?,
                None => pending.oldest(self.driver)?,
            };
            let seconds = begun.elapsed().as_secs_f64();
            Some(Unfinished { number, op, comm: comm.clone(), seconds, failure })
        };
        let live = comm::live();
        live.iter().filter_map(|comm| comm.look_at(|connected| unfinished(comm, connected))?).collect()
    }
}
