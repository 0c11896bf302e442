//! Calls of a device on copies of their arrays in the memory of the host.

use super::pool::Pool;
use crate::call::{Call, Stream};
use crate::error::{Cause, Error};
use crate::ops::Buffer;

/// Copies what a call reads to the host, runs the call there, and copies what it has written back.
///
/// Written once for all operations: what an operation reads is what its call has as `send`, what it writes is `recv` and
/// `received`, and no more than that is copied.
pub fn execute(
    pool: &Pool,
    call: &Call,
    on_host: impl FnOnce(&Call) -> Result<(), Error>,
) -> Result<Result<(), Error>, Cause> {
    let (device, stream) = (pool.device, call.stream);
    let arrays = [call.send, call.recv, call.received];
    let mut leases = Vec::with_capacity(arrays.len());
    let mut copies = [None; 3];
    for (array, copy) in arrays.into_iter().zip(&mut copies) {
        let Some(array) = array else { continue };
        let lease = pool.lease(array.bytes())?;
        // SAFETY: as many bytes were leased.
        *copy = Some(unsafe { array.moved_to(lease.data()) });
        leases.push(lease);
    }
    let [send, recv, received] = copies;
    let copy = |from: Option<Buffer>, to: Option<Buffer>| match from.zip(to) {
        // SAFETY: of one size, and not given back to the pool unless the copies have ended.
        Some((from, to)) => unsafe { device.copy(from.data(), to.data(), from.bytes(), stream) },
        None => Ok(()),
    };
    let run = || {
        copy(call.send, send)?;
        // A rank has come to a barrier when its stream has.
        if call.send.is_some() || call.recv.is_none() {
            device.synchronize(stream)?;
        }
        let result = on_host(&Call { send, recv, received, ..call.clone() });
        if result.is_ok() && recv.or(received).is_some() {
            copy(recv, call.recv)?;
            copy(received, call.received)?;
            device.synchronize(stream)?;
        }
        Ok(result)
    };
    let result = run();
    if result.is_err() {
        // Whether the device still uses it is not known.
        std::mem::forget(leases);
    }
    result
}

/// Reads an array of numbers of 32 bits. It has as many as there is room for, or is read in part.
pub fn read(pool: &Pool, numbers: &Buffer, into: &mut [i32], stream: Stream) -> Result<(), Cause> {
    let bytes = size_of_val(into).min(numbers.bytes());
    let lease = pool.lease(bytes)?;
    // SAFETY: both buffers are as large.
    let copied = unsafe { pool.device.copy(numbers.data(), lease.data(), bytes, stream) };
    if let Err(cause) = copied.and_then(|()| pool.device.synchronize(stream)) {
        std::mem::forget(lease);
        return Err(cause);
    }
    // SAFETY: as above.
    unsafe { lease.data().copy_to_nonoverlapping(into.as_mut_ptr().cast(), bytes) };
    Ok(())
}
