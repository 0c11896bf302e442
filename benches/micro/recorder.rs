//! What the flight recorder adds to an operation: `cargo bench --no-default-features --bench recorder`.
//!
//! Fails above the limit, so that a change that makes it slow is noticed.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use _native::call::{Call, Site, Stream};
use _native::comm::{self, Comm};
use _native::ops::{Buffer, Dtype, Op};
use _native::record::recorder;

const LIMIT_NS: f64 = 50.0;
const OPERATIONS: u32 = 1_000_000;

fn nanoseconds(mut body: impl FnMut()) -> f64 {
    let round = |body: &mut dyn FnMut()| {
        let start = Instant::now();
        for _ in 0..OPERATIONS {
            body();
        }
        start.elapsed().as_secs_f64() * 1e9 / f64::from(OPERATIONS)
    };
    // The least of several rounds: anything above it is the machine's other work.
    (0..20).map(|_| round(&mut body)).fold(f64::INFINITY, f64::min)
}

fn main() {
    let comm = comm::register(Comm::new("bench", 0, 4));
    let mut slowest: f64 = 0.0;
    for op in [Op::Allreduce, Op::Gather, Op::Barrier, Op::Sendrecv] {
        let mut site = Site::new(op, &comm);
        site.location = "solver.py:97".into();
        let site = Arc::new(site);
        let buffer = unsafe { Buffer::new(std::ptr::null_mut(), Dtype::Float32, 1024) };
        let (send, recv) = if op == Op::Barrier { (None, None) } else { (Some(buffer), Some(buffer)) };
        let call = Call { send, recv, ..Call::of(&site, Stream::NONE) };
        let time = nanoseconds(|| {
            drop(black_box(recorder::begin(&site, black_box(&call), |count| (count as u64, 0))))
        });
        println!("{op}: {time:.1} ns per operation");
        slowest = slowest.max(time);
    }
    assert!(slowest < LIMIT_NS, "{slowest:.1} ns per operation, expected less than {LIMIT_NS}");
}
