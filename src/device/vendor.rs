//! The vendors of GPUs: what differs between them, apart from the functions of their drivers (`cuda.rs`, `hip.rs`).

use super::hip;
use crate::dynlib::Name;

pub struct Vendor {
    /// The platform of its GPUs in JAX, and in XLA's registry of custom calls.
    pub platform: &'static str,
    pub xla_platform: &'static str,
    /// The software with which MPI and UCX are built to reach its memory.
    pub software: &'static str,
    /// What finds its devices.
    pub driver: &'static str,
    /// The setting that chooses MPI with device pointers.
    pub mpi_setting: &'static str,
    /// NCCL, or a library with the functions of NCCL.
    pub nccl: Name,
    /// The bit of its memory among UCX's types of memory.
    pub ucx_memory: u64,
}

const NVIDIA: Vendor = Vendor {
    platform: "cuda",
    xla_platform: "CUDA",
    software: "CUDA",
    driver: "the CUDA driver",
    mpi_setting: "MPI4JAX_USE_CUDA_MPI",
    nccl: Name { soname: "libnccl.so.2", variable: "MPI4JAX_LIBNCCL", needed: "2.18 of NCCL" },
    ucx_memory: ucx_sys::UCS_MEMORY_TYPE_CUDA_BIT,
};

const AMD: Vendor = Vendor {
    platform: "rocm",
    xla_platform: "ROCM",
    software: "ROCm",
    driver: "HIP",
    mpi_setting: "MPI4JAX_USE_HIP_MPI",
    // RCCL reports the version of the NCCL to which it corresponds.
    nccl: Name { soname: "librccl.so.1", ..NVIDIA.nccl },
    ucx_memory: ucx_sys::UCS_MEMORY_TYPE_ROCM_BIT,
};

/// The vendor of the GPUs of this machine.
pub fn vendor() -> &'static Vendor {
    if is_rocm() { &AMD } else { &NVIDIA }
}

/// Whether the GPUs are AMD's, which are used through HIP and RCCL.
#[cfg_attr(feature = "python", pyo3::pyfunction)]
pub fn is_rocm() -> bool {
    hip::is_here()
}
