//! Transports: what carries operations between ranks.
//!
//! A [`Transport`] carries the operations on the arrays of one platform. There are five of them, and each has a file with its
//! type and its [`Descriptor`]:
//!
//! | type | file | arrays on | what carries operations |
//! | --- | --- | --- | --- |
//! | [`HostMpi`] | `host_mpi.rs` | CPU | MPI |
//! | [`StagedMpi`] | `staged_mpi.rs` | GPU | MPI, on copies in the memory of the host |
//! | [`CudaAwareMpi`] | `cuda_aware_mpi.rs` | GPU | MPI, given device pointers |
//! | [`Nccl`] | `nccl/` | GPU | NCCL, on XLA's stream |
//! | [`Ucx`], [`CudaUcx`] | `ucx/` | CPU, GPU | UCX for messages, MPI for collectives |
//!
//! `select.rs` chooses among them by their descriptors. To add one: such a file, a variant of [`AnyTransport`], and a line in
//! [`Descriptor::ALL`]. The rest is what they share: `mpi/` has the calls of MPI, `requests/` the nonblocking operations.

mod cuda_aware_mpi;
mod descriptor;
mod host_mpi;
mod message;
mod mpi;
mod nccl;
mod pool;
mod requests;
mod select;
mod staged_mpi;
/// The example of `docs/extending.md`, which only the tests have.
#[cfg(feature = "stand-ins")]
#[path = "../../tests/rust/traced.rs"]
mod traced;
mod ucx;

use std::sync::Arc;

use enum_dispatch::enum_dispatch;

pub use self::cuda_aware_mpi::CudaAwareMpi;
pub use self::descriptor::Descriptor;
pub use self::host_mpi::HostMpi;
pub use self::mpi::{set_count_limit, set_sleeps};
pub use self::nccl::{Nccl, Unfinished};
pub use self::pool::Pool;
pub use self::requests::{
    HANDLE, Handle, Request, RequestLayout, RequestMemory, UnderWay, check_room, freeing, keep, start, take,
};
pub use self::select::{
    Overview, attach, choice, messages_apart, overview, select, selected, stop, takes_packed, unfinished,
};
pub use self::staged_mpi::StagedMpi;
#[cfg(feature = "stand-ins")]
pub use self::traced::Traced;
pub use self::ucx::{CudaUcx, Ucx};
use crate::call::{Call, Envelope, Stream};
use crate::comm::Comm;
use crate::device::Device;
use crate::error::{Cause, Error};
use crate::ops::Buffer;

/// The target of events: `MPI4JAX_LOG=transport=debug`.
const TARGET: &str = "mpi4jax::transport";

/// What carries the operations on the arrays of one platform.
///
/// The contract of everything that communicates: it returns when the call's buffers may be reused by the host, or by what
/// comes later on the call's stream; results are in place for the same readers. Any thread may call, several at a time, and
/// two calls on one communicator are made in the order in which the program has them. No lock that operations of another
/// communicator need is held across anything that waits for another rank.
///
/// Only `base` and `execute` have to be written. A transport that passes calls to another one passes `join`, `unfinished` and
/// `stop` on as well.
#[enum_dispatch]
pub trait Transport {
    /// Its name and its pool of staging memory.
    fn base(&self) -> &Base;

    /// The value of `MPI4JAX_TRANSPORT` that chooses it: errors, reports and log lines name it so.
    fn name(&self) -> &'static str {
        self.base().name
    }

    /// The memory that its arrays are in.
    fn device(&self) -> Device {
        self.base().pool.device
    }

    /// Carries out a call, which may be any operation of the table: what the transport cannot do itself it passes to another
    /// one, or refuses with [`Cause::Unsupported`] before it communicates.
    fn execute(&self, call: &Call) -> Result<(), Error>;

    /// For an operation that is about to be started: a stream of the transport's own, if the transport carries the operation
    /// there without waiting. The memory of the operation is then on the GPU, and the host's otherwise.
    fn own_stream(&self, _call: &Call) -> Result<Option<Stream>, Error> {
        Ok(None)
    }

    /// Starts a call on memory of this package, without waiting for another rank: on the stream that `own_stream` has
    /// returned, after what is on the call's stream; otherwise through MPI, in memory of the host.
    ///
    /// # Safety
    /// The call's buffers stay until what is returned has ended.
    unsafe fn start(&self, call: &Call, _own: Option<Stream>) -> Result<UnderWay, Error> {
        // SAFETY: promised by the caller.
        unsafe { requests::post(call) }
    }

    /// Reads an operand of numbers of 32 bits, once the stream has written it, and returns how many
    /// were read: no more than fit into the result.
    fn read_numbers(&self, numbers: &Buffer, into: &mut [i32], stream: Stream) -> Result<(), Cause> {
        staged_mpi::read(&self.base().pool, numbers, into, stream)
    }

    /// Reads an operand with source, destination and tags of a message; None if the transport takes only those that the
    /// program names when it is compiled, and so need not wait for the operand.
    fn read_envelope(&self, from: &Buffer, stream: Stream) -> Result<Option<Envelope>, Cause> {
        let mut numbers = [0; Envelope::LEN];
        self.read_numbers(from, &mut numbers, stream)?;
        Ok(Some(Envelope::decode(numbers)))
    }

    /// Prepares a communicator that is about to be used for the first time, for instance by exchanging addresses. Collective over
    /// it, if it does anything. The result is attached to the communicator.
    fn join(&self, _comm: &Arc<Comm>) -> Result<(), Error> {
        Ok(())
    }

    /// The last operation on each communicator, where it is on a stream and has not ended. Called by the watchdog's thread; never
    /// blocks.
    fn unfinished(&self) -> Vec<Unfinished> {
        Vec::new()
    }

    /// Called at the end of the program, after the last call: completes messages that were sent and not yet transferred.
    fn stop(&self) {}
}

/// The fields that every transport has.
#[derive(Debug)]
pub struct Base {
    pub name: &'static str,
    /// Staging memory of the host, for copies of arrays.
    pub pool: Pool,
}

impl Base {
    pub fn new(name: &'static str, device: Device) -> Self {
        Self { name, pool: Pool::new(device) }
    }
}

/// A transport that was chosen when the program ran.
#[enum_dispatch(Transport)]
#[derive(Debug)]
pub enum AnyTransport {
    HostMpi,
    StagedMpi,
    CudaAwareMpi,
    Nccl,
    Ucx,
    CudaUcx,
    #[cfg(feature = "stand-ins")]
    Traced,
}

impl Descriptor {
    /// The list of all transports. `auto` prefers the later ones.
    pub const ALL: &[&Self] = &[
        #[cfg(feature = "stand-ins")]
        &traced::DESCRIPTOR,
        &host_mpi::DESCRIPTOR,
        &staged_mpi::DESCRIPTOR,
        &cuda_aware_mpi::DESCRIPTOR,
        &nccl::DESCRIPTOR,
        &ucx::DESCRIPTOR,
    ];
}
