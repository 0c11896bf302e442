//! Received messages: status, check of the length, and comparison, which are the same for all transports.

use std::mem::MaybeUninit;

use ::mpi::ffi;

use crate::call::{Call, Site};
use crate::error::Cause;
use crate::mpilib::{check, wildcards};
use crate::ops::Buffer;
use crate::record::messages;

/// A message that has been received.
#[derive(Clone, Copy, Debug)]
pub struct Arrived {
    pub source: i32,
    pub tag: i32,
    /// Length, in elements of the result's type.
    pub count: usize,
}

/// What every transport does with a message, once it is in the result's memory: writes its source,
/// compares its length with what was asked for, and its type with that at the other end.
#[inline]
pub fn arrive(call: &Call, message: &Arrived) -> Result<(), Cause> {
    messages::received(call, message.source, message.tag, message.count);
    if let Some(received) = call.received {
        let length = i32::try_from(message.count).unwrap_or(i32::MAX);
        let numbers = [message.source, message.tag, length];
        // SAFETY: the frame's decoder has checked that the result has this number of int32.
        unsafe { received.data().cast::<[i32; Site::ENVELOPE_LEN]>().write_unaligned(numbers) };
    }
    match &call.recv {
        Some(recv) if message.count != recv.count() => short(call, recv, message),
        _ => Ok(()),
    }
}

#[cold]
fn short(call: &Call, recv: &Buffer, message: &Arrived) -> Result<(), Cause> {
    // A rank at the end of a chain has no source.
    if !call.may_be_short() && call.envelope.source != wildcards().proc_null {
        return Err(Cause::ShortMessage {
            function: call.site.mpi_name(),
            received: message.count,
            source_rank: message.source,
            expected: recv.count(),
        });
    }
    let size = recv.dtype().size();
    // SAFETY: no transport lets more arrive than fits, so `message.count < recv.count`. Results must not
    // show uninitialized memory.
    unsafe { recv.data().add(message.count * size).write_bytes(0, (recv.count() - message.count) * size) };
    Ok(())
}

/// Fills the `MPI_Status` that a receive was given, for a message that did not go through MPI.
pub fn write_status(call: &Call, arrived: &Arrived) -> Result<(), Cause> {
    let Some(recv) = &call.recv else { return Ok(()) };
    // SAFETY: all-zero is a value of the struct, and MPI itself writes the count that it keeps inside.
    unsafe {
        let mut status = MaybeUninit::<ffi::MPI_Status>::zeroed().assume_init();
        (status.MPI_SOURCE, status.MPI_TAG) = (arrived.source, arrived.tag);
        let count = arrived.count as ffi::MPI_Count;
        let code = ffi::MPI_Status_set_elements_x(&mut status, recv.dtype().mpi(), count);
        check("MPI_Status_set_elements_x", code)?;
        call.status.write(&status);
    }
    Ok(())
}
