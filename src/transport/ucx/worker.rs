//! This process in UCX.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, c_uint, c_void};
use std::mem::zeroed;
use std::path::Path;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::sys::{self, RequestParam, StatusPtr, Ucp};
use super::tag::{self, Label, Wanted};
use crate::call::{Call, Envelope};
use crate::comm::{Comm, Group};
use crate::dynlib::{self, checked};
use crate::error::Cause;
use crate::mpilib::{self, wildcards};
use crate::ops::Buffer;

/// How long the thread sleeps between two calls of UCX: at first, and when nothing has happened for long.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(32));
/// Calls without an event before a waiting rank lets others have the processor.
const SPINS: u32 = 200;

pub fn table() -> Result<&'static Ucp, String> {
    static TABLE: OnceLock<Result<Ucp, String>> = OnceLock::new();
    TABLE.get_or_init(load).as_ref().map_err(Clone::clone)
}

fn load() -> Result<Ucp, String> {
    // Wheels keep UCX beside the MPI library, in a directory of its own.
    if let Some(directory) = dynlib::file_of(mpilib::address()).as_deref().and_then(Path::parent) {
        dynlib::add_directories([directory.join("openmpi"), directory.into()]);
    }
    let ucp = Ucp::load(sys::LIBRARY)?;
    let (major, minor, patch) = ucp.version();
    if (major, minor) < sys::OLDEST {
        return Err(sys::LIBRARY.too_old(&ucp.path, &format!("{major}.{minor}.{patch}")));
    }
    Ok(ucp)
}

impl Ucp {
    fn version(&self) -> (c_uint, c_uint, c_uint) {
        let (mut major, mut minor, mut patch) = (0, 0, 0);
        // SAFETY: three places to write to.
        unsafe { (self.ucp_get_version)(&mut major, &mut minor, &mut patch) };
        (major, minor, patch)
    }

    fn check(&self, function: &'static str, status: sys::Status) -> Result<(), Cause> {
        if status == sys::OK {
            return Ok(());
        }
        // SAFETY: a constant string for every number.
        let text = unsafe { CStr::from_ptr((self.ucs_status_string)(status)) }.to_string_lossy().into();
        Err(Cause::Library { function, code: status, text })
    }
}

/// This process in UCX.
#[derive(Debug)]
pub struct Worker {
    pub ucp: &'static Ucp,
    handle: sys::Worker,
    /// What kinds of memory UCX reaches: a bit mask.
    pub memory_types: u64,
    /// Held around every call: the worker is asked for serialised calls only, which all builds have.
    endpoints: Mutex<BTreeMap<i32, sys::Endpoint>>,
    /// By rank in `MPI_COMM_WORLD`.
    addresses: Vec<Box<[u8]>>,
    contexts: Mutex<Contexts>,
    /// Something was sent or received since the thread has looked.
    used: AtomicBool,
    stopping: AtomicBool,
}

// SAFETY: the handles are used under the lock of `endpoints`.
unsafe impl Send for Worker {}
// SAFETY: as above.
unsafe impl Sync for Worker {}

/// Numbers that stand for communicators.
#[derive(Debug, Default)]
struct Contexts {
    used: BTreeSet<u64>,
    /// The one that was given out last, plus one.
    next: u64,
}

/// What all ranks of a communicator agree on, for as long as it exists.
pub struct Joined {
    worker: &'static Worker,
    pub context: u64,
}

impl Drop for Joined {
    fn drop(&mut self) {
        self.worker.contexts().used.remove(&self.context);
    }
}

type Endpoints<'a> = MutexGuard<'a, BTreeMap<i32, sys::Endpoint>>;

impl Worker {
    fn lock(&self) -> Endpoints<'_> {
        self.endpoints.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts UCX and exchanges addresses. Collective over `MPI_COMM_WORLD`, also on a rank where it fails.
    pub fn start() -> Result<Self, String> {
        let ours = table().and_then(|ucp| {
            let (handle, memory_types, address) = Self::create(ucp).map_err(|cause| cause.to_string())?;
            Ok((ucp, handle, memory_types, address))
        });
        let address = ours.as_ref().map_or(&[][..], |(_, _, _, address)| address);
        let addresses = Group::World.all_bytes(address).map_err(|cause| cause.to_string())?;
        let (ucp, handle, memory_types, _) = ours?;
        if let Some(rank) = addresses.iter().position(|address| address.is_empty()) {
            return Err(format!("UCX could not be started on rank {rank}"));
        }
        Ok(Self {
            ucp,
            handle,
            memory_types,
            endpoints: Mutex::default(),
            addresses,
            contexts: Mutex::default(),
            used: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
        })
    }

    fn create(ucp: &Ucp) -> Result<(sys::Worker, u64, Vec<u8>), Cause> {
        let (major, minor, _) = ucp.version();
        let size = Group::World.size()?;
        // SAFETY: all-zero is a value of these structs; the masks name the fields that are set; what is made
        // lives as long as the process.
        unsafe {
            let mut config = null_mut();
            checked!(ucp, ucp_config_read(null(), null(), &mut config))?;
            let params = sys::Params {
                field_mask: sys::PARAMS_FEATURES | sys::PARAMS_ENDPOINTS,
                features: sys::FEATURE_TAG,
                estimated_num_eps: size,
                ..zeroed()
            };
            let mut context = null_mut();
            let started = checked!(ucp, ucp_init_version(major, minor, &params, config, &mut context));
            (ucp.ucp_config_release)(config);
            started?;
            let mut attributes = sys::Attributes { field_mask: sys::ATTRIBUTES_MEMORY_TYPES, ..zeroed() };
            checked!(ucp, ucp_context_query(context, &mut attributes))?;
            let params = sys::WorkerParams {
                field_mask: sys::WORKER_THREAD_MODE,
                thread_mode: sys::THREAD_MODE_SERIALIZED,
                ..zeroed()
            };
            let mut worker = null_mut();
            checked!(ucp, ucp_worker_create(context, &params, &mut worker))?;
            let (mut address, mut length) = (null_mut(), 0);
            checked!(ucp, ucp_worker_get_address(worker, &mut address, &mut length))?;
            let bytes = std::slice::from_raw_parts(address.cast(), length).to_vec();
            (ucp.ucp_worker_release_address)(worker, address);
            Ok((worker, attributes.memory_types, bytes))
        }
    }

    /// Keeps messages moving while this process is elsewhere.
    pub fn run(&self) {
        let mut pause = PAUSES.0;
        while !self.stopping.load(Ordering::Relaxed) {
            std::thread::sleep(pause);
            let mut something_happened = self.used.swap(false, Ordering::Relaxed);
            // A thread that holds the lock calls UCX itself.
            if let Ok(_locked) = self.endpoints.try_lock() {
                // SAFETY: under the lock.
                while unsafe { (self.ucp.ucp_worker_progress)(self.handle) } != 0 {
                    something_happened = true;
                }
            }
            pause = if something_happened { PAUSES.0 } else { (2 * pause).min(PAUSES.1) };
        }
    }

    /// From now on nothing is sent or received.
    pub fn end(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }

    fn endpoint(&self, endpoints: &mut Endpoints, rank: i32) -> Result<sys::Endpoint, Cause> {
        if let Some(&endpoint) = endpoints.get(&rank) {
            return Ok(endpoint);
        }
        let address = &self.addresses[rank as usize];
        let mut endpoint = null_mut();
        // SAFETY: the address is one that UCX made; the lock is held.
        unsafe {
            let params = sys::EndpointParams {
                field_mask: sys::ENDPOINT_ADDRESS,
                address: address.as_ptr().cast(),
                ..zeroed()
            };
            checked!(self.ucp, ucp_ep_create(self.handle, &params, &mut endpoint))?;
        }
        endpoints.insert(rank, endpoint);
        Ok(endpoint)
    }

    fn contexts(&self) -> MutexGuard<'_, Contexts> {
        self.contexts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A context that none of a communicator's ranks uses. The numbers go round, so that one comes back as late as
    /// can be: a message that was never received would be found by another communicator's receives. Collective.
    pub fn agree(&'static self, comm: &Comm) -> Result<Joined, Cause> {
        let group = Group::Of(comm);
        for _ in 0..tag::CONTEXTS {
            let next = self.contexts().next;
            let agreed = group.largest(next)?;
            let context = agreed % tag::CONTEXTS;
            let is_free = !self.contexts().used.contains(&context);
            self.contexts().next = agreed + 1;
            if group.common_bits(u64::from(is_free))? == 1 {
                self.contexts().used.insert(context);
                return Ok(Joined { worker: self, context });
            }
        }
        let feature = format!("more than {} communicators at a time", tag::CONTEXTS);
        Err(Cause::Unsupported { feature, reason: "the transport ucx has 15 bits for them" })
    }

    /// Starts to send a message, if there is a destination.
    ///
    /// # Safety
    /// The buffer stays valid until the request has ended.
    pub unsafe fn send(
        &self,
        call: &Call,
        context: u64,
        buffer: &Buffer,
    ) -> Result<Option<UcxRequest<'_>>, Cause> {
        let Envelope { dest, sendtag: tag, .. } = call.envelope;
        if dest == wildcards().proc_null {
            return Ok(None);
        }
        let comm = &call.site.comm;
        let no_such_rank = Cause::NoSuchRank { role: "destination", rank: dest, size: comm.size };
        let to = comm.world_rank(dest).ok_or(no_such_rank)?;
        let label = Label { context, source: comm.rank, tag }.encode()?;
        self.used.store(true, Ordering::Relaxed);
        let mut endpoints = self.lock();
        let endpoint = self.endpoint(&mut endpoints, to)?;
        // SAFETY: promised by the caller; the lock is held.
        let status = unsafe {
            let param: RequestParam = zeroed();
            (self.ucp.ucp_tag_send_nbx)(endpoint, buffer.data().cast(), buffer.bytes(), label, &param)
        };
        UcxRequest::new(self, "ucp_tag_send_nbx", status).map(Some)
    }

    /// Starts to receive a message, if there is a source.
    ///
    /// # Safety
    /// The buffer stays valid until the request has ended.
    pub unsafe fn recv(
        &self,
        call: &Call,
        context: u64,
        buffer: &Buffer,
    ) -> Result<Option<UcxRequest<'_>>, Cause> {
        let Envelope { source, recvtag: tag, .. } = call.envelope;
        let (any, size) = (wildcards(), call.site.comm.size);
        if source == any.proc_null {
            return Ok(None);
        }
        if source != any.source && !(0..size).contains(&source) {
            return Err(Cause::NoSuchRank { role: "source", rank: source, size });
        }
        let source = (source != any.source).then_some(source);
        let (label, mask) = Wanted { context, source, tag: (tag != any.tag).then_some(tag) }.encode()?;
        self.used.store(true, Ordering::Relaxed);
        let _locked = self.lock();
        // SAFETY: promised by the caller; the lock is held.
        let status = unsafe {
            let param = RequestParam { op_attr_mask: sys::NO_IMMEDIATE_COMPLETION, ..zeroed() };
            let (data, bytes) = (buffer.data().cast(), buffer.bytes());
            (self.ucp.ucp_tag_recv_nbx)(self.handle, data, bytes, label, mask, &param)
        };
        UcxRequest::new(self, RECEIVE, status).map(Some)
    }

    /// Waits until everything that was sent has left this process.
    pub fn flush(&self, limit: Duration) -> Result<(), Cause> {
        let status = {
            let _locked = self.lock();
            // SAFETY: all-zero is a value of the struct; the lock is held.
            unsafe { (self.ucp.ucp_worker_flush_nbx)(self.handle, &zeroed()) }
        };
        let mut request = UcxRequest::new(self, "ucp_worker_flush_nbx", status)?;
        let until = Instant::now() + limit;
        while !request.poll()? && Instant::now() < until {
            std::thread::yield_now();
        }
        Ok(())
    }
}

/// Something that is under way. A receive that is dropped is taken back: nothing is written after that.
pub struct UcxRequest<'a> {
    worker: &'a Worker,
    function: &'static str,
    /// Null once it has ended.
    handle: *mut c_void,
    received: sys::Received,
}

const RECEIVE: &str = "ucp_tag_recv_nbx";

impl Drop for UcxRequest<'_> {
    fn drop(&mut self) {
        if self.handle.is_null() || self.function != RECEIVE {
            return;
        }
        {
            let _locked = self.worker.lock();
            // SAFETY: the request is not freed yet; the lock is held.
            unsafe { (self.worker.ucp.ucp_request_cancel)(self.worker.handle, self.handle) };
        }
        // Its end is an error now, or what has come meanwhile.
        let _ = self.wait_for();
    }
}

impl<'a> UcxRequest<'a> {
    fn new(worker: &'a Worker, function: &'static str, status: StatusPtr) -> Result<Self, Cause> {
        if (sys::LAST_ERROR..0).contains(&(status as isize)) {
            worker.ucp.check(function, status as isize as sys::Status)?;
        }
        Ok(Self { worker, function, handle: status, received: sys::Received::default() })
    }

    /// Moves everything on. Returns whether this has ended.
    fn poll(&mut self) -> Result<bool, Cause> {
        if self.handle.is_null() {
            return Ok(true);
        }
        let ucp = self.worker.ucp;
        let _locked = self.worker.lock();
        // SAFETY: the request is not freed yet; the lock is held. Only a request for a receive is asked for
        // what it received.
        let status = unsafe {
            (ucp.ucp_worker_progress)(self.worker.handle);
            let status = if self.function == RECEIVE {
                (ucp.ucp_tag_recv_request_test)(self.handle, &mut self.received)
            } else {
                (ucp.ucp_request_check_status)(self.handle)
            };
            if status == sys::IN_PROGRESS {
                return Ok(false);
            }
            (ucp.ucp_request_free)(self.handle);
            status
        };
        self.handle = null_mut();
        ucp.check(self.function, status)?;
        Ok(true)
    }

    pub fn wait(mut self) -> Result<sys::Received, Cause> {
        self.wait_for()?;
        Ok(self.received)
    }

    fn wait_for(&mut self) -> Result<(), Cause> {
        let mut idle = 0;
        while !self.poll()? {
            idle += 1;
            if idle > SPINS {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
        Ok(())
    }
}
