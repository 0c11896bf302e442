//! MPI, given pointers to the memory of a GPU.

use std::sync::Arc;

use super::host_mpi::HostMpi;
use super::mpi::{has_lengths, is_ours, probe_device_pointers};
use super::staged_mpi::Staged;
use super::{Base, Descriptor, Transport, Unfinished};
use crate::call::Call;
use crate::comm::Comm;
use crate::device::cuda::Driver;
use crate::device::{Device, Platform};
use crate::error::Error;
use crate::mpilib::wildcards;
use crate::ops::{Buffer, Op, Reduction};

pub const DESCRIPTOR: Descriptor = Descriptor {
    name: "cuda-mpi",
    takes: |platform| platform == Platform::Gpu,
    use_cuda_mpi: Some(true),
    probe: |_| probe_device_pointers(),
    start: |_| Ok(CudaAwareMpi::new(DESCRIPTOR.name, HostMpi::default())?.into()),
    ..Descriptor::DEFAULT
};

/// A transport of the host that is given pointers to the memory of a GPU. Each call first waits for its stream, because such a
/// transport does not use streams. Buffers that the processor would read or write are staged.
#[derive(Debug)]
pub struct Direct<T> {
    driver: &'static Driver,
    /// The same transport on staged copies, for calls that cannot take device pointers.
    staged: Staged<T>,
}

pub type CudaAwareMpi = Direct<HostMpi>;

/// A transport of the host whose library takes pointers to the memory of a GPU.
pub trait TakesDevicePointers: Transport {
    /// Whether the library takes device pointers in this call.
    fn takes_device_pointers(&self, call: &Call) -> bool;
}

impl TakesDevicePointers for HostMpi {
    fn takes_device_pointers(&self, _: &Call) -> bool {
        true
    }
}

impl<T: TakesDevicePointers> Direct<T> {
    pub fn new(name: &'static str, on_host: T) -> Result<Self, String> {
        let driver = Driver::get()?;
        Ok(Self { driver, staged: Staged::new(name, on_host, Device::Gpu(driver)) })
    }
}

impl<T: TakesDevicePointers> Transport for Direct<T> {
    fn base(&self) -> &Base {
        self.staged.base()
    }

    #[inline(never)]
    fn execute(&self, call: &Call) -> Result<(), Error> {
        let on_host = &self.staged.on_host;
        if needs_processor(call) || !on_host.takes_device_pointers(call) {
            return self.staged.execute(call);
        }
        self.driver.synchronize(call.stream).map_err(|cause| call.site.error(cause))?;
        on_host.execute(call)
    }

    fn join(&self, comm: &Arc<Comm>) -> Result<(), Error> {
        self.staged.join(comm)
    }

    fn unfinished(&self) -> Vec<Unfinished> {
        self.staged.unfinished()
    }

    fn stop(&self) {
        self.staged.stop();
    }
}

/// Whether the processor reads or writes the buffers of a call that goes to a library which takes device pointers.
fn needs_processor(call: &Call) -> bool {
    let row = call.site.op.row();
    let is_reduced_by_us = |(reduction, buffer): (Reduction, Buffer)| match reduction {
        Reduction::User(_) => true,
        Reduction::Builtin(builtin) => is_ours(builtin, buffer.dtype()),
    };
    // A message may be shorter than the result; the rest of the result is then cleared.
    let is_short = call.may_be_short() || call.envelope.source == wildcards().proc_null;
    // One's own block is moved before or after the call; of a reduction, where each rank gets a block.
    let moves = !row.has_reduction || matches!(call.site.op, Op::ReduceScatter | Op::ReduceScatterv);
    let is_moved = || call.send.zip(call.recv).is_some_and(|(send, recv)| send.overlaps(&recv));
    // MPI leaves the first rank's result undefined, and it is cleared.
    let is_cleared = call.site.op == Op::Exscan && call.site.is_first();
    // What no message writes is cleared, and where a message has come from is written.
    let is_whole = || call.site.parts.as_ref().is_some_and(|parts| parts.covers(call.recv.as_ref()));
    has_lengths(call)
        || row.has_any_size() && !is_whole()
        || call.site.reduction.zip(call.send).is_some_and(is_reduced_by_us)
        || row.receives() && (is_short || call.received.is_some())
        || moves && is_moved()
        || is_cleared
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::{Site, Stream};
    use crate::comm;
    use crate::ops::{Dtype, Part, Parts};

    #[test]
    fn what_the_processor_reads_or_writes_is_staged() {
        let comm = comm::register(Comm::new("cuda-aware-mpi-test", 0, 1));
        let all = [Part { rank: 0, start: 0, count: 2 }];
        let mut data = [0_f32; 4];
        let (from, to) = data.split_at_mut(2);
        // SAFETY: the array has this number of elements, and outlives the calls.
        let [send, recv] =
            [from, to].map(|part| Some(unsafe { Buffer::new(part.as_mut_ptr().cast(), Dtype::Float32, 2) }));
        for (op, recv, is_staged) in [
            (Op::Gatherv, recv, true),
            (Op::Scatterv, recv, true),
            (Op::Allgatherv, recv, false),
            (Op::Alltoallv, recv, false),
            (Op::Scan, recv, false),
            (Op::Exscan, recv, true), // on the first rank, whose result is cleared
            (Op::Allreduce, send, false),
            (Op::ReduceScatter, recv, false),
            (Op::ReduceScatter, send, true),
            (Op::Sendrecv, send, true),
        ] {
            let mut site = Site::new(op, &comm);
            site.parts = Some(Arc::new(Parts::of(0, 1, &all, &all)));
            let call = Call { send, recv, ..Call::of(&site, Stream::NONE) };
            assert_eq!(needs_processor(&call), is_staged, "{op}");
        }
    }
}
