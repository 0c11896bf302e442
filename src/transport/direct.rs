//! Pointers to the memory of a GPU, straight to a library that takes them: CUDA-aware MPI, UCX.
//!
//! A call waits for the stream first, because such a library knows nothing of it. What the library, or what
//! we do around it, would touch with the processor goes through staging.

use std::sync::Arc;

use super::mpi::is_ours;
use super::{Mpi, Staged, Transport, Ucx};
use crate::call::{Call, Peers, Stream};
use crate::comm::Comm;
use crate::device::cuda::driver;
use crate::device::{CudaDevice, Device};
use crate::error::{Cause, Error};
use crate::mpilib::wildcards;
use crate::ops::{Buffer, Op, Reduction};

/// A transport for host memory whose library reaches that of the GPU too.
pub trait Reaches: Transport + Copy {
    const NAME: &'static str;

    /// Whether the library itself carries this operation.
    fn carries(op: Op) -> bool;
}

impl Reaches for Mpi {
    const NAME: &'static str = "cuda-mpi";

    fn carries(_: Op) -> bool {
        true
    }
}

impl Reaches for Ucx {
    const NAME: &'static str = "ucx";

    fn carries(op: Op) -> bool {
        !op.row().is_collective()
    }
}

/// Calls of a GPU on a transport that reaches its memory.
#[derive(Debug)]
pub struct Direct<T> {
    device: CudaDevice,
    host: T,
    staged: Staged<CudaDevice, T>,
}

impl<T: Reaches> Direct<T> {
    pub fn new(host: T) -> Result<Self, String> {
        let device = CudaDevice::new(driver().map_err(|error| error.to_string())?);
        Ok(Self { device, host, staged: Staged::new(T::NAME, device, host)? })
    }
}

/// Whether somebody reads or writes these buffers other than MPI's own device code.
fn needs_host(call: &Call) -> bool {
    let by_processor = |(reduction, buffer): (Reduction, Buffer)| match reduction {
        Reduction::User(_) => true,
        Reduction::Builtin(builtin) => is_ours(builtin, buffer.dtype),
    };
    let row = call.site.op.row();
    let by_processor = call.site.reduction.zip(call.send).is_some_and(by_processor);
    // A message may be shorter than the result, the rest of which is then cleared.
    let short = row.receives() && (call.status != 0 || call.envelope.source == wildcards().proc_null);
    // Ghost cells are packed here. One's own block is moved before or after other calls that have two buffers.
    row.has_blocks || by_processor || short || !row.has_reduction && overlap(call)
}

fn overlap(call: &Call) -> bool {
    call.send.zip(call.recv).is_some_and(|(send, recv)| send.overlaps(&recv))
}

impl<T: Reaches> Transport for Direct<T> {
    fn name(&self) -> &'static str {
        T::NAME
    }

    fn execute(&self, call: &Call) -> Result<(), Error> {
        if !T::carries(call.site.op) || needs_host(call) {
            return self.staged.execute(call);
        }
        let located = |cause| Error { transport: Some(self.name()), ..call.site.error(cause) };
        self.device.synchronize(call.stream).map_err(located)?;
        let Some(to) = call.received else { return self.host.execute(call) };
        let mut pair = [0; 2];
        self.host.execute(&Call { received: Some(&raw mut pair), ..call.clone() })?;
        // SAFETY: a result that the frame's decoder has checked.
        unsafe { self.staged.write_pair(pair, to, call.stream) }.map_err(located)
    }

    unsafe fn read_peers(&self, peers: *const Peers, stream: Stream) -> Result<Option<Peers>, Cause> {
        // SAFETY: promised by the caller.
        unsafe { self.staged.read_peers(peers, stream) }
    }

    fn join(&self, comm: &Arc<Comm>) -> Result<(), Error> {
        self.host.join(comm)
    }

    fn stop(&self) {
        self.host.stop();
    }
}
