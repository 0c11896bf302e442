//! The CUDA driver: contexts, streams, events, memory and copies.

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::ptr::{null, null_mut};

pub use cudarc::driver::sys;
pub use sys::{CU_MEMHOSTALLOC_PORTABLE, CUcontext as Context};
use sys::{
    CUevent, CUevent_flags_enum as EventFlags, CUstream_flags_enum as StreamFlags, CUstreamCaptureMode,
};

use super::hip;
use crate::call::Stream;
use crate::dynlib::{Name, addresses};
use crate::error::Cause;

/// `CUresult`; a newer driver has codes that we do not know.
pub type Code = c_int;
/// An address of device memory. Copies take addresses of host memory too: with unified addressing CUDA tells them apart.
pub type Pointer = sys::CUdeviceptr;

const LIBRARY: Name =
    Name { soname: "libcuda.so.1", variable: "MPI4JAX_LIBCUDA", needed: "12.0 of the CUDA driver" };
/// The oldest version that is accepted, as the driver numbers it: 1000 times the major version plus 10 times the minor one.
const OLDEST: c_int = 12000;

/// Flags of events: waits block instead of spinning, and no times are recorded.
const EVENT_FLAGS: c_uint =
    EventFlags::CU_EVENT_BLOCKING_SYNC as c_uint | EventFlags::CU_EVENT_DISABLE_TIMING as c_uint;
/// Flag of streams: no implicit synchronization with the default stream.
const STREAM_FLAGS: c_uint = StreamFlags::CU_STREAM_NON_BLOCKING as c_uint;
const NOT_READY: Code = sys::CUresult::CUDA_ERROR_NOT_READY as Code;

addresses! {
    /// The initialized driver. Its functions have the names of their symbols: CUDA's headers rename some to a newer version.
    Driver {
        cuInit cuDriverGetVersion cuGetErrorString
        cuDeviceGetCount cuDeviceGet cuDeviceGetUuid cuDevicePrimaryCtxRetain
        cuCtxPushCurrent_v2 cuCtxPopCurrent_v2
        cuStreamCreate cuStreamGetCtx cuStreamSynchronize cuStreamWaitEvent
        cuThreadExchangeStreamCaptureMode
        cuMemHostAlloc cuMemFreeHost cuMemAlloc_v2 cuMemAllocAsync cuMemFreeAsync
        cuMemsetD8Async cuMemsetD32Async cuMemcpyAsync
        cuEventCreate cuEventRecord cuEventQuery cuEventDestroy_v2
    }
}

/// Calls a function of the driver with the signature in CUDA's header, and returns its code.
macro_rules! cuda_code {
    ($driver:expr, $function:ident($($argument:expr),* $(,)?)) => {
        $crate::dynlib::call_declared!($crate::device::cuda::sys, $driver, $function($($argument),*))
    };
}

/// As `cuda_code`, but returns an error for a code that is not 0.
macro_rules! cuda {
    ($driver:expr, $function:ident($($argument:expr),* $(,)?)) => {
        $driver.check(stringify!($function), $crate::device::cuda::cuda_code!($driver, $function($($argument),*)))
    };
}

pub(crate) use {cuda, cuda_code};

impl Driver {
    fn start() -> Result<Self, String> {
        let driver = if hip::is_here() {
            let found = hip::open()?;
            Self::of(found.path.clone(), |function| hip::address(&found, function))?
        } else {
            Self::load(LIBRARY)?
        };
        let (path, mut version) = (&driver.path, 0);
        // SAFETY: the first call of the driver; then a place to write to.
        unsafe {
            cuda!(driver, cuInit(0))
                .and_then(|()| cuda!(driver, cuDriverGetVersion(&mut version)))
                .map_err(|cause| format!("{path}: {cause}"))?;
        }
        // HIP numbers its versions in another way; one that has all functions is new enough.
        if version < OLDEST && !hip::is_here() {
            return Err(LIBRARY.too_old(path, &format!("{}.{}", version / 1000, version % 1000 / 10)));
        }
        Ok(driver)
    }

    pub fn check(&self, function: &'static str, code: Code) -> Result<(), Cause> {
        if code == 0 { Ok(()) } else { Err(self.failure(function, code)) }
    }

    #[cold]
    fn failure(&self, function: &'static str, code: Code) -> Cause {
        let mut text = null();
        // SAFETY: sets the pointer to a constant string, or to null for a code that it does not know. The header's type of codes
        // is an enum, which may not have this one; as an argument it is an int too.
        let text = unsafe {
            let describe: unsafe extern "C" fn(Code, *mut *const c_char) -> Code =
                std::mem::transmute(self.cuGetErrorString);
            describe(code, &mut text);
            if text.is_null() {
                "unknown error".into()
            } else {
                CStr::from_ptr(text).to_string_lossy().into()
            }
        };
        let of_hip = if hip::is_here() { hip::name(function) } else { None };
        let function = of_hip.unwrap_or(function.trim_end_matches("_v2"));
        Cause::Library { function, code, text }
    }

    pub fn devices(&self) -> Result<i32, Cause> {
        let mut count = 0;
        // SAFETY: a place to write to.
        unsafe { cuda!(self, cuDeviceGetCount(&mut count))? };
        Ok(count)
    }

    /// The UUID of a device. An instance of a GPU in MIG mode has the UUID of its GPU, because NCCL
    /// counts the GPU as one device.
    pub fn uuid(&self, ordinal: i32) -> Result<[u8; 16], Cause> {
        let (mut device, mut uuid) = (0, sys::CUuuid { bytes: [0; 16] });
        // SAFETY: places to write to.
        unsafe {
            cuda!(self, cuDeviceGet(&mut device, ordinal))?;
            cuda!(self, cuDeviceGetUuid(&mut uuid, device))?;
        }
        Ok(uuid.bytes.map(|byte| byte as u8))
    }

    /// The context that the CUDA runtime, and so XLA, uses for a device.
    pub fn primary_context(&self, ordinal: i32) -> Result<Context, Cause> {
        let (mut device, mut context) = (0, null_mut());
        // SAFETY: places to write to. The context is kept: XLA keeps it too.
        unsafe {
            cuda!(self, cuDeviceGet(&mut device, ordinal))?;
            cuda!(self, cuDevicePrimaryCtxRetain(&mut context, device))?;
        }
        Ok(context)
    }

    pub fn context_of(&self, stream: Stream) -> Result<Context, Cause> {
        let mut context = null_mut();
        // SAFETY: a stream of XLA's.
        unsafe { cuda!(self, cuStreamGetCtx(stream.handle(), &mut context))? };
        Ok(context)
    }

    /// Makes a context current in this thread, until the returned guard is dropped. XLA calls from any thread.
    ///
    /// # Safety
    /// `context` exists.
    pub unsafe fn enter(&'static self, context: Context) -> Result<Entered, Cause> {
        // SAFETY: promised by the caller.
        unsafe { cuda!(self, cuCtxPushCurrent_v2(context))? };
        Ok(Entered { driver: self, _of_this_thread: std::marker::PhantomData })
    }

    /// Creates a stream of the current context, which is never destroyed.
    pub fn stream(&self) -> Result<Stream, Cause> {
        let mut stream = null_mut();
        // SAFETY: a place to write to; the stream is never destroyed.
        unsafe {
            cuda!(self, cuStreamCreate(&mut stream, STREAM_FLAGS))?;
            Ok(Stream::new(stream))
        }
    }

    /// Waits on the host for all that was put on a stream.
    pub fn synchronize(&self, stream: Stream) -> Result<(), Cause> {
        // SAFETY: a stream of XLA's.
        unsafe { cuda!(self, cuStreamSynchronize(stream.handle())) }
    }

    /// Allocates memory on the device of the current context, which is never freed.
    pub fn allocate(&self, bytes: usize) -> Result<Pointer, Cause> {
        let mut pointer = 0;
        // SAFETY: a place to write to.
        unsafe { cuda!(self, cuMemAlloc_v2(&mut pointer, bytes))? };
        Ok(pointer)
    }

    /// Allocates memory on the device of a stream, in stream order: only later work on this stream may use it.
    pub fn allocate_on(&self, stream: Stream, bytes: usize) -> Result<Pointer, Cause> {
        let mut pointer = 0;
        // SAFETY: a place to write to.
        unsafe { cuda!(self, cuMemAllocAsync(&mut pointer, bytes, stream.handle()))? };
        Ok(pointer)
    }

    /// Frees memory of `allocate_on`, in stream order.
    ///
    /// # Safety
    /// All uses of it are on this stream, or on streams that it waits for.
    pub unsafe fn free_on(&self, stream: Stream, pointer: Pointer) -> Result<(), Cause> {
        // SAFETY: promised by the caller.
        unsafe { cuda!(self, cuMemFreeAsync(pointer, stream.handle())) }
    }

    /// A new event of the current context.
    pub fn event(&'static self) -> Result<Event, Cause> {
        let mut handle = null_mut();
        // SAFETY: a place to write to.
        unsafe { cuda!(self, cuEventCreate(&mut handle, EVENT_FLAGS))? };
        Ok(Event { driver: self, handle })
    }

    /// Calls a function that queries events: without this, its queries could end the capture of a graph by another thread.
    pub fn query<T>(&self, events: impl FnOnce() -> T) -> T {
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: a place to read from and to write to. If it fails, a capture may end.
        let exchange = |mode| unsafe { cuda_code!(self, cuThreadExchangeStreamCaptureMode(mode)) };
        exchange(&mut mode);
        let answer = events();
        exchange(&mut mode);
        answer
    }
}

/// A guard: a context is current in this thread while it exists.
#[derive(Debug)]
pub struct Entered {
    driver: &'static Driver,
    /// Contexts are current per thread.
    _of_this_thread: std::marker::PhantomData<*mut ()>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        let mut context = null_mut();
        // SAFETY: pushed by `enter` on this thread.
        unsafe { cuda_code!(self.driver, cuCtxPopCurrent_v2(&mut context)) };
    }
}

/// An event of CUDA: it marks a point in a stream once it has been recorded there.
#[derive(Debug)]
pub struct Event {
    driver: &'static Driver,
    handle: CUevent,
}

// SAFETY: CUDA's handles may be used by any thread.
unsafe impl Send for Event {}

impl Event {
    /// Records it at the end of a stream of its context.
    pub fn record(&self, stream: Stream) -> Result<(), Cause> {
        // SAFETY: the handle is live.
        unsafe { cuda!(self.driver, cuEventRecord(self.handle, stream.handle())) }
    }

    /// Makes later work on a stream wait for it. Does not block the host.
    pub fn hold(&self, stream: Stream) -> Result<(), Cause> {
        // SAFETY: the handle is live.
        unsafe { cuda!(self.driver, cuStreamWaitEvent(stream.handle(), self.handle, 0)) }
    }

    /// Whether the stream has passed it. Errors of the stream are reported by the wait for it, not here.
    pub fn is_reached(&self) -> bool {
        // SAFETY: the handle is live.
        unsafe { cuda_code!(self.driver, cuEventQuery(self.handle)) != NOT_READY }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by `Driver::event`. CUDA destroys it once it has happened.
        unsafe { cuda_code!(self.driver, cuEventDestroy_v2(self.handle)) };
    }
}
