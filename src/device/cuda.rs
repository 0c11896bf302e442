//! The CUDA driver: the functions that moving data needs.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::{null, null_mut};

use crate::call::Stream;
use crate::dynlib::{Name, checked, function_table};
use crate::error::Cause;

/// `CUresult`; a newer driver has codes that we do not know.
pub type Code = c_int;
/// `CUdeviceptr`. A copy also takes the address of host memory as one: CUDA knows which is which.
pub type Pointer = u64;
pub type Context = *mut c_void;
/// `CUstream`
pub type StreamHandle = *mut c_void;
type EventHandle = *mut c_void;

const LIBRARY: Name =
    Name { soname: "libcuda.so.1", variable: "MPI4JAX_LIBCUDA", needed: "12.0 of the CUDA driver" };
/// As the driver counts: 1000 times the major version plus 10 times the minor one.
const OLDEST: c_int = 12000;

/// Host memory that is usable from every context.
pub const HOST_PORTABLE: c_uint = 1;
/// Waits without spinning, measures nothing.
const EVENT_FLAGS: c_uint = 1 | 2;
/// Does not wait for the default stream.
const STREAM_FLAGS: c_uint = 1;
/// `CUDA_ERROR_NOT_READY`
const NOT_READY: Code = 600;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`
const RELAXED: c_int = 2;

function_table! {
    /// The initialised driver. Its functions have the names of their symbols: CUDA's headers rename some to a newer version.
    Driver {
        cuInit(c_uint) -> Code;
        cuDriverGetVersion(*mut c_int) -> Code;
        cuGetErrorString(Code, *mut *const c_char) -> Code;
        cuDeviceGetCount(*mut c_int) -> Code;
        cuDeviceGet(*mut c_int, c_int) -> Code;
        cuDeviceGetUuid(*mut [u8; 16], c_int) -> Code;
        cuDevicePrimaryCtxRetain(*mut Context, c_int) -> Code;
        cuCtxPushCurrent_v2(Context) -> Code;
        cuCtxPopCurrent_v2(*mut Context) -> Code;
        cuStreamCreate(*mut StreamHandle, c_uint) -> Code;
        cuStreamGetCtx(StreamHandle, *mut Context) -> Code;
        cuStreamSynchronize(StreamHandle) -> Code;
        cuStreamWaitEvent(StreamHandle, EventHandle, c_uint) -> Code;
        cuThreadExchangeStreamCaptureMode(*mut c_int) -> Code;
        cuMemHostAlloc(*mut *mut c_void, usize, c_uint) -> Code;
        cuMemFreeHost(*mut c_void) -> Code;
        cuMemAlloc_v2(*mut Pointer, usize) -> Code;
        cuMemAllocAsync(*mut Pointer, usize, StreamHandle) -> Code;
        cuMemFreeAsync(Pointer, StreamHandle) -> Code;
        cuMemsetD8Async(Pointer, u8, usize, StreamHandle) -> Code;
        cuMemsetD32Async(Pointer, c_uint, usize, StreamHandle) -> Code;
        cuMemcpyAsync(Pointer, Pointer, usize, StreamHandle) -> Code;
        cuEventCreate(*mut EventHandle, c_uint) -> Code;
        cuEventRecord(EventHandle, StreamHandle) -> Code;
        cuEventQuery(EventHandle) -> Code;
        cuEventDestroy_v2(EventHandle) -> Code;
    }
}

impl Driver {
    fn start() -> Result<Self, String> {
        let driver = Self::load(LIBRARY)?;
        let (path, mut version) = (&driver.path, 0);
        // SAFETY: the first call of the driver; then a place to write to.
        unsafe {
            checked!(driver, cuInit(0))
                .and_then(|()| checked!(driver, cuDriverGetVersion(&mut version)))
                .map_err(|cause| format!("{path}: {cause}"))?;
        }
        if version < OLDEST {
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
        // SAFETY: sets the pointer to a constant string, or to null for a code that it does not know.
        let text = unsafe {
            (self.cuGetErrorString)(code, &mut text);
            if text.is_null() {
                "unknown error".into()
            } else {
                CStr::from_ptr(text).to_string_lossy().into()
            }
        };
        Cause::Library { function: function.trim_end_matches("_v2"), code, text }
    }

    pub fn devices(&self) -> Result<i32, Cause> {
        let mut count = 0;
        // SAFETY: a place to write to.
        unsafe { checked!(self, cuDeviceGetCount(&mut count))? };
        Ok(count)
    }

    /// What no other device in the world has.
    pub fn uuid(&self, ordinal: i32) -> Result<[u8; 16], Cause> {
        let (mut device, mut uuid) = (0, [0; 16]);
        // SAFETY: places to write to.
        unsafe {
            checked!(self, cuDeviceGet(&mut device, ordinal))?;
            checked!(self, cuDeviceGetUuid(&mut uuid, device))?;
        }
        Ok(uuid)
    }

    /// The context that the CUDA runtime, and so XLA, uses for a device.
    pub fn primary_context(&self, ordinal: i32) -> Result<Context, Cause> {
        let (mut device, mut context) = (0, null_mut());
        // SAFETY: places to write to. The context is kept: XLA keeps it too.
        unsafe {
            checked!(self, cuDeviceGet(&mut device, ordinal))?;
            checked!(self, cuDevicePrimaryCtxRetain(&mut context, device))?;
        }
        Ok(context)
    }

    pub fn context_of(&self, stream: Stream) -> Result<Context, Cause> {
        let mut context = null_mut();
        // SAFETY: a stream of XLA's.
        unsafe { checked!(self, cuStreamGetCtx(stream.handle(), &mut context))? };
        Ok(context)
    }

    /// Makes a context this thread's until the answer is dropped. XLA calls from any thread.
    ///
    /// # Safety
    /// `context` exists.
    pub unsafe fn enter(&'static self, context: Context) -> Result<Entered, Cause> {
        // SAFETY: promised by the caller.
        unsafe { checked!(self, cuCtxPushCurrent_v2(context))? };
        Ok(Entered { driver: self, _of_this_thread: std::marker::PhantomData })
    }

    /// A new stream of the current context, which stays.
    pub fn stream(&self) -> Result<Stream, Cause> {
        let mut stream = null_mut();
        // SAFETY: a place to write to; the stream is never destroyed.
        unsafe {
            checked!(self, cuStreamCreate(&mut stream, STREAM_FLAGS))?;
            Ok(Stream::new(stream))
        }
    }

    /// Waits on the host for all that was put on a stream.
    pub fn synchronize(&self, stream: Stream) -> Result<(), Cause> {
        // SAFETY: a stream of XLA's.
        unsafe { checked!(self, cuStreamSynchronize(stream.handle())) }
    }

    /// Memory of the current context's device, which stays.
    pub fn allocate(&self, bytes: usize) -> Result<Pointer, Cause> {
        let mut pointer = 0;
        // SAFETY: a place to write to.
        unsafe { checked!(self, cuMemAlloc_v2(&mut pointer, bytes))? };
        Ok(pointer)
    }

    /// Memory of the device of a stream, for what comes on this stream from now on.
    pub fn allocate_on(&self, stream: Stream, bytes: usize) -> Result<Pointer, Cause> {
        let mut pointer = 0;
        // SAFETY: a place to write to.
        unsafe { checked!(self, cuMemAllocAsync(&mut pointer, bytes, stream.handle()))? };
        Ok(pointer)
    }

    /// Gives back what `allocate_on` has allocated, once the stream has come here.
    ///
    /// # Safety
    /// Nothing uses it any more that the stream does not wait for.
    pub unsafe fn free_on(&self, stream: Stream, pointer: Pointer) -> Result<(), Cause> {
        // SAFETY: promised by the caller.
        unsafe { checked!(self, cuMemFreeAsync(pointer, stream.handle())) }
    }

    /// A new event of the current context.
    pub fn event(&'static self) -> Result<Event, Cause> {
        let mut handle = null_mut();
        // SAFETY: a place to write to.
        unsafe { checked!(self, cuEventCreate(&mut handle, EVENT_FLAGS))? };
        Ok(Event { driver: self, handle })
    }

    /// For a thread that queries events: its queries would end the capture of a graph by another thread.
    pub fn allow_queries_during_capture(&self) {
        let mut mode = RELAXED;
        // SAFETY: a place to read from and to write to. If it fails, a capture may end.
        unsafe { (self.cuThreadExchangeStreamCaptureMode)(&mut mode) };
    }
}

/// A context that is current.
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
        unsafe { (self.driver.cuCtxPopCurrent_v2)(&mut context) };
    }
}

/// A place in a stream, once it has been recorded there.
#[derive(Debug)]
pub struct Event {
    driver: &'static Driver,
    handle: EventHandle,
}

// SAFETY: CUDA's handles may be used by any thread.
unsafe impl Send for Event {}

impl Event {
    /// Moves it to where a stream of its context is now.
    pub fn record(&self, stream: Stream) -> Result<(), Cause> {
        // SAFETY: the handle is live.
        unsafe { checked!(self.driver, cuEventRecord(self.handle, stream.handle())) }
    }

    /// Lets what comes on a stream from now on wait for it; the host does not.
    pub fn hold(&self, stream: Stream) -> Result<(), Cause> {
        // SAFETY: the handle is live.
        unsafe { checked!(self.driver, cuStreamWaitEvent(stream.handle(), self.handle, 0)) }
    }

    /// Whether the stream has come past it. Errors of the stream are left to the wait for it.
    pub fn is_reached(&self) -> bool {
        // SAFETY: the handle is live.
        unsafe { (self.driver.cuEventQuery)(self.handle) != NOT_READY }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by `Driver::event`. CUDA destroys it once it has happened.
        unsafe { (self.driver.cuEventDestroy_v2)(self.handle) };
    }
}
