//! What a 4-byte allreduce on one rank costs, through the transport alone: in nanoseconds, or in instructions under
//! `valgrind --tool=callgrind --toggle-collect='*bench_execute*'`.

use std::ffi::c_int;
use std::hint::black_box;
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::time::Instant;

use _native::call::{Call, Site};
use _native::comm::{self, Comm};
use _native::mpilib::handle_value;
use _native::ops::{Buffer, Dtype, Op, Reduction};
use _native::transport::{AnyTransport, HostMpi, Transport};
use mpi::ffi;

const REPEATS: u32 = 20;

#[inline(never)]
fn bench_execute(transport: &AnyTransport, call: &Call, calls: u32) {
    for _ in 0..calls {
        black_box(transport).execute(black_box(call)).expect("a sum");
    }
}

fn main() {
    // SAFETY: MPI is initialised first and finalised last, and used by this thread only.
    let comm = unsafe {
        let mut level: c_int = 0;
        assert_eq!(0, ffi::MPI_Init_thread(null_mut(), null_mut(), ffi::RSMPI_THREAD_MULTIPLE, &mut level));
        let mut world = MaybeUninit::uninit();
        assert_eq!(0, ffi::MPI_Comm_dup(ffi::RSMPI_COMM_SELF, world.as_mut_ptr()));
        comm::register(
            Comm::of_mpi("bench", handle_value(world.assume_init()), 0, 1).expect("a communicator"),
        )
    };
    let transport: AnyTransport = HostMpi::default().into();
    let site = Site { reduction: Reduction::from_name("SUM"), ..Site::new(Op::Allreduce, &comm) };
    let (mut from, mut to) = ([1_f32], [0_f32]);
    // SAFETY: an array of one float32, which outlives the call.
    let buffer = |x: &mut [f32; 1]| unsafe { Buffer::new(x.as_mut_ptr().cast(), Dtype::Float32, 1) };
    let call = Call::new(&site, Some(buffer(&mut from)), Some(buffer(&mut to))).expect("buffers");
    let calls: u32 = std::env::args().find_map(|argument| argument.parse().ok()).unwrap_or(50_000);
    let once = |_| {
        let began = Instant::now();
        bench_execute(&transport, &call, calls);
        began.elapsed().as_secs_f64() / f64::from(calls) * 1e9
    };
    let best = (0..REPEATS).map(once).fold(f64::MAX, f64::min);
    println!("allreduce of 4 bytes: {best:.1} ns");
    // SAFETY: see above.
    unsafe { ffi::MPI_Finalize() };
}
