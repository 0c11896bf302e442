//! Reading the buffers of a call frame.
//!
//! A frame is XLA's: its pointers point to what their types say, and its arrays have as many members as it
//! says. What a frame holds is a program's, which may have been exported elsewhere, or changed: data types and
//! shapes are checked, and errors where they are wrong.

pub mod started;

use super::c_api::{self, CallFrame};
use super::statuses;
use crate::call::{Blocks, Call, EagerCall, Peers, Stream};
use crate::error::{Cause, Error};
use crate::mpilib::wildcards;
use crate::ops::{Buffer, Counts, Dtype, Extent, PACKED, Ragged};
use crate::transport::Transport;

#[cold]
fn no_dtype(code: i32) -> Cause {
    match PACKED.iter().find(|packed| packed.xla_code == code) {
        Some(packed) => Cause::PackedDtype { name: packed.name, carrier: packed.carrier.name() },
        None => Cause::UnknownDtype { code },
    }
}

/// The length of an array of XLA's.
#[inline(always)]
fn length(size: i64) -> usize {
    usize::try_from(size).unwrap_or(0)
}

/// The operands or the results of a frame, without XLA's tokens, which come last.
///
/// # Safety
/// `buffers` is what XLA passed: its array has `size` members.
#[inline(always)]
unsafe fn without_tokens(buffers: &c_api::Buffers) -> &[*const c_api::Buffer] {
    let size = length(buffers.size);
    if size == 0 {
        return &[];
    }
    // SAFETY: promised by the caller; buffers are the only kind of argument that the interface has.
    unsafe {
        let mut buffers = std::slice::from_raw_parts(buffers.buffers, size);
        while let [others @ .., last] = buffers
            && (**last).dtype == c_api::TYPE_TOKEN
        {
            buffers = others;
        }
        buffers
    }
}

/// # Safety
/// `buffer` is XLA's.
#[inline(always)]
unsafe fn read(buffer: *const c_api::Buffer) -> Result<Buffer, Cause> {
    // SAFETY: promised by the caller; `dims` has `rank` members.
    unsafe {
        let buffer = &*buffer;
        let dtype = Dtype::from_xla(buffer.dtype).ok_or_else(|| no_dtype(buffer.dtype))?;
        let mut count = Some(1usize);
        for axis in 0..length(buffer.rank) {
            let dim = usize::try_from(*buffer.dims.add(axis)).ok();
            count = count.zip(dim).and_then(|(count, dim)| count.checked_mul(dim));
        }
        // Nothing in memory is larger than that.
        let fits =
            |count: &usize| count.checked_mul(dtype.size()).is_some_and(|n| isize::try_from(n).is_ok());
        let Some(count) = count.filter(fits) else {
            let dims = std::slice::from_raw_parts(buffer.dims, length(buffer.rank));
            return Err(Cause::Shape { dims: dims.into() });
        };
        Ok(Buffer::new(buffer.data.cast(), dtype, count))
    }
}

/// A buffer that has to hold some int32.
#[inline(always)]
fn int32s(operand: &'static str, buffer: Buffer, expected: usize) -> Result<Buffer, Cause> {
    match (buffer.dtype(), buffer.count()) {
        (Dtype::Int32, count) if count == expected => Ok(buffer),
        (dtype, count) => Err(Cause::Envelope { operand, expected, dtype: dtype.name(), count }),
    }
}

/// The buffers of one side of a frame, to be read one after the other.
struct Side<'a> {
    operand: &'static str,
    buffers: std::slice::Iter<'a, *const c_api::Buffer>,
}

impl<'a> Side<'a> {
    /// # Safety
    /// `buffers` is what XLA passed.
    #[inline(always)]
    unsafe fn new(
        operand: &'static str,
        buffers: &'a c_api::Buffers,
        expected: usize,
    ) -> Result<Self, Cause> {
        // SAFETY: promised by the caller.
        let buffers = unsafe { without_tokens(buffers) };
        if buffers.len() != expected {
            return Err(Cause::Buffers { operand, expected, actual: buffers.len() });
        }
        Ok(Self { operand, buffers: buffers.iter() })
    }

    #[inline(always)]
    fn read(&mut self) -> Result<Buffer, Cause> {
        let Some(&buffer) = self.buffers.next() else { return Err(Cause::missing(self.operand)) };
        // SAFETY: XLA's, as promised to `new`.
        unsafe { read(buffer) }
    }

    #[inline(always)]
    fn int32s(&mut self, expected: usize) -> Result<Buffer, Cause> {
        int32s(self.operand, self.read()?, expected)
    }

    /// Reads counts of rows, one or two for each rank, into a list that gets as long.
    fn counts(
        &mut self,
        ragged: &Ragged,
        counts: &mut Counts,
        transport: &Transport,
        stream: Stream,
    ) -> Result<(), Cause> {
        let (given, ranks) = (self.read()?, ragged.ranks());
        counts.resize(if given.count() == 2 * ranks { 2 * ranks } else { ranks }, 0);
        transport.read_numbers(&int32s(self.operand, given, counts.len())?, counts, stream)
    }
}

/// The operand of an eager call.
///
/// # Safety
/// `frame` is what XLA passed to the execute stage. `transport` reads the memory of its arrays.
#[inline]
pub unsafe fn eager_call(
    frame: &CallFrame,
    transport: &Transport,
    stream: Stream,
) -> Result<EagerCall, Cause> {
    // SAFETY: promised by the caller.
    let operand = unsafe {
        match without_tokens(&frame.args) {
            [.., last] => int32s("operand", read(*last)?, EagerCall::LEN)?,
            [] => return Err(Cause::Buffers { operand: "operand", expected: 1, actual: 0 }),
        }
    };
    let mut numbers = [0; EagerCall::LEN];
    transport.read_numbers(&operand, &mut numbers, stream)?;
    Ok(EagerCall::decode(numbers))
}

/// Reads the buffers of a frame into a call that has none yet: a call is too large to be passed around. What an eager
/// call says is given.
///
/// # Safety
/// `frame` is what XLA passed to the execute stage of the call's site.
#[inline(always)]
pub unsafe fn fill<'a>(
    call: &mut Call<'a>,
    frame: &CallFrame,
    transport: &Transport,
    eager: Option<EagerCall>,
    (others, counts): (&'a mut Blocks, &'a mut Counts),
) -> Result<(), Error> {
    let site = call.site;
    let (extents, arrays) = (site.extents(), site.arrays());
    let [sent, received] =
        [extents.send, extents.recv].map(|extent| if extent == Extent::None { 0 } else { arrays });
    let mut given = None;
    let mut sides = || {
        let numbers = usize::from(site.ragged.is_some()) + usize::from(!site.operand.is_empty());
        let learnt = site.received();
        // SAFETY: promised by the caller.
        let (mut operands, mut results) = unsafe {
            let operands = Side::new("operand", &frame.args, sent + numbers)?;
            (operands, Side::new("result", &frame.rets, received + usize::from(learnt > 0))?)
        };
        if sent > 0 {
            call.send = Some(operands.read()?);
        }
        if received > 0 {
            call.recv = Some(results.read()?);
        }
        for _ in 1..arrays {
            others.push((operands.read()?, results.read()?));
        }
        if let Some(ragged) = &site.ragged {
            operands.counts(ragged, counts, transport, call.stream)?;
        }
        if !site.operand.is_empty() {
            given = Some(operands.int32s(site.operand.len())?);
        }
        if learnt > 0 {
            call.received = Some(results.int32s(learnt)?);
        }
        Ok(())
    };
    sides().map_err(|cause| site.error(cause))?;
    (call.others, call.counts) = (others, counts);
    call.check()?;
    let peers = match (eager, given) {
        (Some(EagerCall::Run { peers, status, .. }), _) => {
            call.status = statuses::checked(status).map_err(|cause| site.error(cause))?;
            Some(peers)
        }
        (None, Some(given)) => {
            transport.read_peers(&given, call.stream).map_err(|cause| site.error(cause))?
        }
        _ => None,
    };
    peers.map_or(Ok(()), |peers| address(call, peers))
}

/// Lets an operand say the source, destination and tags of a message.
pub fn address(call: &mut Call, peers: Peers) -> Result<(), Error> {
    if !call.site.op.row().has_peer {
        return Ok(());
    }
    call.envelope = peers.into();
    call.check_envelope(wildcards())
}
