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

/// An operand or result of some int32.
///
/// # Safety
/// `buffer` is XLA's.
#[inline(always)]
unsafe fn int32s(
    operand: &'static str,
    buffer: *const c_api::Buffer,
    expected: usize,
) -> Result<Buffer, Cause> {
    // SAFETY: promised by the caller.
    let buffer = unsafe { read(buffer) }?;
    match (buffer.dtype(), buffer.count()) {
        (Dtype::Int32, count) if count == expected => Ok(buffer),
        (dtype, count) => Err(Cause::Envelope { operand, expected, dtype: dtype.name(), count }),
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
            [.., last] => int32s("operand", *last, EagerCall::LEN)?,
            [] => return Err(Cause::Buffers { operand: "operand", expected: 1, actual: 0 }),
        }
    };
    let mut numbers = [0; EagerCall::LEN];
    transport.read_numbers(&operand, &mut numbers, stream)?;
    Ok(EagerCall::decode(numbers))
}

/// Reads the buffers of one side; those of the arrays after the first are left to the caller.
///
/// # Safety
/// `buffers` is what XLA passed.
#[inline(always)]
unsafe fn side<'a>(
    operand: &'static str,
    buffers: &'a c_api::Buffers,
    arrays: usize,
    payload: &mut Option<Buffer>,
    numbers: (usize, &mut Option<Buffer>),
) -> Result<&'a [*const c_api::Buffer], Cause> {
    // SAFETY: promised by the caller.
    unsafe {
        let buffers = without_tokens(buffers);
        let (length, numbers) = numbers;
        let expected = arrays + usize::from(length > 0);
        if buffers.len() != expected {
            return Err(Cause::Buffers { operand, expected, actual: buffers.len() });
        }
        let (arrays, rest) = buffers.split_at(arrays);
        if let [last] = rest {
            *numbers = Some(int32s(operand, *last, length)?);
        }
        let [first, others @ ..] = arrays else { return Ok(&[]) };
        *payload = Some(read(*first)?);
        Ok(others)
    }
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
    let arrays = |extent| if extent == Extent::None { 0 } else { arrays };
    let (mut given, mut received) = (None, None);
    // SAFETY: promised by the caller.
    let mut sides = || unsafe {
        let numbers = (site.operand.len(), &mut given);
        let operands = arrays(extents.send) + usize::from(site.ragged.is_some());
        let more = side("operand", &frame.args, operands, &mut call.send, numbers)?;
        let numbers = (site.received(), &mut received);
        let more_results = side("result", &frame.rets, arrays(extents.recv), &mut call.recv, numbers)?;
        for (&from, &to) in more.iter().zip(more_results) {
            others.push((read(from)?, read(to)?));
        }
        if let (Some(ragged), [last]) = (&site.ragged, more) {
            let given = counts_in(*last, ragged, counts)?;
            transport.read_numbers(&given, counts, call.stream)?;
        }
        Ok(())
    };
    sides().map_err(|cause| site.error(cause))?;
    (call.others, call.counts) = (others, counts);
    call.received = received;
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

/// Where an operand has its counts, one or two for each rank, for which there is room then.
///
/// # Safety
/// `buffer` is XLA's.
unsafe fn counts_in(
    buffer: *const c_api::Buffer,
    ragged: &Ragged,
    counts: &mut Counts,
) -> Result<Buffer, Cause> {
    let ranks = ragged.ranks();
    // SAFETY: promised by the caller.
    unsafe {
        let is_both = read(buffer)?.count() == 2 * ranks;
        counts.resize(if is_both { 2 * ranks } else { ranks }, 0);
        int32s("operand", buffer, counts.len())
    }
}

/// Lets an operand say who a message goes to and comes from.
pub fn address(call: &mut Call, peers: Peers) -> Result<(), Error> {
    if !call.site.op.row().has_peer {
        return Ok(());
    }
    call.envelope = peers.into();
    call.check_envelope(wildcards())
}
