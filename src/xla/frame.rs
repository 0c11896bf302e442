//! Reading the buffers of a call frame.
//!
//! A frame is XLA's: its pointers point to what their types say, and its arrays have as many members as it
//! says. What a frame holds is a program's, which may have been exported elsewhere, or changed: data types and
//! shapes are checked, and errors where they are wrong.

use smallvec::SmallVec;

use super::c_api::{self, CallFrame};
use super::statuses;
use crate::call::{Blocks, Call, EagerCall, Envelope, Operand, Stream};
use crate::error::{Cause, Error};
use crate::mpilib::wildcards;
use crate::ops::{Buffer, Counts, Dtype, Extent, Extents, PACKED, Ragged};
use crate::transport::{AnyTransport, HANDLE, Handle, RequestLayout, Transport};

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
/// `buffer` is XLA's, and has this type and this number of elements.
#[inline(always)]
unsafe fn placed(buffer: &c_api::Buffer, dtype: Dtype, count: usize) -> Buffer {
    // XLA may put an empty array at the address of another one. Where two addresses are equal, MPI takes the operation for one
    // that is in place. So an empty array gets the address of its own description, which no array
    // has.
    let data = if count == 0 { (&raw const *buffer).cast_mut().cast() } else { buffer.data.cast() };
    // SAFETY: promised by the caller.
    unsafe { Buffer::new(data, dtype, count) }
}

/// The first buffer of one side, if that side has one: it has the type and the number of elements of an earlier run.
///
/// # Safety
/// `buffers` is what XLA passed, for the same operation of a compiled program as in that run.
#[inline(always)]
unsafe fn again(buffers: &c_api::Buffers, known: Option<(Dtype, usize)>) -> Option<Buffer> {
    let (dtype, count) = known?;
    // SAFETY: promised by the caller: there is a buffer, as in the earlier run.
    unsafe { Some(placed(&**buffers.buffers, dtype, count)) }
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
        Ok(placed(buffer, dtype, count))
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

    /// Reads a handle, which is an array of float32.
    fn handle(&mut self) -> Result<Buffer, Cause> {
        let buffer = self.read()?;
        if (buffer.dtype(), buffer.count()) == (Dtype::Float32, HANDLE) {
            return Ok(buffer);
        }
        Err(Cause::Buffers { operand: self.operand, expected: 1, actual: 0 })
    }

    /// Reads counts of rows, one or two for each rank, into `counts`.
    fn counts(
        &mut self,
        ragged: &Ragged,
        counts: &mut Counts,
        transport: &AnyTransport,
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
    transport: &AnyTransport,
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
/// call says is given. A start has its operand, and a handle as its result, which is returned.
///
/// # Safety
/// `frame` is what XLA passed to the execute stage of the call's site.
#[inline(always)]
pub unsafe fn fill<'a>(
    call: &mut Call<'a>,
    frame: &CallFrame,
    transport: &AnyTransport,
    eager: Option<&EagerCall>,
    start: Option<&RequestLayout>,
    (others, counts): (&'a mut Blocks, &'a mut Counts),
) -> Result<Option<Buffer>, Error> {
    let site = call.site;
    if let Some([send, recv]) = site.checked.get() {
        // SAFETY: promised by the caller.
        (call.send, call.recv) = unsafe { (again(&frame.args, *send), again(&frame.rets, *recv)) };
        if let Some(&EagerCall::Run { envelope, status, .. }) = eager {
            address(call, envelope, status)?;
        }
        return Ok(None);
    }
    // SAFETY: promised by the caller.
    unsafe { fill_and_check(call, frame, transport, eager, start, (others, counts)) }
}

/// As `fill`, at the first run of a site, or at each run if what is to be checked differs between runs.
///
/// # Safety
/// See `fill`.
#[inline(never)]
unsafe fn fill_and_check<'a>(
    call: &mut Call<'a>,
    frame: &CallFrame,
    transport: &AnyTransport,
    eager: Option<&EagerCall>,
    start: Option<&RequestLayout>,
    (others, counts): (&'a mut Blocks, &'a mut Counts),
) -> Result<Option<Buffer>, Error> {
    let site = call.site;
    let arrays = site.arrays();
    let (sent, received, learnt) = match (start, site.extents()) {
        (Some(layout), _) => (usize::from(layout.has_operand()), 1, 0),
        (None, Extents { send, recv }) => {
            let [sent, received] = [send, recv].map(|it| if it == Extent::None { 0 } else { arrays });
            (sent, received, site.received())
        }
    };
    let (mut given, mut handle) = (None, None);
    let mut sides = || {
        let numbers = usize::from(site.ragged.is_some()) + usize::from(!site.operand.is_empty());
        // SAFETY: promised by the caller.
        let (mut operands, mut results) = unsafe {
            let operands = Side::new("operand", &frame.args, sent + numbers)?;
            (operands, Side::new("result", &frame.rets, received + usize::from(learnt > 0))?)
        };
        if sent > 0 {
            call.send = Some(operands.read()?);
        }
        if start.is_some() {
            handle = Some(results.handle()?);
        } else {
            if received > 0 {
                call.recv = Some(results.read()?);
            }
            for _ in 1..arrays {
                others.push((operands.read()?, results.read()?));
            }
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
    if start.is_none() {
        call.check()?;
    }
    match (eager, given) {
        (Some(&EagerCall::Run { envelope, status, .. }), _) => address(call, envelope, status)?,
        (None, Some(given)) => {
            let read = transport.read_envelope(&given, call.stream);
            if let Some(envelope) = read.map_err(|cause| site.error(cause))? {
                address(call, envelope, 0)?;
            }
        }
        _ => {}
    }
    let has_numbers = site.ragged.is_some() || site.operand == Operand::Peers || learnt > 0;
    if start.is_none() && arrays == 1 && !has_numbers {
        let known = |buffer: Option<Buffer>| buffer.map(|buffer| (buffer.dtype(), buffer.count()));
        let _ = site.checked.set([known(call.send), known(call.recv)]);
    }
    Ok(handle)
}

/// Takes source, destination and tags of a message, and the address of the program's status, from an operand.
fn address(call: &mut Call, envelope: Envelope, status: usize) -> Result<(), Error> {
    if status != 0 {
        call.status = statuses::checked(status).map_err(|cause| call.site.error(cause))?;
    }
    if call.site.op.row().has_peer {
        call.envelope = envelope;
        call.check_envelope(wildcards())?;
    }
    Ok(())
}

/// The only result of a frame.
///
/// # Safety
/// `frame` is what XLA passed to the execute stage.
pub unsafe fn result(frame: &CallFrame) -> Result<Buffer, Cause> {
    // SAFETY: promised by the caller.
    unsafe { Side::new("result", &frame.rets, 1)? }.read()
}

/// The only result of a frame, which is a handle.
///
/// # Safety
/// `frame` is what XLA passed to the execute stage.
pub unsafe fn handle(frame: &CallFrame) -> Result<Buffer, Cause> {
    // SAFETY: promised by the caller.
    unsafe { Side::new("result", &frame.rets, 1)? }.handle()
}

/// The leaves of a tree, all operands or all results of a frame, with the message that they are packed into or unpacked from,
/// and its length along the last axis: the leaves lie side by side in each of its rows.
///
/// # Safety
/// `frame` is what XLA passed to the execute stage.
pub unsafe fn leaves(
    frame: &CallFrame,
    is_packed: bool,
) -> Result<(SmallVec<[Buffer; 16]>, Buffer, usize), Cause> {
    let (many, one) = if is_packed { (&frame.args, &frame.rets) } else { (&frame.rets, &frame.args) };
    let name = if is_packed { "result" } else { "operand" };
    // SAFETY: promised by the caller.
    unsafe {
        let message = Side::new(name, one, 1)?.read()?;
        let &shape = without_tokens(one).first().ok_or_else(|| Cause::missing(name))?;
        let rank = length((*shape).rank);
        let row = if rank > 0 { length(*(*shape).dims.add(rank - 1)) } else { 1 };
        let leaves: SmallVec<[Buffer; 16]> =
            without_tokens(many).iter().map(|&leaf| read(leaf)).collect::<Result<_, _>>()?;
        let total = leaves.iter().fold(0, |total: usize, leaf| total.saturating_add(leaf.count()));
        if total != message.count() || leaves.iter().any(|leaf| leaf.dtype() != message.dtype()) {
            return Err(Cause::Buffers { operand: "leaf", expected: message.count(), actual: total });
        }
        Ok((leaves, message, row))
    }
}

/// The handle and the results of the frame of a wait.
///
/// # Safety
/// `frame` is what XLA passed to the execute stage. `transport` reads the memory of its arrays.
pub unsafe fn wait(
    frame: &CallFrame,
    operand: Operand,
    layout: &RequestLayout,
    transport: &AnyTransport,
    stream: Stream,
) -> Result<(Handle, [Option<Buffer>; 2]), Cause> {
    let (gives, keeps) = (layout.gives.is_some(), layout.keeps);
    // SAFETY: promised by the caller.
    let (mut operands, mut results) = unsafe {
        let operands = Side::new("operand", &frame.args, 1 + usize::from(!operand.is_empty()))?;
        (operands, Side::new("result", &frame.rets, usize::from(gives) + usize::from(keeps))?)
    };
    let handle = operands.handle()?;
    if !operand.is_empty() {
        operands.int32s(operand.len())?;
    }
    let mut result = |is_there: bool| is_there.then(|| results.read()).transpose();
    let results = [result(gives)?, result(keeps)?];
    let mut bits = [0; HANDLE];
    transport.read_numbers(&handle, &mut bits, stream)?;
    Ok((bits.map(|bits| f32::from_bits(bits as u32)), results))
}
