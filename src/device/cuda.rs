//! The CUDA driver: the functions that moving data needs.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::{null, null_mut};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Loaded;
use crate::call::Stream;
use crate::dynlib::{LoadError, Name, function_table};
use crate::error::Cause;

/// `CUresult`; a newer driver has codes that we do not know.
pub type Code = c_int;
/// `CUdeviceptr`
pub type Pointer = u64;
pub type Context = *mut c_void;
/// `CUstream`
pub type StreamHandle = *mut c_void;
pub type Event = *mut c_void;

const LIBRARY: Name =
    Name { soname: "libcuda.so.1", variable: "MPI4JAX_LIBCUDA", needed: "12.0 of the CUDA driver" };
/// As the driver counts: 1000 times the major version plus 10 times the minor one.
const OLDEST: c_int = 12000;

/// Usable from every context.
const HOST_PORTABLE: c_uint = 1;
/// Waits without spinning, measures nothing.
const EVENT_FLAGS: c_uint = 1 | 2;
/// Does not wait for the default stream.
const STREAM_FLAGS: c_uint = 1;
/// `CUDA_ERROR_NOT_READY`
const NOT_READY: Code = 600;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`
const RELAXED: c_int = 2;

function_table! {
    /// libcuda's functions.
    Functions {
        cuInit(c_uint) -> Code;
        cuDriverGetVersion(*mut c_int) -> Code;
        cuGetErrorString(Code, *mut *const c_char) -> Code;
        cuDeviceGetCount(*mut c_int) -> Code;
        cuDeviceGet(*mut c_int, c_int) -> Code;
        cuDeviceGetUuid(*mut [u8; 16], c_int) -> Code;
        cuDevicePrimaryCtxRetain(*mut Context, c_int) -> Code;
        cuCtxPushCurrent = "cuCtxPushCurrent_v2" (Context) -> Code;
        cuCtxPopCurrent = "cuCtxPopCurrent_v2" (*mut Context) -> Code;
        cuStreamCreate(*mut StreamHandle, c_uint) -> Code;
        cuStreamGetCtx(StreamHandle, *mut Context) -> Code;
        cuStreamSynchronize(StreamHandle) -> Code;
        cuStreamWaitEvent(StreamHandle, Event, c_uint) -> Code;
        cuThreadExchangeStreamCaptureMode(*mut c_int) -> Code;
        cuMemHostAlloc(*mut *mut c_void, usize, c_uint) -> Code;
        cuMemFreeHost(*mut c_void) -> Code;
        cuMemAlloc = "cuMemAlloc_v2" (*mut Pointer, usize) -> Code;
        cuMemFree = "cuMemFree_v2" (Pointer) -> Code;
        cuMemsetD32Async(Pointer, c_uint, usize, StreamHandle) -> Code;
        cuMemcpyDtoHAsync = "cuMemcpyDtoHAsync_v2" (*mut c_void, Pointer, usize, StreamHandle) -> Code;
        cuMemcpyHtoDAsync = "cuMemcpyHtoDAsync_v2" (Pointer, *const c_void, usize, StreamHandle) -> Code;
        cuMemcpyDtoDAsync = "cuMemcpyDtoDAsync_v2" (Pointer, Pointer, usize, StreamHandle) -> Code;
        cuEventCreate(*mut Event, c_uint) -> Code;
        cuEventRecord(Event, StreamHandle) -> Code;
        cuEventSynchronize(Event) -> Code;
        cuEventQuery(Event) -> Code;
        cuEventDestroy = "cuEventDestroy_v2" (Event) -> Code;
    } optional {}
}

/// The initialised driver.
#[derive(Debug)]
pub struct Driver {
    f: Functions,
    /// Events that are not in use, with their contexts: to make one and to destroy it takes longer than to record it.
    spare: Mutex<Vec<Spare>>,
}

/// How many are kept.
const SPARE: usize = 64;

#[derive(Debug)]
struct Spare {
    context: Context,
    event: Event,
}

// SAFETY: CUDA's handles may be used by any thread.
unsafe impl Send for Spare {}

/// The driver, loaded and initialised by the first who asks.
pub fn driver() -> Result<&'static Driver, LoadError> {
    static DRIVER: Loaded<Driver> = Loaded::new();
    DRIVER.get_or_init(Driver::load).as_ref().map_err(Clone::clone)
}

impl Driver {
    fn load() -> Result<Self, LoadError> {
        let driver = Self { f: Functions::load(LIBRARY)?, spare: Mutex::default() };
        let mut version = 0;
        // SAFETY: the first call of the driver; then a place to write to.
        let started = unsafe {
            driver.check("cuInit", (driver.f.cuInit)(0)).and_then(|()| {
                driver.check("cuDriverGetVersion", (driver.f.cuDriverGetVersion)(&mut version))
            })
        };
        let path = driver.f.path.clone();
        match started {
            Err(cause) => Err(LoadError::Unusable { path, reason: cause.to_string() }),
            Ok(()) if version < OLDEST => {
                let found = format!("{}.{}", version / 1000, version % 1000 / 10);
                Err(LoadError::TooOld { path, found, needed: LIBRARY.needed })
            }
            Ok(()) => Ok(driver),
        }
    }

    fn check(&self, function: &'static str, code: Code) -> Result<(), Cause> {
        if code == 0 { Ok(()) } else { Err(self.failure(function, code)) }
    }

    #[cold]
    fn failure(&self, function: &'static str, code: Code) -> Cause {
        let mut text = null();
        // SAFETY: sets the pointer to a constant string, or to null for a code that it does not know.
        let text = unsafe {
            (self.f.cuGetErrorString)(code, &mut text);
            if text.is_null() {
                "unknown error".into()
            } else {
                CStr::from_ptr(text).to_string_lossy().into()
            }
        };
        Cause::Library { function, code, text }
    }

    pub fn devices(&self) -> Result<i32, Cause> {
        let mut count = 0;
        // SAFETY: a place to write to.
        self.check("cuDeviceGetCount", unsafe { (self.f.cuDeviceGetCount)(&mut count) })?;
        Ok(count)
    }

    /// What no other device in the world has.
    pub fn uuid(&self, ordinal: i32) -> Result<[u8; 16], Cause> {
        let (mut device, mut uuid) = (0, [0; 16]);
        // SAFETY: places to write to.
        unsafe {
            self.check("cuDeviceGet", (self.f.cuDeviceGet)(&mut device, ordinal))?;
            self.check("cuDeviceGetUuid", (self.f.cuDeviceGetUuid)(&mut uuid, device))?;
        }
        Ok(uuid)
    }

    /// Writes 32 bits, in the order of a stream.
    ///
    /// # Safety
    /// `to` is an aligned place in a GPU's memory.
    pub unsafe fn fill(&self, to: Pointer, value: i32, stream: Stream) -> Result<(), Cause> {
        // SAFETY: promised by the caller.
        let code = unsafe { (self.f.cuMemsetD32Async)(to, value as c_uint, 1, stream.0) };
        self.check("cuMemsetD32Async", code)
    }

    /// Copies to the host, in the order of a stream.
    ///
    /// # Safety
    /// Both places hold so many bytes, which is not none, until the stream has come past it, and do not overlap.
    pub unsafe fn download(
        &self,
        from: Pointer,
        to: *mut u8,
        bytes: usize,
        stream: Stream,
    ) -> Result<(), Cause> {
        // SAFETY: promised by the caller.
        let code = unsafe { (self.f.cuMemcpyDtoHAsync)(to.cast(), from, bytes, stream.0) };
        self.check("cuMemcpyDtoHAsync", code)
    }

    /// Copies from the host, likewise.
    ///
    /// # Safety
    /// As for `download`.
    pub unsafe fn upload(
        &self,
        from: *const u8,
        to: Pointer,
        bytes: usize,
        stream: Stream,
    ) -> Result<(), Cause> {
        // SAFETY: promised by the caller.
        let code = unsafe { (self.f.cuMemcpyHtoDAsync)(to, from.cast(), bytes, stream.0) };
        self.check("cuMemcpyHtoDAsync", code)
    }

    /// Copies within the memory of a GPU, likewise.
    ///
    /// # Safety
    /// As for `download`.
    pub unsafe fn copy(&self, from: Pointer, to: Pointer, bytes: usize, stream: Stream) -> Result<(), Cause> {
        // SAFETY: promised by the caller.
        let code = unsafe { (self.f.cuMemcpyDtoDAsync)(to, from, bytes, stream.0) };
        self.check("cuMemcpyDtoDAsync", code)
    }

    /// The context that the CUDA runtime, and so XLA, uses for a device.
    pub fn primary_context(&self, ordinal: i32) -> Result<Context, Cause> {
        let (mut device, mut context) = (0, null_mut());
        // SAFETY: places to write to. The context is kept: XLA keeps it too.
        unsafe {
            self.check("cuDeviceGet", (self.f.cuDeviceGet)(&mut device, ordinal))?;
            let code = (self.f.cuDevicePrimaryCtxRetain)(&mut context, device);
            self.check("cuDevicePrimaryCtxRetain", code)?;
        }
        Ok(context)
    }

    pub fn context_of(&self, stream: Stream) -> Result<Context, Cause> {
        let mut context = null_mut();
        // SAFETY: a stream of XLA's.
        self.check("cuStreamGetCtx", unsafe { (self.f.cuStreamGetCtx)(stream.0, &mut context) })?;
        Ok(context)
    }

    /// Makes a context this thread's until the answer is dropped. XLA calls from any thread.
    ///
    /// # Safety
    /// `context` exists.
    pub unsafe fn enter(&'static self, context: Context) -> Result<Entered, Cause> {
        // SAFETY: promised by the caller.
        self.check("cuCtxPushCurrent", unsafe { (self.f.cuCtxPushCurrent)(context) })?;
        Ok(Entered { driver: self, _of_this_thread: std::marker::PhantomData })
    }

    pub fn synchronize(&self, stream: Stream) -> Result<(), Cause> {
        // SAFETY: a stream of XLA's.
        self.check("cuStreamSynchronize", unsafe { (self.f.cuStreamSynchronize)(stream.0) })
    }

    /// What a thread that only looks on has to do first: its questions would end what other threads record.
    pub fn look_on(&self) {
        let mut mode = RELAXED;
        // SAFETY: a place to read from and to write to. If it fails, recordings may.
        unsafe { (self.f.cuThreadExchangeStreamCaptureMode)(&mut mode) };
    }

    /// A place in a stream of the current context, and later in others of it.
    pub fn mark(&'static self, context: Context) -> Result<Mark, Cause> {
        let found = {
            let mut spare = self.spare();
            let found = spare.iter().rposition(|spare| spare.context == context);
            found.map(|index| spare.swap_remove(index).event)
        };
        if let Some(event) = found {
            return Ok(Mark { driver: self, context, event });
        }
        let mut event = null_mut();
        // SAFETY: a place to write to.
        let code = unsafe { (self.f.cuEventCreate)(&mut event, EVENT_FLAGS) };
        self.check("cuEventCreate", code).map(|()| Mark { driver: self, context, event })
    }

    /// The place that a stream has reached so far.
    pub fn mark_on(&'static self, stream: Stream) -> Result<Mark, Cause> {
        let mark = self.mark(self.context_of(stream)?)?;
        mark.put(stream)?;
        Ok(mark)
    }

    fn spare(&self) -> MutexGuard<'_, Vec<Spare>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new stream of the current context, which stays.
    pub fn stream(&self) -> Result<Stream, Cause> {
        let mut stream = null_mut();
        // SAFETY: a place to write to.
        let code = unsafe { (self.f.cuStreamCreate)(&mut stream, STREAM_FLAGS) };
        self.check("cuStreamCreate", code).map(|()| Stream(stream))
    }

    /// Host memory that the GPU copies to and from by itself.
    pub fn allocate_pinned(&self, bytes: usize) -> Result<*mut u8, Cause> {
        let mut data = null_mut();
        // SAFETY: a place to write to.
        let code = unsafe { (self.f.cuMemHostAlloc)(&mut data, bytes, HOST_PORTABLE) };
        self.check("cuMemHostAlloc", code).map(|()| data.cast())
    }

    /// Gives back what `allocate_pinned` has allocated.
    ///
    /// # Safety
    /// Nothing on a stream uses it any more.
    pub unsafe fn free_pinned(&self, data: *mut u8) {
        // SAFETY: promised by the caller. There is nothing to be done about an error.
        unsafe { (self.f.cuMemFreeHost)(data.cast()) };
    }

    /// Memory of the current context's device.
    pub fn allocate(&self, bytes: usize) -> Result<Pointer, Cause> {
        let mut pointer = 0;
        // SAFETY: a place to write to.
        self.check("cuMemAlloc", unsafe { (self.f.cuMemAlloc)(&mut pointer, bytes) })?;
        Ok(pointer)
    }

    /// Gives back what `allocate` has allocated, in the same context.
    ///
    /// # Safety
    /// Nothing on a stream uses it any more.
    pub unsafe fn free(&self, pointer: Pointer) {
        // SAFETY: promised by the caller. There is nothing to be done about an error.
        unsafe { (self.f.cuMemFree)(pointer) };
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
        unsafe { (self.driver.f.cuCtxPopCurrent)(&mut context) };
    }
}

/// A place in a stream.
#[derive(Debug)]
pub struct Mark {
    driver: &'static Driver,
    context: Context,
    event: Event,
}

// SAFETY: CUDA's handles may be used by any thread.
unsafe impl Send for Mark {}

impl Mark {
    /// Moves it to where the stream is now.
    pub fn put(&self, stream: Stream) -> Result<(), Cause> {
        // SAFETY: made by `Driver::mark` in the context of the stream, which is XLA's.
        let code = unsafe { (self.driver.f.cuEventRecord)(self.event, stream.0) };
        self.driver.check("cuEventRecord", code)
    }

    /// Lets what comes on a stream from now on wait for it; the host does not.
    pub fn hold(&self, stream: Stream) -> Result<(), Cause> {
        // SAFETY: made by `Driver::mark`; a stream of the same context.
        let code = unsafe { (self.driver.f.cuStreamWaitEvent)(stream.0, self.event, 0) };
        self.driver.check("cuStreamWaitEvent", code)
    }

    /// Waits on the host until the stream has come past it.
    pub fn wait(&self) -> Result<(), Cause> {
        // SAFETY: made by `Driver::mark`.
        let code = unsafe { (self.driver.f.cuEventSynchronize)(self.event) };
        self.driver.check("cuEventSynchronize", code)
    }

    /// Whether the stream has come past it. Errors of the stream are left to those who wait for it.
    pub fn is_reached(&self) -> bool {
        // SAFETY: made by `Driver::mark`.
        unsafe { (self.driver.f.cuEventQuery)(self.event) != NOT_READY }
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        let &mut Self { driver, context, event } = self;
        let mut spare = driver.spare();
        if spare.len() < SPARE {
            // It may not have happened yet: then the next one to record it moves it.
            spare.push(Spare { context, event });
        } else {
            // SAFETY: made by `Driver::mark`; CUDA destroys it once it has happened.
            unsafe { (driver.f.cuEventDestroy)(event) };
        }
    }
}
