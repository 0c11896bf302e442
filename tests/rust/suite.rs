//! What every transport has to do: all operations, data types and reductions, on buffers that are empty,
//! unaligned, or one and the same.
//!
//! Expected results are computed from the ranks' numbers and the model alone, with encodings of its own.

mod messages;
mod rows;

use std::fmt::Debug;

use std::sync::Arc;

use _native::call::{Call, Site};
use _native::comm::Comm;
use _native::device::cuda::Driver;
use _native::device::{Platform, is_on_cpu, set_device};
use _native::error::Error;
use _native::ops::{
    Buffer, Builtin, Class, Dtype, Extent, Face, Halo, HaloFields, Op, Part, Parts, PartsFields, Reduction,
};
use _native::transport::{Descriptor, Transport, set_count_limit, set_sleeps};

use super::model::{Made, Model, Place, model, reverses, rows_of};

/// Runs everything on each transport that can start, and gives their names: those for arrays in the memory of the host, and
/// where fakes take the part of the CUDA driver and of NCCL, those for GPUs. Called on every rank of `comm`.
pub fn run_all(comm: &Arc<Comm>) -> Vec<String> {
    let mut names = Vec::new();
    set_device(0);
    for platform in Platform::ALL {
        for it in Descriptor::ALL.iter().filter(|it| (it.takes)(platform)) {
            (it.settings)(false).expect("settings");
            let driver = (platform == Platform::Gpu).then(|| Driver::get().ok()).flatten();
            let is_packed = it.takes_packed || driver.is_some();
            match (it.start)(platform) {
                Ok(transport) => {
                    let transport: &dyn Transport = &transport;
                    assert_eq!(transport.name(), it.name);
                    transport.join(comm).expect("all ranks come here");
                    let suite = Suite {
                        transport,
                        comm,
                        driver,
                        is_packed,
                        is_nccl: it.name == "nccl",
                        aliased: false,
                    };
                    run(&suite, Dtype::ALL);
                    names.push(format!("{} ({})", it.name, platform.name()));
                    // Derived types, and reductions in pieces.
                    set_count_limit(Some(4));
                    run(&suite, &OF_EACH_SIZE);
                    set_count_limit(None);
                    if it.name == "mpi" {
                        set_sleeps(true);
                        run(&suite, &OF_EACH_SIZE);
                        set_sleeps(false);
                    }
                    transport.stop();
                }
                Err(reason) => {
                    let may_lack = platform == Platform::Gpu && !is_on_cpu() || it.name == "ucx";
                    assert!(may_lack, "{}: {reason}", it.name);
                }
            }
        }
    }
    names
}

/// One data type of each size.
const OF_EACH_SIZE: [Dtype; 5] =
    [Dtype::Bool, Dtype::Bfloat16, Dtype::Int32, Dtype::Float64, Dtype::Complex128];

/// Runs everything. Called on every rank of `comm`, in the same order.
fn run(suite: &Suite, dtypes: &[Dtype]) {
    for &dtype in dtypes {
        for (count, offset) in [(0, 0), (1, 0), (1, 1), (5, 1), (1027, 0)] {
            for row in Op::TABLE {
                suite.operation(row.op, dtype, count, offset);
            }
        }
    }
    let aliased = Suite { aliased: true, ..*suite };
    for dtype in [Dtype::Uint8, Dtype::Bfloat16, Dtype::Int32, Dtype::Complex128] {
        for offset in [0, 1] {
            // Of NCCL's, only those for which XLA is given an alias.
            let is_aliased = |op| !suite.is_nccl || matches!(op, Op::Allreduce | Op::Scan);
            for row in Op::TABLE.iter().filter(|row| is_aliased(row.op)) {
                aliased.operation(row.op, dtype, 6, offset);
            }
        }
    }
    if suite.is_nccl {
        suite.refusals();
    } else {
        suite.envelopes();
        suite.short_messages();
    }
    suite.errors();
}

struct Suite<'a> {
    transport: &'a dyn Transport,
    comm: &'a Arc<Comm>,
    /// Of a transport for GPUs.
    driver: Option<&'static Driver>,
    /// XLA packs ghost cells, which an alltoallv carries.
    is_packed: bool,
    /// Messages have no tags and no wildcards.
    is_nccl: bool,
    /// Operand and result begin at one place.
    aliased: bool,
}

/// Memory with something before and after it that nobody may touch.
struct Memory {
    bytes: Vec<u8>,
    start: usize,
    dtype: Dtype,
    count: usize,
}

const GUARD: usize = 64;

impl Memory {
    /// `offset` bytes beyond an aligned address.
    fn new(dtype: Dtype, count: usize, offset: usize) -> Self {
        let bytes = vec![0xa5; GUARD + offset + count * dtype.size() + GUARD + 16];
        let aligned = (bytes.as_ptr() as usize + GUARD).next_multiple_of(16) - bytes.as_ptr() as usize;
        Self { bytes, start: aligned + offset, dtype, count }
    }

    fn holding(dtype: Dtype, contents: &[u8], offset: usize) -> Self {
        let mut memory = Self::new(dtype, contents.len() / dtype.size(), offset);
        memory.contents_mut().copy_from_slice(contents);
        memory
    }

    fn end(&self) -> usize {
        self.start + self.count * self.dtype.size()
    }

    fn contents(&self) -> &[u8] {
        &self.bytes[self.start..self.end()]
    }

    fn contents_mut(&mut self) -> &mut [u8] {
        let (start, end) = (self.start, self.end());
        &mut self.bytes[start..end]
    }

    fn buffer(&mut self) -> Buffer {
        // SAFETY: the suite's own memory.
        unsafe { Buffer::new(self.contents_mut().as_mut_ptr(), self.dtype, self.count) }
    }

    fn check(&self, expected: &[u8], what: &impl Debug) {
        assert!(self.contents() == expected, "{what:?}: got {:?}, expected {expected:?}", self.contents());
        let (before, after) = (&self.bytes[..self.start], &self.bytes[self.end()..]);
        assert!(
            before.iter().chain(after).all(|byte| *byte == 0xa5),
            "{what:?}: wrote outside of its result"
        );
    }
}

/// Any bytes that a value of the type may have, different for every rank, block and element.
fn pattern(dtype: Dtype, rank: usize, block: usize, count: usize) -> Vec<u8> {
    let byte = |i: usize| {
        let mixed = (rank * 7919 + block * 104_729 + i * 31 + 17).wrapping_mul(0x9e37_79b9) >> 13;
        if dtype.class() == Class::Bool { mixed as u8 & 1 } else { mixed as u8 }
    };
    (0..count * dtype.size()).map(byte).collect()
}

/// A number as a value of a type that holds it exactly.
fn encode(dtype: Dtype, n: u32) -> Vec<u8> {
    match dtype {
        Dtype::Bool => vec![u8::from(n != 0)],
        Dtype::Int8 | Dtype::Uint8 => vec![n as u8],
        Dtype::Int16 | Dtype::Uint16 => (n as u16).to_ne_bytes().into(),
        Dtype::Int32 | Dtype::Uint32 => n.to_ne_bytes().into(),
        Dtype::Int64 | Dtype::Uint64 => u64::from(n).to_ne_bytes().into(),
        Dtype::Float16 => half::f16::from_f32(n as f32).to_ne_bytes().into(),
        Dtype::Bfloat16 => half::bf16::from_f32(n as f32).to_ne_bytes().into(),
        Dtype::Float32 => (n as f32).to_ne_bytes().into(),
        Dtype::Float64 => f64::from(n).to_ne_bytes().into(),
        Dtype::Complex64 => [encode(Dtype::Float32, n), encode(Dtype::Float32, 0)].concat(),
        Dtype::Complex128 => [encode(Dtype::Float64, n), encode(Dtype::Float64, 0)].concat(),
        dtype => unreachable!("nothing computes with {}", dtype.name()),
    }
}

/// What a rank contributes to a reduction. Small, so that the results are exact in every type.
fn number(builtin: Builtin, rank: usize, i: usize) -> u32 {
    match builtin {
        Builtin::Sum => ((rank + i) % 2) as u32,
        Builtin::Prod => {
            if rank < 3 {
                1 + ((rank + i) % 2) as u32
            } else {
                1
            }
        }
        Builtin::Max | Builtin::Min => 1 << ((rank * 3 + i) % 3),
        Builtin::Land | Builtin::Lor | Builtin::Lxor => u32::from((rank + i) % 3 != 0),
        Builtin::Band | Builtin::Bor | Builtin::Bxor => ((rank * 5 + i) % 8) as u32,
        // A value, then an index.
        Builtin::Maxloc | Builtin::Minloc => 1 << ((if i % 2 == 0 { rank + i / 2 } else { rank }) % 3),
    }
}

/// The numbers of some ranks, reduced.
fn reduced(builtin: Builtin, dtype: Dtype, ranks: impl Iterator<Item = usize> + Clone, i: usize) -> u32 {
    let numbers = ranks.clone().map(|rank| number(builtin, rank, i));
    let logical = |f: fn(bool, bool) -> bool| numbers.clone().map(|n| n != 0).reduce(f).map(u32::from);
    // Booleans are 0 or 1 before they are reduced.
    let bits = numbers.clone().map(|n| if dtype == Dtype::Bool { u32::from(n != 0) } else { n });
    match builtin {
        Builtin::Sum => Some(numbers.sum()),
        Builtin::Prod => Some(numbers.product()),
        Builtin::Max | Builtin::Min if dtype == Dtype::Bool => Some(1),
        Builtin::Max => numbers.max(),
        Builtin::Min => numbers.min(),
        Builtin::Land => logical(|a, b| a & b),
        Builtin::Lor => logical(|a, b| a | b),
        Builtin::Lxor => logical(|a, b| a ^ b),
        Builtin::Band => bits.reduce(|a, b| a & b),
        Builtin::Bor => bits.reduce(|a, b| a | b),
        Builtin::Bxor => bits.reduce(|a, b| a ^ b),
        Builtin::Maxloc | Builtin::Minloc => {
            let encoded = |n: u32| if dtype == Dtype::Bool { 1 } else { n };
            let at = i - i % 2;
            let pairs = ranks
                .map(|rank| (encoded(number(builtin, rank, at)), encoded(number(builtin, rank, at + 1))));
            let best = if builtin == Builtin::Maxloc {
                pairs.min_by_key(|(value, index)| (std::cmp::Reverse(*value), *index))
            } else {
                pairs.min()
            };
            best.map(|(value, index)| if i % 2 == 0 { value } else { index })
        }
    }
    .expect("there is a rank")
}

impl Suite<'_> {
    fn rank(&self) -> usize {
        self.comm.rank as usize
    }

    fn size(&self) -> usize {
        self.comm.size as usize
    }

    /// Carries out a call, and waits for what it has put on a stream.
    fn carry(&self, call: &Call) -> Result<(), Error> {
        let Some(driver) = self.driver else { return self.transport.execute(call) };
        let context = driver.context_of(call.stream)?;
        // SAFETY: the context exists.
        let _entered = unsafe { driver.enter(context)? };
        self.transport.execute(call)?;
        Ok(driver.synchronize(call.stream)?)
    }

    /// Executes an operation: `send` is what this rank sends, if it sends, and so on. The result.
    fn execute(&self, site: &Site, send: &[u8], dtype: Dtype, recv: usize, offset: usize) -> Option<Memory> {
        let side = site.extents();
        let mut from = (side.send != Extent::None).then(|| Memory::holding(dtype, send, offset));
        let mut to = (side.recv != Extent::None).then(|| Memory::new(dtype, recv, offset));
        let (mut given, mut taken) = (from.as_mut().map(Memory::buffer), to.as_mut().map(Memory::buffer));
        let mut both = None;
        if let (Some(given), Some(taken), true) = (&mut given, &mut taken, self.aliased) {
            let memory = both.insert(Memory::new(dtype, given.count().max(recv), offset));
            memory.contents_mut()[..send.len()].copy_from_slice(send);
            let data = memory.buffer().data();
            // SAFETY: as large as the larger of the two.
            (*given, *taken) = unsafe { (given.moved_to(data), taken.moved_to(data)) };
        }
        let call = Call::new(site, given, taken).expect("buffers as the table says");
        self.carry(&call).unwrap_or_else(|error| panic!("{error}"));
        if let Some(from) = &from {
            from.check(send, &("the operand of", site.op, dtype));
        }
        match both {
            Some(memory) => {
                memory.check(memory.contents(), &("the memory of", site.op, dtype));
                // Of an operand that is longer than the result, the rest is nobody's.
                Some(Memory::holding(dtype, &memory.contents()[..recv * dtype.size()], offset))
            }
            None => to,
        }
    }

    fn operation(&self, op: Op, dtype: Dtype, count: usize, offset: usize) {
        match model(op, Place { rank: self.rank(), size: self.size(), root: 0, reverse: false }) {
            Model::Blocks(Made::Of(_)) => self.blocks(op, None, dtype, count, offset),
            Model::Blocks(Made::Reduced(..)) => {
                for &builtin in Builtin::ALL.iter().filter(|builtin| builtin.allows(dtype)) {
                    self.blocks(op, Some(builtin), dtype, count, offset);
                }
            }
            Model::Message => self.message(op, dtype, count, offset),
            Model::Parts { rows, is_same } => self.parts(op, (rows, is_same), dtype, count, offset),
            Model::Ragged => self.ragged(op, dtype, count, offset),
            Model::Ghosts if self.aliased || self.is_packed => {}
            Model::Ghosts => self.halo(dtype, count, offset),
        }
    }

    /// Of each root, and in either direction.
    fn blocks(&self, op: Op, builtin: Option<Builtin>, dtype: Dtype, count: usize, offset: usize) {
        let (rank, size) = (self.rank(), self.size());
        let pairs = matches!(builtin, Some(Builtin::Maxloc | Builtin::Minloc));
        let count = if pairs { count - count % 2 } else { count };
        // Block `to` is for rank `to` where there is one for each.
        let sized = |to: usize| if op.row().has_parts { rows_of(to) * count } else { count };
        let encoded = |to: usize, n: &dyn Fn(usize) -> u32| {
            (0..sized(to)).flat_map(|i| encode(dtype, n(i))).collect::<Vec<u8>>()
        };
        // Block 0 of a rank that has one block.
        let block = |from: usize, to: usize| match builtin {
            Some(builtin) => encoded(to, &|i| number(builtin, from + to, i)),
            None => pattern(dtype, from, to, sized(to)),
        };
        let parts = op.row().has_parts.then(|| {
            let start = |to: usize| (0..to).map(sized).sum();
            let sends = (0..size).map(|to| Part { rank: to, start: start(to), count: sized(to) }).collect();
            let receives = (0..size).map(|from| Part { rank: from, start: 0, count: sized(rank) }).collect();
            let fields = PartsFields { sends, receives, whole: None };
            Arc::new(Parts::new(self.comm.rank, self.comm.size, &fields).expect("starts and counts"))
        });
        let roots = if op.row().has_root { 0..size } else { 0..1 };
        let directions: &[bool] = if reverses(op) { &[false, true] } else { &[false] };
        for (root, &reverse) in roots.flat_map(|root| directions.iter().map(move |it| (root, it))) {
            let reduction = builtin.map(Reduction::Builtin);
            let parts = parts.clone();
            let site = Site { reduction, root: root as i32, reverse, parts, ..Site::new(op, self.comm) };
            let send: Vec<u8> = match site.extents().send {
                Extent::None => Vec::new(),
                Extent::One => block(rank, 0),
                Extent::PerRank | Extent::Variable => (0..size).flat_map(|to| block(rank, to)).collect(),
            };
            let what = (op, builtin, dtype, count, offset, root, reverse);
            let expected = match (model(op, Place { rank, size, root, reverse }), builtin) {
                (Model::Blocks(Made::Of(blocks)), _) => {
                    blocks.into_iter().flat_map(|(from, which)| block(from, which)).collect()
                }
                (Model::Blocks(Made::Reduced(ranks, _)), Some(_)) if ranks.is_empty() => vec![0; send.len()],
                (Model::Blocks(Made::Reduced(ranks, which)), Some(builtin)) => {
                    encoded(which, &|i| reduced(builtin, dtype, ranks.clone().map(|rank| rank + which), i))
                }
                _ => unreachable!("no model of {what:?}"),
            };
            let result = self.execute(&site, &send, dtype, expected.len() / dtype.size(), offset);
            if let Some(result) = result {
                result.check(&expected, &what);
            }
        }
    }

    /// An exchange of two blocks of rows of three cells in a ring.
    fn ring(&self, dtype: Dtype, rows: usize, [low, high]: [usize; 2]) -> Site {
        let (rank, size) = (self.rank(), self.size());
        let [previous, next] = [rank + size - 1, rank + 1].map(|peer| (peer % size) as i32);
        let faces = |of: &[(i32, usize, usize)]| -> Vec<Face> {
            let of = of.iter().flat_map(|&(peer, start, end)| [(peer, 0, start, end), (peer, 1, start, end)]);
            of.map(|(peer, block, start, end)| (peer, block, vec![(start, end), (0, 3)])).collect()
        };
        let fields = HaloFields {
            itemsize: dtype.size(),
            shapes: vec![vec![rows, 3]; 2],
            adjoint: false,
            sends: faces(&[(previous, low, low + high), (next, rows - high - low, rows - high)]),
            // In the order of the directions that they are sent to.
            receives: faces(&[(next, rows - high, rows), (previous, 0, low)]),
        };
        let halo = Halo::new(self.comm.rank, self.comm.size, &fields).expect("a halo");
        Site { halo: Some(Arc::new(halo)), ..Site::new(Op::HaloExchange, self.comm) }
    }

    /// A ring of blocks: one ghost row below and two above `count` + 2 inner ones, of three cells.
    /// Two blocks at once, in place or not.
    fn halo(&self, dtype: Dtype, count: usize, offset: usize) {
        const ROW: usize = 3;
        let (rank, size) = (self.rank(), self.size());
        let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
        let (width, inner) = ([1, 2], count + 2);
        let rows = 1 + inner + 2;
        let row = ROW * dtype.size();
        let site = self.ring(dtype, rows, width);
        let block = |rank, which| pattern(dtype, rank, which, rows * ROW);
        let run = |site: &Site, blocks: [Vec<u8>; 2], in_place: bool| {
            let mut from = blocks.map(|block| Memory::holding(dtype, &block, offset));
            let mut to = [0, 1].map(|_| Memory::new(dtype, rows * ROW, offset));
            let [a, b] = [0, 1].map(|i| {
                let operand = from[i].buffer();
                (operand, if in_place { operand } else { to[i].buffer() })
            });
            let mut call = Call::new(site, Some(a.0), Some(a.1)).expect("equal sizes");
            let others = [b];
            call.others = &others;
            self.carry(&call).unwrap_or_else(|error| panic!("{error}"));
            if in_place { from } else { to }
        };
        let what = ("halo_exchange", dtype, count, offset);
        for in_place in [false, true] {
            let results = run(&site, [block(rank, 0), block(rank, 1)], in_place);
            for (which, result) in results.iter().enumerate() {
                let mut expected = block(rank, which);
                expected[..row].copy_from_slice(&block(previous, which)[inner * row..(inner + 1) * row]);
                expected[(1 + inner) * row..].copy_from_slice(&block(next, which)[row..3 * row]);
                result.check(&expected, &what);
            }
        }
    }

    fn errors(&self) {
        let reduction = Some(Reduction::Builtin(Builtin::Max));
        let site = Site { reduction, ..Site::new(Op::Allreduce, self.comm) };
        let mut from = Memory::new(Dtype::Complex64, 1, 0);
        let mut to = Memory::new(Dtype::Complex64, 1, 0);
        let call = Call::new(&site, Some(from.buffer()), Some(to.buffer())).expect("equal sizes");
        let error = self.carry(&call).expect_err("complex numbers have no order").to_string();
        assert!(error.contains("MAX") && error.contains("complex64"), "{error}");
    }
}
