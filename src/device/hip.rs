//! HIP, the runtime of AMD's GPUs, in the place of the CUDA driver. **Nobody has run this on a GPU.**
//!
//! HIP's functions take the arguments and flags of the CUDA functions that this package calls, and return the same codes, under
//! other names. Functions without an equal one are written here. HIP has no contexts: a context is the number of a device plus
//! one here, and to enter it is to make that device the current one of the thread.

use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_void};
use std::path::Path;
use std::sync::OnceLock;

use crate::dynlib::{Found, Name};

const VARIABLE: &str = "MPI4JAX_LIBHIP";
/// The newest first: JAX's plugin for a version of ROCm loads the library of that version.
const LIBRARIES: [Name; 3] = [
    Name { soname: "libamdhip64.so.7", variable: VARIABLE, needed: NEEDED },
    Name { soname: "libamdhip64.so.6", variable: VARIABLE, needed: NEEDED },
    Name { soname: "libamdhip64.so.5", variable: VARIABLE, needed: NEEDED },
];
const NEEDED: &str = "5.2 of ROCm";
/// `hipMemcpyDefault`: HIP finds out from the addresses which memory they are in.
const COPY_KIND: c_int = 4;

/// Whether the GPUs of this machine are AMD's: the kernel has AMD's driver and not NVIDIA's, or the user has named HIP's library.
pub fn is_here() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| {
        std::env::var_os(VARIABLE).is_some_and(|path| !path.is_empty())
            || Path::new("/dev/kfd").exists() && !Path::new("/dev/nvidiactl").exists()
    })
}

/// HIP's library. If no version is found, the error names the newest one.
pub fn open() -> Result<Found, String> {
    let [newest, older @ ..] = LIBRARIES;
    Found::open(newest)
        .or_else(|error| older.into_iter().find_map(|name| Found::open(name).ok()).ok_or(error))
}

/// What a function of HIP returns, as a function of the CUDA driver does.
type Code = c_int;
type Stream = *mut c_void;

/// The functions of HIP that are called here.
struct Functions {
    set_device: unsafe extern "C" fn(c_int) -> Code,
    get_device: unsafe extern "C" fn(*mut c_int) -> Code,
    device_of_stream: unsafe extern "C" fn(Stream) -> c_int,
    error_string: unsafe extern "C" fn(Code) -> *const c_char,
    copy: unsafe extern "C" fn(*mut c_void, *const c_void, usize, c_int, Stream) -> Code,
}

static FUNCTIONS: OnceLock<Functions> = OnceLock::new();

fn functions() -> &'static Functions {
    FUNCTIONS.get().expect("HIP has been loaded")
}

impl Functions {
    fn find(found: &Found) -> Result<Self, String> {
        /// # Safety
        /// The function has this signature.
        unsafe fn at<F: Copy>(found: &Found, name: &str) -> Result<F, String> {
            let address = found.address(name)?;
            // SAFETY: promised by the caller; both are pointers.
            Ok(unsafe { std::mem::transmute_copy(&address) })
        }
        // SAFETY: the signatures of HIP's header.
        unsafe {
            Ok(Self {
                set_device: at(found, "hipSetDevice")?,
                get_device: at(found, "hipGetDevice")?,
                device_of_stream: at(found, "hipGetStreamDeviceId")?,
                error_string: at(found, "hipGetErrorString")?,
                copy: at(found, "hipMemcpyAsync")?,
            })
        }
    }
}

/// The functions of the CUDA driver, and HIP's counterparts. HIP has no contexts, but current
/// devices.
const NAMES: [(&str, &str); 26] = [
    ("cuInit", "hipInit"),
    ("cuDriverGetVersion", "hipDriverGetVersion"),
    ("cuGetErrorString", "hipGetErrorString"),
    ("cuDeviceGetCount", "hipGetDeviceCount"),
    ("cuDeviceGet", "hipDeviceGet"),
    ("cuDeviceGetUuid", "hipDeviceGetUuid"),
    ("cuDevicePrimaryCtxRetain", "hipSetDevice"),
    ("cuCtxPushCurrent_v2", "hipSetDevice"),
    ("cuCtxPopCurrent_v2", "hipSetDevice"),
    ("cuStreamCreate", "hipStreamCreateWithFlags"),
    ("cuStreamGetCtx", "hipGetStreamDeviceId"),
    ("cuStreamSynchronize", "hipStreamSynchronize"),
    ("cuStreamWaitEvent", "hipStreamWaitEvent"),
    ("cuThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode"),
    ("cuMemHostAlloc", "hipHostMalloc"),
    ("cuMemFreeHost", "hipHostFree"),
    ("cuMemAlloc_v2", "hipMalloc"),
    ("cuMemAllocAsync", "hipMallocAsync"),
    ("cuMemFreeAsync", "hipFreeAsync"),
    ("cuMemsetD8Async", "hipMemsetD8Async"),
    ("cuMemsetD32Async", "hipMemsetD32Async"),
    ("cuMemcpyAsync", "hipMemcpyAsync"),
    ("cuEventCreate", "hipEventCreateWithFlags"),
    ("cuEventRecord", "hipEventRecord"),
    ("cuEventQuery", "hipEventQuery"),
    ("cuEventDestroy_v2", "hipEventDestroy"),
];

/// The function of HIP in the place of one of the CUDA driver.
pub fn name(function: &str) -> Option<&'static str> {
    NAMES.iter().find(|(cuda, _)| *cuda == function).map(|(_, hip)| *hip)
}

/// The address of what is called in the place of a function of the CUDA driver.
pub fn address(found: &Found, function: &str) -> Result<*const c_void, String> {
    if FUNCTIONS.get().is_none() {
        let functions = Functions::find(found)?;
        FUNCTIONS.get_or_init(|| functions);
    }
    Ok(match function {
        "cuGetErrorString" => get_error_string as *const c_void,
        "cuDevicePrimaryCtxRetain" => retain_context as *const c_void,
        "cuStreamGetCtx" => context_of_stream as *const c_void,
        "cuCtxPushCurrent_v2" => push_context as *const c_void,
        "cuCtxPopCurrent_v2" => pop_context as *const c_void,
        "cuMemcpyAsync" => copy as *const c_void,
        other => found.address(name(other).ok_or_else(|| format!("HIP has no {other}"))?)?,
    })
}

unsafe extern "C" fn get_error_string(code: Code, text: *mut *const c_char) -> Code {
    // SAFETY: HIP returns a constant string for any code; the caller gives a place to write to.
    unsafe { *text = (functions().error_string)(code) };
    0
}

unsafe extern "C" fn copy(to: u64, from: u64, bytes: usize, stream: Stream) -> Code {
    // SAFETY: promised by the caller.
    unsafe { (functions().copy)(to as *mut c_void, from as *const c_void, bytes, COPY_KIND, stream) }
}

fn context(device: c_int) -> *mut c_void {
    std::ptr::without_provenance_mut(device as usize + 1)
}

unsafe extern "C" fn retain_context(made: *mut *mut c_void, device: c_int) -> Code {
    // SAFETY: the caller gives a place to write to.
    unsafe { *made = context(device) };
    0
}

unsafe extern "C" fn context_of_stream(stream: Stream, found: *mut *mut c_void) -> Code {
    // SAFETY: a stream of XLA's, and a place to write to.
    unsafe { *found = context((functions().device_of_stream)(stream)) };
    0
}

thread_local! {
    /// The devices that were current before the contexts that are entered.
    static BEFORE: RefCell<Vec<c_int>> = const { RefCell::new(Vec::new()) };
}

unsafe extern "C" fn push_context(entered: *mut c_void) -> Code {
    let mut before = 0;
    // SAFETY: a place to write to, and the number of a device.
    let code = unsafe {
        match (functions().get_device)(&mut before) {
            0 => (functions().set_device)(entered.addr() as c_int - 1),
            code => code,
        }
    };
    if code == 0 {
        BEFORE.with_borrow_mut(|devices| devices.push(before));
    }
    code
}

unsafe extern "C" fn pop_context(_: *mut *mut c_void) -> Code {
    match BEFORE.with_borrow_mut(Vec::pop) {
        // SAFETY: the number of a device.
        Some(device) => unsafe { (functions().set_device)(device) },
        None => 0,
    }
}
