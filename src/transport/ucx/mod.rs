//! Messages through UCX's tag matching; everything else through MPI.
//!
//! Each process has one worker. Addresses are exchanged once, when mpi4jax is imported, and an endpoint is
//! made when the first message goes to its rank. UCX delivers nothing unless it is called, so while a rank
//! is elsewhere (in MPI, say), a thread calls it: a thousand times a second while messages come and go, and about
//! thirty times when none do.

mod tag;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, c_uint};
use std::fmt;
use std::mem::zeroed;
use std::ops::Deref;
use std::path::Path;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use ucx_sys as sys;

use self::tag::Label;
use super::cuda_aware_mpi::{Direct, TakesDevicePointers};
use super::host_mpi::HostMpi;
use super::message::{Arrived, arrive, write_status};
use super::{Base, Descriptor, TARGET, Transport};
use crate::call::{Call, Envelope, Stream};
use crate::comm::{Comm, Group};
use crate::device::{self, Platform};
use crate::dynlib::{self, Found, Name};
use crate::error::{Cause, Error};
use crate::mpilib::{self, wildcards};
use crate::ops::Buffer;
use crate::sync::lock;

const LIBRARY: Name = Name { soname: "libucp.so.0", variable: "MPI4JAX_LIBUCP", needed: "1.11 of UCX" };
/// The oldest version that is accepted: earlier ones lack functions or fields that are used here.
const OLDEST: (c_uint, c_uint) = (1, 11);

/// How long the end of the program waits for messages that are not received.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long the thread sleeps between two calls of UCX: at first, and when nothing has happened for long.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(32));
/// Calls without an event before a waiting rank lets others have the processor.
const SPINS: u32 = 200;

pub const DESCRIPTOR: Descriptor = Descriptor {
    name: "ucx",
    probe,
    start: |platform| {
        // Collective: also on a rank that cannot use it.
        let worker = start()?;
        probe(platform)?;
        let ucx = Ucx { worker, mpi: HostMpi::default() };
        if platform == Platform::Cpu {
            return Ok(ucx.into());
        }
        worker.reaches_gpu()?;
        Ok(CudaUcx::new(DESCRIPTOR.name, ucx)?.into())
    },
    is_collective: true,
    meets_mpi: false,
    messages_apart: || Some("with MPI4JAX_TRANSPORT=ucx, send and recv do not meet the messages of MPI"),
    ..Descriptor::DEFAULT
};

/// UCX for messages, MPI for everything else.
#[derive(Debug)]
pub struct Ucx {
    worker: &'static Worker,
    mpi: HostMpi,
}

/// UCX for messages of arrays in the memory of a GPU.
pub type CudaUcx = Direct<Ucx>;

impl Transport for Ucx {
    fn base(&self) -> &Base {
        self.mpi.base()
    }

    fn name(&self) -> &'static str {
        DESCRIPTOR.name
    }

    #[inline(never)]
    fn execute(&self, call: &Call) -> Result<(), Error> {
        if call.site.op.row().is_collective() {
            return self.mpi.execute(call);
        }
        self.worker.execute(call).map_err(|cause| call.site.error(cause))
    }

    fn read_numbers(&self, numbers: &Buffer, into: &mut [i32], stream: Stream) -> Result<(), Cause> {
        self.mpi.read_numbers(numbers, into, stream)
    }

    fn join(&self, comm: &Arc<Comm>) -> Result<(), Error> {
        Ok(self.worker.join(comm)?)
    }

    fn stop(&self) {
        self.worker.stop();
    }
}

impl TakesDevicePointers for Ucx {
    /// MPI may not take them where UCX does.
    fn takes_device_pointers(&self, call: &Call) -> bool {
        !call.site.op.row().is_collective()
    }
}

/// Whether UCX could be used. Whether it reaches the memory of a GPU is known when it has been started.
fn probe(platform: Platform) -> Result<(), String> {
    if platform == Platform::Gpu {
        device::support()?;
    }
    Ucp::get().map(|_| ())
}

/// The worker of this process, started by the first call. Collective over `MPI_COMM_WORLD`.
fn start() -> Result<&'static Worker, String> {
    static WORKER: OnceLock<Result<&'static Worker, String>> = OnceLock::new();
    WORKER.get_or_init(Worker::start).clone()
}

/// UCX's functions.
struct Ucp {
    path: String,
    functions: sys::Functions,
}

impl Deref for Ucp {
    type Target = sys::Functions;

    fn deref(&self) -> &Self::Target {
        &self.functions
    }
}

impl fmt::Debug for Ucp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Ucp").field(&self.path).finish()
    }
}

/// Calls a function of UCX's, and makes an error of its code and its name.
macro_rules! checked {
    ($ucp:expr, $function:ident($($argument:expr),* $(,)?)) => {
        $ucp.check(stringify!($function), ($ucp.$function)($($argument),*))
    };
}

impl Ucp {
    fn get() -> Result<&'static Self, String> {
        static UCP: OnceLock<Result<Ucp, String>> = OnceLock::new();
        UCP.get_or_init(Self::start).as_ref().map_err(Clone::clone)
    }

    fn start() -> Result<Self, String> {
        // Wheels keep UCX beside the MPI library, in a directory of its own.
        if let Some(directory) = dynlib::file_of(mpilib::address()).as_deref().and_then(Path::parent) {
            dynlib::add_directories([directory.join("openmpi"), directory.into()]);
        }
        let found = Found::open(LIBRARY)?;
        // SAFETY: addresses in the library of that name, which stays.
        let functions = unsafe { sys::Functions::find(|name| found.address(name))? };
        let ucp = Self { path: found.path, functions };
        let (major, minor, patch) = ucp.version();
        if (major, minor) < OLDEST {
            return Err(LIBRARY.too_old(&ucp.path, &format!("{major}.{minor}.{patch}")));
        }
        Ok(ucp)
    }

    fn version(&self) -> (c_uint, c_uint, c_uint) {
        let (mut major, mut minor, mut patch) = (0, 0, 0);
        // SAFETY: three places to write to.
        unsafe { (self.ucp_get_version)(&mut major, &mut minor, &mut patch) };
        (major, minor, patch)
    }

    fn check(&self, function: &'static str, status: sys::ucs_status_t) -> Result<(), Cause> {
        if status == sys::UCS_OK {
            return Ok(());
        }
        // SAFETY: a constant string for every number.
        let text = unsafe { CStr::from_ptr((self.ucs_status_string)(status)) }.to_string_lossy().into();
        Err(Cause::Library { function, code: status, text })
    }

    /// A worker, the kinds of memory that it reaches, and its address.
    fn worker(&self) -> Result<(sys::ucp_worker_h, u64, Vec<u8>), Cause> {
        let (major, minor, _) = self.version();
        let size = Group::World.size()?;
        // SAFETY: all-zero is a value of these structs; the masks name the fields that are set; what is made
        // lives as long as the process.
        unsafe {
            let mut config = null_mut();
            checked!(self, ucp_config_read(null(), null(), &mut config))?;
            let params = sys::ucp_params_t {
                field_mask: sys::UCP_PARAM_FIELD_FEATURES | sys::UCP_PARAM_FIELD_ESTIMATED_NUM_EPS,
                features: sys::UCP_FEATURE_TAG,
                estimated_num_eps: size,
                ..zeroed()
            };
            let mut context = null_mut();
            let started = checked!(self, ucp_init_version(major, minor, &params, config, &mut context));
            (self.ucp_config_release)(config);
            started?;
            let mut attributes =
                sys::ucp_context_attr_t { field_mask: sys::UCP_ATTR_FIELD_MEMORY_TYPES, ..zeroed() };
            checked!(self, ucp_context_query(context, &mut attributes))?;
            let params = sys::ucp_worker_params_t {
                field_mask: sys::UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                thread_mode: sys::UCS_THREAD_MODE_SERIALIZED,
                ..zeroed()
            };
            let mut worker = null_mut();
            checked!(self, ucp_worker_create(context, &params, &mut worker))?;
            let (mut address, mut length) = (null_mut(), 0);
            checked!(self, ucp_worker_get_address(worker, &mut address, &mut length))?;
            let bytes = std::slice::from_raw_parts(address.cast(), length).to_vec();
            (self.ucp_worker_release_address)(worker, address);
            Ok((worker, attributes.memory_types, bytes))
        }
    }
}

/// The worker of this process: UCX's context for all of its messages.
#[derive(Debug)]
pub struct Worker {
    ucp: &'static Ucp,
    handle: sys::ucp_worker_h,
    /// What kinds of memory UCX reaches: a bit mask.
    memory_types: u64,
    /// By rank in `MPI_COMM_WORLD`.
    addresses: Vec<Box<[u8]>>,
    /// Locked around every call: the worker is made for serialized calls, which all builds support.
    state: Mutex<WorkerState>,
    /// Whether a message was sent or received since the thread has last looked.
    used: AtomicBool,
    stopping: AtomicBool,
}

#[derive(Debug, Default)]
struct WorkerState {
    /// By rank in `MPI_COMM_WORLD`.
    endpoints: BTreeMap<i32, sys::ucp_ep_h>,
    /// Numbers that stand for communicators: those in use, and the one that was given out last, plus one.
    contexts: BTreeSet<u64>,
    next_context: u64,
}

// SAFETY: the handles are used under the lock of `state`.
unsafe impl Send for Worker {}
// SAFETY: as above.
unsafe impl Sync for Worker {}

/// The attachment of a communicator: the number that stands for it in tags, which its ranks have agreed on.
struct Joined {
    worker: &'static Worker,
    context: u64,
}

impl Drop for Joined {
    fn drop(&mut self) {
        self.worker.lock().contexts.remove(&self.context);
    }
}

impl Worker {
    fn lock(&self) -> MutexGuard<'_, WorkerState> {
        lock(&self.state)
    }

    /// Starts UCX and exchanges addresses. Collective over `MPI_COMM_WORLD`, also on a rank where it fails.
    fn start() -> Result<&'static Self, String> {
        let ours = Ucp::get().and_then(|ucp| {
            let (handle, memory_types, address) = ucp.worker().map_err(|cause| cause.to_string())?;
            Ok((ucp, handle, memory_types, address))
        });
        let address = ours.as_ref().map_or(&[][..], |(_, _, _, address)| address);
        let addresses = Group::World.all_bytes(address).map_err(|cause| cause.to_string())?;
        let (ucp, handle, memory_types, _) = ours?;
        if let Some(rank) = addresses.iter().position(|address| address.is_empty()) {
            return Err(format!("UCX could not be started on rank {rank}"));
        }
        let (state, used, stopping) = (Mutex::default(), AtomicBool::new(false), AtomicBool::new(false));
        let worker = Self { ucp, handle, memory_types, addresses, state, used, stopping };
        let worker: &'static Self = Box::leak(Box::new(worker));
        let (major, minor, patch) = ucp.version();
        let (path, bytes) = (&*ucp.path, worker.addresses.iter().map(|it| it.len()).sum::<usize>());
        tracing::info!(target: TARGET, path, version = %format_args!("{major}.{minor}.{patch}"), addresses = bytes, "UCX has started");
        let thread = std::thread::Builder::new().name("mpi4jax-ucx".into()).spawn(|| worker.run());
        thread.map(|_| worker).map_err(|error| error.to_string())
    }

    pub fn reaches_gpu(&self) -> Result<(), String> {
        let vendor = device::vendor();
        if self.memory_types & vendor.ucx_memory != 0 || device::is_reached_from_cpu() {
            return Ok(());
        }
        Err(format!("{} was built without {}", self.ucp.path, vendor.software))
    }

    /// The body of the thread that makes progress while no other thread calls UCX.
    fn run(&self) {
        let mut pause = PAUSES.0;
        while !self.stopping.load(Ordering::Relaxed) {
            std::thread::sleep(pause);
            let mut something_happened = self.used.swap(false, Ordering::Relaxed);
            // A thread that holds the lock calls UCX itself.
            if let Ok(_locked) = self.state.try_lock() {
                // SAFETY: under the lock.
                while unsafe { (self.ucp.ucp_worker_progress)(self.handle) } != 0 {
                    something_happened = true;
                }
            }
            pause = if something_happened { PAUSES.0 } else { (2 * pause).min(PAUSES.1) };
        }
    }

    /// Agrees with the other ranks of a communicator on a number for it, before its first message. Collective.
    pub fn join(&'static self, comm: &Comm) -> Result<(), Cause> {
        self.context(comm).map(|_| ())
    }

    /// A number that none of a communicator's ranks uses for another one. The numbers go round, so that one comes back as late
    /// as can be: a message that was never received would be found by another communicator's receives.
    fn context(&'static self, comm: &Comm) -> Result<Arc<Joined>, Cause> {
        let group = Group::Of(comm);
        comm.attach(|| {
            for _ in 0..tag::CONTEXTS {
                let next = self.lock().next_context;
                let agreed = group.largest(next)?;
                let context = agreed % tag::CONTEXTS;
                let is_free = !self.lock().contexts.contains(&context);
                self.lock().next_context = agreed + 1;
                if group.common_bits(u64::from(is_free))? == 1 {
                    self.lock().contexts.insert(context);
                    tracing::debug!(target: TARGET, comm = &*comm.key, context, "UCX has a number for a communicator");
                    return Ok(Joined { worker: self, context });
                }
            }
            let feature = format!("more than {} communicators at a time", tag::CONTEXTS);
            Err(Cause::Unsupported { feature, reason: "the transport ucx has 15 bits for them" })
        })
    }

    fn endpoint(&self, state: &mut WorkerState, rank: i32) -> Result<sys::ucp_ep_h, Cause> {
        if let Some(&endpoint) = state.endpoints.get(&rank) {
            return Ok(endpoint);
        }
        let address = &self.addresses[rank as usize];
        let mut endpoint = null_mut();
        // SAFETY: the address is one that UCX made; the lock is held.
        unsafe {
            let params = sys::ucp_ep_params_t {
                field_mask: sys::UCP_EP_PARAM_FIELD_REMOTE_ADDRESS,
                address: address.as_ptr().cast(),
                ..zeroed()
            };
            checked!(self.ucp, ucp_ep_create(self.handle, &params, &mut endpoint))?;
        }
        state.endpoints.insert(rank, endpoint);
        Ok(endpoint)
    }

    /// Sends or receives a message, or both.
    pub fn execute(&'static self, call: &Call) -> Result<(), Cause> {
        let (comm, any) = (&call.site.comm, wildcards());
        let context = self.context(comm)?.context;
        let Envelope { source, recvtag, dest, sendtag } = call.envelope;
        // The two may not share memory, and they may differ in size.
        let mut copy = Vec::new();
        let send = call.send.filter(|_| dest != any.proc_null);
        let send = send.map(|from| call.recv.map_or(from, |to| from.apart_from(&to, &mut copy)));
        let recv = call.recv.filter(|_| source != any.proc_null);
        // All that may be wrong is found before UCX writes into a result: an error of UCX's own
        // aborts the job.
        let no_such_rank = Cause::NoSuchRank { role: "destination", rank: dest, size: comm.size };
        let to = comm.world_rank(dest).ok_or(no_such_rank);
        let label = Label { context, source: comm.rank, tag: sendtag }.encode();
        let outgoing = send.map(|buffer| Ok::<_, Cause>((buffer, to?, label?))).transpose()?;
        let wanted = recv.map(|_| tag::wanted(context, source, recvtag)).transpose()?;
        self.used.store(true, Ordering::Relaxed);
        // SAFETY: the buffers are XLA's and stay valid until this returns; requests end before that.
        unsafe {
            let receiving = recv.zip(wanted).map(|(buffer, (label, mask))| {
                let param =
                    sys::ucp_request_param_t { op_attr_mask: sys::UCP_OP_ATTR_FLAG_NO_IMM_CMPL, ..zeroed() };
                let (data, bytes) = (buffer.data().cast(), buffer.bytes());
                let _locked = self.lock();
                (self.ucp.ucp_tag_recv_nbx)(self.handle, data, bytes, label, mask, &param)
            });
            if let Some((buffer, to, label)) = outgoing {
                let sending = {
                    let mut state = self.lock();
                    let endpoint = self.endpoint(&mut state, to)?;
                    let (data, bytes) = (buffer.data().cast(), buffer.bytes());
                    (self.ucp.ucp_tag_send_nbx)(endpoint, data, bytes, label, &zeroed())
                };
                self.wait("ucp_tag_send_nbx", sending, None, Duration::MAX)?;
            }
            let mut arrived = Arrived { source: any.proc_null, tag: any.tag, count: 0 };
            if let (Some(receiving), Some(recv)) = (receiving, recv) {
                let mut received = sys::ucp_tag_recv_info_t::default();
                self.wait("ucp_tag_recv_nbx", receiving, Some(&mut received), Duration::MAX)?;
                let Label { source, tag, .. } = Label::decode(received.sender_tag);
                arrived = Arrived { source, tag, count: received.length / recv.dtype().size() };
            }
            if call.recv.is_none() {
                return Ok(());
            }
            if call.status.is_some() {
                write_status(call, &arrived)?;
            }
            arrive(call, &arrived)
        }
    }

    /// Calls UCX until a request has completed, and returns what a receive has received; if nothing
    /// arrives, until the time is over.
    ///
    /// # Safety
    /// `function` has returned the request; it is the request of a receive, if `received` is given.
    unsafe fn wait(
        &self,
        function: &'static str,
        request: sys::ucs_status_ptr_t,
        mut received: Option<&mut sys::ucp_tag_recv_info_t>,
        limit: Duration,
    ) -> Result<(), Cause> {
        if request.is_null() || (sys::UCS_ERR_LAST..0).contains(&(request as isize)) {
            return self.ucp.check(function, request as isize as sys::ucs_status_t);
        }
        let (ucp, began, mut calls) = (self.ucp, Instant::now(), 0);
        loop {
            // SAFETY: the request is not freed yet; the lock is held.
            let status = unsafe {
                let _locked = self.lock();
                (ucp.ucp_worker_progress)(self.handle);
                let status = match &mut received {
                    Some(received) => (ucp.ucp_tag_recv_request_test)(request, *received),
                    None => (ucp.ucp_request_check_status)(request),
                };
                if status != sys::UCS_INPROGRESS {
                    (ucp.ucp_request_free)(request);
                }
                status
            };
            if status != sys::UCS_INPROGRESS {
                return ucp.check(function, status);
            }
            calls += 1;
            if calls <= SPINS {
                std::hint::spin_loop();
            } else if began.elapsed() > limit {
                return Ok(());
            } else {
                std::thread::yield_now();
            }
        }
    }

    /// The program ends: others may need what this rank has sent; if one of them is gone, there is nothing to be done.
    pub fn stop(&self) {
        // SAFETY: all-zero is a value of the struct; the lock is held around the call.
        unsafe {
            let flushing = {
                let _locked = self.lock();
                (self.ucp.ucp_worker_flush_nbx)(self.handle, &zeroed())
            };
            let _ = self.wait("ucp_worker_flush_nbx", flushing, None, PATIENCE);
        }
        self.stopping.store(true, Ordering::Relaxed);
    }
}
