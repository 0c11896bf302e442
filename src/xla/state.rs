//! States: what XLA keeps for each operation of a compiled program, from its instantiate stage to its execute stage.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use super::c_api::{self, Api, Args, CallFrame, FfiError, TypeId};
use super::description::Description;
use super::errors::{caught, check};
use super::frame;
use super::watched;
use crate::call::{EagerCall, Operand, Phase, Site, Stream};
use crate::comm;
use crate::device::cuda::{Driver, Entered};
use crate::device::{self, Platform};
use crate::error::{Cause, Error};
use crate::finalize;
use crate::ops::{self, Reduction};
use crate::record::timeline;
use crate::transport::{self, AnyTransport, Transport};
use crate::watch;

/// The result of the instantiate stage, which XLA keeps for the execute stage as the state of the operation.
pub(super) struct Instantiated {
    pub transport: &'static AnyTransport,
    pub phase: Phase,
    pub description: Description,
    /// The user's line of a compiled operation.
    pub location: Arc<str>,
    sites: Sites,
}

enum Sites {
    One(Arc<Site>),
    /// Sites of an eager operation, by the numbers of communicator and line in its operand. Empty for a wait, which needs none.
    ByOperand(RwLock<HashMap<(i32, i32), Arc<Site>>>),
}

impl Instantiated {
    fn new(description: Description, phase: Phase, platform: Platform) -> Result<Self, Error> {
        let located = |cause| description.error(phase, cause);
        if phase != Phase::Whole {
            check_request(&description, phase, platform).map_err(located)?;
        }
        let transport = transport::selected(platform).map_err(|error| located(error.cause))?;
        if description.op.row().has_blocks && transport::takes_packed(platform) {
            // A program that was exported for another transport.
            let (expected, actual) = ("ghost cells that XLA packs for this transport", "blocks".into());
            return Err(located(Cause::Attribute { name: "halo", expected, actual }));
        }
        let sites = if phase == Phase::Wait || description.operand == Operand::Call {
            Sites::ByOperand(RwLock::default())
        } else {
            let expected = "a communicator, or an operand that says which one";
            let none = || Cause::Attribute { name: "comm", expected, actual: "none".into() };
            let comm = description.comm.as_deref().ok_or_else(none).and_then(comm::lookup);
            let comm = comm.map_err(located)?;
            let site = description.site(phase, comm, description.location(), transport.name())?;
            Sites::One(Arc::new(site))
        };
        let location = description.location().into();
        Ok(Self { transport, phase, description, location, sites })
    }

    /// An error before a communicator is known, or without one.
    #[cold]
    pub fn error(&self, cause: Cause) -> Error {
        self.description.error(self.phase, cause)
    }

    /// The operand of an eager call; `None` for other calls.
    ///
    /// # Safety
    /// `frame` is what XLA passed to the execute stage.
    #[inline]
    pub unsafe fn eager_call(&self, frame: &CallFrame, stream: Stream) -> Result<Option<EagerCall>, Error> {
        if self.description.operand != Operand::Call {
            return Ok(None);
        }
        // SAFETY: promised by the caller.
        let call = unsafe { frame::eager_call(frame, self.transport, stream) };
        call.map(Some).map_err(|cause| self.error(cause))
    }

    /// Runs an operation where its communicator can be used, with what an eager call says. After an error the ranks are out of
    /// step.
    ///
    /// # Safety
    /// As `eager_call`.
    #[inline]
    pub unsafe fn run(
        &self,
        frame: &CallFrame,
        stream: Stream,
        body: impl FnOnce(&Arc<Site>, Option<&EagerCall>) -> Result<(), Box<Error>>,
    ) -> Result<(), Box<Error>> {
        let (call, bound);
        // By reference: copying what has just been written in pieces would cost every call 10 ns.
        let (site, eager) = match &self.sites {
            Sites::One(site) => (site, None),
            Sites::ByOperand(sites) => {
                // SAFETY: promised by the caller.
                call = unsafe { self.eager_call(frame, stream)? };
                let Some(EagerCall::Run { comm, line, .. }) = &call else { return Ok(()) };
                bound = self.bind(sites, *comm, *line)?;
                (&bound, call.as_ref())
            }
        };
        let _guard = usable(site)?;
        body(site, eager).inspect_err(|error| fail(error, site, self.phase))
    }

    /// The site of a communicator and a line, by their numbers.
    fn bind(
        &self,
        sites: &RwLock<HashMap<(i32, i32), Arc<Site>>>,
        number: i32,
        line: i32,
    ) -> Result<Arc<Site>, Error> {
        let key = (number, line);
        if let Some(found) = sites.read().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return Ok(found.clone());
        }
        let unknown = || self.error(Cause::UnknownCommunicator { key: format!("number {number}").into() });
        let comm = comm::numbered(number).ok_or_else(unknown)?;
        let location = ops::numbered_line(line);
        let new = Arc::new(self.description.site(self.phase, comm, location, self.transport.name())?);
        let mut sites = sites.write().unwrap_or_else(PoisonError::into_inner);
        sites.retain(|_, old| !old.comm.is_freed());
        sites.insert(key, new.clone());
        Ok(new)
    }
}

/// The platform of a target. Handlers are generic over it, so that the handlers of the CPU do
/// nothing for GPUs at run time.
pub(super) const fn platform<const GPU: bool>() -> Platform {
    if GPU { Platform::Gpu } else { Platform::Cpu }
}

/// Checks an operation that is started: it goes through MPI, whatever carries the other operations, or is put on a stream of the
/// transport's own.
fn check_request(description: &Description, phase: Phase, platform: Platform) -> Result<(), Cause> {
    let row = description.op.row();
    let layout = description.layout()?;
    if row.started.is_none() {
        let feature = format!("starting {} without waiting for its end", row.name);
        return Err(Cause::Unsupported { feature, reason: "MPI has no such function" });
    }
    if !row.is_collective()
        && !layout.local
        && let Some(reason) = transport::messages_apart(platform)
    {
        return Err(Cause::Unsupported { feature: description.op.name_of(phase).into(), reason });
    }
    Ok(())
}

/// An error if the ranks of the communicator are known to be out of step. The communicator is kept for the operation.
#[inline]
fn usable(site: &Site) -> Result<comm::CommGuard, Error> {
    let comm = &site.comm;
    if finalize::is_ending() {
        return Err(site.error(Cause::Finalized));
    }
    if comm.is_freed() {
        return Err(site.error(Cause::FreedCommunicator { key: comm.key.clone() }));
    }
    if let Some(Reduction::User(user)) = site.reduction
        && user.is_freed()
    {
        return Err(site.error(Cause::FreedReduction));
    }
    match comm.failure() {
        None => comm.guard().map_err(|cause| site.error(cause)),
        Some(first) => Err(site.error(Cause::EarlierFailure { key: comm.key.clone(), first: first.into() })),
    }
}

/// After an error the ranks are out of step, or the job has to end.
#[cold]
pub(super) fn fail(error: &Error, site: &Arc<Site>, phase: Phase) {
    if error.cause.is_fatal() {
        timeline::flush();
        let words = watched::explain(site, phase, &error.cause);
        watch::ending();
        site.comm.abort(error.cause.code(), &words);
    }
    site.comm.fail(&error.to_string());
}

/// Answers metadata requests, runs `body`, and turns its errors and panics into XLA's errors.
///
/// # Safety
/// `frame` was passed by XLA.
#[inline]
pub(super) unsafe fn guard<const GPU: bool>(
    frame: *mut CallFrame,
    body: impl FnOnce(&CallFrame) -> Result<(), Box<Error>>,
) -> *mut FfiError {
    // SAFETY: promised by the caller. The closure's captures are not used after a panic.
    unsafe {
        let api = (*frame).api;
        let run = || match metadata(frame) {
            Some(metadata) => Ok(answer::<GPU>(&*frame, metadata)?),
            None => {
                let _calling = comm::Calling::new();
                body(&*frame)
            }
        };
        caught(api, run)
    }
}

/// The request for metadata, if the frame is one.
///
/// # Safety
/// `frame` was passed by XLA.
#[inline]
unsafe fn metadata(frame: *const CallFrame) -> Option<*mut c_api::Metadata> {
    // SAFETY: the type of an extension says what it is a part of.
    unsafe {
        let extension = (*frame).extension_start;
        let is_metadata = !extension.is_null() && (*extension).kind == c_api::EXTENSION_METADATA;
        is_metadata.then(|| (*extension.cast::<c_api::MetadataExtension>()).metadata)
    }
}

/// The API minor that XLA and this file have in common. XLA refuses handlers that claim a newer one than
/// its own, and passes older ones the same structs.
unsafe fn minor(api: *const Api) -> c_int {
    // SAFETY: promised by the caller: XLA's API struct, or null where a request comes without one.
    if api.is_null() { 1 } else { unsafe { (*api).version.minor.min(c_api::NEWEST_API_MINOR) } }
}

#[cold]
unsafe fn answer<const GPU: bool>(frame: &CallFrame, metadata: *mut c_api::Metadata) -> Result<(), Error> {
    // SAFETY: XLA's struct; the last field exists from the minor on that is asked for.
    unsafe {
        let minor = minor(frame.api);
        (*metadata).api_version.major = c_api::API_MAJOR;
        (*metadata).api_version.minor = minor;
        // XLA may not record calls into CUDA graphs: NCCL requires that all ranks do, or none.
        (*metadata).traits = 0;
        if minor >= c_api::MINOR_TYPE_INFO && frame.stage == c_api::STAGE_INSTANTIATE {
            (*metadata).state_type_id = registered::<GPU>(frame.api)?;
        }
    }
    Ok(())
}

/// The stream that a call is on, and its context, which becomes this thread's: XLA calls from any. On the CPU there are none.
///
/// # Safety
/// `frame` is XLA's, of the execute stage.
#[inline]
pub(super) unsafe fn enter<const GPU: bool>(frame: &CallFrame) -> Result<(Stream, Option<Entered>), Cause> {
    if !GPU {
        return Ok((Stream::NONE, None));
    }
    let driver = Driver::get().map_err(|message| Cause::Setting { message })?;
    let mut args = Args::new(c_api::StreamGet { ctx: frame.ctx, stream: null_mut() });
    // SAFETY: promised by the caller. The CPU, where the tests' driver has its memory, has no streams.
    unsafe {
        let get = std::mem::transmute::<usize, Option<c_api::StreamFunction>>((*frame.api).stream_get);
        if let Some(get) = get.filter(|_| !device::is_on_cpu()) {
            check(frame.api, "XLA_FFI_Stream_Get", get(&mut args))?;
        }
        let stream = Stream::new(args.fields.stream.cast());
        Ok((stream, Some(driver.enter(driver.context_of(stream)?)?)))
    }
}

unsafe extern "C" fn delete_state(state: *mut c_void) {
    // SAFETY: XLA deletes once what `set_up` gave it.
    drop(unsafe { Box::from_raw(state.cast::<Instantiated>()) });
}

/// The id of our type of states in the XLA of a kind of target. A process may hold two: the plugin for GPUs has
/// an XLA of its own.
///
/// # Safety
/// `api` is that XLA's.
#[inline]
unsafe fn registered<const GPU: bool>(api: *const Api) -> Result<TypeId, Cause> {
    static IDS: [OnceLock<Result<TypeId, String>>; 2] = [const { OnceLock::new() }; 2];
    // SAFETY: promised by the caller.
    let id = IDS[GPU as usize].get_or_init(|| unsafe { register(api) }.map_err(|cause| cause.to_string()));
    id.as_ref().copied().map_err(|message| Cause::Setting { message: message.clone() })
}

/// # Safety
/// `api` is an XLA's.
#[cold]
unsafe fn register(api: *const Api) -> Result<TypeId, Cause> {
    static INFO: c_api::TypeInfo = Args::new(c_api::Deleter { deleter: delete_state });
    const NAME: &str = "mpi4jax_state";

    let mut type_id = c_api::UNKNOWN_TYPE_ID;
    let name = c_api::ByteSpan { ptr: NAME.as_ptr().cast(), len: NAME.len() };
    let fields = c_api::TypeRegister { name, type_id: &mut type_id, type_info: &INFO };
    // SAFETY: promised by the caller.
    unsafe { check(api, "XLA_FFI_Type_Register", ((*api).type_register)(&mut Args::new(fields)))? };
    Ok(type_id)
}

/// Calls one of XLA's two functions for states, with the struct of the API's minor. The state that it takes, or gives.
///
/// # Safety
/// `function` is of `frame`'s API.
#[inline(always)]
unsafe fn call_with_state<const GPU: bool>(
    frame: &CallFrame,
    name: &'static str,
    function: c_api::StateFunction,
    state: *mut c_void,
) -> Result<*mut c_void, Cause> {
    let ctx = frame.ctx;
    // SAFETY: promised by the caller.
    unsafe {
        let mut id = registered::<GPU>(frame.api)?;
        let type_id = &raw mut id;
        if minor(frame.api) >= c_api::MINOR_STATE_STAGE {
            let stage = c_api::STAGE_INSTANTIATE;
            let mut args = Args::new(c_api::StagedState { ctx, stage, type_id, state });
            check(frame.api, name, function((&raw mut args).cast()))?;
            Ok(args.fields.state)
        } else {
            let deleter = delete_state;
            let mut args = Args::new(c_api::UnstagedState { ctx, type_id, state, deleter });
            check(frame.api, name, function((&raw mut args).cast()))?;
            Ok(args.fields.state)
        }
    }
}

/// Decodes the attributes of an operation, and leaves what they say for the execute stage.
///
/// # Safety
/// Called by XLA with a frame of its own making.
pub(super) unsafe fn set_up<const GPU: bool>(frame: *mut CallFrame, phase: Phase) -> *mut FfiError {
    // SAFETY: promised by the caller.
    unsafe {
        guard::<GPU>(frame, |frame| {
            let description = Description::of(&frame.attrs).map_err(Error::from)?;
            let state = Instantiated::new(description, phase, platform::<GPU>())?;
            let state = Box::into_raw(Box::new(state)).cast();
            let set = call_with_state::<GPU>(frame, "XLA_FFI_State_Set", (*frame.api).state_set, state);
            // XLA owns the state once it has accepted it.
            set.inspect_err(|_| delete_state(state)).map_err(Error::from)?;
            Ok(())
        })
    }
}

/// # Safety
/// `frame` is XLA's, of the execute stage.
#[inline]
pub(super) unsafe fn get_state<const GPU: bool>(frame: &CallFrame) -> Result<&Instantiated, Error> {
    // SAFETY: promised by the caller; a state of our type is what `set_up` stored, and it outlives the executable that is
    // running.
    unsafe {
        let get = (*frame.api).state_get;
        Ok(&*call_with_state::<GPU>(frame, "XLA_FFI_State_Get", get, null_mut())?.cast::<Instantiated>())
    }
}
