//! Frames of any content are decoded or refused: here with pseudo-random ones, in `fuzz/` with those that
//! libFuzzer finds.

use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};

use _native::call::{Blocks, Call, Phase, Stream};
use _native::comm::{self, Comm};
use _native::error::Error;
use _native::ops::{Counts, Dtype, Extent, Op, PACKED};
use _native::transport::HostMpi;
use _native::xla::c_api::{self, Attrs, Buffer, Buffers, ByteSpan, CallFrame};
use _native::xla::description::Description;
use _native::xla::frame;
use serde_json::{Value, json};

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

/// What a program says: mostly what is usual, here and there something else, or less.
fn said(source: &mut Source, usual: Value) -> Value {
    match (source.byte(), usual) {
        (0, _) => Value::Null,
        (1, _) => json!(source.number()),
        (2, _) => json!(source.byte() < 128),
        (3, _) => json!(String::from_utf8_lossy(&source.text("text"))),
        (4, Value::Array(items)) => {
            let length = usize::from(source.byte() % 8);
            items.into_iter().cycle().take(length).map(|item| said(source, item)).collect()
        }
        (_, Value::Array(items)) => items.into_iter().map(|item| said(source, item)).collect(),
        (_, Value::Object(fields)) => {
            let fields = fields.into_iter().filter_map(|(name, value)| {
                let is_there = source.byte() >= 2;
                is_there.then(|| (name, said(source, value)))
            });
            Value::Object(fields.collect())
        }
        (5..32, Value::Number(_)) => json!(source.number()),
        (_, usual) => usual,
    }
}

/// What is usual of an operation on three ranks.
fn usual(source: &mut Source) -> Value {
    let row = source.one_of(Op::TABLE);
    let mut fields = json!({
        "op": row.name,
        "comm": "fuzz",
        "operand": source.one_of(&["none", "none", "peers", "call"]),
        "root": source.byte() % 3,
        "reverse": source.byte() < 64,
        "envelope_result": source.byte() < 64,
        "may_be_short": source.byte() < 64,
        "line": "f.py:1",
        "envelope": {"source": 0, "recvtag": 1, "dest": 2, "sendtag": 1},
    });
    let others = [
        (row.has_reduction, "reduction", json!(source.one_of(&["SUM", "MAX", "LAND", "BXOR", "user#1"]))),
        // One block of five floats, whose ends go to a neighbor, and come from there.
        (
            row.has_blocks,
            "halo",
            json!({
                "itemsize": 4,
                "shapes": [[5]],
                "sends": [[2, 0, [[1, 2]]], [2, 0, [[3, 4]]]],
                "receives": [[2, 0, [[0, 1]]], [2, 0, [[4, 5]]]],
            }),
        ),
        // Two elements to the next rank and from the previous one, and one to and from oneself.
        (
            row.has_parts,
            "parts",
            json!({
                "sends": [[0, 0], [0, 1], [1, 2]],
                "receives": [[1, 2], [0, 1], [0, 0]],
            }),
        ),
        (row.is_ragged, "ragged", json!({"rows": 1, "capacity": 3, "row": 1})),
        (
            source.byte() < 128,
            "request",
            json!({
                "sends": source.byte() < 128,
                "keeps": source.byte() < 64,
                "initial": source.byte() < 64,
                "gives": ["float32", 3],
                "local": source.byte() < 64,
            }),
        ),
    ];
    for (is_needed, name, value) in others {
        if is_needed != (source.byte() < 4) {
            fields[name] = value;
        }
    }
    fields
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
    comm::register(Comm::new("fuzz", 1, size));
    let description = usual(source);
    let mut text = said(source, description).to_string().into_bytes();
    if source.byte() < 4 {
        text.truncate(usize::from(source.byte()));
    }
    let (name, value) = (span(b"call"), span(&text));
    let (name, value): (*const ByteSpan, *const c_void) = (&name, (&raw const value).cast());
    // Of another kind than a string, what it points to does not matter.
    let kind = if source.byte() < 2 { 5 + c_int::from(source.byte()) } else { c_api::ATTR_STRING };
    let attrs = Attrs {
        struct_size: size_of::<Attrs>(),
        extension_start: null_mut(),
        size: if source.byte() < 2 { source.number().min(0) } else { 1 },
        types: &kind,
        names: &name,
        attrs: &value,
    };
    // SAFETY: arrays and pointers are as XLA makes them.
    let description = unsafe { Description::of(&attrs) };
    let site = description.map_err(Error::from).and_then(|description| {
        let key = description.comm.as_deref().unwrap_or("fuzz");
        let site = description.site(Phase::Whole, comm::lookup(key)?, description.location(), "mpi")?;
        Ok((site, description.request))
    });
    let (site, layout) = match site {
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
    // SAFETY: as above.
    let _ = unsafe { frame::result(&frame) };
    for is_packed in [true, false] {
        // SAFETY: as above.
        if let Ok((leaves, message, _)) = unsafe { frame::leaves(&frame, is_packed) } {
            let counts: usize = leaves.iter().map(|leaf| leaf.count()).sum();
            assert_eq!(counts, message.count());
        }
    }
    let (mut others, mut counts) = (Blocks::new(), Counts::new());
    // SAFETY: as above; a handle, and what an operand says, have their memory.
    unsafe {
        if let Some(layout) = layout {
            let mut call = Call::of(&site, Stream::NONE);
            let memory = (&mut Blocks::new(), &mut Counts::new());
            if frame::fill(&mut call, &frame, &HostMpi::default().into(), None, Some(&layout), memory).is_ok()
            {
                assert_eq!(call.send.is_some(), layout.has_operand());
            }
            if let Ok((_, results)) =
                frame::wait(&frame, site.operand, &layout, &HostMpi::default().into(), Stream::NONE)
            {
                let [received, kept] = results.map(|result| result.is_some());
                assert_eq!((received, kept), (layout.gives.is_some(), layout.keeps));
            }
        }
    }
    let mut call = Call::of(&site, Stream::NONE);
    // SAFETY: as above; an operand of two int32 has its memory.
    match unsafe {
        frame::fill(&mut call, &frame, &HostMpi::default().into(), None, None, (&mut others, &mut counts))
    } {
        Ok(_) => {
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
