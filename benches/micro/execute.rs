//! What the handler costs of a 4-byte allreduce on one rank: in nanoseconds, or in instructions by
//! `python benches/micro/instructions.py`, which runs this under callgrind.

#[path = "../../tests/rust/program.rs"]
#[allow(dead_code)]
mod program;

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::time::Instant;

use _native::comm::{self, Comm};
use _native::mpilib::handle_value;
use _native::xla::c_api::Buffer;
use mpi::ffi;
use program::{F32, Program, api, buffer};
use serde_json::json;

const REPEATS: u32 = 20;

#[inline(never)]
fn bench_execute(program: &mut Program, from: &[*const Buffer], to: &[*const Buffer], calls: u32) {
    for _ in 0..calls {
        program.execute(from, to).expect("a sum");
    }
}

fn main() {
    // SAFETY: MPI is initialized first and finalized last, and used by this thread only.
    unsafe {
        let mut level: c_int = 0;
        assert_eq!(0, ffi::MPI_Init_thread(null_mut(), null_mut(), ffi::RSMPI_THREAD_MULTIPLE, &mut level));
        let mut made = MaybeUninit::uninit();
        assert_eq!(0, ffi::MPI_Comm_dup(ffi::RSMPI_COMM_SELF, made.as_mut_ptr()));
        let made = handle_value(made.assume_init());
        comm::register(Comm::of_mpi("bench", made, 0, 1).expect("a communicator"));
    }
    let api = Box::leak(Box::new(api::<4>()));
    let call = json!({"op": "allreduce", "comm": "bench", "reduction": "SUM", "line": "solver.py:97"});
    let mut program = Program::new(api, &call).expect("compiles");
    let (mut x, mut y) = ([1_f32], [0_f32]);
    let (from, to) = (buffer(F32, &mut x, &[1]), buffer(F32, &mut y, &[1]));
    let calls: u32 = std::env::args().find_map(|argument| argument.parse().ok()).unwrap_or(50_000);
    program.execute(&[&from], &[&to]).expect("the first run"); // which checks more than later ones
    let once = |_| {
        let began = Instant::now();
        bench_execute(&mut program, &[&from], &[&to], calls);
        began.elapsed().as_secs_f64() / f64::from(calls) * 1e9
    };
    let best = (0..REPEATS).map(once).fold(f64::MAX, f64::min);
    println!("allreduce of 4 bytes: {best:.1} ns");
    // SAFETY: see above.
    unsafe { ffi::MPI_Finalize() };
}
