//! The handler, driven as XLA drives it, by every minor of its interface.

use std::mem::MaybeUninit;
use std::ptr::null_mut;

use _native::comm::{self, Comm};
use _native::mpilib::handle_value;
use _native::xla::c_api::{self, Api, ApiVersion, Buffer, TypeId};
use _native::xla::instantiate;
use mpi::ffi;
use serde_json::{Value, json};

use super::program::{F32, Program, S32, TYPE, api, buffer, buffers, no_attrs, outcome};

fn metadata<const GPU: bool>(api: &'static Api) {
    let minor = api.version.minor;
    let mut metadata = c_api::Metadata {
        struct_size: 36,
        api_version: ApiVersion { struct_size: 24, extension_start: null_mut(), major: 9, minor: 9 },
        traits: 9,
        state_type_id: TypeId { id: -5 },
    };
    let mut extension = c_api::MetadataExtension {
        base: c_api::ExtensionBase { struct_size: 32, kind: c_api::EXTENSION_METADATA, next: null_mut() },
        metadata: &mut metadata,
    };
    let mut program = Program { api, ctx: Box::default() };
    let mut frame = program.frame(0, buffers(&[]), buffers(&[]), no_attrs());
    frame.extension_start = (&raw mut extension).cast();
    // SAFETY: a frame as XLA makes them.
    outcome(unsafe { instantiate::<GPU>(&mut frame) }).expect("metadata");
    assert_eq!((metadata.api_version.major, metadata.api_version.minor), (0, minor.min(4)));
    // XLA may not record calls into CUDA graphs.
    assert_eq!(metadata.traits, 0);
    // A field that older headers do not have is not written.
    assert_eq!(metadata.state_type_id.id, if minor >= 2 { TYPE } else { -5 });
}

/// Makes another key name a communicator.
fn another(key: &str, comm: &Comm) {
    // SAFETY: it is live.
    let named = unsafe { Comm::of_mpi(key, handle_value(comm.handle()), comm.rank, comm.size) };
    comm::register(named.expect("a communicator"));
}

fn calls(api: &'static Api, comm: &Comm) {
    let (rank, size) = (comm.rank, comm.size);
    let allreduce = json!({"op": "allreduce", "comm": "xla", "reduction": "SUM", "line": "xla.rs:1"});
    let (mut x, mut y) = ([rank as f32, 1.0, 2.0, 3.0], [0f32; 4]);
    let dims = [2i64, 2];
    let (from, to) = (buffer(F32, &mut x, &dims), buffer(F32, &mut y, &dims));
    let token = buffer::<u8>(c_api::TYPE_TOKEN, &mut [], &[]);
    let mut program = Program::new(api, &allreduce).expect("compiles");
    for with_token in [false, true] {
        let list = |buffer| if with_token { vec![buffer, &raw const token] } else { vec![buffer] };
        program.execute(&list(&from), &list(&to)).expect("runs");
        let n = size as f32;
        assert_eq!(y, [n * (n - 1.0) / 2.0, n, 2.0 * n, 3.0 * n]);
        y.fill(0.0);
    }

    // The envelope comes as an operand, and goes as a result.
    let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
    let sendrecv = json!({
        "op": "sendrecv",
        "comm": "xla",
        "envelope": {"source": -1, "recvtag": 0, "dest": next, "sendtag": 8},
        "operand": "peers",
        "envelope_result": true,
    });
    let mut program = Program::new(api, &sendrecv).expect("compiles");
    let (mut given, mut received) = ([previous, 8, next, 8], [0; 3]);
    let (given, taken) = (buffer(S32, &mut given, &[4]), buffer(S32, &mut received, &[3]));
    program.execute(&[&from, &given], &[&to, &taken]).expect("runs");
    assert_eq!((y[0], received), (previous as f32, [previous, 8, 4]));

    let barrier = |comm| json!({"op": "barrier", "comm": comm});
    let mut program = Program::new(api, &barrier("xla")).expect("compiles");
    program.execute(&[&token], &[&token]).expect("runs");

    // What cannot be, says so.
    let fails = |result: Result<(), String>, words: &[&str]| {
        let error = result.expect_err("an error");
        assert!(words.iter().all(|word| error.contains(word)), "{error}: expected {words:?}");
    };
    let wrong = json!({"op": "allreduce", "comm": "wrong", "reduction": "SUM"});
    let fails_to_run = |args: &[*const Buffer], rets: &[*const Buffer], words: &[&str]| {
        another("wrong", comm);
        let mut program = Program::new(api, &wrong).expect("compiles");
        fails(program.execute(args, rets), words);
        fails(program.execute(args, rets), &["wrong", "earlier operation", words[1]]);
        comm::free("wrong");
    };
    fails_to_run(&[], &[&to], &["allreduce", "operand", "expected 1", "got 0"]);
    fails_to_run(&[&from, &from], &[&to], &["allreduce", "operand", "expected 1", "got 2"]);
    let short = [3i64];
    fails_to_run(&[&from], &[&buffer(F32, &mut y, &short)], &["allreduce", "4", "3", "float32"]);
    fails_to_run(&[&buffer(21, &mut x, &dims)], &[&to], &["int4", "int8"]);
    fails_to_run(&[&buffer(99, &mut x, &dims)], &[&to], &["allreduce", "99"]);
    let refused = |description: Value, words: &[&str]| {
        fails(Program::new(api, &description).map(drop), words);
    };
    refused(json!({"op": "allreduce", "comm": "who?", "reduction": "SUM"}), &["allreduce", "who?"]);
    refused(json!({"op": "sum", "comm": "xla"}), &["unknown variant `sum`", "`allreduce`"]);
    refused(json!({"comm": "xla"}), &["missing field `op`"]);
    refused(json!({"op": "barrier", "comm": "xla", "colour": 1}), &["unknown field `colour`"]);
    refused(json!({"op": "bcast", "comm": "xla", "root": 99}), &["bcast", "99"]);
    refused(json!({"op": "bcast", "comm": "xla", "root": 1u64 << 40}), &["invalid value", "i32"]);
    refused(json!({"op": "scan", "comm": "xla", "reduction": "user#9"}), &["scan", "user#9"]);
    refused(json!({"op": "scan", "comm": "xla"}), &["scan", "reduction"]);
    refused(json!({"op": "halo_exchange", "comm": "xla"}), &["halo_exchange", "halo"]);
    refused(json!({"op": "barrier", "comm": "xla", "status": 4096}), &["status", "0x1000"]);
    refused(json!({"op": "barrier"}), &["barrier", "comm", "operand"]);
    Program::new(api, &json!({"op": "barrier", "operand": "call"})).expect("an operand says which one");

    another("gone", comm);
    let gone = barrier("gone");
    let mut program = Program::new(api, &gone).expect("compiles");
    comm::free("gone");
    fails(program.execute(&[], &[]), &["barrier", "gone", "freed"]);
    fails(Program::new(api, &gone).and_then(|mut program| program.execute(&[], &[])), &["freed"]);
}

/// Resident bytes of this process.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok());
    4096 * pages.unwrap_or(0)
}

/// Communicators that are made, used and freed one at a time leave nothing behind.
fn many(api: &'static Api, count: usize) {
    let mut x = [1f32];
    let (operand, mut y) = (buffer(F32, &mut x, &[1]), [0f32]);
    let result = buffer(F32, &mut y, &[1]);
    let mut before = 0;
    for i in 0..count {
        if i == count / 4 {
            before = resident();
        }
        // SAFETY: MPI is initialized; the communicator is freed last.
        unsafe {
            let mut made = MaybeUninit::uninit();
            assert_eq!(0, ffi::MPI_Comm_dup(ffi::RSMPI_COMM_WORLD, made.as_mut_ptr()));
            let mut made = made.assume_init();
            let (mut rank, mut size) = (0, 0);
            ffi::MPI_Comm_rank(made, &mut rank);
            ffi::MPI_Comm_size(made, &mut size);
            let key = format!("many#{i}");
            comm::register(Comm::of_mpi(&key, handle_value(made), rank, size).expect("a communicator"));
            // A suffix scan makes a communicator of its own.
            let scan = json!({
                "op": "scan",
                "comm": key,
                "reduction": "SUM",
                "reverse": true,
                "line": format!("many.py:{i}"),
            });
            let mut program = Program::new(api, &scan).expect("compiles");
            program.execute(&[&operand], &[&result]).expect("runs");
            assert_eq!(y[0], (size - rank) as f32);
            comm::free(&key);
            drop(program);
            assert_eq!(0, ffi::MPI_Comm_free(&mut made));
        }
    }
    let grown = resident().saturating_sub(before);
    println!("xla: {count} communicators, {} kB more than after the first quarter", grown >> 10);
    assert!(grown < 4 << 20, "{grown} bytes for {} communicators", count - count / 4);
}

pub fn run(comm: &Comm) {
    another("xla", comm);
    // The last one is newer than what we know.
    let apis = [api::<1>(), api::<2>(), api::<3>(), api::<4>(), api::<5>()];
    let apis = apis.map(|api| &*Box::leak(Box::new(api)));
    for api in apis {
        metadata::<false>(api);
        metadata::<true>(api);
        calls(api, comm);
    }
    // The first one, whose states are deleted here.
    let count = std::env::var("MPI4JAX_TEST_COMMUNICATORS").ok().and_then(|count| count.parse().ok());
    many(apis[0], count.unwrap_or(if comm.size == 1 { 4000 } else { 1000 }));
}
