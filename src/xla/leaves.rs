//! The handlers that pack the leaves of a tree into a message, and unpack it: in the memory of the host.

use super::c_api::{CallFrame, FfiError};
use super::state::guard;
use super::{frame, pages};
use crate::error::{Cause, Error};

/// # Safety
/// Called by XLA with a frame of its own making, whose buffers stay valid until this returns.
pub unsafe extern "C" fn pack<const GPU: bool>(call: *mut CallFrame) -> *mut FfiError {
    // SAFETY: promised by the caller.
    unsafe { guard::<GPU>(call, |call| Ok(copy::<GPU>(call, true).map_err(Error::from)?)) }
}

/// # Safety
/// Called by XLA with a frame of its own making, whose buffers stay valid until this returns.
pub unsafe extern "C" fn unpack<const GPU: bool>(call: *mut CallFrame) -> *mut FfiError {
    // SAFETY: promised by the caller.
    unsafe { guard::<GPU>(call, |call| Ok(copy::<GPU>(call, false).map_err(Error::from)?)) }
}

/// Copies leaf after leaf: a stretch of it into, or out of, each row of the message.
///
/// # Safety
/// `call` is what XLA passed to the execute stage.
unsafe fn copy<const GPU: bool>(call: &CallFrame, is_packed: bool) -> Result<(), Cause> {
    if GPU {
        // XLA packs there: a program that was exported for the host.
        return Err(Cause::Unsupported {
            feature: "packing".into(),
            reason: "the host cannot access GPU memory",
        });
    }
    // SAFETY: promised by the caller.
    let (leaves, message, row) = unsafe { frame::leaves(call, is_packed)? };
    let rows = message.count().checked_div(row).unwrap_or(0);
    if rows == 0 {
        return Ok(());
    }
    if let Some(leaf) = leaves.iter().find(|leaf| !leaf.count().is_multiple_of(rows)) {
        return Err(Cause::Buffers { operand: "leaf", expected: rows, actual: leaf.count() });
    }
    for written in if is_packed { std::slice::from_ref(&message) } else { &leaves[..] } {
        pages::prepare(written);
    }
    let (stride, mut start) = (message.bytes() / rows, 0);
    for leaf in &leaves {
        let bytes = leaf.bytes() / rows;
        for i in 0..rows {
            // SAFETY: the stretches of all leaves are together as large as a row, and buffers of XLA's do not overlap.
            unsafe {
                let (of_leaf, of_message) =
                    (leaf.data().add(i * bytes), message.data().add(i * stride + start));
                let (from, to) = if is_packed { (of_leaf, of_message) } else { (of_message, of_leaf) };
                to.copy_from_nonoverlapping(from, bytes);
            }
        }
        start += bytes;
    }
    Ok(())
}
