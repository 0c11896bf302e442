//! Memory of the host and of GPUs. Needs no CUDA toolkit: the driver and NCCL are loaded when they are first needed.

pub mod cuda;
mod hip;
mod memory;
pub mod nccl;
mod vendor;

use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};

pub use self::memory::{Device, Staging};
pub use self::vendor::{is_rocm, vendor};

/// A platform of XLA, on which an operation and its arrays are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Platform {
    Cpu,
    Gpu,
}

impl Platform {
    pub const ALL: [Self; 2] = [Self::Cpu, Self::Gpu];

    /// Its name in JAX.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Gpu => vendor().platform,
        }
    }
}

/// Whether this process has a GPU that it can use, or why not.
pub fn support() -> Result<(), String> {
    match cuda::Driver::get()?.devices() {
        Ok(0) => Err(format!("{} finds no device", vendor().driver)),
        Ok(_) => Ok(()),
        Err(cause) => Err(cause.to_string()),
    }
}

/// Whether the targets for GPUs are registered for the CPU: the tests do so, with a driver of their own whose
/// device memory is host memory, to run everything but CUDA itself. Never in a build without the feature.
#[inline]
#[cfg_attr(feature = "python", pyo3::pyfunction(name = "is_gpu_on_cpu"))]
pub fn is_on_cpu() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    cfg!(feature = "stand-ins") && *ANSWER.get_or_init(|| std::env::var_os(ON_CPU).is_some())
}

const ON_CPU: &str = "MPI4JAX_TEST_CUDA_ON_CPU";

/// Whether, in such a test, host libraries are given device pointers, as if they were CUDA-aware.
pub fn is_reached_from_cpu() -> bool {
    is_on_cpu() && std::env::var(ON_CPU).is_ok_and(|value| value == "reached")
}

/// The UUID of each GPU that this process sees; none where it has no driver.
pub fn uuids() -> Vec<[u8; 16]> {
    let Ok(driver) = cuda::Driver::get() else { return Vec::new() };
    let devices = driver.devices().unwrap_or(0);
    (0..devices).map_while(|ordinal| driver.uuid(ordinal).ok()).collect()
}

/// Number of the GPU that JAX computes on, or -1 before Python has set it.
static DEVICE: AtomicI32 = AtomicI32::new(-1);

/// Sets the GPU that JAX computes on: at import as far as it is known then, and before the first operation.
#[cfg_attr(feature = "python", pyo3::pyfunction)]
pub fn set_device(ordinal: i32) {
    DEVICE.store(ordinal, Ordering::Relaxed);
}

pub fn device() -> Option<i32> {
    Some(DEVICE.load(Ordering::Relaxed)).filter(|&ordinal| ordinal >= 0)
}
