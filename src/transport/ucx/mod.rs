//! Messages through UCX's tag matching; everything else through MPI.
//!
//! Each process has one worker. Addresses are exchanged once, when mpi4jax is imported, and an endpoint is
//! made when the first message goes to its rank. UCX delivers nothing unless it is called, so while a rank
//! is elsewhere (in MPI, say), a thread calls it a thousand times a second.

mod sys;
mod tag;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, c_uint, c_void};
use std::mem::zeroed;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use mpi::ffi;

use self::sys::{RequestParam, StatusPtr, Ucp};
use self::tag::{Label, Wanted};
use super::host::{Pairs, Partial};
use super::{Arrived, Platform, Transport, arrive, write_status};
use crate::call::{Call, Envelope};
use crate::comm::{Comm, Group};
use crate::device;
use crate::dynlib::{self, LoadError};
use crate::error::{Cause, Error};
use crate::mpilib::wildcards;
use crate::ops::Buffer;

/// How often UCX is called while nobody waits for it.
const IDLE: Duration = Duration::from_millis(1);
/// Calls without an event before a waiting rank lets others have the processor.
const SPINS: u32 = 200;
/// How long the end of the program waits for messages that nobody receives.
const PATIENCE: Duration = Duration::from_secs(2);

fn table() -> Result<&'static Ucp, LoadError> {
    static TABLE: OnceLock<Result<Ucp, LoadError>> = OnceLock::new();
    TABLE.get_or_init(load).as_ref().map_err(Clone::clone)
}

fn load() -> Result<Ucp, LoadError> {
    // Wheels keep UCX beside the MPI library, in a directory of its own.
    if let Some(directory) = dynlib::directory_of(ffi::MPI_Init as *const () as usize) {
        dynlib::add_directories([directory.join("openmpi"), directory]);
    }
    let ucp = Ucp::load(sys::LIBRARY)?;
    let (major, minor, patch) = ucp.version();
    if (major, minor) < sys::OLDEST {
        let found = format!("{major}.{minor}.{patch}");
        return Err(LoadError::TooOld { path: ucp.path, found, needed: sys::LIBRARY.needed });
    }
    Ok(ucp)
}

/// Whether UCX could be used. Whether it reaches the memory of a GPU is known when it has been started.
pub fn probe(platform: Platform) -> Result<(), String> {
    if platform == Platform::Cuda {
        device::support()?;
    }
    table().map(|_| ()).map_err(|error| error.to_string())
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
struct Worker {
    ucp: &'static Ucp,
    handle: sys::Worker,
    /// What kinds of memory UCX reaches: a bit mask.
    memory_types: u64,
    /// Held around every call: the worker is asked for serialised calls only, which all builds have.
    endpoints: Mutex<BTreeMap<i32, sys::Endpoint>>,
    /// By rank in `MPI_COMM_WORLD`.
    addresses: Vec<Box<[u8]>>,
    contexts: Mutex<Contexts>,
    stopping: AtomicBool,
}

// SAFETY: the handles are used under the lock of `endpoints`.
unsafe impl Send for Worker {}
// SAFETY: as above.
unsafe impl Sync for Worker {}

/// Numbers that stand for communicators.
#[derive(Default)]
struct Contexts {
    used: BTreeSet<u64>,
    /// The one that was given out last, plus one.
    next: u64,
}

/// What all ranks of a communicator agree on, for as long as it exists.
struct Joined {
    worker: &'static Worker,
    context: u64,
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
    fn start() -> Result<Self, String> {
        let ours = table().map_err(|error| error.to_string()).and_then(|ucp| {
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
            ucp.check("ucp_config_read", (ucp.ucp_config_read)(null(), null(), &mut config))?;
            let params = sys::Params {
                field_mask: sys::PARAMS_FEATURES | sys::PARAMS_ENDPOINTS,
                features: sys::FEATURE_TAG,
                estimated_num_eps: size,
                ..zeroed()
            };
            let mut context = null_mut();
            let status = (ucp.ucp_init_version)(major, minor, &params, config, &mut context);
            (ucp.ucp_config_release)(config);
            ucp.check("ucp_init_version", status)?;
            let mut attributes = sys::Attributes { field_mask: sys::ATTRIBUTES_MEMORY_TYPES, ..zeroed() };
            ucp.check("ucp_context_query", (ucp.ucp_context_query)(context, &mut attributes))?;
            let params = sys::WorkerParams {
                field_mask: sys::WORKER_THREAD_MODE,
                thread_mode: sys::THREAD_MODE_SERIALIZED,
                ..zeroed()
            };
            let mut worker = null_mut();
            ucp.check("ucp_worker_create", (ucp.ucp_worker_create)(context, &params, &mut worker))?;
            let (mut address, mut length) = (null_mut(), 0);
            let status = (ucp.ucp_worker_get_address)(worker, &mut address, &mut length);
            ucp.check("ucp_worker_get_address", status)?;
            let bytes = std::slice::from_raw_parts(address.cast(), length).to_vec();
            (ucp.ucp_worker_release_address)(worker, address);
            Ok((worker, attributes.memory_types, bytes))
        }
    }

    /// Keeps messages moving while this process is elsewhere.
    fn run(&self) {
        while !self.stopping.load(Ordering::Relaxed) {
            std::thread::sleep(IDLE);
            // Whoever holds the lock is doing just that.
            if let Ok(_locked) = self.endpoints.try_lock() {
                // SAFETY: under the lock.
                while unsafe { (self.ucp.ucp_worker_progress)(self.handle) } != 0 {}
            }
        }
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
            let status = (self.ucp.ucp_ep_create)(self.handle, &params, &mut endpoint);
            self.ucp.check("ucp_ep_create", status)?;
        }
        endpoints.insert(rank, endpoint);
        Ok(endpoint)
    }

    fn contexts(&self) -> MutexGuard<'_, Contexts> {
        self.contexts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A context that none of a communicator's ranks uses. The numbers go round, so that one comes back as late as
    /// can be: a message that nobody has received would be found by another communicator's receives. Collective.
    fn agree(&'static self, comm: &Comm) -> Result<Joined, Cause> {
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
        let what = format!("more than {} communicators at a time", tag::CONTEXTS);
        Err(Cause::Unsupported { what, reason: "the transport ucx has 15 bits for them" })
    }

    /// # Safety
    /// The buffer stays valid until the request has ended.
    unsafe fn send(&self, buffer: &Buffer, to: i32, label: Label) -> Result<Request<'_>, Cause> {
        let label = label.encode()?;
        let mut endpoints = self.lock();
        let endpoint = self.endpoint(&mut endpoints, to)?;
        // SAFETY: promised by the caller; the lock is held.
        let status = unsafe {
            let param: RequestParam = zeroed();
            (self.ucp.ucp_tag_send_nbx)(endpoint, buffer.data.cast(), buffer.bytes(), label, &param)
        };
        Request::new(self, "ucp_tag_send_nbx", status)
    }

    /// # Safety
    /// The buffer stays valid until the request has ended.
    unsafe fn recv(&self, buffer: &Buffer, wanted: Wanted) -> Result<Request<'_>, Cause> {
        let (label, mask) = wanted.encode()?;
        let _locked = self.lock();
        // SAFETY: promised by the caller; the lock is held.
        let status = unsafe {
            let param = RequestParam { op_attr_mask: sys::NO_IMMEDIATE_COMPLETION, ..zeroed() };
            let (data, bytes) = (buffer.data.cast(), buffer.bytes());
            (self.ucp.ucp_tag_recv_nbx)(self.handle, data, bytes, label, mask, &param)
        };
        Request::new(self, "ucp_tag_recv_nbx", status)
    }

    /// Waits until everything that was sent has left this process.
    fn flush(&self, limit: Duration) -> Result<(), Cause> {
        let status = {
            let _locked = self.lock();
            // SAFETY: all-zero is a value of the struct; the lock is held.
            unsafe { (self.ucp.ucp_worker_flush_nbx)(self.handle, &zeroed()) }
        };
        let mut request = Request::new(self, "ucp_worker_flush_nbx", status)?;
        let until = Instant::now() + limit;
        while !request.poll()? && Instant::now() < until {
            std::thread::yield_now();
        }
        Ok(())
    }
}

/// Something that is under way.
struct Request<'a> {
    worker: &'a Worker,
    function: &'static str,
    /// Null once it has ended.
    handle: *mut c_void,
    received: sys::Received,
}

impl<'a> Request<'a> {
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
            let status = if self.function == "ucp_tag_recv_nbx" {
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

    fn wait(mut self) -> Result<sys::Received, Cause> {
        let mut idle = 0;
        while !self.poll()? {
            idle += 1;
            if idle > SPINS {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
        Ok(self.received)
    }
}

/// Messages through UCX.
#[derive(Clone, Copy)]
pub struct Ucx {
    worker: &'static Worker,
}

impl std::fmt::Debug for Ucx {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Ucx").field(&self.worker.ucp.path).finish()
    }
}

impl Ucx {
    /// Collective over `MPI_COMM_WORLD`.
    pub fn start() -> Result<Self, String> {
        static WORKER: OnceLock<Result<Worker, String>> = OnceLock::new();
        let worker = WORKER.get_or_init(Worker::start).as_ref().map_err(String::clone)?;
        static THREAD: OnceLock<Result<(), String>> = OnceLock::new();
        let thread = || {
            let builder = std::thread::Builder::new().name("mpi4jax-ucx".into());
            builder.spawn(|| worker.run()).map(|_| ()).map_err(|error| error.to_string())
        };
        THREAD.get_or_init(thread).clone()?;
        Ok(Self { worker })
    }

    pub fn reaches_cuda(&self) -> Result<(), String> {
        if self.worker.memory_types & sys::MEMORY_TYPE_CUDA != 0 || device::is_reached_from_cpu() {
            return Ok(());
        }
        Err(format!("{} was built without CUDA", self.worker.ucp.path))
    }

    fn run(&self, call: &Call) -> Result<(), Cause> {
        let comm = &call.site.comm;
        let joined = comm.attached::<Joined>().ok_or_else(|| Cause::NotJoined { key: comm.key.clone() })?;
        let joined = &*joined;
        // SAFETY: the buffers are XLA's and stay valid until this returns; requests end before that.
        unsafe {
            match (call.send, call.recv) {
                (Some(send), None) => {
                    let sending = self.send(call, joined, &send)?;
                    sending.map(Request::wait).transpose()?;
                    Ok(())
                }
                (None, Some(recv)) => {
                    let receiving = self.recv(call, joined, &recv)?;
                    self.finish(call, receiving)
                }
                (Some(send), Some(recv)) => {
                    // The two may not share memory, and they may differ in size.
                    let bytes = || std::slice::from_raw_parts(send.data, send.bytes()).to_vec();
                    let mut copy = send.overlaps(&recv).then(bytes);
                    let data = copy.as_mut().map_or(send.data, |copy| copy.as_mut_ptr());
                    let receiving = self.recv(call, joined, &recv)?;
                    let sending = self.send(call, joined, &Buffer { data, ..send })?;
                    sending.map(Request::wait).transpose()?;
                    self.finish(call, receiving)
                }
                (None, None) => Err(Cause::Buffers { what: "operand", expected: 1, actual: 0 }),
            }
        }
    }

    /// # Safety
    /// As [`Worker::send`].
    unsafe fn send(
        &self,
        call: &Call,
        joined: &Joined,
        buffer: &Buffer,
    ) -> Result<Option<Request<'static>>, Cause> {
        let Envelope { dest, sendtag, .. } = call.envelope;
        if dest == wildcards().proc_null {
            return Ok(None);
        }
        let comm = &call.site.comm;
        let no_such_rank = Cause::NoSuchRank { role: "destination", rank: dest, size: comm.size };
        let to = comm.world_rank(dest).ok_or(no_such_rank)?;
        let label = Label { context: joined.context, source: comm.rank, tag: sendtag };
        // SAFETY: promised by the caller.
        unsafe { self.worker.send(buffer, to, label) }.map(Some)
    }

    /// # Safety
    /// As [`Worker::recv`].
    unsafe fn recv(
        &self,
        call: &Call,
        joined: &Joined,
        buffer: &Buffer,
    ) -> Result<Option<Request<'static>>, Cause> {
        let Envelope { source, recvtag, .. } = call.envelope;
        let any = wildcards();
        if source == any.proc_null {
            return Ok(None);
        }
        let size = call.site.comm.size;
        if source != any.source && !(0..size).contains(&source) {
            return Err(Cause::NoSuchRank { role: "source", rank: source, size });
        }
        let wanted = Wanted {
            context: joined.context,
            source: (source != any.source).then_some(source),
            tag: (recvtag != any.tag).then_some(recvtag),
        };
        // SAFETY: promised by the caller.
        unsafe { self.worker.recv(buffer, wanted) }.map(Some)
    }

    /// Waits, and says what came as MPI does.
    fn finish(&self, call: &Call, receiving: Option<Request>) -> Result<(), Cause> {
        let size = call.recv.map_or(1, |recv| recv.dtype.size());
        let arrived = match receiving {
            None => {
                let any = wildcards();
                Arrived { source: any.proc_null, tag: any.tag, count: 0 }
            }
            Some(request) => {
                let received = request.wait()?;
                let Label { source, tag, .. } = Label::decode(received.sender_tag);
                Arrived { source, tag, count: received.length / size }
            }
        };
        if call.status != 0 {
            write_status(call, &arrived)?;
        }
        arrive(call, &arrived)
    }
}

impl Partial for Ucx {
    /// Messages; MPI has all else.
    fn takes(&self, call: &Call) -> Result<bool, Cause> {
        Ok(!call.site.op.row().is_collective())
    }

    fn pairs(&self) -> Pairs {
        Pairs::Here
    }
}

impl Transport for Ucx {
    fn name(&self) -> &'static str {
        "ucx"
    }

    fn execute(&self, call: &Call) -> Result<(), Error> {
        self.run(call).map_err(|cause| Error { transport: Some(self.name()), ..call.site.error(cause) })
    }

    fn attach(&self, comm: &Arc<Comm>) -> Result<(), Error> {
        Ok(comm.attach(|| self.worker.agree(comm)).map(drop)?)
    }

    fn stop(&self) {
        // Others may need what this rank has sent; if one of them is gone, there is nothing to be done.
        let _ = self.worker.flush(PATIENCE);
        self.worker.stopping.store(true, Ordering::Relaxed);
    }
}
