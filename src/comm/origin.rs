//! Which communicator of one rank is which of another: known of `MPI_COMM_WORLD`, of its duplicates, and of theirs.
//!
//! MPI has no name for a communicator that all of its ranks share. All ranks of a communicator duplicate it in the same order
//! (MPI 4.1, 7.4.2), so its second duplicate on one rank is its second one on another. An attribute that is copied counts them.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::{from_ref, null_mut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use mpi::ffi::{self, MPI_Comm};

use super::hash;
use crate::board::own;
use crate::dynlib::is_called_by;
use crate::error::Cause;
use crate::mpilib::{check, may_copy_for_groups};

/// The origin of communicators whose origin is not known.
pub const UNKNOWN: u64 = 0;
/// Stands for the origin of all freed communicators of a class.
pub const FREED: u64 = u64::MAX;
/// The origin of the default communicator and of `MPI_COMM_WORLD`, each the only one of its class.
pub const ONLY_ONE: u64 = 1;

struct Origin {
    id: u64,
    copies: AtomicU64,
}

static WORLD: Origin = Origin { id: ONLY_ONE, copies: AtomicU64::new(0) };
static KEY: OnceLock<c_int> = OnceLock::new();

/// Duplicates of `MPI_COMM_WORLD` are counted from now on. MPI is initialized.
pub fn start() -> Result<(), Cause> {
    let mut key = 0;
    // SAFETY: the callbacks are functions; `copy` changes no more of the value than an atomic.
    unsafe {
        let code = ffi::MPI_Comm_create_keyval(Some(copy), Some(delete), &mut key, null_mut());
        check("MPI_Comm_create_keyval", code)?;
        let value = from_ref(&WORLD).cast_mut().cast();
        check("MPI_Comm_set_attr", ffi::MPI_Comm_set_attr(ffi::RSMPI_COMM_WORLD, key, value))?;
    }
    let _ = KEY.set(key);
    Ok(())
}

/// What a communicator comes from: equal on all of its ranks, if they have counted the same duplicates of `MPI_COMM_WORLD`, as the board says.
///
/// # Safety
/// `comm` is live.
pub unsafe fn of(comm: MPI_Comm) -> u64 {
    let Some(&key) = KEY.get() else { return UNKNOWN };
    let (mut value, mut found) = (MaybeUninit::<*const Origin>::uninit(), 0);
    // SAFETY: promised by the caller; MPI writes the address of an `Origin` where it finds one, which lives as long as the
    // communicator.
    unsafe {
        let code = ffi::MPI_Comm_get_attr(comm, key, value.as_mut_ptr().cast(), &mut found);
        if code == 0 && found != 0 { (*value.assume_init()).id } else { UNKNOWN }
    }
}

unsafe extern "C" fn copy(
    _: MPI_Comm,
    _: c_int,
    _: *mut c_void,
    value: *mut c_void,
    new: *mut c_void,
    flag: *mut c_int,
) -> c_int {
    // Open MPI also copies attributes for `MPI_Comm_create_group`, which not all ranks call: those that did would count one more.
    // With other libraries, nobody looks at the callers.
    if may_copy_for_groups() && is_called_by("create_group") {
        // SAFETY: MPI gives the address of an int.
        unsafe { *flag = 0 };
        return 0;
    }
    // SAFETY: the value is an `Origin`, and MPI gives the addresses of a pointer and of an int.
    unsafe {
        let from = &*value.cast::<Origin>();
        let id = hash((from.id, from.copies.fetch_add(1, Ordering::Relaxed)));
        *new.cast() = Box::into_raw(Box::new(Origin { id: id.max(ONLY_ONE + 1), copies: AtomicU64::new(0) }));
        *flag = 1;
        if std::ptr::eq(from, &raw const WORLD) {
            own().copies.store(WORLD.copies.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
    0
}

unsafe extern "C" fn delete(_: MPI_Comm, _: c_int, value: *mut c_void, _: *mut c_void) -> c_int {
    let value = value.cast::<Origin>();
    if !std::ptr::eq(value, &raw const WORLD) {
        // SAFETY: made by `copy`; MPI deletes it once.
        drop(unsafe { Box::from_raw(value) });
    }
    0
}
