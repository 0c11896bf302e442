//! How operations are carried out. To add a transport: a module, and a row of `ROWS`.

mod direct;
mod mpi;
mod nccl;
mod pool;
mod progress;
mod request;
mod request_memory;
mod requests;
mod route;
mod select;
mod staged;
mod ucx;

use std::fmt;
use std::mem::MaybeUninit;
use std::sync::Arc;

use ::mpi::ffi;

use crate::call::{Call, Peers, Stream};
use crate::comm::Comm;
use crate::device::cuda::{self, Driver};
use crate::device::{self, Device};
use crate::error::{Cause, Error};
use crate::mpilib::{check, wildcards};
use crate::ops::{Buffer, Op};
use crate::record::samples;

pub use self::direct::Direct;
pub use self::mpi::{Mpi, Posted, matching, set_count_limit, start as post};
pub use self::nccl::Nccl;
pub use self::pool::Pool;
pub use self::request::{Ahead, Request};
pub use self::request_memory::{RequestLayout, RequestMemory, memory_pool, memory_pool_on_gpu};
pub use self::requests::{HANDLE, Handle, freeing, outstanding, start, start_on, take};
pub use self::route::Route;
pub use self::select::{
    Choice, Found, Platform, chosen, messages_apart, overview, select, selected, takes_packed,
};
pub use self::staged::Staged;
pub use self::ucx::Ucx;

/// Carries out operations.
pub trait Transport: Send + Sync + fmt::Debug {
    fn name(&self) -> &'static str;

    /// Blocks until the call's buffers hold the result and may be reused.
    fn execute(&self, call: &Call) -> Result<(), Error>;

    /// Whether it carries a call; else its [fallback](Self::fallback) does.
    fn takes(&self, call: &Call) -> Result<bool, Cause> {
        let _ = call;
        Ok(true)
    }

    /// Whether it reads operands of numbers itself; else its fallback does.
    fn reads_operands(&self) -> bool {
        true
    }

    /// Whether an operand that says who a message goes to and comes from says nothing new.
    fn knows_peers(&self) -> bool {
        false
    }

    /// Reads an operand that says who a message goes to and comes from, unless it says nothing new.
    fn read_peers(&self, peers: &Buffer, stream: Stream) -> Result<Option<Peers>, Cause> {
        let mut read = Peers::default();
        self.read_numbers(peers, &mut read, stream)?;
        Ok(Some(read))
    }

    /// Reads an operand of numbers of 32 bits, in the memory that this transport's calls are in. It has as many as there
    /// is room for, or is read in part.
    fn read_numbers(&self, numbers: &Buffer, into: &mut [i32], stream: Stream) -> Result<(), Cause> {
        let _ = stream;
        let bytes = size_of_val(into).min(numbers.bytes());
        // SAFETY: the buffer has so many bytes, in the memory of the host.
        unsafe { numbers.data().copy_to_nonoverlapping(into.as_mut_ptr().cast(), bytes) };
        Ok(())
    }

    /// What carries the calls that it does not, in the same order.
    fn fallback(&self) -> Result<&dyn Transport, String> {
        Err("it carries everything".into())
    }

    /// Meets the other ranks of a communicator that is about to be used for the first time. Collective. What comes of it is
    /// attached to the communicator, and dropped when that is freed.
    fn attach(&self, comm: &Arc<Comm>) -> Result<(), Error> {
        let _ = comm;
        Ok(())
    }

    /// Whether a message has to be as long as its receive says, also where a shorter one would do.
    fn has_exact_lengths(&self) -> bool {
        false
    }

    /// A stream of its own, if it carries a call there without waiting, for an operation that is started. Collective on a
    /// communicator's first such operation.
    fn own_stream(&self, call: &Call) -> Result<Option<Stream>, Error> {
        let _ = call;
        Ok(None)
    }

    /// What calls have put on streams, and has not happened yet. Called from the watchdog's thread.
    fn unfinished(&self) -> Vec<Unfinished> {
        Vec::new()
    }

    /// The program ends: from now on there are no calls.
    fn stop(&self) {}
}

/// A transport that can be chosen.
#[derive(Debug)]
pub struct Row {
    /// What `MPI4JAX_TRANSPORT` calls it.
    pub name: &'static str,
    /// Where the arrays are that it takes.
    pub platforms: &'static [Platform],
    /// Among those that could start, `auto` takes the highest for arrays on GPUs, and never a 0.
    pub priority: u8,
    /// Whether it could start, or why not. Asks this process only, and starts nothing.
    pub probe: fn(Platform) -> Result<(), String>,
    /// What `auto` asks all ranks together, besides.
    pub suits: fn() -> Result<bool, Cause>,
    pub start: fn(Platform) -> Result<Box<dyn Transport>, String>,
    /// Starting is collective over `MPI_COMM_WORLD`, or has to be done before the first communicator is used.
    pub starts_early: bool,
    /// Reads settings of its own, `auto` if it may be chosen by that; what the user may want to know of them.
    pub settings: fn(auto: bool) -> Result<Option<String>, Cause>,
    /// Why its messages do not meet those of MPI, if they do not.
    pub messages_apart: fn() -> Option<&'static str>,
    /// Whether XLA packs ghost cells into messages for it, because it does not reach the blocks.
    pub takes_packed: fn(Platform) -> bool,
}

impl Row {
    pub fn is_for(&self, platform: Platform) -> bool {
        self.platforms.contains(&platform)
    }
}

/// A row for what most transports have in common.
const PLAIN: Row = Row {
    name: "mpi",
    platforms: &[Platform::Cpu],
    priority: 0,
    probe: |_| Ok(()),
    suits: || Ok(true),
    start: |_| Ok(Box::new(Mpi)),
    starts_early: false,
    settings: |_| Ok(None),
    messages_apart: || None,
    takes_packed: |platform| platform == Platform::Cuda,
};

const ROWS: &[Row] = &[
    PLAIN,
    Row {
        name: "staged",
        // On the CPU for tests: the whole path, with host memory in the part of the device.
        platforms: &Platform::ALL,
        priority: 1,
        probe: |platform| if platform == Platform::Cpu { Ok(()) } else { device::support() },
        start: |platform| match platform {
            Platform::Cpu => Ok(Box::new(Staged::new("staged", Device::Host, Mpi))),
            Platform::Cuda => start_staged("staged"),
        },
        takes_packed: |_| true,
        ..PLAIN
    },
    Row {
        name: "cuda-mpi",
        platforms: &[Platform::Cuda],
        priority: 2,
        probe: |_| direct::probe_mpi(),
        suits: || Ok(direct::is_mpi_aware()),
        start: |_| {
            direct::probe_mpi()?;
            let direct = Direct::new("cuda-mpi", driver()?, Mpi);
            Ok(Box::new(Route::new(direct, start_staged("cuda-mpi"))))
        },
        ..PLAIN
    },
    Row {
        name: nccl::NAME,
        platforms: &[Platform::Cuda],
        priority: 3,
        probe: |_| nccl::probe(),
        suits: nccl::one_gpu_each,
        start: |_| Ok(Box::new(Route::new(Nccl::start(), start_staged("staged")))),
        settings: nccl::settings,
        messages_apart: nccl::messages_apart,
        ..PLAIN
    },
    Row {
        name: "ucx",
        platforms: &Platform::ALL,
        probe: ucx::probe,
        start: |platform| {
            let ucx = Ucx::start()?;
            let on_host = Route::new(ucx, Ok(Box::new(Mpi)));
            if platform == Platform::Cpu {
                return Ok(Box::new(on_host));
            }
            ucx::probe(platform)?;
            ucx.reaches_cuda()?;
            let staged = Staged::new("ucx", Device::Gpu(driver()?), on_host);
            Ok(Box::new(Route::new(Direct::new("ucx", driver()?, ucx), Ok(Box::new(staged)))))
        },
        starts_early: true,
        messages_apart: || Some("with MPI4JAX_TRANSPORT=ucx, send and recv do not meet the messages of MPI"),
        ..PLAIN
    },
];

fn driver() -> Result<&'static Driver, String> {
    device::support()?;
    cuda::driver().map_err(|error| error.to_string())
}

fn start_staged(name: &'static str) -> Result<Box<dyn Transport>, String> {
    Ok(Box::new(Staged::new(name, Device::Gpu(driver()?), Mpi)))
}

/// The transports that are running.
fn running() -> impl Iterator<Item = &'static dyn Transport> {
    Platform::ALL.into_iter().filter_map(|platform| select::running(platform))
}

/// Tells transports of a communicator. Collective where one of them needs it to be.
pub fn attach(comm: &Arc<Comm>) -> Result<(), Error> {
    running().try_for_each(|transport| transport.attach(comm))
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

/// What is on streams.
pub fn unfinished() -> Vec<Unfinished> {
    running().flat_map(|transport| transport.unfinished()).collect()
}

/// Tells every transport that the program ends.
pub fn stop() {
    running().for_each(|transport| transport.stop());
}

/// A message that has been received.
#[derive(Clone, Copy, Debug)]
pub struct Arrived {
    pub source: i32,
    pub tag: i32,
    /// In elements of the type that was asked for.
    pub count: usize,
}

/// What every transport does with a message, once it is in the result's memory: says who it is from,
/// compares its length with what was asked for, and takes a sample of it.
#[inline]
pub fn arrive(call: &Call, message: &Arrived) -> Result<(), Cause> {
    if call.site.runs.is_sampled() {
        samples::received(call, message.source, message.tag, message.count);
    }
    if let Some(received) = call.received {
        // SAFETY: a result of two int32, checked by the frame's decoder.
        unsafe { received.data().cast::<[i32; 2]>().write_unaligned([message.source, message.tag]) };
    }
    match &call.recv {
        Some(recv) if message.count != recv.count() => short(call, recv, message),
        _ => Ok(()),
    }
}

#[cold]
fn short(call: &Call, recv: &Buffer, message: &Arrived) -> Result<(), Cause> {
    // A rank at the end of a chain receives from nobody, and whoever asks for a status can see the length.
    if !call.status.is_some() && call.envelope.source != wildcards().proc_null {
        return Err(Cause::ShortMessage {
            function: call.site.mpi_name(),
            received: message.count,
            source_rank: message.source,
            expected: recv.count(),
        });
    }
    let size = recv.dtype().size();
    // SAFETY: no transport lets more arrive than fits, so `message.count < recv.count`. Results must not
    // show uninitialised memory.
    unsafe { recv.data().add(message.count * size).write_bytes(0, (recv.count() - message.count) * size) };
    Ok(())
}

/// Fills the `MPI_Status` that a receive was given, for a message that MPI knows nothing of.
fn write_status(call: &Call, arrived: &Arrived) -> Result<(), Cause> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_named_as_their_transports() {
        for row in ROWS.iter().filter(|row| !row.starts_early) {
            for &platform in row.platforms {
                if let Ok(transport) = (row.start)(platform) {
                    assert_eq!(transport.name(), row.name);
                }
            }
        }
    }
}
