//! Errors on their way from XLA, and to it.

use std::ffi::{CStr, CString};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{null, null_mut};

use super::c_api::{self, Api, FfiError};
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
        let mut get = c_api::ErrorGetMessageArgs {
            struct_size: size_of::<c_api::ErrorGetMessageArgs>(),
            extension_start: null_mut(),
            error,
            message: null(),
            code: 0,
        };
        ((*api).error_get_message)(&mut get);
        let message = CStr::from_ptr(get.message).to_string_lossy().into_owned();
        let mut destroy = c_api::ErrorDestroyArgs {
            struct_size: size_of::<c_api::ErrorDestroyArgs>(),
            extension_start: null_mut(),
            error,
        };
        ((*api).error_destroy)(&mut destroy);
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
    let mut args = c_api::ErrorCreateArgs {
        struct_size: size_of::<c_api::ErrorCreateArgs>(),
        extension_start: null_mut(),
        message: message.as_ptr(),
        code: c_api::ERROR_INTERNAL,
    };
    // SAFETY: promised by the caller; XLA copies the message.
    unsafe { ((*api).error_create)(&mut args) }
}
