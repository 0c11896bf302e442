//! MPI, on copies of a GPU's arrays in the memory of the host.

use std::sync::Arc;

use super::host_mpi::HostMpi;
use super::pool::{self, Pool};
use super::{Base, Descriptor, Transport, Unfinished};
use crate::call::{Call, Stream};
use crate::comm::Comm;
use crate::device::cuda::Driver;
use crate::device::{self, Device, Platform};
use crate::error::{Cause, Error};
use crate::ops::Buffer;

pub const DESCRIPTOR: Descriptor = Descriptor {
    name: "staged",
    default_on: Some(Platform::Gpu),
    use_cuda_mpi: Some(false),
    settings: |_| pool::read_setting().map(|()| None),
    probe: |platform| if platform == Platform::Gpu { device::support() } else { Ok(()) },
    start: |platform| {
        let device = match platform {
            // For tests: the whole path, with memory of the host in the part of the device's.
            Platform::Cpu => Device::Host,
            Platform::Gpu => Device::Gpu(Driver::get()?),
        };
        Ok(StagedMpi::new(DESCRIPTOR.name, HostMpi::default(), device).into())
    },
    takes_packed: true,
    ..Descriptor::DEFAULT
};

/// Gives a transport of the host copies of a device's arrays.
#[derive(Debug)]
pub struct Staged<T> {
    base: Base,
    pub on_host: T,
}

pub type StagedMpi = Staged<HostMpi>;

impl<T: Transport> Staged<T> {
    /// `name` is the name of the transport that the user has chosen; this may be a part of it. The
    /// device may be the host, for tests.
    pub fn new(name: &'static str, on_host: T, device: Device) -> Self {
        Self { base: Base::new(name, device), on_host }
    }
}

impl<T: Transport> Transport for Staged<T> {
    fn base(&self) -> &Base {
        &self.base
    }

    // One function for all that is staged; not a part of each of its callers.
    #[inline(never)]
    fn execute(&self, call: &Call) -> Result<(), Error> {
        let Base { pool, .. } = &self.base;
        execute(pool, call, |call| self.on_host.execute(call)).map_err(|cause| call.site.error(cause))?
    }

    fn join(&self, comm: &Arc<Comm>) -> Result<(), Error> {
        self.on_host.join(comm)
    }

    fn unfinished(&self) -> Vec<Unfinished> {
        self.on_host.unfinished()
    }

    fn stop(&self) {
        self.on_host.stop();
    }
}

/// Copies what a call reads to the host, runs the call there, and copies what it has written back.
///
/// Written once for all operations: what an operation reads is what its call has as `send`, what it writes is `recv` and
/// `received`, and no more than that is copied.
fn execute(
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
        // A barrier must not start before the stream has reached it.
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

/// Reads an array of 32-bit numbers: all of them, or the first ones that fit into the result.
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
