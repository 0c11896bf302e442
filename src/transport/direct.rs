//! Pointers to the memory of a GPU, straight to a library that takes them: CUDA-aware MPI, UCX.
//!
//! A call waits for the stream first, because such a library knows nothing of it. What the library, or what
//! we do around it, would touch with the processor goes through staging.

use super::mpi::is_ours;
use super::{Device, Mpi, Staged, Transport, Ucx, wildcards};
use crate::error::{Cause, Error};
use crate::gpu::cuda::{CudaDevice, driver};
use crate::ops::{Buffer, Call, Comm, Op, Peers, Reduction, Stream};

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
        matches!(op, Op::Recv | Op::Send | Op::Sendrecv)
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
    let by_processor = |reduction, buffer: &Buffer| match reduction {
        Reduction::User(_) => true,
        Reduction::Builtin(builtin) => is_ours(builtin, buffer.dtype),
    };
    match call.site.op {
        Op::Allreduce | Op::Reduce | Op::Scan => {
            call.site.reduction.zip(call.send).is_some_and(|(reduction, send)| by_processor(reduction, &send))
        }
        // A message may be shorter than the result, the rest of which is then cleared.
        Op::Recv | Op::Sendrecv => {
            call.status != 0 || call.envelope.source == wildcards().proc_null || overlap(call)
        }
        Op::Allgather | Op::Alltoall | Op::Gather | Op::Scatter => overlap(call),
        // Packed here.
        Op::HaloExchange => true,
        Op::Barrier | Op::Bcast | Op::Send => false,
    }
}

/// One's own block is moved before or after the call.
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

    fn join(&self, comm: &'static Comm) -> Result<(), Error> {
        self.host.join(comm)
    }

    fn stop(&self) {
        self.host.stop();
    }
}
