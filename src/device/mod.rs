//! Memory that operations are on: the host's, and that of GPUs, without CUDA's toolkit. The driver and NCCL are loaded
//! when they are first needed.

mod any;
pub mod cuda;
mod host;
pub mod nccl;
mod vram;

use std::fmt;
use std::sync::OnceLock;

pub use self::any::AnyDevice;
pub use self::cuda::CudaDevice;
pub use self::host::HostDevice;
pub use self::vram::Vram;
use crate::call::Stream;
use crate::dynlib::LoadError;
use crate::error::Cause;

/// Memory that a host transport cannot reach, and how to copy from and to it.
pub trait Device: Send + Sync + fmt::Debug {
    /// Host memory that the device copies to and from quickly.
    type Staging: Staging;
    /// A place in a stream.
    type Mark: Send + fmt::Debug;

    fn allocate(&self, bytes: usize) -> Result<Self::Staging, Cause>;

    /// Starts to copy from the device to the host, on a stream of XLA's.
    ///
    /// # Safety
    /// Both places hold so many bytes until the stream has come past it, and do not overlap.
    unsafe fn download(
        &self,
        from: *const u8,
        to: *mut u8,
        bytes: usize,
        stream: Stream,
    ) -> Result<(), Cause>;

    /// The same from the host to the device.
    ///
    /// # Safety
    /// As for `download`.
    unsafe fn upload(&self, from: *const u8, to: *mut u8, bytes: usize, stream: Stream) -> Result<(), Cause>;

    /// Waits for all that was started on a stream.
    fn synchronize(&self, stream: Stream) -> Result<(), Cause>;

    /// The place in a stream that has been reached so far.
    fn mark(&self, stream: Stream) -> Result<Self::Mark, Cause>;

    /// Waits for what was started on a stream before a mark.
    fn wait(&self, mark: Self::Mark) -> Result<(), Cause>;

    /// Lets what comes on a stream from now on wait for a mark: the host does, if it touches the memory too.
    fn follow(&self, mark: Self::Mark, stream: Stream) -> Result<(), Cause> {
        let _ = stream;
        self.wait(mark)
    }
}

/// A piece of host memory. It is freed when it is dropped.
pub trait Staging: Send {
    fn data(&mut self) -> *mut u8;
    fn capacity(&self) -> usize;
}

/// Whether this process has a GPU that it can use, or why not.
pub fn support() -> Result<(), String> {
    let driver = cuda::driver().map_err(|error| error.to_string())?;
    match driver.devices() {
        Ok(0) => Err("the CUDA driver finds no device".into()),
        Ok(_) => Ok(()),
        Err(cause) => Err(cause.to_string()),
    }
}

/// Whether the targets for GPUs are registered for the CPU: the tests do so, with a driver of their own whose
/// device memory is host memory, to run everything but CUDA itself. Never in a build without the feature.
#[inline]
pub fn is_on_cpu() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    cfg!(feature = "stand-ins") && *ANSWER.get_or_init(|| std::env::var_os(ON_CPU).is_some())
}

const ON_CPU: &str = "MPI4JAX_TEST_CUDA_ON_CPU";

/// Whether host libraries reach that driver's memory, as they do when they are told so: it is host memory.
pub fn is_reached_from_cpu() -> bool {
    is_on_cpu() && std::env::var(ON_CPU).is_ok_and(|value| value == "reached")
}

/// Number of the GPU that JAX computes on, once Python has told it.
static DEVICE: OnceLock<i32> = OnceLock::new();

/// Says which GPU JAX computes on. The first word counts: a process has one.
pub fn set_device(ordinal: i32) {
    DEVICE.get_or_init(|| ordinal);
}

pub fn device() -> Option<i32> {
    DEVICE.get().copied()
}

/// What a loader found, kept for the life of the process.
type Loaded<T> = OnceLock<Result<T, LoadError>>;
