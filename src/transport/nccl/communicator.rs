//! NCCL communicators, one for each MPI communicator that has been used on a GPU.

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
        Ok(Self { driver, library, context, scratch: driver.allocate(size_of::<i32>())? })
    }

    /// Creates what a communicator needs on this rank before the ranks connect: an event, and on rank 0 the unique id.
    fn prepare(&self, comm: &Comm) -> Result<(Event, Option<UniqueId>), Cause> {
        // SAFETY: the context exists.
        let _entered = unsafe { self.driver.enter(self.context)? };
        let event = self.driver.event()?;
        let mut id = None;
        if comm.rank == 0 {
            let id = id.insert(UniqueId { internal: [0; 128] });
            // SAFETY: a place to write to.
            unsafe { nccl!(self.library, ncclGetUniqueId(id))? };
        }
        Ok((event, id))
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
    last: Mutex<Last>,
}

/// The operation that was put on a stream last.
#[derive(Debug)]
pub struct Last {
    /// `None` before the first one.
    pub op: Option<Op>,
    pub number: u64,
    pub since: Instant,
    pub end: Event,
}

// SAFETY: the handle is used under the lock of `last`, but for questions that NCCL answers to any thread.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

impl Communicator {
    /// The lock that is held while work is put on a stream.
    pub fn lock(&self) -> MutexGuard<'_, Last> {
        lock(&self.last)
    }

    /// As [`lock`](Self::lock), but `None` where another thread holds it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, Last>> {
        self.last.try_lock().ok()
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
            let (event, id) = gpu.prepare(comm).map_err(|cause| cause.to_string())?;
            Ok((gpu, event, id))
        });
        let our_bits = u64::from(ours.is_ok()) | 1 << (1 + messages as u32);
        let all_bits = group.common_bits(our_bits)?;
        if all_bits >> 1 == 0 {
            let here = messages.name();
            return Ok(Err(format!("{MESSAGES} differs between ranks, here it is {here}")));
        }
        let (gpu, event, id) = match ours {
            Ok(_) if all_bits & 1 == 0 => return Ok(Err("another rank has no NCCL or no GPU".into())),
            Ok(ours) => ours,
            Err(reason) => return Ok(Err(reason)),
        };
        let name = id.map(|id| id.internal.map(|byte| byte as u8));
        let all = group.all_bytes(name.as_ref().map_or(&[], |name| name.as_slice()))?;
        let mut id = UniqueId { internal: [0; 128] };
        for (to, from) in id.internal.iter_mut().zip(&all[0]) {
            *to = *from as c_char;
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
            let last = Last { op: None, number: 0, since: Instant::now(), end: event };
            return Ok(Ok(Self { gpu, handle, last: Mutex::new(last) }));
        }
        Ok(Err(match made {
            Err(cause) => cause.to_string(),
            Ok(()) => {
                // SAFETY: only this rank has made it, and aborting waits for no other rank.
                unsafe { nccl_code!(gpu.library, ncclCommAbort(handle)) };
                "another rank could not make it".into()
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
