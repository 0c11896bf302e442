//! NCCL on XLA's stream, without waiting for anything on the host.
//!
//! A call only puts work on the stream. What NCCL cannot do goes through staging. Both ends of a message have to take
//! the same way, and neither knows what the other was given: so either all messages go through NCCL, and what
//! needs matching is an error, or all go through staging (see [`Messages`]).

mod carries;
mod communicator;
mod queue;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use self::carries::carries;
use self::carries::{Messages, TAG, messages};
pub use self::carries::{messages_apart, settings};
use self::communicator::{Joined, Libraries};
use self::queue::{Put, Queue, put};
use super::{Arrived, Transport, Unfinished, write_status};
use crate::call::{Call, Stream};
use crate::comm::{self, Comm, Group};
use crate::device;
use crate::device::cuda::{self, Driver, Mark, Pointer};
use crate::device::nccl;
use crate::error::{Cause, Error};
use crate::mpilib::wildcards;

pub const NAME: &str = "nccl";

/// Numbers of what is put on streams, apart from those of the watchdog's other cares.
static NUMBERS: AtomicU64 = AtomicU64::new(1 << 62);

/// NCCL.
#[derive(Debug)]
pub struct Nccl {
    messages: Messages,
    /// Why there is none: ranks without NCCL take part in joining, so that the others learn of it.
    libraries: Result<Libraries, String>,
    own: Mutex<Option<Own>>,
}

/// A stream of ours, for operations that are started.
#[derive(Debug)]
struct Own {
    stream: Stream,
    /// Where the last one ends.
    end: Mark,
}

// SAFETY: CUDA's handles may be used by any thread.
unsafe impl Send for Own {}

/// Whether NCCL could be used, apart from the question whether each rank has a GPU of its own.
pub fn probe() -> Result<(), String> {
    device::support()?;
    nccl::library().map(|_| ()).map_err(|error| error.to_string())
}

/// For `auto`: whether each rank has a GPU of its own, or the launcher has shown it one that no other rank
/// has. Collective.
pub fn one_gpu_each() -> Result<bool, Cause> {
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
    pub fn start() -> Self {
        let libraries = probe().and_then(|()| {
            let driver = cuda::driver().map_err(|error| error.to_string())?;
            let library = nccl::library().map_err(|error| error.to_string())?;
            Ok(Libraries { driver, library })
        });
        Self { messages: messages(), libraries, own: Mutex::default() }
    }

    fn run(&self, call: &Call) -> Result<(), Cause> {
        let key = || call.site.comm.key.clone();
        let joined = self.join(&call.site.comm)?;
        let no_communicator = |reason: &String| Cause::NoCommunicator { key: key(), reason: reason.clone() };
        let communicator = joined.0.as_ref().map_err(no_communicator)?;
        let Libraries { driver, library } = communicator.libraries;
        let mut last = communicator.queue.lock().unwrap_or_else(PoisonError::into_inner);
        if driver.context_of(call.stream)? != communicator.scratch.context {
            return Err(Cause::Unsupported {
                feature: "an array on this device".into(),
                reason: "NCCL's communicators were made for JAX's first local device",
            });
        }
        communicator.failure()?;
        let put = put(call.site.op).ok_or_else(|| Cause::Unsupported {
            feature: call.site.op.to_string(),
            reason: "NCCL has no such operation",
        })?;
        let queue = Queue { library, handle: communicator.handle, stream: call.stream };
        let own = || self.own.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = own().as_ref().filter(|own| own.stream != call.stream) {
            // What NCCL does, on whichever communicators, it does in one order on all ranks.
            own.end.hold(call.stream)?;
        }
        // NCCL may wait for other ranks here, for which other threads with other communicators may be needed.
        put(&Put { call, queue, scratch: communicator.scratch.pointer })?;
        if let Some(own) = own().as_ref().filter(|own| own.stream == call.stream) {
            own.end.put(own.stream)?;
        }
        self.message_arrives(call, driver)?;
        last.end.put(call.stream)?;
        (last.op, last.number) = (Some(call.site.op), NUMBERS.fetch_add(1, Ordering::Relaxed));
        last.since = Instant::now();
        Ok(())
    }

    /// NCCL's counterpart of a communicator, which the first operation makes. Collective then.
    fn join(&self, comm: &Comm) -> Result<Arc<Joined>, Cause> {
        comm.attach(|| Joined::connect(&self.libraries, self.messages, comm))
    }

    /// NCCL's messages are as long as the receiver says, and their sender and tag are known beforehand.
    fn message_arrives(&self, call: &Call, driver: &Driver) -> Result<(), Cause> {
        let (true, Some(recv)) = (call.site.op.row().receives(), call.recv) else { return Ok(()) };
        let (any, source) = (wildcards(), call.site.envelope.source);
        let arrived = if source == any.proc_null {
            Arrived { source, tag: any.tag, count: 0 }
        } else {
            Arrived { source, tag: TAG, count: recv.count() }
        };
        if let Some(pair) = call.received {
            let words = pair.data() as Pointer;
            // SAFETY: a result of two int32 in the memory of the GPU.
            unsafe {
                driver.fill(words, arrived.source, call.stream)?;
                driver.fill(words + size_of::<i32>() as Pointer, arrived.tag, call.stream)?;
            }
        }
        if call.status.is_some() { write_status(call, &arrived) } else { Ok(()) }
    }
}

impl Transport for Nccl {
    fn name(&self) -> &'static str {
        NAME
    }

    fn execute(&self, call: &Call) -> Result<(), Error> {
        let located = |cause| Error { transport: Some(self.name()), ..call.site.error(cause) };
        self.run(call).map_err(located)
    }

    fn takes(&self, call: &Call) -> Result<bool, Cause> {
        carries(call)
    }

    fn reads_operands(&self) -> bool {
        false
    }

    /// Reading an operand would mean to wait: NCCL's messages have one tag, and their source is known to the program.
    fn knows_peers(&self) -> bool {
        self.messages == Messages::Nccl
    }

    fn own_stream(&self, call: &Call) -> Result<Option<Stream>, Error> {
        if call.site.op.row().has_peer {
            return Ok(None);
        }
        let Ok(Libraries { driver, .. }) = &self.libraries else { return Ok(None) };
        let mut own = self.own.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = &*own {
            return Ok(Some(own.stream));
        }
        let located = |cause| Error { transport: Some(NAME), ..call.site.error(cause) };
        let made = driver
            .context_of(call.stream)
            .and_then(|context| Ok(Own { stream: driver.stream()?, end: driver.mark(context)? }));
        Ok(Some(own.insert(made.map_err(located)?).stream))
    }

    /// NCCL's calls return before anything has happened. Nobody is waited for.
    fn unfinished(&self) -> Vec<Unfinished> {
        let Ok(libraries) = &self.libraries else { return Vec::new() };
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
        libraries.driver.look_on();
        comm::live().into_iter().filter_map(waiting).collect()
    }

    /// It would wait for the rest.
    fn has_exact_lengths(&self) -> bool {
        true
    }
}
