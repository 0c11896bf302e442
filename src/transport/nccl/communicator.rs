//! NCCL's counterpart of an MPI communicator.

use std::sync::Mutex;
use std::time::Instant;

use super::carries::{MESSAGES, Messages};
use crate::comm::{Comm, Group};
use crate::device;
use crate::device::cuda::{self, Driver, Entered, Mark, Pointer};
use crate::device::nccl::{self, Library, UniqueId};
use crate::error::Cause;
use crate::ops::Op;

#[derive(Clone, Copy, Debug)]
pub struct Libraries {
    pub driver: &'static Driver,
    pub library: &'static Library,
}

impl Libraries {
    fn prepare(self, comm: &Comm) -> Result<Prepared, Cause> {
        let Self { driver, library } = self;
        let device = device::device()
            .ok_or_else(|| Cause::Setting { message: "JAX does not compute on a GPU".into() })?;
        let context = driver.primary_context(device)?;
        // SAFETY: the context exists.
        let entered = unsafe { driver.enter(context)? };
        let scratch = Scratch { driver, context, pointer: driver.allocate(size_of::<i32>())? };
        let last = Last { op: None, number: 0, since: Instant::now(), end: driver.mark(context)? };
        let mut id = None;
        if comm.rank == 0 {
            let id = id.insert(UniqueId([0; 128]));
            // SAFETY: a place to write to.
            let code = unsafe { (library.f.ncclGetUniqueId)(id) };
            library.check("ncclGetUniqueId", code)?;
        }
        Ok(Prepared { libraries: self, id, scratch, last, _entered: entered })
    }
}

/// What this rank needs before the ranks come together. All of it: a rank that fails later leaves the others in
/// NCCL's bootstrap.
struct Prepared {
    libraries: Libraries,
    /// On rank 0: a name for NCCL's communicator.
    id: Option<UniqueId>,
    scratch: Scratch,
    last: Last,
    _entered: Entered,
}

impl Prepared {
    fn communicator(self, id: UniqueId, comm: &Comm) -> Result<Communicator, Cause> {
        let Self { libraries, scratch, last, .. } = self;
        let (library, mut handle) = (libraries.library, std::ptr::null_mut());
        // SAFETY: every rank of the communicator comes here with the same identifier.
        let code = unsafe { (library.f.ncclCommInitRank)(&mut handle, comm.size, id, comm.rank) };
        library.check("ncclCommInitRank", code)?;
        Ok(Communicator { libraries, handle, scratch, queue: Mutex::new(last), is_alone: false })
    }
}

/// What a barrier reduces.
#[derive(Debug)]
pub struct Scratch {
    driver: &'static Driver,
    pub context: cuda::Context,
    pub pointer: Pointer,
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: the context exists; what was on streams has ended with the communicator.
        unsafe {
            let Ok(_entered) = self.driver.enter(self.context) else { return };
            self.driver.free(self.pointer);
        }
    }
}

/// What is attached to a communicator on which NCCL has met the other ranks.
pub struct Joined(pub Result<Communicator, String>);

/// NCCL's counterpart of an MPI communicator.
#[derive(Debug)]
pub struct Communicator {
    pub libraries: Libraries,
    pub handle: nccl::Handle,
    pub scratch: Scratch,
    /// Held while work is put on a stream.
    pub queue: Mutex<Last>,
    /// Another rank could not make it.
    is_alone: bool,
}

/// What was put on a stream last.
#[derive(Debug)]
pub struct Last {
    /// `None` before.
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
        let (library, mut broken) = (self.libraries.library, 0);
        // SAFETY: the communicator is live; a place to write to. Any thread may ask.
        let code = unsafe { (library.f.ncclCommGetAsyncError)(self.handle, &mut broken) };
        library.check("ncclCommGetAsyncError", code)?;
        if broken == nccl::IN_PROGRESS { Ok(()) } else { library.check("an earlier operation", broken) }
    }
}

impl Drop for Communicator {
    /// As collective as the freeing of what it belongs to; after an error it waits for nobody.
    fn drop(&mut self) {
        let Libraries { driver, library } = self.libraries;
        // SAFETY: the context exists. Nobody else has the handle, and what is on streams has ended when NCCL returns.
        unsafe {
            let Ok(_entered) = driver.enter(self.scratch.context) else { return };
            let is_whole = !self.is_alone && self.failure().is_ok();
            let end = if is_whole { library.f.ncclCommDestroy } else { library.f.ncclCommAbort };
            end(self.handle);
        }
    }
}

impl Joined {
    /// Every rank comes here, also one that has nothing to offer, with the communicator's first operation on NCCL: in the
    /// order of the program, as its other operations.
    pub fn connect(
        libraries: &Result<Libraries, String>,
        messages: Messages,
        comm: &Comm,
    ) -> Result<Self, Cause> {
        let group = Group::Of(comm);
        let mut ours = libraries
            .clone()
            .and_then(|libraries| libraries.prepare(comm).map_err(|cause| cause.to_string()));
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
        let ours = match ours {
            Ok(ours) => ours,
            Err(reason) => return Ok(Self(Err(reason))),
        };
        let all = group.all_bytes(ours.id.as_ref().map_or(&[], |id| id.0.as_slice()))?;
        let mut id = UniqueId([0; 128]);
        id.0.copy_from_slice(&all[0]);
        // A rank that fails closes its connections, on which the others wait, so that they fail too. Then all
        // know, and none uses it.
        let mut made = ours.communicator(id, comm).map_err(|cause| cause.to_string());
        if group.common_bits(u64::from(made.is_ok()))? == 0 {
            if let Ok(made) = &mut made {
                made.is_alone = true;
            }
            return Ok(Self(made.and(Err("another rank could not make it".into()))));
        }
        Ok(Self(made))
    }
}
