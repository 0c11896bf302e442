//! What XLA holds of ours: the state of each operation of a compiled program, and how handlers get at it.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::mem::offset_of;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use super::c_api::{self, Api, CallFrame, FfiError, StageStateArgs, StateArgs, TypeId};
use super::errors::{caught, check};
use super::watched::Watched;
use crate::call::{Operand, Site, Stream};
use crate::comm;
use crate::device;
use crate::device::cuda::{self, Entered};
use crate::error::{Cause, Error};
use crate::mpilib;
use crate::ops;
use crate::record::recorder::OpInfo;
use crate::record::timeline;
use crate::transport::{RequestLayout, Transport};
use crate::watch;

/// What the instantiate stage leaves for the execute stage.
pub(super) struct State {
    pub transport: &'static Transport,
    pub site: Sites,
    /// Of an operation that is started, and waited for later.
    pub request: Option<RequestPlan>,
}

/// A site, and how the watchdog knows it.
pub(super) struct Bound {
    pub site: Site,
    pub watched: Watched,
}

impl Bound {
    pub fn new(site: Site, transport: &'static Transport) -> Self {
        let watched = Watched::new(&site, transport);
        Self { site, watched }
    }
}

pub(super) enum Sites {
    One(Bound),
    /// An eager operation, whose communicator and line an operand says.
    ByOperand {
        template: Site,
        bound: RwLock<HashMap<(i32, i32), Arc<Bound>>>,
    },
}

impl Sites {
    pub fn of(site: Site, transport: &'static Transport) -> Result<Self, Error> {
        if site.operand == Operand::Call {
            return Ok(Self::ByOperand { template: site, bound: RwLock::default() });
        }
        if site.comm.is_template() {
            let actual = format!("{} without such an operand", site.comm.key);
            let expected = "a communicator, or an operand that says which one";
            return Err(site.error(Cause::Attribute { name: "comm", expected, actual }));
        }
        Ok(Self::One(Bound::new(site, transport)))
    }
}

/// The site of a communicator and a line, by their numbers.
pub(super) fn bind(
    template: &Site,
    bound: &RwLock<HashMap<(i32, i32), Arc<Bound>>>,
    key: (i32, i32),
    transport: &'static Transport,
) -> Result<Arc<Bound>, Error> {
    if let Some(found) = bound.read().unwrap_or_else(PoisonError::into_inner).get(&key) {
        return Ok(found.clone());
    }
    let (number, line) = key;
    let unknown = || template.error(Cause::UnknownCommunicator { key: format!("number {number}").into() });
    let comm = comm::numbered(number)
        .filter(|comm| (comm.rank, comm.size) == (template.comm.rank, template.comm.size))
        .ok_or_else(unknown)?;
    let site = Site { comm, location: ops::numbered_line(line), ..template.clone() };
    let new = Arc::new(Bound::new(site, transport));
    let mut bound = bound.write().unwrap_or_else(PoisonError::into_inner);
    bound.retain(|_, old| !old.site.comm.is_freed());
    bound.insert(key, new.clone());
    Ok(new)
}

/// The kinds of targets. Handlers are one function per kind, so that the CPU's pays nothing for the others.
pub mod kind {
    use crate::transport::Platform;

    pub const CPU: u8 = 0;
    pub const CUDA: u8 = 1;

    pub(in super::super) const fn platform<const KIND: u8>() -> Platform {
        if KIND == CPU { Platform::Cpu } else { Platform::Cuda }
    }
}

/// What a program asks of a request, and what carries it out.
pub(super) struct RequestPlan {
    pub layout: RequestLayout,
    /// Of the waits: how each operation that was waited for here last is recorded, with the line of the wait.
    pub waits: Mutex<Vec<RecordedWait>>,
}

/// What was started, the number of the line of the wait, and how that is recorded.
pub(super) type RecordedWait = (Arc<OpInfo>, i32, Arc<Watched>);

/// After an error the ranks are out of step.
#[inline]
pub(super) fn judged(
    site: &Site,
    watched: &Watched,
    result: Result<(), Box<Error>>,
) -> Result<(), Box<Error>> {
    result.inspect_err(|error| {
        end_if_fatal(error, &site.comm, watched);
        site.comm.fail(&error.to_string());
    })
}

/// Whether the ranks of the communicator are in step, as far as this one knows. It is kept for the operation.
#[inline]
pub(super) fn usable(site: &Site) -> Result<comm::CommGuard, Error> {
    let comm = &site.comm;
    if mpilib::is_ending() {
        return Err(site.error(Cause::Finalized));
    }
    if comm.is_freed() {
        return Err(site.error(Cause::FreedCommunicator { key: comm.key.clone() }));
    }
    match comm.failure() {
        None => comm.guard().map_err(|cause| site.error(cause)),
        Some(first) => Err(site.error(Cause::EarlierFailure { key: comm.key.clone(), first: first.into() })),
    }
}

#[cold]
pub(super) fn end_if_fatal(error: &Error, comm: &comm::Comm, watched: &Watched) {
    if error.cause.is_fatal() {
        timeline::flush();
        let words = watched.explain(&error.cause);
        watch::ending();
        comm.abort(error.cause.code(), &words);
    }
}

/// Answers metadata requests, runs `body`, and turns its errors and panics into XLA's errors.
///
/// # Safety
/// `frame` was passed by XLA.
#[inline]
pub(super) unsafe fn guard(
    frame: *mut CallFrame,
    body: impl FnOnce(&CallFrame) -> Result<(), Box<Error>>,
) -> *mut FfiError {
    // SAFETY: promised by the caller. The closure's captures are not used after a panic.
    unsafe {
        let api = (*frame).api;
        let run = || match metadata(frame) {
            Some(metadata) => Ok(answer(&*frame, metadata)?),
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
unsafe fn answer(frame: &CallFrame, metadata: *mut c_api::Metadata) -> Result<(), Error> {
    // SAFETY: XLA's struct; the last field exists from the minor on that is asked for.
    unsafe {
        let minor = minor(frame.api);
        (*metadata).api_version.major = c_api::API_MAJOR;
        (*metadata).api_version.minor = minor;
        // XLA may not record calls into CUDA graphs: NCCL wants all ranks to, or none.
        (*metadata).traits = 0;
        if minor >= c_api::MINOR_TYPE_INFO && frame.stage == c_api::STAGE_INSTANTIATE {
            (*metadata).state_type_id = register(frame.api)?;
        }
    }
    Ok(())
}

/// The stream that a call is on, and its context, which becomes this thread's: XLA calls from any. On the CPU there are none.
///
/// # Safety
/// `frame` is XLA's, of the execute stage.
#[inline]
pub(super) unsafe fn enter<const KIND: u8>(frame: &CallFrame) -> Result<(Stream, Option<Entered>), Cause> {
    if KIND == kind::CPU {
        return Ok((Stream::NONE, None));
    }
    // SAFETY: promised by the caller.
    let (stream, context) = unsafe { enter_stream(frame)? };
    Ok((stream, Some(context)))
}

/// # Safety
/// `frame` is XLA's, of the execute stage of a target for GPUs.
unsafe fn enter_stream(frame: &CallFrame) -> Result<(Stream, Entered), Cause> {
    let driver = cuda::driver().map_err(|message| Cause::Setting { message })?;
    let mut args = c_api::StreamGetArgs {
        struct_size: size_of::<c_api::StreamGetArgs>(),
        extension_start: null_mut(),
        ctx: frame.ctx,
        stream: null_mut(),
    };
    // SAFETY: promised by the caller. The CPU, where the tests' driver has its memory, has no streams.
    unsafe {
        if !device::is_on_cpu() {
            let get = std::mem::transmute::<usize, Option<c_api::StreamGet>>((*frame.api).stream_get);
            if let Some(get) = get {
                check(frame.api, "XLA_FFI_Stream_Get", get(&mut args))?;
            }
        }
        let stream = Stream(args.stream);
        Ok((stream, driver.enter(driver.context_of(stream)?)?))
    }
}

unsafe extern "C" fn delete_state(state: *mut c_void) {
    // SAFETY: XLA deletes once what `set_state` gave it.
    drop(unsafe { Box::from_raw(state.cast::<State>()) });
}

/// Our state type as one XLA knows it. A process may hold several XLAs (the CPU client and a GPU plugin),
/// and each numbers types on its own.
struct Registration {
    api: usize,
    type_id: TypeId,
}

/// Written at registration, read without a lock by every execution.
static REGISTRATIONS: [OnceLock<Registration>; 8] = [const { OnceLock::new() }; 8];

/// The id under which the XLA that `api` belongs to knows our state type.
#[inline]
fn registered(api: *const Api) -> Option<TypeId> {
    REGISTRATIONS
        .iter()
        .map_while(OnceLock::get)
        .find(|registration| registration.api == api as usize)
        .map(|registration| registration.type_id)
}

/// # Safety
/// `api` is an XLA's.
unsafe fn register(api: *const Api) -> Result<TypeId, Cause> {
    static INFO: c_api::TypeInfo = c_api::TypeInfo {
        struct_size: size_of::<c_api::TypeInfo>(),
        extension_start: null_mut(),
        deleter: delete_state,
    };
    const NAME: &str = "mpi4jax_state";
    /// Held while a registration is added.
    static ADDING: Mutex<()> = Mutex::new(());

    let _adding = ADDING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(type_id) = registered(api) {
        return Ok(type_id);
    }
    let mut type_id = c_api::UNKNOWN_TYPE_ID;
    // SAFETY: `api` is XLA's, the struct has the size of the API's minor.
    unsafe {
        let has_type_info = minor(api) >= c_api::MINOR_TYPE_INFO;
        let mut args = c_api::TypeRegisterArgs {
            struct_size: if has_type_info {
                size_of::<c_api::TypeRegisterArgs>()
            } else {
                offset_of!(c_api::TypeRegisterArgs, type_info)
            },
            extension_start: null_mut(),
            name: c_api::ByteSpan { ptr: NAME.as_ptr().cast(), len: NAME.len() },
            type_id: &mut type_id,
            type_info: &INFO,
        };
        check(api, "XLA_FFI_Type_Register", ((*api).type_register)(&mut args))?;
    }
    let added =
        REGISTRATIONS.iter().any(|slot| slot.set(Registration { api: api as usize, type_id }).is_ok());
    if added { Ok(type_id) } else { Err(Cause::TooManyXlas) }
}

/// # Safety
/// `frame` is XLA's, of the instantiate stage.
pub(super) unsafe fn set_state(frame: &CallFrame, state: State) -> Result<(), Error> {
    // SAFETY: the struct is the one of the API's minor; XLA owns the state once it has accepted it.
    unsafe {
        let mut type_id = register(frame.api)?;
        let state = Box::into_raw(Box::new(state)).cast();
        let error = if minor(frame.api) >= c_api::MINOR_STATE_STAGE {
            let mut args = StageStateArgs::new(frame.ctx, &mut type_id, state);
            ((*frame.api).state_set)((&raw mut args).cast())
        } else {
            let mut args = StateArgs::new(frame.ctx, &mut type_id, state, delete_state);
            if minor(frame.api) >= c_api::MINOR_TYPE_INFO {
                args.struct_size = StateArgs::SIZE_WITHOUT_DELETER;
            }
            ((*frame.api).state_set)((&raw mut args).cast())
        };
        check(frame.api, "XLA_FFI_State_Set", error).inspect_err(|_| delete_state(state))?;
    }
    Ok(())
}

/// # Safety
/// `frame` is XLA's, of the execute stage.
#[inline]
pub(super) unsafe fn get_state(frame: &CallFrame) -> Result<&State, Error> {
    // SAFETY: the struct is the one of the API's minor; a state of our type is what `set_state` stored, and
    // it outlives the executable that is running.
    unsafe {
        let mut type_id = registered(frame.api).unwrap_or(c_api::UNKNOWN_TYPE_ID);
        let (error, state) = if minor(frame.api) >= c_api::MINOR_STATE_STAGE {
            let mut args = StageStateArgs::new(frame.ctx, &mut type_id, null_mut());
            (((*frame.api).state_get)((&raw mut args).cast()), args.state)
        } else {
            let mut args = StateArgs::new(frame.ctx, &mut type_id, null_mut(), delete_state);
            args.struct_size = StateArgs::SIZE_WITHOUT_DELETER;
            (((*frame.api).state_get)((&raw mut args).cast()), args.state)
        };
        check(frame.api, "XLA_FFI_State_Get", error)?;
        Ok(&*state.cast::<State>())
    }
}
