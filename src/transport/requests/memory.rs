//! The memory of an operation between its start and the wait for it.
//!
//! It belongs to this package, because XLA may move its own between the two. It is in the host for what goes through MPI, wherever
//! the arrays are, and on a GPU for what is put on a stream there.

use std::mem::ManuallyDrop;

use serde::Deserialize;

use super::super::Transport;
use super::super::pool::Lease;
use crate::call::{Call, Stream};
use crate::device::Device;
use crate::device::cuda::Pointer;
use crate::error::Cause;
use crate::ops::{Buffer, Dtype, Op};

/// Which memory an operation has between its start and the wait, and for what.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct RequestLayout {
    /// The operand is sent.
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

enum Block {
    Host(Lease<'static>),
    Gpu(Pointer),
}

/// The memory of an operation that is under way. It is lost unless it is given back: MPI or a stream may still use it.
pub struct RequestMemory {
    device: Device,
    blocks: ManuallyDrop<Vec<Block>>,
    send: Option<Buffer>,
    recv: Option<Buffer>,
    /// The operand, if the wait gives it.
    operand: Option<Buffer>,
}

// SAFETY: the buffers point to the blocks, which are its own.
unsafe impl Send for RequestMemory {}

impl RequestMemory {
    /// Memory with a copy of the operand. It is on the GPU, in the order of the stream, for an operation that is put on an
    /// own stream; else the host's, and the host waits for the copy.
    ///
    /// # Safety
    /// `operand` is an array of the transport's platform, until the stream has come past the copy.
    pub unsafe fn new(
        transport: &'static impl Transport,
        op: Op,
        layout: &RequestLayout,
        operand: Option<&Buffer>,
        (stream, own): (Stream, Option<Stream>),
    ) -> Result<Self, Cause> {
        let device = transport.device();
        // Not freed after an error: a copy may be under way.
        let mut blocks = ManuallyDrop::new(Vec::new());
        let mut block = |dtype: Dtype, count: usize| {
            let bytes = count.checked_mul(dtype.size()).filter(|&bytes| isize::try_from(bytes).is_ok());
            let bytes = bytes.ok_or_else(|| Cause::Shape { dims: [count as i64].into() })?;
            let (block, data) = match (device, own) {
                (Device::Gpu(driver), Some(_)) => {
                    let pointer = driver.allocate_on(stream, bytes.max(1))?;
                    (Block::Gpu(pointer), pointer as *mut u8)
                }
                _ => {
                    let lease = transport.base().pool.lease(bytes)?;
                    let data = lease.data();
                    (Block::Host(lease), data)
                }
            };
            blocks.push(block);
            // SAFETY: it has this number of bytes.
            Ok::<_, Cause>(unsafe { Buffer::new(data, dtype, count) })
        };
        let mut copied = |operand: &Buffer| {
            let buffer = block(operand.dtype(), operand.count())?;
            // SAFETY: promised by the caller; both hold this number of bytes.
            unsafe { device.copy(operand.data(), buffer.data(), buffer.bytes(), stream)? };
            Ok::<_, Cause>(buffer)
        };
        let own_operand = operand.filter(|_| layout.sends || layout.keeps).map(&mut copied).transpose()?;
        let is_result = |buffer: &Buffer| layout.gives == Some((buffer.dtype(), buffer.count()));
        // In place: MPI copies nothing then.
        let in_place = own_operand.filter(|it| op == Op::Allreduce && !layout.keeps && is_result(it));
        let initial = operand.filter(|operand| layout.initial && is_result(operand));
        let recv = match (layout.gives, in_place, initial) {
            (None, ..) => None,
            (_, Some(operand), _) => Some(operand),
            (_, _, Some(operand)) => Some(copied(operand)?),
            (Some((dtype, count)), ..) => Some(block(dtype, count)?),
        };
        // The host reads what was copied. A barrier must not start before the stream has reached
        // it.
        if own.is_none() && (own_operand.is_some() || initial.is_some() || recv.is_none()) {
            device.synchronize(stream)?;
        }
        Ok(Self {
            device,
            blocks,
            send: own_operand.filter(|_| layout.sends),
            recv,
            operand: own_operand.filter(|_| layout.keeps),
        })
    }

    /// The buffers of a call on it.
    pub fn lend(&self, call: &mut Call) {
        (call.send, call.recv) = (self.send, self.recv);
    }

    /// What a wait gives: what was received, and the operand.
    pub fn results(&self) -> [Option<Buffer>; 2] {
        [self.recv, self.operand]
    }

    /// Copies one of the results to an array of its size, in the order of a stream.
    ///
    /// # Safety
    /// `to` is an array of the platform until the stream has come past it.
    pub unsafe fn copy(&self, result: &Buffer, to: &Buffer, stream: Stream) -> Result<(), Cause> {
        // SAFETY: promised by the caller; the result is not given back before the stream has come past it.
        unsafe { self.device.copy(result.data(), to.data(), to.bytes(), stream) }
    }

    /// Gives it back, once the operation has ended and a stream has come here: the host waits for that, or the GPU.
    pub(super) fn give_back(mut self, stream: Stream) -> Result<(), Cause> {
        // SAFETY: taken once, as `self` goes.
        let blocks = ManuallyDrop::new(unsafe { ManuallyDrop::take(&mut self.blocks) });
        if blocks.iter().any(|block| matches!(block, Block::Host(_))) {
            self.device.synchronize(stream)?;
        }
        for block in ManuallyDrop::into_inner(blocks) {
            match (block, self.device) {
                // SAFETY: the stream waits for the operation.
                (Block::Gpu(pointer), Device::Gpu(driver)) => unsafe { driver.free_on(stream, pointer)? },
                (Block::Gpu(_), Device::Host) => {}
                (Block::Host(lease), _) => drop(lease),
            }
        }
        Ok(())
    }
}
