//! The end of MPI: what is done where `MPI_Finalize` begins, and `MPI_Abort`.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

use mpi::ffi::{self, MPI_Comm};

use crate::error::Cause;
use crate::mpilib::{any_thread_may_call, check, is_open_mpi, is_running, no_copy};
use crate::sync::lock;

static ENDING: AtomicBool = AtomicBool::new(false);
/// What happens at the beginning of `MPI_Finalize`.
struct AtFinalize {
    is_told: bool,
    first: Vec<Box<dyn FnOnce() + Send>>,
    functions: Vec<fn()>,
}

static AT_FINALIZE: Mutex<AtFinalize> =
    Mutex::new(AtFinalize { is_told: false, first: Vec::new(), functions: Vec::new() });

fn functions_at_finalize() -> MutexGuard<'static, AtFinalize> {
    lock(&AT_FINALIZE)
}

/// Whether `MPI_Finalize` has begun: MPI frees by itself what is its own.
pub fn is_ending() -> bool {
    ENDING.load(Ordering::Relaxed)
}

impl AtFinalize {
    /// Registers for a call by MPI, which never comes if MPI is not running.
    fn be_told(&mut self) -> Result<(), Cause> {
        if self.is_told || !is_running() {
            return Ok(());
        }
        let mut key = 0;
        // SAFETY: the callbacks are functions. MPI_Finalize deletes the attributes of MPI_COMM_SELF before anything
        // else (MPI 4.1, 11.2.4).
        unsafe {
            let code = ffi::MPI_Comm_create_keyval(Some(no_copy), Some(finalizes), &mut key, null_mut());
            check("MPI_Comm_create_keyval", code)?;
            check("MPI_Comm_set_attr", ffi::MPI_Comm_set_attr(ffi::RSMPI_COMM_SELF, key, null_mut()))?;
        }
        self.is_told = true;
        Ok(())
    }
}

/// Calls a function at the beginning of `MPI_Finalize`, before those that were named earlier. Without MPI, never.
pub fn at_finalize(function: fn()) -> Result<(), Cause> {
    let mut at_finalize = functions_at_finalize();
    at_finalize.be_told()?;
    let functions = &mut at_finalize.functions;
    if !functions.iter().any(|known| std::ptr::fn_addr_eq(*known, function)) {
        functions.push(function);
    }
    Ok(())
}

/// Calls a function before all those, when what they end still works; of several, the last one first.
pub fn first_at_finalize(function: Box<dyn FnOnce() + Send>) -> Result<(), Cause> {
    let mut at_finalize = functions_at_finalize();
    at_finalize.first.push(function);
    at_finalize.be_told()
}

unsafe extern "C" fn finalizes(_: MPI_Comm, _: c_int, _: *mut c_void, _: *mut c_void) -> c_int {
    let first = std::mem::take(&mut functions_at_finalize().first);
    first.into_iter().rev().for_each(|function| function());
    ENDING.store(true, Ordering::Relaxed);
    let functions = std::mem::take(&mut functions_at_finalize().functions);
    functions.into_iter().rev().for_each(|function| function());
    0
}

/// Ends the job through MPI, if MPI can be asked from here. In `MPI_Finalize`, MPICH has no `MPI_COMM_WORLD` any more to abort, and
/// would end with a status of its own: there, the end of the process has to do.
pub fn abort(code: i32) {
    if any_thread_may_call() && (is_open_mpi() || !is_ending()) {
        // SAFETY: MPI is initialized, and any thread may call it.
        unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, code) };
    }
}
