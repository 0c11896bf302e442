//! NCCL communicators, one for each MPI communicator that has been used on a GPU.

use std::collections::VecDeque;
use std::ffi::c_char;
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use super::messages::{MESSAGES, MessagePath};
use crate::comm::{Comm, Group};
use crate::device;
use crate::device::cuda::{Context, Driver, Event, Pointer};
use crate::device::nccl::{self, Library, UniqueId, nccl, nccl_code};
use crate::error::Cause;
use crate::ops::Op;
use crate::sync::lock;

/// What all NCCL communicators of this process share.
#[derive(Clone, Copy, Debug)]
pub struct Gpu {
    pub driver: &'static Driver,
    pub library: &'static Library,
    /// The number of the device among those that are visible.
    pub device: i32,
    pub context: Context,
    /// One integer, which barriers reduce.
    pub scratch: Pointer,
}

impl Gpu {
    pub fn new(driver: &'static Driver, library: &'static Library) -> Result<Self, Cause> {
        let device =
            device::device().ok_or_else(|| Cause::Setting { message: "JAX does not run on a GPU".into() })?;
        let context = driver.primary_context(device)?;
        // SAFETY: the context exists.
        let _entered = unsafe { driver.enter(context)? };
        Ok(Self { driver, library, device, context, scratch: driver.allocate(size_of::<i32>())? })
    }

    /// Two events, before and after an operation.
    fn events(&self) -> Result<[Event; 2], Cause> {
        // SAFETY: the context exists.
        let _entered = unsafe { self.driver.enter(self.context)? };
        Ok([self.driver.event()?, self.driver.event()?])
    }

    /// Creates what a communicator needs on this rank before the ranks connect: events, and what the ranks tell each other.
    fn prepare(&self, comm: &Comm) -> Result<([Event; 2], Introduction), Cause> {
        let events = self.events()?;
        // SAFETY: the context exists.
        let _entered = unsafe { self.driver.enter(self.context)? };
        let mut id = None;
        if comm.rank == 0 {
            let id = id.insert(UniqueId { internal: [0; 128] });
            // SAFETY: a place to write to.
            unsafe { nccl!(self.library, ncclGetUniqueId(id))? };
        }
        let (version, uuid) = (self.library.version()?, self.driver.uuid(self.device)?);
        Ok((events, Introduction { version, uuid, id }))
    }
}

// SAFETY: a context and an address on a GPU may be used by any thread.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

/// An NCCL communicator of the ranks of an MPI communicator.
#[derive(Debug)]
pub struct Communicator {
    pub gpu: Gpu,
    pub handle: nccl::Handle,
    pending: Mutex<Pending>,
}

/// The operations that were put on streams and were not seen to complete, oldest first. They complete in this order.
#[derive(Debug)]
pub struct Pending {
    operations: VecDeque<Enqueued>,
    /// Pairs of events of completed operations, for later ones.
    spare: Vec<[Event; 2]>,
    /// The operation that was put on a stream last, which may have completed, and its number.
    pub last: Option<(Op, u64)>,
}

/// An operation that was put on a stream.
#[derive(Debug)]
struct Enqueued {
    op: Op,
    number: u64,
    /// Recorded before it and after it.
    events: [Event; 2],
    /// When the first event was seen to be reached: what the stream does before is not counted as time of the operation.
    begun: Option<Instant>,
}

impl Pending {
    /// Forgets the operations that have completed. If the GPU has begun the oldest of the others, returns its name, its number
    /// and when that was first seen.
    pub fn oldest(&mut self, driver: &Driver) -> Option<(Op, u64, Instant)> {
        driver.query(|| {
            while self.operations.front().is_some_and(|it| it.events[1].is_reached()) {
                self.spare.extend(self.operations.pop_front().map(|it| it.events));
            }
            let oldest = self.operations.front_mut()?;
            if oldest.begun.is_none() && oldest.events[0].is_reached() {
                oldest.begun = Some(Instant::now());
            }
            Some((oldest.op, oldest.number, oldest.begun?))
        })
    }

    /// Two events for the next operation.
    pub fn events(&mut self, gpu: &Gpu) -> Result<[Event; 2], Cause> {
        self.oldest(gpu.driver);
        self.spare.pop().map_or_else(|| gpu.events(), Ok)
    }

    /// Adds an operation between two events that have been recorded.
    pub fn add(&mut self, op: Op, number: u64, events: [Event; 2]) {
        self.operations.push_back(Enqueued { op, number, events, begun: None });
        self.last = Some((op, number));
    }
}

/// What a rank tells the others before they connect.
#[derive(Debug)]
struct Introduction {
    /// The version of NCCL, as NCCL numbers it, and the UUID of the GPU.
    version: i32,
    uuid: [u8; 16],
    /// On rank 0, the name under which they connect.
    id: Option<UniqueId>,
}

impl Introduction {
    fn to_bytes(&self) -> Vec<u8> {
        let id = self.id.iter().flat_map(|id| id.internal.map(|byte| byte as u8));
        self.version.to_ne_bytes().into_iter().chain(self.uuid).chain(id).collect()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (version, rest) = bytes.split_first_chunk()?;
        let (uuid, id) = rest.split_first_chunk()?;
        let id = id.first_chunk().map(|id| UniqueId { internal: id.map(|byte: u8| byte as c_char) });
        Some(Self { version: i32::from_ne_bytes(*version), uuid: *uuid, id })
    }
}

/// Why ranks cannot connect, or are unlikely to.
fn why_not(all: &[Introduction]) -> Option<String> {
    for (rank, it) in all.iter().enumerate() {
        if it.version != all[0].version {
            let [first, other] = [all[0].version, it.version].map(nccl::version_name);
            return Some(format!("rank 0 has NCCL {first}, rank {rank} has NCCL {other}"));
        }
        if let Some(earlier) = all[..rank].iter().position(|earlier| earlier.uuid == it.uuid) {
            return Some(format!("ranks {earlier} and {rank} compute on one GPU"));
        }
    }
    None
}

// SAFETY: the handle is used under the lock of `pending`, but for questions that NCCL answers to any thread.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

impl Communicator {
    /// The lock that is held while work is put on a stream.
    pub fn lock(&self) -> MutexGuard<'_, Pending> {
        lock(&self.pending)
    }

    /// As [`lock`](Self::lock), but `None` where another thread holds it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, Pending>> {
        self.pending.try_lock().ok()
    }

    /// An asynchronous error, if NCCL has detected one since the last call.
    pub fn failure(&self) -> Result<(), Cause> {
        let (library, mut broken): (_, nccl::Code) = (self.gpu.library, 0);
        // SAFETY: the communicator is live; a place to write to. Any thread may ask.
        unsafe { nccl!(library, ncclCommGetAsyncError(self.handle, (&raw mut broken).cast()))? };
        if broken == nccl::IN_PROGRESS { Ok(()) } else { library.check("an earlier operation", broken) }
    }

    /// Every rank comes here, also one that has nothing to offer, with the communicator's first operation on NCCL: in the
    /// order of the program, as its other operations. Whatever may fail on one rank alone comes before the agreement: the
    /// others would wait in NCCL's bootstrap. The inner error is why NCCL cannot be used.
    pub fn connect(
        gpu: Result<Gpu, String>,
        messages: MessagePath,
        comm: &Comm,
    ) -> Result<Result<Self, String>, Cause> {
        let group = Group::Of(comm);
        let ours = gpu.and_then(|gpu| {
            let (events, ours) = gpu.prepare(comm).map_err(|cause| cause.to_string())?;
            Ok((gpu, events, ours))
        });
        let our_bits = u64::from(ours.is_ok()) | 1 << (1 + messages as u32);
        let all_bits = group.common_bits(our_bits)?;
        if all_bits >> 1 == 0 {
            let here = messages.name();
            return Ok(Err(format!("{MESSAGES} differs between ranks, here it is {here}")));
        }
        let (gpu, events, ours) = match ours {
            Ok(_) if all_bits & 1 == 0 => return Ok(Err("another rank has no NCCL or no GPU".into())),
            Ok(ours) => ours,
            Err(reason) => return Ok(Err(reason)),
        };
        let all = group.all_bytes(&ours.to_bytes())?;
        let all: Option<Vec<_>> = all.iter().map(|bytes| Introduction::from_bytes(bytes)).collect();
        let Some((all, id)) = all.and_then(|all| all.first()?.id.map(|id| (all, id))) else {
            return Ok(Err("rank 0 has given NCCL no name".into()));
        };
        let reason = why_not(&all);
        if let Some(reason) = reason.as_ref().filter(|_| all.iter().any(|it| it.version != all[0].version)) {
            return Ok(Err(reason.clone()));
        }
        // A rank that fails closes its connections, on which the others wait, so that they fail too. Then all
        // know, and none uses it.
        let mut handle = std::ptr::null_mut();
        // SAFETY: every rank of the communicator comes here with the same identifier.
        let made = unsafe {
            let _entered = gpu.driver.enter(gpu.context)?;
            nccl!(gpu.library, ncclCommInitRank(&mut handle, comm.size, id, comm.rank))
        };
        if group.common_bits(u64::from(made.is_ok()))? == 1 {
            let pending = Pending { operations: VecDeque::new(), spare: vec![events], last: None };
            return Ok(Ok(Self { gpu, handle, pending: Mutex::new(pending) }));
        }
        let why = reason.map_or_else(String::new, |reason| format!(" ({reason})"));
        Ok(Err(match made {
            Err(cause) => format!("{cause}{why}"),
            Ok(()) => {
                // SAFETY: only this rank has made it, and aborting waits for no other rank.
                unsafe { nccl_code!(gpu.library, ncclCommAbort(handle)) };
                format!("another rank could not make it{why}")
            }
        }))
    }
}

impl Drop for Communicator {
    /// As collective as the freeing of what it belongs to; after an error it waits for no rank.
    fn drop(&mut self) {
        let Gpu { driver, library, context, .. } = self.gpu;
        // SAFETY: the context exists. Nothing else has the handle, and what is on streams has ended when NCCL returns.
        unsafe {
            let Ok(_entered) = driver.enter(context) else { return };
            let is_whole = self.failure().is_ok();
            if is_whole {
                nccl_code!(library, ncclCommDestroy(self.handle));
            } else {
                nccl_code!(library, ncclCommAbort(self.handle));
            }
        }
    }
}
