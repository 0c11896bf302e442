//! The handler of an array whose contents do not matter, since a loop of the program writes all of it: filling it first would
//! write it twice.

use super::c_api::{CallFrame, FfiError};
use super::state::guard;
use super::{frame, pages};
use crate::error::Error;

/// # Safety
/// Called by XLA with a frame of its own making.
pub unsafe extern "C" fn empty<const GPU: bool>(call: *mut CallFrame) -> *mut FfiError {
    // SAFETY: promised by the caller.
    unsafe {
        guard::<GPU>(call, |call| {
            let result = frame::result(call).map_err(Error::from)?;
            if !GPU {
                pages::prepare(&result);
            }
            Ok(())
        })
    }
}
