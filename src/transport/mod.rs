//! How operations are carried out.
//!
//! [`Transport`] says which way a call goes. To add one: a kind in `select.rs`, and a way of [`Transport`].

mod message;
mod mpi;
mod nccl;
mod pool;
mod progress;
mod request;
mod request_memory;
mod requests;
mod select;
mod staged;
mod ucx;

use std::fmt;
use std::sync::Arc;

use self::mpi::is_ours;
use self::nccl::Nccl;
use self::pool::Pool;
use self::ucx::Ucx;
use crate::call::{Call, Peers, Stream};
use crate::comm::Comm;
use crate::device::Device;
use crate::device::cuda::Driver;
use crate::error::{Cause, Error};
use crate::mpilib::wildcards;
use crate::ops::{Buffer, Op, Reduction};

pub use self::mpi::set_count_limit;
pub use self::request::Request;
pub use self::request_memory::{RequestLayout, RequestMemory};
pub use self::requests::{HANDLE, Handle, freeing, outstanding, start, start_on, take};
pub use self::select::{
    Choice, Found, Platform, chosen, messages_apart, overview, select, selected, takes_packed,
};

/// What carries the operations on the arrays of one platform.
#[derive(Debug)]
pub struct Transport {
    name: &'static str,
    way: Way,
    /// What carries calls in the memory of the host.
    host: Host,
    /// Memory of the host for copies of arrays.
    pool: Pool,
}

/// The way of calls to what carries them.
#[derive(Debug)]
enum Way {
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

#[derive(Debug)]
enum Host {
    Mpi,
    /// Messages through UCX, everything else through MPI.
    Ucx(Ucx),
}

impl Host {
    fn execute(&self, call: &Call) -> Result<(), Error> {
        let failed = |name| move |cause| Error { transport: Some(name), ..call.site.error(cause) };
        match self {
            Self::Ucx(ucx) if !call.site.op.row().is_collective() => ucx.execute(call).map_err(failed("ucx")),
            Self::Mpi | Self::Ucx(_) => mpi::execute(call).map_err(failed("mpi")),
        }
    }
}

impl Transport {
    /// MPI, on arrays in the memory of the host.
    pub fn mpi() -> Self {
        Self { name: "mpi", way: Way::Host, host: Host::Mpi, pool: Pool::new(Device::Host) }
    }

    /// MPI, on copies of the arrays of a device. The device may be the host, for tests.
    pub fn staged(device: Device) -> Self {
        Self { name: "staged", way: Way::Staged, host: Host::Mpi, pool: Pool::new(device) }
    }

    /// MPI, on arrays of a GPU.
    fn cuda_mpi(driver: &'static Driver) -> Self {
        Self { name: "cuda-mpi", way: Way::Direct(driver), ..Self::staged(Device::Gpu(driver)) }
    }

    fn nccl(driver: &'static Driver) -> Self {
        Self { name: "nccl", way: Way::Nccl(Nccl::new(driver)), ..Self::staged(Device::Gpu(driver)) }
    }

    /// UCX, on arrays of a GPU if there is a driver for it.
    fn ucx(ucx: Ucx, driver: Option<&'static Driver>) -> Self {
        let way = driver.map_or(Way::Host, Way::Direct);
        let pool = Pool::new(driver.map_or(Device::Host, Device::Gpu));
        Self { name: "ucx", way, host: Host::Ucx(ucx), pool }
    }

    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Blocks until the call's buffers hold the result and may be reused, by the host or by what comes later on the stream.
    #[inline]
    pub fn execute(&self, call: &Call) -> Result<(), Error> {
        match self.way {
            Way::Host => self.host.execute(call),
            _ => self.execute_on_device(call),
        }
    }

    fn execute_on_device(&self, call: &Call) -> Result<(), Error> {
        let failed = |cause| Error { transport: Some(self.name), ..call.site.error(cause) };
        match &self.way {
            Way::Nccl(nccl) if nccl.carries(call).map_err(failed)? => nccl.execute(call).map_err(failed),
            Way::Direct(driver) if self.reaches(call) => {
                driver.synchronize(call.stream).map_err(failed)?;
                self.host.execute(call)
            }
            _ => staged::execute(&self.pool, call, |call| self.host.execute(call)).map_err(failed)?,
        }
    }

    /// Whether a library that takes pointers to the memory of a GPU carries all of a call.
    fn reaches(&self, call: &Call) -> bool {
        // MPI may not take them where UCX does.
        let is_taken = matches!(self.host, Host::Mpi) || !call.site.op.row().is_collective();
        is_taken && !needs_processor(call)
    }

    /// A stream of the transport's own, if it carries a call there without waiting, for an operation that is started.
    pub fn own_stream(&self, call: &Call) -> Result<Option<Stream>, Error> {
        match &self.way {
            Way::Nccl(nccl) => nccl
                .own_stream(call)
                .map_err(|cause| Error { transport: Some(self.name), ..call.site.error(cause) }),
            _ => Ok(None),
        }
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

    /// Reads an operand that says who a message goes to and comes from, unless it says nothing new: NCCL's messages have one
    /// tag, and their source is known to the program. To read it would mean to wait.
    #[inline]
    pub fn read_peers(&self, peers: &Buffer, stream: Stream) -> Result<Option<Peers>, Cause> {
        if self.has_exact_lengths() {
            return Ok(None);
        }
        let mut read = Peers::default();
        self.read_numbers(peers, &mut read, stream)?;
        Ok(Some(read))
    }

    /// Whether a message has to be as long as its receive says, also where a shorter one would do: NCCL would wait for the
    /// rest.
    pub fn has_exact_lengths(&self) -> bool {
        matches!(&self.way, Way::Nccl(nccl) if nccl.has_messages())
    }

    /// Writes numbers to an array of as many, in the order of a stream.
    ///
    /// # Safety
    /// It is an array of the platform until the stream has come past it.
    pub unsafe fn write<const N: usize>(
        &self,
        numbers: [f32; N],
        array: &Buffer,
        stream: Stream,
    ) -> Result<(), Cause> {
        // SAFETY: promised by the caller.
        unsafe { self.pool.device.write(numbers.map(f32::to_bits), array, stream) }
    }

    /// Fills an array with zeros, in the order of a stream.
    ///
    /// # Safety
    /// As for `write`.
    pub unsafe fn clear(&self, array: &Buffer, stream: Stream) -> Result<(), Cause> {
        // SAFETY: promised by the caller.
        unsafe { self.pool.device.clear(array, stream) }
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
    row.has_any_size() && !is_whole()
        || call.site.reduction.zip(call.send).is_some_and(is_reduced_by_us)
        || row.receives() && (is_short || call.received.is_some())
        || !row.has_reduction && is_moved()
}

/// Meets the other ranks of a communicator that is about to be used for the first time, where a transport needs that.
/// Collective then. What comes of it is attached to the communicator, and dropped when that is freed.
pub fn attach(comm: &Arc<Comm>) -> Result<(), Error> {
    for transport in select::running() {
        if let Host::Ucx(ucx) = &transport.host {
            ucx.join(comm)?;
        }
    }
    Ok(())
}

/// An operation that is on a stream: the last one of its communicator.
#[derive(Debug)]
pub struct Unfinished {
    pub number: u64,
    pub op: Op,
    pub comm: Arc<Comm>,
    pub seconds: f64,
    /// Why it never ends, if the library knows.
    pub failure: Option<String>,
}

impl fmt::Display for Unfinished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {}, which is on the GPU,", self.op, self.comm.key)
    }
}

/// What calls have put on streams, and has not happened yet. Called from the watchdog's thread.
pub fn unfinished() -> Vec<Unfinished> {
    let of = |transport: &'static Transport| match &transport.way {
        Way::Nccl(nccl) => nccl.unfinished(),
        _ => Vec::new(),
    };
    select::running().flat_map(of).collect()
}

/// The program ends: from now on there are no calls.
pub fn stop() {
    for transport in select::running() {
        if let Host::Ucx(ucx) = &transport.host {
            ucx.stop();
        }
    }
}
