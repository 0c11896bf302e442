//! Conversion between errors of this package and errors of XLA.

use std::ffi::{CStr, CString};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{null, null_mut};

use super::c_api::{self, Api, Args, FfiError};
use crate::error::{Cause, Error};

/// Runs `body`, and turns its errors and panics into XLA's errors.
///
/// # Safety
/// `api` is XLA's. The closure's captures are not used after a panic.
#[inline]
pub(super) unsafe fn caught(api: *const Api, body: impl FnOnce() -> Result<(), Box<Error>>) -> *mut FfiError {
    // SAFETY: promised by the caller.
    unsafe {
        match catch_unwind(AssertUnwindSafe(body)) {
            Ok(Ok(())) => null_mut(),
            Ok(Err(error)) => raise(api, &error),
            Err(panic) => {
                let message = panic
                    .downcast_ref::<&str>()
                    .map(|text| (*text).to_owned())
                    .or_else(|| panic.downcast_ref::<String>().cloned())
                    .unwrap_or_else(|| "with no message".into());
                raise(api, &Cause::Panic { message }.into())
            }
        }
    }
}

/// Turns an error that XLA returned into one of ours.
///
/// # Safety
/// `error` is null or was returned by a function of `api`.
#[inline]
pub(super) unsafe fn check(api: *const Api, call: &'static str, error: *mut FfiError) -> Result<(), Cause> {
    if error.is_null() {
        return Ok(());
    }
    // SAFETY: promised by the caller; the message lives as long as the error.
    unsafe {
        let mut get = Args::new(c_api::ErrorGetMessage { error, message: null(), code: 0 });
        ((*api).error_get_message)(&mut get);
        let message = CStr::from_ptr(get.fields.message).to_string_lossy().into_owned();
        ((*api).error_destroy)(&mut Args::new(c_api::ErrorDestroy { error }));
        Err(Cause::Xla { call, message })
    }
}

/// Hands an error to XLA, which raises it in Python.
///
/// # Safety
/// `api` is XLA's.
#[cold]
unsafe fn raise(api: *const Api, error: &Error) -> *mut FfiError {
    let message = CString::new(error.to_string().replace('\0', "")).unwrap_or_default();
    let code = match error.cause {
        Cause::Argument { .. } => c_api::ERROR_INVALID_ARGUMENT,
        Cause::Finalized
        | Cause::FreedCommunicator { .. }
        | Cause::FreedReduction
        | Cause::EarlierFailure { .. }
        | Cause::UnknownCommunicator { .. }
        | Cause::Request { .. } => c_api::ERROR_FAILED_PRECONDITION,
        _ => c_api::ERROR_INTERNAL,
    };
    let fields = c_api::ErrorCreate { message: message.as_ptr(), code };
    // SAFETY: promised by the caller; XLA copies the message.
    unsafe { ((*api).error_create)(&mut Args::new(fields)) }
}
