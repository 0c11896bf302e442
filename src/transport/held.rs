//! The memory of an operation between its start and the wait for it.
//!
//! It is the host's, wherever the arrays are: what is started goes through MPI, and between the two XLA may move what it owns.

use std::sync::OnceLock;

use super::Platform;
use super::pool::{Lease, Pool, bytes_to_keep};
use crate::call::{Call, Stream};
use crate::device::{Device, HostDevice, Place};
use crate::error::Cause;
use crate::ops::{Buffer, Dtype, Op};

/// What memory there is between the start and the wait, and what for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
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

impl Held {
    pub fn has_operand(&self) -> bool {
        self.sends || self.keeps || self.initial
    }
}

/// Where the arrays of a platform are, and the memory that is used again for operations on them.
#[derive(Debug)]
pub struct Home {
    place: Place,
    pool: Pool<Place>,
}

/// The only one of a platform.
pub fn home(platform: Platform) -> Result<&'static Home, Cause> {
    static HOMES: [OnceLock<Result<Home, String>>; Platform::ALL.len()] =
        [const { OnceLock::new() }; Platform::ALL.len()];
    let made = HOMES[platform as usize].get_or_init(|| {
        let place = match platform {
            Platform::Cpu => Place::Host(HostDevice),
            Platform::Cuda => Place::Cuda(super::device()?),
        };
        Ok(Home { place, pool: Pool::new(bytes_to_keep()?) })
    });
    made.as_ref().map_err(|message| Cause::Setting { message: message.clone() })
}

type Leased = Lease<'static, Place>;

impl Home {
    /// Memory that the device has nothing to do with so far.
    fn lease(&'static self, bytes: usize) -> Result<Leased, Cause> {
        let mut lease = self.pool.lease(&self.place, bytes)?;
        lease.settled = true;
        Ok(lease)
    }

    /// Copies to an array, in the order of a stream. What was leased is in use until then.
    ///
    /// # Safety
    /// `to` is an array at home, which holds no more than was leased, until the stream has come past it.
    unsafe fn upload(&self, lease: &mut Leased, to: &Buffer, stream: Stream) -> Result<(), Cause> {
        // Where this fails, nobody knows until when.
        lease.settled = false;
        // SAFETY: promised by the caller.
        unsafe { self.place.upload(lease.data(), to.data, to.bytes(), stream)? };
        lease.until(self.place.mark(stream)?);
        Ok(())
    }

    /// Fills an array with zeros, in the order of a stream.
    ///
    /// # Safety
    /// As for `upload`.
    pub unsafe fn clear(&'static self, array: &Buffer, stream: Stream) -> Result<(), Cause> {
        let mut lease = self.lease(array.bytes())?;
        // SAFETY: promised by the caller; so many bytes were leased.
        unsafe {
            lease.data().write_bytes(0, array.bytes());
            self.upload(&mut lease, array, stream)
        }
    }

    /// Writes numbers to an array, in the order of a stream.
    ///
    /// # Safety
    /// `to` is an array at home of so many.
    pub unsafe fn write<const N: usize>(
        &self,
        numbers: [f32; N],
        to: *mut [f32; N],
        stream: Stream,
    ) -> Result<(), Cause> {
        // SAFETY: promised by the caller.
        unsafe { self.place.fill(to.cast(), numbers.map(f32::to_bits), stream) }
    }
}

/// The memory of an operation that is under way.
#[derive(Default)]
pub struct Memory {
    leases: Vec<Leased>,
    send: Option<Buffer>,
    recv: Option<Buffer>,
}

// SAFETY: the buffers point to what the leases own.
unsafe impl Send for Memory {}

impl Memory {
    /// Memory with a copy of the operand, for which the host waits if it is in the order of a stream.
    ///
    /// # Safety
    /// `operand` is an array at home.
    pub unsafe fn of(
        home: &'static Home,
        op: Op,
        held: &Held,
        operand: Option<&Buffer>,
        stream: Stream,
    ) -> Result<Self, Cause> {
        let mut memory = Self::default();
        // SAFETY (for both copies): promised by the caller; the stream has come past them below.
        if let (true, Some(operand)) = (held.sends || held.keeps, operand) {
            memory.send = Some(unsafe { memory.copied(home, operand, stream)? });
        }
        memory.recv = match (held.gives, operand, memory.send) {
            // In one place: MPI copies nothing then.
            (Some((dtype, count)), _, Some(send))
                if op == Op::Allreduce && !held.keeps && (send.dtype, send.count) == (dtype, count) =>
            {
                Some(send)
            }
            (Some((dtype, count)), Some(operand), _)
                if held.initial && (operand.dtype, operand.count) == (dtype, count) =>
            {
                Some(unsafe { memory.copied(home, operand, stream)? })
            }
            (Some((dtype, count)), ..) => Some(memory.leased(home, dtype, count)?),
            (None, ..) => None,
        };
        // A rank has come to a barrier when its stream has.
        if memory.leases.is_empty() || memory.leases.iter().any(|lease| !lease.settled) {
            home.place.synchronize(stream)?;
        }
        memory.leases.iter_mut().for_each(|lease| lease.settled = true);
        Ok(memory)
    }

    fn leased(&mut self, home: &'static Home, dtype: Dtype, count: usize) -> Result<Buffer, Cause> {
        let bytes = count.checked_mul(dtype.size()).filter(|&bytes| isize::try_from(bytes).is_ok());
        let bytes = bytes.ok_or_else(|| Cause::Shape { dims: [count as i64].into() })?;
        let mut lease = home.lease(bytes)?;
        let data = lease.data();
        self.leases.push(lease);
        Ok(Buffer { data, dtype, count })
    }

    /// # Safety
    /// `operand` is an array at home until the stream has come past the copy.
    unsafe fn copied(
        &mut self,
        home: &'static Home,
        operand: &Buffer,
        stream: Stream,
    ) -> Result<Buffer, Cause> {
        let buffer = self.leased(home, operand.dtype, operand.count)?;
        self.leases.iter_mut().last().into_iter().for_each(|lease| lease.settled = false);
        // SAFETY: promised by the caller; both hold so many bytes, and the lease is nobody else's.
        unsafe { home.place.download(operand.data, buffer.data, buffer.bytes(), stream)? };
        Ok(buffer)
    }

    /// The buffers of a call on it.
    pub fn lend(&self, call: &mut Call, held: &Held) {
        call.send = self.send.filter(|_| held.sends);
        call.recv = self.recv;
    }

    /// What a wait gives: what was received, and the operand.
    pub fn results(&self, held: &Held) -> [Option<Buffer>; 2] {
        [self.recv, self.send.filter(|_| held.keeps)]
    }

    /// Copies one of the results to an array of its size, in the order of a stream.
    ///
    /// # Safety
    /// `to` is an array at home until the stream has come past it.
    pub unsafe fn give(
        &mut self,
        result: &Buffer,
        to: &Buffer,
        home: &Home,
        stream: Stream,
    ) -> Result<(), Cause> {
        let mut leases = self.leases.iter_mut();
        match leases.find_map(|lease| (lease.data() == result.data).then_some(lease)) {
            // SAFETY: promised by the caller.
            Some(lease) => unsafe { home.upload(lease, to, stream) },
            None => Err(Cause::Buffers { what: "result", expected: 0, actual: 1 }),
        }
    }
}
