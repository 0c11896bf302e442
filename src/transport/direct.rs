//! Pointers to the memory of a GPU, straight to a library that takes them: CUDA-aware MPI, UCX.
//!
//! A call waits for the stream first, because such a library knows nothing of it. What the library, or what
//! we do around it, would touch with the processor goes through the host.

use std::sync::Arc;

use super::Transport;
use super::mpi::is_ours;
use crate::call::Call;
use crate::comm::Comm;
use crate::device;
use crate::device::cuda::Driver;
use crate::error::{Cause, Error};
use crate::mpilib::{CudaSupport, cuda_support, wildcards};
use crate::ops::{Buffer, Reduction};

/// Whether the MPI library says that it takes pointers to the memory of a GPU.
pub fn is_mpi_aware() -> bool {
    device::is_reached_from_cpu() || cuda_support() == CudaSupport::Yes
}

/// Whether the MPI library may take such pointers. One that cannot say is trusted, as the user has named it.
pub fn probe_mpi() -> Result<(), String> {
    device::support()?;
    if cuda_support() == CudaSupport::No && !device::is_reached_from_cpu() {
        return Err("the MPI library says that it is not CUDA-aware: use staged or nccl".into());
    }
    Ok(())
}

/// Calls of a GPU on a library that reaches its memory.
#[derive(Debug)]
pub struct Direct<T> {
    name: &'static str,
    driver: &'static Driver,
    library: T,
}

impl<T> Direct<T> {
    pub fn new(name: &'static str, driver: &'static Driver, library: T) -> Self {
        Self { name, driver, library }
    }
}

/// Whether somebody reads or writes these buffers other than MPI's own device code.
fn needs_host(call: &Call) -> bool {
    let by_processor = |(reduction, buffer): (Reduction, Buffer)| match reduction {
        Reduction::User(_) => true,
        Reduction::Builtin(builtin) => is_ours(builtin, buffer.dtype()),
    };
    let row = call.site.op.row();
    let by_processor = call.site.reduction.zip(call.send).is_some_and(by_processor);
    // A message may be shorter than the result, the rest of which is then cleared.
    let is_short = call.status.is_some() || call.envelope.source == wildcards().proc_null;
    // One's own block is moved before or after the call.
    let is_moved = || call.send.zip(call.recv).is_some_and(|(send, recv)| send.overlaps(&recv));
    // What no message writes is cleared, and where a message has come from is written.
    let is_whole = || call.site.parts.as_ref().is_some_and(|parts| parts.covers(call.recv.as_ref()));
    row.has_any_size() && !is_whole()
        || by_processor
        || row.receives() && (is_short || call.received.is_some())
        || !row.has_reduction && is_moved()
}

impl<T: Transport> Transport for Direct<T> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn execute(&self, call: &Call) -> Result<(), Error> {
        let located = |cause| Error { transport: Some(self.name), ..call.site.error(cause) };
        self.driver.synchronize(call.stream).map_err(located)?;
        self.library.execute(call)
    }

    fn takes(&self, call: &Call) -> Result<bool, Cause> {
        Ok(self.library.takes(call)? && !needs_host(call))
    }

    fn reads_operands(&self) -> bool {
        false
    }

    fn attach(&self, comm: &Arc<Comm>) -> Result<(), Error> {
        self.library.attach(comm)
    }

    fn stop(&self) {
        self.library.stop();
    }
}
