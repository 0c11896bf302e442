//! NCCL on XLA's stream, without waiting for anything on the host.
//!
//! A call only puts work on the stream. What NCCL cannot do goes through staging. Both ends of a message have to take
//! the same way, and neither rank has the other one's arguments: so either all messages go through NCCL, and what
//! needs matching is an error, or all go through staging (see [`Messages`]).

mod communicator;
mod messages;
mod operations;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use self::communicator::{Communicator, Gpu};
pub use self::messages::Messages;
use self::messages::TAG;
use super::message::{Arrived, write_status};
use crate::call::{Call, Stream};
use crate::comm::{self, Comm, Group};
use crate::device::cuda::{Driver, Event};
use crate::device::{self, Device, nccl};
use crate::error::Cause;
use crate::mpilib::wildcards;
use crate::ops::Op;

/// Numbers of what is put on streams, apart from those of the flight recorder.
static NUMBERS: AtomicU64 = AtomicU64::new(1 << 62);

/// NCCL.
#[derive(Debug)]
pub struct Nccl {
    pub messages: Messages,
    driver: &'static Driver,
    /// Or why there is none: ranks without NCCL take part in connecting, so that the others learn of it.
    gpu: OnceLock<Result<Gpu, String>>,
    own: OnceLock<OwnStream>,
}

/// A stream of ours, for operations that are started.
#[derive(Debug)]
struct OwnStream {
    stream: Stream,
    /// Where the last one ends.
    end: Event,
}

// SAFETY: CUDA's handles may be used by any thread.
unsafe impl Send for OwnStream {}
// SAFETY: as above.
unsafe impl Sync for OwnStream {}

/// What is attached to a communicator on which NCCL has met the other ranks, or why it cannot be used there.
type Connected = Result<Communicator, String>;

/// An operation that is on a stream: the last one of its communicator.
#[derive(Debug)]
pub struct Unfinished {
    pub number: u64,
    pub op: Op,
    pub comm: Arc<Comm>,
    pub seconds: f64,
    /// Why it never ends, if NCCL reports an error.
    pub failure: Option<String>,
}

impl fmt::Display for Unfinished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {}, which is on the GPU,", self.op, self.comm.key)
    }
}

/// Whether NCCL could be used, apart from the question whether each rank has a GPU of its own.
pub fn probe() -> Result<(), String> {
    device::support()?;
    nccl::Library::get().map(|_| ())
}

/// For `auto`: whether each rank has a GPU of its own, or the launcher has shown it one that no other rank
/// has. Collective.
pub fn one_gpu_each() -> Result<bool, Cause> {
    let ranks = Group::World.local_size()?;
    let driver = Driver::get().ok();
    let devices = driver.and_then(|driver| driver.devices().ok()).unwrap_or(0);
    let only = driver.filter(|_| devices == 1).and_then(|driver| driver.uuid(0).ok());
    let mut all = Group::World.all_bytes(only.as_ref().map_or(&[], |uuid| uuid.as_slice()))?;
    let known = all.iter().all(|uuid| !uuid.is_empty());
    all.sort_unstable();
    let distinct = known && all.windows(2).all(|two| two[0] != two[1]);
    Ok(devices as usize >= ranks || distinct)
}

impl Nccl {
    pub fn new(driver: &'static Driver) -> Self {
        Self { messages: Messages::setting(), driver, gpu: OnceLock::new(), own: OnceLock::new() }
    }

    fn gpu(&self) -> Result<Gpu, String> {
        let new = || Gpu::new(self.driver, nccl::Library::get()?).map_err(|cause| cause.to_string());
        self.gpu.get_or_init(new).clone()
    }

    /// Puts a call on its stream.
    pub fn execute(&self, call: &Call) -> Result<(), Cause> {
        let comm = &call.site.comm;
        // The communicator's first operation makes its counterpart, together with the other ranks.
        let connected: Arc<Connected> =
            comm.attach(|| Communicator::connect(self.gpu(), self.messages, comm))?;
        let no_communicator =
            |reason: &String| Cause::NoCommunicator { key: comm.key.clone(), reason: reason.clone() };
        let communicator = connected.as_ref().as_ref().map_err(no_communicator)?;
        let mut last = communicator.lock();
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
        // NCCL may wait for other ranks here, for which other threads with other communicators may be needed.
        operations::put(call, communicator)?;
        if let Some(own) = own.filter(|own| own.stream == call.stream) {
            own.end.record(own.stream)?;
        }
        self.message_arrives(call)?;
        last.end.record(call.stream)?;
        (last.op, last.number) = (Some(call.site.op), NUMBERS.fetch_add(1, Ordering::Relaxed));
        last.since = Instant::now();
        Ok(())
    }

    /// NCCL's messages are as long as the receiver says, and their sender and tag are known beforehand.
    fn message_arrives(&self, call: &Call) -> Result<(), Cause> {
        let (true, Some(recv)) = (call.site.op.row().receives(), call.recv) else { return Ok(()) };
        let (any, source) = (wildcards(), call.site.envelope.source);
        let arrived = if source == any.proc_null {
            Arrived { source, tag: any.tag, count: 0 }
        } else {
            Arrived { source, tag: TAG, count: recv.count() }
        };
        if let Some(pair) = call.received {
            let words = [arrived.source, arrived.tag].map(|word| word as u32);
            // SAFETY: a result of two int32 in the memory of the GPU.
            unsafe { Device::Gpu(self.driver).write(words, &pair, call.stream)? };
        }
        if call.status.is_some() { write_status(call, &arrived) } else { Ok(()) }
    }

    /// A stream of its own, for a call that is started, if it carries it.
    pub fn own_stream(&self, call: &Call) -> Result<Option<Stream>, Cause> {
        if call.site.op.row().has_peer || !self.messages.carries(call)? {
            return Ok(None);
        }
        if let Some(own) = self.own.get() {
            return Ok(Some(own.stream));
        }
        let new = OwnStream { stream: self.driver.stream()?, end: self.driver.event()? };
        Ok(Some(self.own.get_or_init(|| new).stream))
    }

    /// What calls have put on streams, and has not happened yet. Waits for nothing.
    pub fn unfinished(&self) -> Vec<Unfinished> {
        let unfinished = |comm: Arc<Comm>| {
            let connected = comm.attached::<Connected>()?;
            let communicator = connected.as_ref().as_ref().ok()?;
            let last = communicator.try_lock()?;
            let op = last.op?;
            let failure = communicator.failure().err().map(|cause| cause.to_string());
            if failure.is_none() && last.end.is_reached() {
                return None;
            }
            let (number, seconds) = (last.number, last.since.elapsed().as_secs_f64());
            drop(last);
            Some(Unfinished { number, op, comm, seconds, failure })
        };
        self.driver.allow_queries_during_capture();
        comm::live().into_iter().filter_map(unfinished).collect()
    }
}
