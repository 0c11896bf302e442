//! Messages through UCX's tag matching; everything else through MPI.
//!
//! Each process has one worker. Addresses are exchanged once, when mpi4jax is imported, and an endpoint is
//! made when the first message goes to its rank. UCX delivers nothing unless it is called, so while a rank
//! is elsewhere (in MPI, say), a thread calls it: a thousand times a second while messages come and go, and about
//! thirty times when none do.

mod sys;
mod tag;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, c_uint};
use std::mem::zeroed;
use std::path::Path;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use self::sys::{RequestParam, StatusPtr, Ucp};
use self::tag::Label;
use super::message::{Arrived, arrive, write_status};
use crate::call::{Call, Envelope};
use crate::comm::{Comm, Group};
use crate::device::{self, Platform};
use crate::dynlib::{self, checked};
use crate::error::Cause;
use crate::mpilib::{self, wildcards};

/// How long the end of the program waits for messages that are not received.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long the thread sleeps between two calls of UCX: at first, and when nothing has happened for long.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(32));
/// Calls without an event before a waiting rank lets others have the processor.
const SPINS: u32 = 200;

/// Whether UCX could be used. Whether it reaches the memory of a GPU is known when it has been started.
pub fn probe(platform: Platform) -> Result<(), String> {
    if platform == Platform::Cuda {
        device::support()?;
    }
    Ucp::get().map(|_| ())
}

/// This process in UCX. Collective over `MPI_COMM_WORLD`.
pub fn start() -> Result<&'static Worker, String> {
    static WORKER: OnceLock<Result<&'static Worker, String>> = OnceLock::new();
    WORKER.get_or_init(Worker::start).clone()
}

impl Ucp {
    fn start() -> Result<Self, String> {
        // Wheels keep UCX beside the MPI library, in a directory of its own.
        if let Some(directory) = dynlib::file_of(mpilib::address()).as_deref().and_then(Path::parent) {
            dynlib::add_directories([directory.join("openmpi"), directory.into()]);
        }
        let ucp = Self::load(sys::LIBRARY)?;
        let (major, minor, patch) = ucp.version();
        if (major, minor) < sys::OLDEST {
            return Err(sys::LIBRARY.too_old(&ucp.path, &format!("{major}.{minor}.{patch}")));
        }
        Ok(ucp)
    }

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

    /// A worker, the kinds of memory that it reaches, and its address.
    fn worker(&self) -> Result<(sys::Worker, u64, Vec<u8>), Cause> {
        let (major, minor, _) = self.version();
        let size = Group::World.size()?;
        // SAFETY: all-zero is a value of these structs; the masks name the fields that are set; what is made
        // lives as long as the process.
        unsafe {
            let mut config = null_mut();
            checked!(self, ucp_config_read(null(), null(), &mut config))?;
            let params = sys::Params {
                field_mask: sys::PARAMS_FEATURES | sys::PARAMS_ENDPOINTS,
                features: sys::FEATURE_TAG,
                estimated_num_eps: size,
                ..zeroed()
            };
            let mut context = null_mut();
            let started = checked!(self, ucp_init_version(major, minor, &params, config, &mut context));
            (self.ucp_config_release)(config);
            started?;
            let mut attributes = sys::Attributes { field_mask: sys::ATTRIBUTES_MEMORY_TYPES, ..zeroed() };
            checked!(self, ucp_context_query(context, &mut attributes))?;
            let params = sys::WorkerParams {
                field_mask: sys::WORKER_THREAD_MODE,
                thread_mode: sys::THREAD_MODE_SERIALIZED,
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

/// This process in UCX.
#[derive(Debug)]
pub struct Worker {
    ucp: &'static Ucp,
    handle: sys::Worker,
    /// What kinds of memory UCX reaches: a bit mask.
    memory_types: u64,
    /// By rank in `MPI_COMM_WORLD`.
    addresses: Vec<Box<[u8]>>,
    /// Locked around every call: the worker is asked for serialised calls only, which all builds have.
    state: Mutex<State>,
    /// Something was sent or received since the thread has looked.
    used: AtomicBool,
    stopping: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    /// By rank in `MPI_COMM_WORLD`.
    endpoints: BTreeMap<i32, sys::Endpoint>,
    /// Numbers that stand for communicators: those in use, and the one that was given out last, plus one.
    contexts: BTreeSet<u64>,
    next_context: u64,
}

// SAFETY: the handles are used under the lock of `state`.
unsafe impl Send for Worker {}
// SAFETY: as above.
unsafe impl Sync for Worker {}

/// What all ranks of a communicator agree on, for as long as it exists.
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
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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
        let thread = std::thread::Builder::new().name("mpi4jax-ucx".into()).spawn(|| worker.run());
        thread.map(|_| worker).map_err(|error| error.to_string())
    }

    pub fn reaches_cuda(&self) -> Result<(), String> {
        if self.memory_types & sys::MEMORY_TYPE_CUDA != 0 || device::is_reached_from_cpu() {
            return Ok(());
        }
        Err(format!("{} was built without CUDA", self.ucp.path))
    }

    /// Keeps messages moving while this process is elsewhere.
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
                    return Ok(Joined { worker: self, context });
                }
            }
            let feature = format!("more than {} communicators at a time", tag::CONTEXTS);
            Err(Cause::Unsupported { feature, reason: "the transport ucx has 15 bits for them" })
        })
    }

    fn endpoint(&self, state: &mut State, rank: i32) -> Result<sys::Endpoint, Cause> {
        if let Some(&endpoint) = state.endpoints.get(&rank) {
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
        // All that may be wrong is found before UCX writes into a result: an error of UCX's own ends the job.
        let no_such_rank = Cause::NoSuchRank { role: "destination", rank: dest, size: comm.size };
        let to = comm.world_rank(dest).ok_or(no_such_rank);
        let label = Label { context, source: comm.rank, tag: sendtag }.encode();
        let outgoing = send.map(|buffer| Ok::<_, Cause>((buffer, to?, label?))).transpose()?;
        let wanted = recv.map(|_| tag::wanted(context, source, recvtag)).transpose()?;
        self.used.store(true, Ordering::Relaxed);
        // SAFETY: the buffers are XLA's and stay valid until this returns; requests end before that.
        unsafe {
            let receiving = recv.zip(wanted).map(|(buffer, (label, mask))| {
                let param = RequestParam { op_attr_mask: sys::NO_IMMEDIATE_COMPLETION, ..zeroed() };
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
                let mut received = sys::Received::default();
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

    /// Calls UCX until a request has ended, and says what a receive has received; or, if nothing comes, for so long.
    ///
    /// # Safety
    /// The request is what `function` has returned; that of a receive, if `received` is given.
    unsafe fn wait(
        &self,
        function: &'static str,
        request: StatusPtr,
        mut received: Option<&mut sys::Received>,
        limit: Duration,
    ) -> Result<(), Cause> {
        if request.is_null() || (sys::LAST_ERROR..0).contains(&(request as isize)) {
            return self.ucp.check(function, request as isize as sys::Status);
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
                if status != sys::IN_PROGRESS {
                    (ucp.ucp_request_free)(request);
                }
                status
            };
            if status != sys::IN_PROGRESS {
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
