//! Reading a call frame.
//!
//! A frame is XLA's: its pointers point to what their types say, and its arrays have as many members as it
//! says. What a frame holds is a program's, which may have been exported elsewhere, or changed: names,
//! kinds, numbers, data types and shapes are checked, and errors where they are wrong.

pub mod started;

use std::borrow::Cow;
use std::sync::Arc;

use super::c_api::{self, CallFrame};
use super::statuses;
use crate::call::{Blocks, Call, EagerCall, Envelope, Operand, Peers, Phase, Runs, Site};
use crate::comm::{self, Comm};
use crate::error::{Cause, Error};
use crate::mpilib::wildcards;
use crate::ops::{
    self, Around, Block, Buffer, Counts, Dtype, Extent, Halo, Op, PACKED, Parts, Ragged, Reduction, Width,
};
use crate::transport::{RequestLayout, Transport};

/// The attributes of a custom call. They are read once per compiled program.
pub struct Attributes<'a>(&'a c_api::Attrs);

impl<'a> Attributes<'a> {
    /// # Safety
    /// `attrs` is what XLA passed: its arrays have `size` members, valid as long as the frame.
    pub unsafe fn new(attrs: &'a c_api::Attrs) -> Self {
        Self(attrs)
    }

    /// Type and address of an attribute.
    fn find(&self, name: &'static str) -> Result<(i32, *const std::ffi::c_void), Cause> {
        for i in 0..length(self.0.size) {
            // SAFETY: promised to `new`.
            unsafe {
                if bytes(*self.0.names.add(i)) == name.as_bytes() {
                    return Ok((*self.0.types.add(i), *self.0.attrs.add(i)));
                }
            }
        }
        Err(Cause::Attribute { name, expected: "to be present", actual: "none".into() })
    }

    fn integer(&self, name: &'static str) -> Result<i64, Cause> {
        let (kind, attr) = self.find(name)?;
        let wrong = |actual| Cause::Attribute { name, expected: "an int64", actual };
        if kind != c_api::ATTR_SCALAR {
            return Err(wrong(format!("an attribute of kind {kind}")));
        }
        // SAFETY: `kind` says what `attr` points to, `dtype` what `value` points to.
        unsafe {
            let scalar = &*attr.cast::<c_api::Scalar>();
            match scalar.dtype {
                c_api::TYPE_S64 => Ok(scalar.value.cast::<i64>().read_unaligned()),
                dtype => Err(wrong(format!("a scalar of XLA type {dtype}"))),
            }
        }
    }

    /// A number that MPI takes as an `int`.
    fn int(&self, name: &'static str) -> Result<i32, Cause> {
        let value = self.integer(name)?;
        value.try_into().map_err(|_| Cause::Attribute {
            name,
            expected: "a number of 32 bits",
            actual: value.to_string(),
        })
    }

    fn integers(&self, name: &'static str) -> Result<&'a [i64], Cause> {
        let (kind, attr) = self.find(name)?;
        let wrong = |actual| Cause::Attribute { name, expected: "an array of int64", actual };
        if kind != c_api::ATTR_ARRAY {
            return Err(wrong(format!("an attribute of kind {kind}")));
        }
        // SAFETY: `kind` says what `attr` points to, `dtype` what `data` points to.
        unsafe {
            let array = &*attr.cast::<c_api::Array>();
            match (array.dtype, array.size) {
                (_, 0) => Ok(&[]),
                (c_api::TYPE_S64, size) => Ok(std::slice::from_raw_parts(array.data.cast(), size)),
                (dtype, _) => Err(wrong(format!("one of XLA type {dtype}"))),
            }
        }
    }

    /// What `ops/halo_exchange.py` wrote: lists after their lengths. The widths (below, above) of the
    /// exchanged axes, the rank in each direction, and the blocks: bytes of an element, extents, and which
    /// axes are exchanged.
    fn halo(&self, &Comm { rank, size: ranks, .. }: &Comm, adjoint: bool) -> Result<Halo, Cause> {
        let numbers = self.integers("halo")?;
        let mut rest = numbers.iter();
        let mut next = || {
            let number = rest.next().and_then(|&number| i32::try_from(number).ok());
            number.ok_or_else(|| Cause::Attribute {
                name: "halo",
                expected: "the lists of a halo",
                actual: format!("{numbers:?}"),
            })
        };
        // Of a negative number there is too much: no block has room for it.
        let size = |number: i32| usize::try_from(number).unwrap_or(i32::MAX as usize);
        let mut widths = Vec::new();
        for _ in 0..next()? {
            widths.push(Width { low: size(next()?), high: size(next()?) });
        }
        let neighbours = (0..next()?).map(|_| next()).collect::<Result<Vec<_>, Cause>>()?;
        if let Some(&rank) = neighbours.iter().find(|&&rank| rank >= ranks) {
            return Err(Cause::NoSuchRank { role: "neighbour", rank, size: ranks });
        }
        let mut blocks = Vec::new();
        for _ in 0..next()? {
            let mut list = |length| (0..length).map(|_| Ok(size(next()?))).collect::<Result<Vec<_>, Cause>>();
            let (itemsize, rank) = (list(1)?[0], list(1)?[0]);
            blocks.push(Block { itemsize, shape: list(rank)?, axes: list(widths.len())? });
        }
        let around = Around { widths: &widths, neighbours: &neighbours };
        Halo::new(rank, around, &blocks, adjoint, self.flag("packed")?)
    }

    fn flag(&self, name: &'static str) -> Result<bool, Cause> {
        Ok(self.integer(name)? != 0)
    }

    fn string(&self, name: &'static str) -> Result<Cow<'a, str>, Cause> {
        match self.find(name)? {
            // SAFETY: `kind` says what `attr` points to.
            (c_api::ATTR_STRING, attr) => Ok(String::from_utf8_lossy(unsafe { bytes(attr.cast()) })),
            (kind, _) => Err(Cause::Attribute {
                name,
                expected: "a string",
                actual: format!("an attribute of kind {kind}"),
            }),
        }
    }

    /// What a program says of the memory of an operation that is started.
    pub fn layout(&self) -> Result<RequestLayout, Cause> {
        let gives = match *self.integers("gives")? {
            [] => None,
            [code, count] => {
                let code = i32::try_from(code).unwrap_or(0);
                let dtype = Dtype::from_xla(code).ok_or_else(|| no_dtype(code))?;
                let count = usize::try_from(count).map_err(|_| Cause::Shape { dims: [count].into() })?;
                Some((dtype, count))
            }
            ref other => {
                let actual = format!("{other:?}");
                return Err(Cause::Attribute { name: "gives", expected: "a type and a count", actual });
            }
        };
        let (sends, keeps) = (self.flag("sends")?, self.flag("keeps")?);
        Ok(RequestLayout { sends, keeps, initial: self.flag("initial")?, gives, local: self.flag("local")? })
    }

    pub fn site(&self) -> Result<Site, Error> {
        let name = self.string("op")?;
        let op = Op::from_name(&name).ok_or_else(|| Cause::Attribute {
            name: "op",
            expected: "the name of an operation",
            actual: name.into(),
        })?;
        self.site_of(op).map_err(|cause| Error { op: Some(op.name()), ..cause.into() })?.validated()
    }

    fn site_of(&self, op: Op) -> Result<Site, Cause> {
        let key = self.string("comm")?;
        let comm = any_comm(&key).map_or_else(|| comm::lookup(&key), Ok)?;
        let reduction = match &*self.string("reduction")? {
            "" => None,
            key => {
                Some(Reduction::from_name(key).ok_or_else(|| Cause::UnknownReduction { key: key.into() })?)
            }
        };
        let length = self.integer("env_in")?;
        let known = [Operand::None, Operand::Peers, Operand::Call];
        let operand = known.into_iter().find(|operand| operand.len() as i64 == length).ok_or_else(|| {
            Cause::Attribute { name: "env_in", expected: "0, 4 or 8", actual: length.to_string() }
        })?;
        let reverse = self.flag("reverse")?;
        let halo = op.row().has_blocks.then(|| self.halo(&comm, reverse)).transpose()?.map(Arc::new);
        let parts = op.row().has_parts.then(|| Parts::new(comm.rank, comm.size, self.integers("parts")?));
        let ragged =
            (op.row().is_ragged).then(|| Ragged::new(comm.rank, comm.size, self.integers("rows")?, reverse));
        Ok(Site {
            op,
            phase: Phase::Whole,
            comm,
            reduction,
            reverse,
            halo,
            parts: parts.transpose()?.map(Arc::new),
            ragged: ragged.transpose()?.map(Arc::new),
            root: self.int("root")?,
            envelope: Envelope {
                source: self.int("source")?,
                recvtag: self.int("recvtag")?,
                dest: self.int("dest")?,
                sendtag: self.int("sendtag")?,
            },
            operand,
            envelope_result: self.flag("env_out")?,
            status: statuses::checked(self.integer("status")? as usize)?,
            location: ops::named_line(&self.string("site")?),
            runs: Runs::default(),
        })
    }
}

/// The communicator of a call whose operand says which one it is: `any#rank/size`, the key that `_op.comm.AnyComm` has.
fn any_comm(key: &str) -> Option<Arc<Comm>> {
    let (rank, size) = key.strip_prefix("any#")?.split_once('/')?;
    let size = size.parse().ok().filter(|&size| size > 0)?;
    let rank = rank.parse().ok().filter(|rank| (0..size).contains(rank))?;
    Some(Arc::new(Comm::template(key, rank, size)))
}

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

/// # Safety
/// `span` points to a span whose bytes outlive `'a`.
unsafe fn bytes<'a>(span: *const c_api::ByteSpan) -> &'a [u8] {
    // SAFETY: promised by the caller; an empty span may have no address.
    unsafe {
        let c_api::ByteSpan { ptr, len } = *span;
        if len == 0 { &[] } else { std::slice::from_raw_parts(ptr.cast(), len) }
    }
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

/// The operand of an eager call, in the memory of the host.
///
/// # Safety
/// `frame` is what XLA passed to the execute stage of a call on the CPU.
#[inline]
pub unsafe fn eager_call(frame: &CallFrame) -> Result<EagerCall, Cause> {
    // SAFETY: promised by the caller; there are so many.
    let numbers = unsafe { eager_operand(frame)?.data().cast::<[i32; EagerCall::LEN]>().read_unaligned() };
    Ok(EagerCall::decode(numbers))
}

/// # Safety
/// `frame` is what XLA passed to the execute stage.
#[inline]
unsafe fn eager_operand(frame: &CallFrame) -> Result<Buffer, Cause> {
    // SAFETY: promised by the caller.
    unsafe {
        let [.., last] = without_tokens(&frame.args) else {
            return Err(Cause::Buffers { operand: "operand", expected: 1, actual: 0 });
        };
        int32s("operand", *last, EagerCall::LEN)
    }
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

/// Reads the buffers of a frame into a call that has none yet: a call is too large to be passed around.
///
/// # Safety
/// `frame` is what XLA passed to the execute stage of the call's site.
#[inline(always)]
pub unsafe fn fill<'a>(
    call: &mut Call<'a>,
    frame: &CallFrame,
    transport: &Transport,
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
    let Some(given) = given else { return Ok(()) };
    let peers = if site.operand == Operand::Call {
        let mut numbers = [0; EagerCall::LEN];
        transport.read_numbers(&given, &mut numbers, call.stream).map_err(|cause| site.error(cause))?;
        let EagerCall::Run { peers, status, .. } = EagerCall::decode(numbers) else { return Ok(()) };
        call.status = statuses::checked(status).map_err(|cause| site.error(cause))?;
        Some(peers)
    } else {
        transport.read_peers(&given, call.stream).map_err(|cause| site.error(cause))?
    };
    match peers {
        Some(peers) => address(call, peers),
        None => Ok(()),
    }
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
