//! Frames of any content are decoded or refused: here with pseudo-random ones, in `fuzz/` with those that
//! libFuzzer finds.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};

use _native::call::{Blocks, Call, Stream};
use _native::comm::{self, Comm};
use _native::ops::{Counts, Dtype, Extent, Op, PACKED};
use _native::transport::Transport;
use _native::xla::c_api::{self, Attrs, Buffer, Buffers, ByteSpan, CallFrame, Scalar};
use _native::xla::frame::{self, Attributes, started};

/// Takes what it needs from the bytes. High ones, as when there are none left, stand for what is usual.
struct Source<'a>(&'a [u8]);

impl Source<'_> {
    fn byte(&mut self) -> u8 {
        let (&first, rest) = self.0.split_first().unwrap_or((&255, &[]));
        self.0 = rest;
        first
    }

    fn number(&mut self) -> i64 {
        // Those where something may go wrong, and any.
        const SPECIAL: [i64; 12] = [0, 1, 2, 3, 6, -1, -2, 1 << 31, 1 << 32, 1 << 62, i64::MAX, i64::MIN];
        match usize::from(self.byte()) {
            small if small < 128 => SPECIAL[small % SPECIAL.len()],
            _ => i64::from_le_bytes(std::array::from_fn(|_| self.byte())),
        }
    }

    fn text(&mut self, usual: &str) -> Vec<u8> {
        match self.byte() {
            4.. => usual.into(),
            length => (0..8 * length).map(|_| self.byte()).collect(),
        }
    }

    fn one_of<'i, T>(&mut self, items: &'i [T]) -> &'i T {
        &items[usize::from(self.byte()) % items.len()]
    }
}

enum Value {
    Number(c_int, Box<i64>),
    Text(Vec<u8>),
    Numbers(c_int, Vec<i64>),
}

/// An attribute that holds a list: one exchanged axis and one block, or whatever.
fn list(source: &mut Source, usual: &[i64]) -> (c_int, Value) {
    let dtype = if source.byte() < 2 { source.number() as c_int } else { c_api::TYPE_S64 };
    let number = |source: &mut Source, usual| if source.byte() < 8 { source.number() } else { usual };
    let length = if source.byte() < 16 { source.byte() % 16 } else { usual.len() as u8 };
    let numbers = (0..length).map(|i| number(source, usual.get(usize::from(i)).copied().unwrap_or(1)));
    (c_api::ATTR_ARRAY, Value::Numbers(dtype, numbers.collect()))
}

/// An attribute as a program may have it: mostly of the right kind.
fn attribute(source: &mut Source, usual: Option<&str>) -> (c_int, Value) {
    let is_text = if source.byte() < 2 { usual.is_none() } else { usual.is_some() };
    let kind = if is_text { c_api::ATTR_STRING } else { c_api::ATTR_SCALAR };
    let value = if is_text {
        Value::Text(source.text(usual.unwrap_or_default()))
    } else {
        let dtype = if source.byte() < 2 { source.number() as c_int } else { c_api::TYPE_S64 };
        let number = match source.byte() {
            0..8 => source.number(),
            few @ 8..80 => i64::from(few % 3),
            _ => 0,
        };
        Value::Number(dtype, Box::new(number))
    };
    // Kinds that are not read: what they point to does not matter.
    if source.byte() < 2 { (5 + c_int::from(source.byte()), value) } else { (kind, value) }
}

fn span(text: &[u8]) -> ByteSpan {
    ByteSpan { ptr: if text.is_empty() { null() } else { text.as_ptr().cast() }, len: text.len() }
}

struct Array {
    dtype: c_int,
    rank: i64,
    dims: Vec<i64>,
}

fn arrays(source: &mut Source) -> Vec<Array> {
    let codes: Vec<i32> = Dtype::ALL
        .iter()
        .map(|dtype| dtype.xla_code())
        .chain(PACKED.iter().map(|packed| packed.xla_code))
        .chain([c_api::TYPE_TOKEN, c_api::TYPE_TOKEN, Dtype::Int32.xla_code()])
        .collect();
    let array = |source: &mut Source| {
        let dtype = match source.byte() {
            0..8 => source.number() as c_int,
            8..128 => *source.one_of(&codes),
            _ => Dtype::Float32.xla_code(),
        };
        let dim = |source: &mut Source| if source.byte() < 64 { source.number() } else { 3 };
        let dims: Vec<i64> = (0..source.byte() % 4).map(|_| dim(source)).collect();
        let rank =
            if source.byte() < 4 { -source.number().saturating_abs().max(1) } else { dims.len() as i64 };
        Array { dtype, rank, dims }
    };
    let count = if source.byte() < 128 { source.byte() % 5 } else { 1 };
    (0..count).map(|_| array(source)).collect()
}

fn side(arrays: &[Array], memory: *mut c_void) -> Vec<Buffer> {
    let buffer = |array: &Array| Buffer {
        struct_size: size_of::<Buffer>(),
        extension_start: null_mut(),
        dtype: array.dtype,
        data: memory,
        rank: array.rank,
        dims: array.dims.as_ptr(),
    };
    arrays.iter().map(buffer).collect()
}

fn buffers(pointers: &[*const Buffer], negative: bool) -> Buffers {
    Buffers {
        struct_size: size_of::<Buffers>(),
        extension_start: null_mut(),
        size: if negative { -1 } else { pointers.len() as i64 },
        types: null(),
        buffers: pointers.as_ptr(),
    }
}

/// Decodes the frame that these bytes describe; whether that has worked.
pub fn decode(bytes: &[u8]) -> bool {
    let source = &mut Source(bytes);
    let size = 3;
    comm::register(Comm::new("fuzz", 1, 1, size));
    let op = source.one_of(Op::TABLE).name;
    let reduction = *source.one_of(&["", "", "SUM", "MAX", "LAND", "BXOR"]);
    let mut attributes: Vec<(Vec<u8>, (c_int, Value))> = Vec::new();
    let texts = HashMap::from([("op", op), ("comm", "fuzz"), ("reduction", reduction), ("site", "f.py:1")]);
    let lists: [(&str, &[i64]); 4] = [
        // Three float32.
        ("gives", &[i64::from(Dtype::Float32.xla_code()), 3]),
        // Widths of one axis, a neighbour in each of three directions, one block of five floats.
        ("halo", &[1, 1, 1, 3, -1, 1, 2, 1, 4, 1, 5, 1]),
        // Two elements to the next rank and from the previous one, and one to and from oneself.
        ("parts", &[0, 0, 1, 2, 0, 1, 0, 1, 1, 2, 0, 0]),
        // One row of an element, and room for three.
        ("rows", &[1, 3, 1]),
    ];
    for name in [
        *b"comm     ",
        *b"dest     ",
        *b"env_in   ",
        *b"env_out  ",
        *b"gives    ",
        *b"halo     ",
        *b"initial  ",
        *b"keeps    ",
        *b"local    ",
        *b"op       ",
        *b"packed   ",
        *b"parts    ",
        *b"recvtag  ",
        *b"reduction",
        *b"reverse  ",
        *b"root     ",
        *b"rows     ",
        *b"sends    ",
        *b"sendtag  ",
        *b"site     ",
        *b"source   ",
        *b"status   ",
    ] {
        let name = std::str::from_utf8(name.trim_ascii()).unwrap();
        // Some are missing, some there twice.
        for _ in 0..[1, 0, 2].get(usize::from(source.byte())).copied().unwrap_or(1) {
            let value = match lists.iter().find(|(list, _)| *list == name) {
                Some((_, usual)) => list(source, usual),
                None => attribute(source, texts.get(name).copied()),
            };
            attributes.push((source.text(name), value));
        }
    }
    let names: Vec<ByteSpan> = attributes.iter().map(|(name, _)| span(name)).collect();
    let strings: Vec<ByteSpan> = attributes
        .iter()
        .map(|(_, (_, value))| if let Value::Text(text) = value { span(text) } else { span(b"") })
        .collect();
    let scalars: Vec<Scalar> = attributes
        .iter()
        .map(|(_, (_, value))| match value {
            Value::Number(dtype, number) => Scalar { dtype: *dtype, value: (&raw const **number).cast() },
            Value::Text(_) | Value::Numbers(..) => Scalar { dtype: 0, value: null() },
        })
        .collect();
    let lists: Vec<c_api::Array> = attributes
        .iter()
        .map(|(_, (_, value))| match value {
            Value::Numbers(dtype, numbers) => {
                c_api::Array { dtype: *dtype, size: numbers.len(), data: numbers.as_ptr().cast() }
            }
            Value::Number(..) | Value::Text(_) => c_api::Array { dtype: 0, size: 0, data: null() },
        })
        .collect();
    let types: Vec<c_int> = attributes.iter().map(|(_, (kind, _))| *kind).collect();
    let name_pointers: Vec<*const ByteSpan> = names.iter().map(|name| &raw const *name).collect();
    let pointers: Vec<*const c_void> = attributes
        .iter()
        .enumerate()
        .map(|(i, (_, (_, value)))| match value {
            Value::Number(..) => (&raw const scalars[i]).cast(),
            Value::Text(_) => (&raw const strings[i]).cast(),
            Value::Numbers(..) => (&raw const lists[i]).cast(),
        })
        .collect();
    let attrs = Attrs {
        struct_size: size_of::<Attrs>(),
        extension_start: null_mut(),
        size: if source.byte() < 2 { source.number().min(0) } else { attributes.len() as i64 },
        types: types.as_ptr(),
        names: name_pointers.as_ptr(),
        attrs: pointers.as_ptr(),
    };

    // SAFETY: arrays and pointers are as XLA makes them.
    let site = match unsafe { Attributes::new(&attrs) }.site() {
        Ok(site) => site,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return false;
        }
    };
    let mut memory = [0u64; 4];
    let (args, rets) = (arrays(source), arrays(source));
    let (given, taken) = (side(&args, memory.as_mut_ptr().cast()), side(&rets, memory.as_mut_ptr().cast()));
    let of = |side: &[Buffer]| side.iter().map(|buffer| &raw const *buffer).collect::<Vec<_>>();
    let (given, taken) = (of(&given), of(&taken));
    let frame = CallFrame {
        struct_size: size_of::<CallFrame>(),
        extension_start: null_mut(),
        api: null(),
        ctx: null_mut(),
        stage: 0,
        args: buffers(&given, source.byte() < 2),
        rets: buffers(&taken, source.byte() < 2),
        attrs,
        future: null_mut(),
    };
    let (mut others, mut counts) = (Blocks::new(), Counts::new());
    // SAFETY: as above; a handle, and what an operand says, have their memory.
    unsafe {
        if let Ok(layout) = Attributes::new(&frame.attrs).layout() {
            if let Ok((operand, peers, _)) =
                started::start(&frame, &site, &layout, &mut counts, &Transport::mpi(), Stream::NONE)
            {
                assert_eq!(operand.is_some(), layout.has_operand());
                assert_eq!(peers.is_some(), !site.operand.is_empty());
            }
            if let Ok((_, results)) = started::wait(&frame, &site, &layout, &Transport::mpi(), Stream::NONE) {
                let [received, kept] = results.map(|result| result.is_some());
                assert_eq!((received, kept), (layout.gives.is_some(), layout.keeps));
            }
        }
    }
    let mut call = Call::of(&site, Stream::NONE);
    // SAFETY: as above; an operand of two int32 has its memory.
    match unsafe { frame::fill(&mut call, &frame, &Transport::mpi(), (&mut others, &mut counts)) } {
        Ok(()) => {
            for (extent, buffer) in [(site.extents().send, call.send), (site.extents().recv, call.recv)] {
                assert_eq!(extent == Extent::None, buffer.is_none());
                let Some(buffer) = buffer else { continue };
                let described = args.iter().chain(&rets).any(|array| {
                    let mut dims = array.dims.iter().map(|&dim| usize::try_from(dim).ok());
                    let count = dims.try_fold(1usize, |n, dim| n.checked_mul(dim?));
                    count == Some(buffer.count()) || array.rank <= 0
                });
                assert!(described, "{} elements", buffer.count());
                assert!(extent != Extent::PerRank || buffer.count().is_multiple_of(size as usize));
            }
            true
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            false
        }
    }
}

#[test]
fn any_frame_is_decoded_or_refused() {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut bytes = [0u8; 512];
    let mut decoded = 0;
    for _ in 0..if cfg!(miri) { 100 } else { 200_000 } {
        // xorshift64*
        for eight in bytes.chunks_mut(8) {
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            eight.copy_from_slice(&state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes());
        }
        decoded += u32::from(decode(&bytes));
    }
    assert!(cfg!(miri) || decoded > 200, "most frames are refused, but only {decoded} are not");
}
