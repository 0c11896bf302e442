//! Which way a call goes: to a library that reaches its arrays, or through staging.

use super::mpi::{self, is_ours};
use super::nccl::{Messages, Nccl};
use super::pool::Pool;
use super::staged;
use super::ucx;
use crate::call::{Call, Envelope, Stream};
use crate::device::Device;
use crate::device::cuda::Driver;
use crate::error::{Cause, Error};
use crate::mpilib::wildcards;
use crate::ops::{Buffer, Op, Reduction};

/// What carries the operations on the arrays of one platform.
#[derive(Debug)]
pub struct Transport {
    name: &'static str,
    way: Way,
    /// What carries messages there, if that is not MPI.
    ucx: Option<&'static ucx::Worker>,
    /// Memory of the host for copies of arrays.
    pub(super) pool: Pool,
}

/// The way of calls to what carries them.
#[derive(Debug)]
pub enum Way {
    /// Arrays are in the memory of the host.
    Host,
    /// Arrays are copied to the memory of the host, and back.
    Staged,
    /// The library on the host takes pointers to the memory of a GPU. A call waits for its stream first, of which such a
    /// library knows nothing. What the processor would touch is staged.
    Direct(&'static Driver),
    /// NCCL puts calls on their stream. What it cannot do is staged.
    Nccl(Nccl),
}

impl Transport {
    pub fn new(name: &'static str, way: Way, ucx: Option<&'static ucx::Worker>, device: Device) -> Self {
        Self { name, way, ucx, pool: Pool::new(device) }
    }

    /// MPI, on arrays in the memory of the host.
    pub fn mpi() -> Self {
        Self::new("mpi", Way::Host, None, Device::Host)
    }

    /// MPI, on copies of the arrays of a device. The device may be the host, for tests.
    pub fn staged(device: Device) -> Self {
        Self::new("staged", Way::Staged, None, device)
    }

    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Where its arrays are.
    pub fn device(&self) -> Device {
        self.pool.device
    }

    /// UCX, where that carries messages.
    pub(super) fn ucx(&self) -> Option<&'static ucx::Worker> {
        self.ucx
    }

    /// NCCL, where that carries operations.
    pub(super) fn nccl(&self) -> Option<&Nccl> {
        if let Way::Nccl(nccl) = &self.way { Some(nccl) } else { None }
    }

    /// Blocks until the call's buffers hold the result and may be reused, by the host or by what comes later on the stream.
    #[inline]
    pub fn execute(&self, call: &Call) -> Result<(), Error> {
        match self.way {
            Way::Host => self.execute_on_host(call),
            _ => self.execute_on_device(call),
        }
    }

    /// Carries a call out by a library on the host: messages by UCX where that is chosen, everything else by MPI.
    #[inline]
    fn execute_on_host(&self, call: &Call) -> Result<(), Error> {
        let failed = |name| move |cause| Error { transport: Some(name), ..call.site.error(cause) };
        match self.ucx {
            Some(ucx) if !call.site.op.row().is_collective() => ucx.execute(call).map_err(failed("ucx")),
            _ => mpi::execute(call).map_err(failed("mpi")),
        }
    }

    fn execute_on_device(&self, call: &Call) -> Result<(), Error> {
        let failed = |cause| Error { transport: Some(self.name), ..call.site.error(cause) };
        match &self.way {
            Way::Nccl(nccl) if nccl.messages.carries(call).map_err(failed)? => {
                nccl.execute(call).map_err(failed)
            }
            Way::Direct(driver) if self.reaches(call) => {
                driver.synchronize(call.stream).map_err(failed)?;
                self.execute_on_host(call)
            }
            _ => staged::execute(&self.pool, call, |call| self.execute_on_host(call)).map_err(failed)?,
        }
    }

    /// Whether a library that takes pointers to the memory of a GPU carries all of a call.
    fn reaches(&self, call: &Call) -> bool {
        // MPI may not take them where UCX does.
        let is_taken = self.ucx.is_none() || !call.site.op.row().is_collective();
        is_taken && !needs_processor(call)
    }

    /// A stream of the transport's own, if it carries a call there without waiting, for an operation that is started.
    pub fn own_stream(&self, call: &Call) -> Result<Option<Stream>, Error> {
        let Some(nccl) = self.nccl() else { return Ok(None) };
        let failed = |cause| Error { transport: Some(self.name), ..call.site.error(cause) };
        nccl.own_stream(call).map_err(failed)
    }

    /// Reads an operand of numbers of 32 bits. It has as many as there is room for, or is read in part.
    #[inline]
    pub fn read_numbers(&self, numbers: &Buffer, into: &mut [i32], stream: Stream) -> Result<(), Cause> {
        if !matches!(self.way, Way::Host) {
            return staged::read(&self.pool, numbers, into, stream);
        }
        let bytes = size_of_val(into).min(numbers.bytes());
        // SAFETY: the buffer has so many bytes, in the memory of the host.
        unsafe { numbers.data().copy_to_nonoverlapping(into.as_mut_ptr().cast(), bytes) };
        Ok(())
    }

    /// Reads an operand with source, destination and tags of a message, unless the program says them already: NCCL's
    /// messages have one tag, and a source that the program names. To read it would mean to wait.
    #[inline]
    pub fn read_envelope(&self, from: &Buffer, stream: Stream) -> Result<Option<Envelope>, Cause> {
        if self.nccl().is_some_and(|nccl| nccl.messages == Messages::Nccl) {
            return Ok(None);
        }
        let mut numbers = [0; Envelope::LEN];
        self.read_numbers(from, &mut numbers, stream)?;
        Ok(Some(Envelope::decode(numbers)))
    }
}

/// Whether the processor reads or writes the buffers of a call that goes to a library which takes device pointers.
fn needs_processor(call: &Call) -> bool {
    let row = call.site.op.row();
    let is_reduced_by_us = |(reduction, buffer): (Reduction, Buffer)| match reduction {
        Reduction::User(_) => true,
        Reduction::Builtin(builtin) => is_ours(builtin, buffer.dtype()),
    };
    // A message may be shorter than the result, the rest of which is then cleared.
    let is_short = call.status.is_some() || call.envelope.source == wildcards().proc_null;
    // One's own block is moved before or after the call.
    let is_moved = || call.send.zip(call.recv).is_some_and(|(send, recv)| send.overlaps(&recv));
    // What no message writes is cleared, and where a message has come from is written.
    let is_whole = || call.site.parts.as_ref().is_some_and(|parts| parts.covers(call.recv.as_ref()));
    // Its messages begin with their lengths, which are in the memory of the host.
    let has_lengths = matches!(call.site.op, Op::Gatherv | Op::Scatterv);
    has_lengths
        || row.has_any_size() && !is_whole()
        || call.site.reduction.zip(call.send).is_some_and(is_reduced_by_us)
        || row.receives() && (is_short || call.received.is_some())
        || !row.has_reduction && is_moved()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::call::Site;
    use crate::comm::{self, Comm};
    use crate::ops::{Dtype, Part, Parts};

    #[test]
    fn messages_with_lengths_are_staged() {
        let comm = comm::register(Comm::new("dispatch-test", 0, 1));
        let all = [Part { start: 0, count: 2 }];
        let mut data = [0_f32; 4];
        let (from, to) = data.split_at_mut(2);
        // SAFETY: an array of so many elements, which outlives the calls.
        let [send, recv] =
            [from, to].map(|part| Some(unsafe { Buffer::new(part.as_mut_ptr().cast(), Dtype::Float32, 2) }));
        for (op, is_staged) in [(Op::Gatherv, true), (Op::Scatterv, true), (Op::Alltoallv, false)] {
            let mut site = Site::new(op, &comm);
            site.parts = Some(Arc::new(Parts::of(0, all[..].into(), all[..].into())));
            let call = Call { send, recv, ..Call::of(&site, Stream::NONE) };
            assert_eq!(needs_processor(&call), is_staged, "{op}");
        }
    }
}
