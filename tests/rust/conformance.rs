//! The suite over ranks that are threads.

mod loopback;
mod model;
mod suite;

use std::io::Write;
use std::sync::Arc;

use _native::comm::Comm;
use _native::device::HostDevice;
use _native::transport::{Staged, Transport};

use loopback::Loopback;

/// Bytes of a piece: small, for the longer calls to have several, and an odd one at the end.
const PIECE: usize = 384;

/// Runs the suite on `size` ranks.
fn on_threads<T: Transport + Send>(size: usize, make: impl Fn(Loopback) -> T) {
    // The other ranks wait for one that has failed, for ever. The harness would keep what it says, and not print it at exit.
    std::panic::set_hook(Box::new(|panic| {
        let _ = writeln!(std::io::stderr(), "{panic}");
        std::process::exit(101);
    }));
    std::thread::scope(|scope| {
        for (rank, loopback) in Loopback::world(size).into_iter().enumerate() {
            let transport = make(loopback);
            scope.spawn(move || {
                let comm = Arc::new(Comm::new("suite", 0, rank as i32, size as i32));
                suite::run(&transport, &comm);
            });
        }
    });
}

/// Nobody, one other, an even and an odd number of others, and more than one round of a tree.
const SIZES: [usize; 4] = [1, 2, 3, 5];

#[test]
fn loopback() {
    on_threads(3, |loopback| loopback);
}

#[test]
fn staged() {
    for size in SIZES {
        on_threads(size, |loopback| Staged::with_sizes("staged", HostDevice, loopback, PIECE, 1 << 20));
    }
}
