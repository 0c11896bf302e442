//! NCCL's counterpart of an MPI communicator.

use std::sync::Mutex;
use std::time::Instant;

use super::carries::{MESSAGES, Messages};
use crate::comm::{Comm, Group};
use crate::device;
use crate::device::cuda::{self, Driver, Mark, Pointer};
use crate::device::nccl::{self, Library, UniqueId};
use crate::error::Cause;
use crate::ops::Op;

#[derive(Clone, Copy, Debug)]
pub struct Parts {
    pub driver: &'static Driver,
    pub library: &'static Library,
}

impl Parts {
    /// What this rank needs before the ranks come together: the device's context, and on rank 0 a name for
    /// NCCL's communicator.
    fn prepare(self, comm: &Comm) -> Result<(Parts, cuda::Context, Option<UniqueId>), String> {
        let Self { driver, library } = self;
        let device = device::device().ok_or("JAX does not compute on a GPU")?;
        let context = driver.primary_context(device).map_err(|cause| cause.to_string())?;
        if comm.rank != 0 {
            return Ok((self, context, None));
        }
        let mut id = UniqueId([0; 128]);
        // SAFETY: a place to write to.
        let code = unsafe { (library.f.ncclGetUniqueId)(&mut id) };
        library.check("ncclGetUniqueId", code).map_err(|cause| cause.to_string())?;
        Ok((self, context, Some(id)))
    }

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
pub struct Joined(pub Result<Communicator, String>);

/// NCCL's counterpart of an MPI communicator.
#[derive(Debug)]
pub struct Communicator {
    pub parts: Parts,
    pub handle: nccl::Handle,
    pub context: cuda::Context,
    /// What a barrier reduces.
    pub scratch: Pointer,
    /// Held while work is put on a stream.
    pub queue: Mutex<Last>,
}

/// What was put on a stream last.
#[derive(Debug)]
pub struct Last {
    /// `None` before, and for what is recorded.
    pub op: Option<Op>,
    pub number: u64,
    pub since: Instant,
    pub end: Mark,
}

// SAFETY: the handles are used under the lock.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

impl Communicator {
    /// An error that NCCL has found out meanwhile.
    pub fn failure(&self) -> Result<(), Cause> {
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

impl Joined {
    /// Every rank comes here, also one that has nothing to offer.
    pub fn connect(parts: &Result<Parts, String>, messages: Messages, comm: &Comm) -> Result<Self, Cause> {
        let group = Group::Of(comm);
        let mut ours = parts.clone().and_then(|parts| parts.prepare(comm));
        let our_bits = u64::from(ours.is_ok()) | 1 << (1 + messages as u32);
        let all_bits = group.common_bits(our_bits)?;
        if all_bits >> 1 == 0 {
            return Ok(Self(Err(format!(
                "{MESSAGES} differs between ranks, here it is {}",
                messages.name()
            ))));
        }
        if all_bits & 1 == 0 {
            ours = ours.and(Err("another rank has no NCCL or no GPU".into()));
        }
        let (parts, context, id) = match ours {
            Ok(ours) => ours,
            Err(reason) => return Ok(Self(Err(reason))),
        };
        let all = group.all_bytes(id.as_ref().map_or(&[], |id| id.0.as_slice()))?;
        let mut id = UniqueId([0; 128]);
        id.0.copy_from_slice(&all[0]);
        // A rank that fails closes its connections, on which the others wait, so that they fail too. Then all
        // know, and none uses it.
        let made = parts.communicator(context, id, comm).map_err(|cause| cause.to_string());
        if group.common_bits(u64::from(made.is_ok()))? == 0 {
            return Ok(Self(made.and(Err("another rank could not make it".into()))));
        }
        Ok(Self(made))
    }
}
