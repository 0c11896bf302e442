//! Communicators that are freed when Python cannot be asked any more: by a `__del__` while the interpreter is taken down.
//!
//! Until then, Python is told of it by an attribute of its own, and waits for what it has started before it calls
//! [`free`](super::free).

use std::ffi::{c_int, c_void};
use std::ptr::{null_mut, without_provenance_mut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use mpi::ffi::{self, MPI_Comm};

use super::registry;
use crate::error::Cause;
use crate::mpilib::{check, no_copy};

static ALONE: AtomicBool = AtomicBool::new(false);

/// From now on Python may miss that a communicator is freed. All that it has started has ended.
#[cfg_attr(feature = "python", pyo3::pyfunction(name = "python_ends"))]
pub fn without_python() {
    ALONE.store(true, Ordering::Relaxed);
}

fn key() -> Result<c_int, Cause> {
    static KEY: OnceLock<c_int> = OnceLock::new();
    if let Some(&key) = KEY.get() {
        return Ok(key);
    }
    let mut key = 0;
    // SAFETY: the callbacks are functions.
    let code = unsafe { ffi::MPI_Comm_create_keyval(Some(no_copy), Some(deleted), &mut key, null_mut()) };
    check("MPI_Comm_create_keyval", code)?;
    Ok(*KEY.get_or_init(|| key))
}

/// Notices when MPI frees a communicator, which is known here by its number.
///
/// # Safety
/// `comm` is live.
pub unsafe fn notice(comm: MPI_Comm, number: i32) -> Result<(), Cause> {
    let value = without_provenance_mut(number as usize);
    // SAFETY: promised by the caller; the value is a number, which nothing reads as an address.
    check("MPI_Comm_set_attr", unsafe { ffi::MPI_Comm_set_attr(comm, key()?, value) })
}

unsafe extern "C" fn deleted(_: MPI_Comm, _: c_int, value: *mut c_void, _: *mut c_void) -> c_int {
    if ALONE.load(Ordering::Relaxed)
        && let Some(comm) = registry::numbered(value.addr() as i32)
    {
        registry::free(&comm.key);
    }
    0
}
