//! The memory of an operation between its start and the wait for it.
//!
//! It is ours: between the two, XLA may move what it owns. It is the host's, wherever the arrays are, for what goes through
//! MPI, and a GPU's for what is put on a stream there.

use std::sync::OnceLock;

use serde::Deserialize;

use super::Platform;
use super::pool::{Lease, Pool};
use crate::call::{Call, Stream};
use crate::device::Device;
use crate::device::cuda::Mark;
use crate::error::Cause;
use crate::ops::{Buffer, Dtype, Op};

/// What memory there is between the start and the wait, and what for.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct RequestLayout {
    /// The operand goes to MPI.
    pub sends: bool,
    /// The operand is a result of the wait.
    pub keeps: bool,
    /// The operand is in the memory of what is received at first, and stays there if there is no sender. Of a wait: so
    /// are zeros, which stay there if nothing was started.
    pub initial: bool,
    /// What is received.
    pub gives: Option<(Dtype, usize)>,
    /// Nothing is communicated.
    pub local: bool,
}

impl RequestLayout {
    pub fn has_operand(&self) -> bool {
        self.sends || self.keeps || self.initial
    }
}

type Lazy = OnceLock<Result<Pool, String>>;

/// With memory of the host, the only one of a platform.
pub fn memory_pool(platform: Platform) -> Result<&'static Pool, Cause> {
    static POOLS: [Lazy; Platform::ALL.len()] = [const { Lazy::new() }; Platform::ALL.len()];
    started(&POOLS[platform as usize], || match platform {
        Platform::Cpu => Ok(Device::Host),
        Platform::Cuda => super::driver().map(Device::Gpu),
    })
}

/// With memory of a GPU.
pub fn memory_pool_on_gpu() -> Result<&'static Pool, Cause> {
    static POOL: Lazy = Lazy::new();
    started(&POOL, || super::driver().map(Device::WithinGpu))
}

fn started(
    lazy: &'static Lazy,
    device: impl FnOnce() -> Result<Device, String>,
) -> Result<&'static Pool, Cause> {
    let pool = lazy.get_or_init(|| device().map(Pool::new));
    pool.as_ref().map_err(|message| Cause::Setting { message: message.clone() })
}

/// The memory of an operation that is under way.
#[derive(Default)]
pub struct RequestMemory {
    leases: Vec<Lease<'static>>,
    send: Option<Buffer>,
    recv: Option<Buffer>,
}

// SAFETY: the buffers point to what the leases own.
unsafe impl Send for RequestMemory {}

impl RequestMemory {
    /// Memory with a copy of the operand, for which the host waits if it is in the order of a stream.
    ///
    /// # Safety
    /// `operand` is an array of the platform.
    pub unsafe fn of(
        pool: &'static Pool,
        op: Op,
        layout: &RequestLayout,
        operand: Option<&Buffer>,
        stream: Stream,
    ) -> Result<Self, Cause> {
        let mut memory = Self::default();
        // SAFETY (for both copies): promised by the caller; the stream has come past them below.
        if let (true, Some(operand)) = (layout.sends || layout.keeps, operand) {
            memory.send = Some(unsafe { memory.copied(pool, operand, stream)? });
        }
        memory.recv = match (layout.gives, operand, memory.send) {
            // In place: MPI copies nothing then.
            (Some((dtype, count)), _, Some(send))
                if op == Op::Allreduce && !layout.keeps && (send.dtype(), send.count()) == (dtype, count) =>
            {
                Some(send)
            }
            (Some((dtype, count)), Some(operand), _)
                if layout.initial && (operand.dtype(), operand.count()) == (dtype, count) =>
            {
                Some(unsafe { memory.copied(pool, operand, stream)? })
            }
            (Some((dtype, count)), ..) => Some(memory.leased(pool, dtype, count, stream)?),
            (None, ..) => None,
        };
        // A rank has come to a barrier when its stream has.
        if memory.leases.is_empty() || memory.leases.iter().any(|lease| !lease.settled) {
            pool.device().synchronize(stream)?;
        }
        memory.leases.iter_mut().for_each(|lease| lease.settled = true);
        Ok(memory)
    }

    fn leased(
        &mut self,
        pool: &'static Pool,
        dtype: Dtype,
        count: usize,
        stream: Stream,
    ) -> Result<Buffer, Cause> {
        let bytes = count.checked_mul(dtype.size()).filter(|&bytes| isize::try_from(bytes).is_ok());
        let bytes = bytes.ok_or_else(|| Cause::Shape { dims: [count as i64].into() })?;
        let mut lease = pool.lease(bytes, stream)?;
        lease.settled = true;
        let data = lease.data();
        self.leases.push(lease);
        // SAFETY: so much was leased, and goes back with the request's memory.
        Ok(unsafe { Buffer::new(data, dtype, count) })
    }

    /// # Safety
    /// `operand` is an array of the platform until the stream has come past the copy.
    unsafe fn copied(
        &mut self,
        pool: &'static Pool,
        operand: &Buffer,
        stream: Stream,
    ) -> Result<Buffer, Cause> {
        let buffer = self.leased(pool, operand.dtype(), operand.count(), stream)?;
        self.leases.iter_mut().last().into_iter().for_each(|lease| lease.settled = false);
        // SAFETY: promised by the caller; both hold so many bytes, and the lease is nobody else's.
        unsafe { pool.device().download(operand.data(), buffer.data(), buffer.bytes(), stream)? };
        Ok(buffer)
    }

    /// The buffers of a call on it.
    pub fn lend(&self, call: &mut Call, layout: &RequestLayout) {
        call.send = self.send.filter(|_| layout.sends);
        call.recv = self.recv;
    }

    /// What a wait gives: what was received, and the operand.
    pub fn results(&self, layout: &RequestLayout) -> [Option<Buffer>; 2] {
        [self.recv, self.send.filter(|_| layout.keeps)]
    }

    /// Lets a stream wait for the end of what was put on another one, until which all of this is in use.
    pub fn follow(&mut self, end: &Mark, stream: Stream) -> Result<(), Cause> {
        end.hold(stream)?;
        self.leases.iter_mut().try_for_each(|lease| lease.until_now(stream))
    }

    /// Copies one of the results to an array of its size, in the order of a stream.
    ///
    /// # Safety
    /// `to` is an array of the platform until the stream has come past it.
    pub unsafe fn give(&mut self, result: &Buffer, to: &Buffer, stream: Stream) -> Result<(), Cause> {
        let mut leases = self.leases.iter_mut();
        match leases.find_map(|lease| (lease.data() == result.data()).then_some(lease)) {
            // SAFETY: promised by the caller.
            Some(lease) => unsafe { lease.upload(to.data(), to.bytes(), stream) },
            None => Err(Cause::Buffers { operand: "result", expected: 0, actual: 1 }),
        }
    }
}
