//! The MPI library: conversion of its handles and codes, its constants, and what it supports.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::mem::{MaybeUninit, size_of};
use std::sync::atomic::{AtomicI32, Ordering};

use mpi::ffi::{self, MPI_Comm, MPI_Group, MPI_Request, MPI_Status};

use crate::dynlib;
use crate::error::Cause;

unsafe extern "C" {
    // mpi_shim.c
    static mpi4jax_in_place: *mut c_void;
    static mpi4jax_vendor: *const c_char;
    static mpi4jax_version: *const c_char;
    fn mpi4jax_query_gpu_support(rocm: c_int) -> c_int;
    fn mpi4jax_neighbours(comm: MPI_Comm) -> c_int;
    fn mpi4jax_create_group(comm: MPI_Comm, group: MPI_Group, tag: c_int, made: *mut MPI_Comm) -> c_int;
}

pub fn in_place() -> *mut c_void {
    // SAFETY: a constant of our shim.
    unsafe { mpi4jax_in_place }
}

fn vendor() -> &'static CStr {
    // SAFETY: a constant of our shim.
    unsafe { CStr::from_ptr(mpi4jax_vendor) }
}

/// How many neighbors this rank has in the topology of a communicator; 0 if that has none.
///
/// # Safety
/// `comm` is live.
pub unsafe fn neighbours(comm: MPI_Comm) -> usize {
    // SAFETY: promised by the caller.
    unsafe { mpi4jax_neighbours(comm) as usize }
}

/// `MPI_Comm_create_group`, with messages that no receive of the program matches.
///
/// # Safety
/// As for MPI's function.
pub unsafe fn create_group(comm: MPI_Comm, group: MPI_Group, tag: c_int, made: *mut MPI_Comm) -> c_int {
    // SAFETY: promised by the caller.
    unsafe { mpi4jax_create_group(comm, group, tag, made) }
}

/// An MPI handle from the integer that `Comm` and `Reduction` keep.
///
/// # Safety
/// `H` is one of MPI's handle types (a pointer or a 32-bit integer), `raw` is such a handle's value.
pub unsafe fn handle<H: Copy>(raw: usize) -> H {
    // SAFETY: the two arms copy exactly `size_of::<H>()` bytes, and every bit pattern is a valid
    // handle to hold (if not to use).
    unsafe {
        if size_of::<H>() == size_of::<u32>() {
            std::mem::transmute_copy(&(raw as u32))
        } else {
            const { assert!(size_of::<H>() <= size_of::<usize>()) };
            std::mem::transmute_copy(&raw)
        }
    }
}

/// The integer for an MPI handle, as mpi4py gives it; the inverse of `handle`.
pub fn handle_value<H: Copy>(handle: H) -> usize {
    const { assert!(size_of::<H>() == 4 || size_of::<H>() == size_of::<usize>()) };
    // SAFETY: handles are plain data, of one of these two sizes.
    unsafe {
        if size_of::<H>() == 4 {
            std::mem::transmute_copy::<H, u32>(&handle) as usize
        } else {
            std::mem::transmute_copy(&handle)
        }
    }
}

#[inline]
pub fn check(function: &'static str, code: c_int) -> Result<(), Cause> {
    if code == 0 { Ok(()) } else { Err(failure(function, code)) }
}

#[cold]
fn failure(function: &'static str, code: c_int) -> Cause {
    let mut text = [0 as c_char; 1024];
    let mut length = 0;
    // SAFETY: the buffer is larger than MPI_MAX_ERROR_STRING of any MPI (256 or 512).
    let text = unsafe {
        ffi::MPI_Error_string(code, text.as_mut_ptr(), &mut length);
        CStr::from_ptr(text.as_ptr()).to_string_lossy().into()
    };
    Cause::Mpi { function, code, text }
}

/// The ranks and tags that MPI gives a meaning of their own.
#[derive(Clone, Copy, Debug)]
pub struct Wildcards {
    pub source: i32,
    pub tag: i32,
    pub proc_null: i32,
    /// The largest tag.
    pub tag_limit: i32,
    /// A power of two. A derivative's tag is the tag of the program plus this number, so tags of
    /// derivatives are never below it.
    pub derivative: i32,
}

static TAG_LIMIT: AtomicI32 = AtomicI32::new(i32::MAX);
static DERIVATIVE: AtomicI32 = AtomicI32::new(1 << 30);

/// Python has asked MPI for the largest tag. Returns what the tags of derivatives begin with.
#[cfg_attr(feature = "python", pyo3::pyfunction)]
pub fn set_tag_limit(limit: i32) -> i32 {
    let derivative = 1 << ((limit.max(1) as u32 + 1).ilog2() - 1);
    TAG_LIMIT.store(limit, Ordering::Relaxed);
    DERIVATIVE.store(derivative, Ordering::Relaxed);
    derivative
}

pub fn wildcards() -> Wildcards {
    // SAFETY: constants of the MPI shim, written once by its loader.
    unsafe {
        Wildcards {
            source: ffi::RSMPI_ANY_SOURCE,
            tag: ffi::RSMPI_ANY_TAG,
            proc_null: ffi::RSMPI_PROC_NULL,
            tag_limit: TAG_LIMIT.load(Ordering::Relaxed),
            derivative: DERIVATIVE.load(Ordering::Relaxed),
        }
    }
}

/// A tag as error messages and reports write it.
#[derive(Clone, Copy, Debug)]
pub struct Tag(pub i32);

impl Tag {
    pub fn is_of_derivative(self) -> bool {
        self.0 >= wildcards().derivative
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_of_derivative() {
            write!(f, "tag {} of derivatives", self.0 - wildcards().derivative)
        } else {
            write!(f, "tag {}", self.0)
        }
    }
}

/// Whether MPI is between its initialization and its end.
pub fn is_running() -> bool {
    let (mut initialized, mut finalized) = (0, 0);
    // SAFETY: may be called at any time.
    unsafe {
        ffi::MPI_Initialized(&mut initialized);
        ffi::MPI_Finalized(&mut finalized);
    }
    initialized != 0 && finalized == 0
}

/// Whether this thread may call MPI while another one does.
pub fn any_thread_may_call() -> bool {
    let mut level = 0;
    // SAFETY: between MPI_Init and MPI_Finalize.
    is_running() && unsafe { ffi::MPI_Query_thread(&mut level) == 0 && level >= ffi::RSMPI_THREAD_MULTIPLE }
}

/// Whether all requests have ended; lets MPI go on with them. They stay requests, whatever the answer is.
///
/// # Safety
/// The requests are under way, or null, and no other thread uses them now.
pub unsafe fn have_ended(requests: &[MPI_Request]) -> Result<bool, Cause> {
    for &request in requests {
        let (mut flag, mut status) = (0, MaybeUninit::<MPI_Status>::zeroed());
        // SAFETY: promised by the caller.
        let code = unsafe { ffi::MPI_Request_get_status(request, &mut flag, status.as_mut_ptr()) };
        check("MPI_Request_get_status", code)?;
        if flag == 0 {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The callback of an attribute that duplicates of a communicator do not have.
///
/// # Safety
/// MPI calls it.
pub unsafe extern "C" fn no_copy(
    _: MPI_Comm,
    _: c_int,
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    flag: *mut c_int,
) -> c_int {
    // SAFETY: MPI gives the address of an int.
    unsafe { *flag = 0 };
    0
}

/// Where the MPI library in use has a function that no tool replaces.
pub fn address() -> usize {
    ffi::PMPI_Get_version as *const () as usize
}

/// The MPI that this library was built for and runs with. The rest is known to mpi4py.
#[derive(Debug)]
#[cfg_attr(feature = "python", derive(pyo3::IntoPyObject))]
pub struct MpiInfo {
    pub vendor: String,
    pub version: String,
    /// The file of the library in use.
    pub library: String,
    pub address: usize,
    /// Whether it takes pointers to the memory of a GPU.
    pub cuda_aware: &'static str,
    pub rocm_aware: &'static str,
    pub sizeof_comm: usize,
    pub sizeof_status: usize,
}

/// MPI is initialized.
#[cfg_attr(feature = "python", pyo3::pyfunction(name = "mpi_info"))]
pub fn info() -> MpiInfo {
    // SAFETY: a constant of our shim.
    let version = unsafe { CStr::from_ptr(mpi4jax_version) };
    let text = |text: &CStr| text.to_string_lossy().trim().to_owned();
    let aware = |rocm| gpu_support(rocm).map_or("unknown", |is_aware| if is_aware { "yes" } else { "no" });
    MpiInfo {
        vendor: text(vendor()),
        version: text(version),
        library: dynlib::file_of(address()).map_or_else(String::new, |file| file.display().to_string()),
        address: address(),
        cuda_aware: aware(false),
        rocm_aware: aware(true),
        sizeof_comm: size_of::<MPI_Comm>(),
        sizeof_status: size_of::<ffi::MPI_Status>(),
    }
}

/// Whether this library was built for Open MPI alone.
pub fn is_open_mpi() -> bool {
    vendor() == c"Open MPI"
}

/// Whether `MPI_Comm_free` may call the owners of attributes when nothing uses the communicator any more, rather than at once,
/// as Open MPI does.
pub fn may_free_late() -> bool {
    !is_open_mpi()
}

/// Whether `MPI_Comm_create_group`, which not all ranks need to call, may copy attributes, as Open MPI does.
pub fn may_copy_for_groups() -> bool {
    may_be_open_mpi(vendor())
}

/// Whether a library that was built for this MPI may run with Open MPI: one that was built for the MPI ABI does, too.
fn may_be_open_mpi(vendor: &CStr) -> bool {
    vendor != c"MPICH" && vendor != c"Intel MPI"
}

/// Whether the MPI library says that it takes pointers to the memory of GPUs of NVIDIA, or of AMD (`rocm`); `None` if it has no
/// `MPIX_Query_cuda_support`, or `MPIX_Query_rocm_support`. MPICH can tell only after `MPI_Init`.
pub fn gpu_support(rocm: bool) -> Option<bool> {
    // SAFETY: takes nothing, and is absent-safe (see the shim).
    match unsafe { mpi4jax_query_gpu_support(rocm.into()) } {
        0 => Some(false),
        1 => Some(true),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mpich_and_intel_mpi_are_not_open_mpi() {
        assert!([c"Open MPI", c"MPI ABI", c"unknown"].into_iter().all(may_be_open_mpi));
        assert!(![c"MPICH", c"Intel MPI"].into_iter().any(may_be_open_mpi));
    }
}
