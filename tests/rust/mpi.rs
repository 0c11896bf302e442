//! The suite over MPI: on one rank by `cargo test`, on more by `mpiexec -n N` before the program that
//! `cargo test --no-run` names.

mod model;
mod program;
mod suite;
mod xla;

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::ptr::null_mut;

use _native::comm::{self, Comm};
use _native::mpilib::handle_value;
use mpi::ffi;

fn main() {
    // SAFETY: MPI is initialized first and finalized last, and used by this thread only.
    let comm = unsafe {
        let mut level: c_int = 0;
        assert_eq!(0, ffi::MPI_Init_thread(null_mut(), null_mut(), ffi::RSMPI_THREAD_MULTIPLE, &mut level));
        let mut world = MaybeUninit::uninit();
        assert_eq!(0, ffi::MPI_Comm_dup(ffi::RSMPI_COMM_WORLD, world.as_mut_ptr()));
        let world = world.assume_init();
        let (mut rank, mut size) = (0, 0);
        ffi::MPI_Comm_rank(world, &mut rank);
        ffi::MPI_Comm_size(world, &mut size);
        comm::register(Comm::of_mpi("suite", handle_value(world), rank, size).expect("a communicator"))
    };
    let comm = &comm;
    xla::run(comm);
    // A rank that panics ends its process, and MPI the others.
    let carried = suite::run_all(comm);
    if comm.rank == 0 {
        println!("mpi: the suite passes on {} rank(s), over {}", comm.size, carried.join(", "));
    }
    // SAFETY: see above.
    unsafe { ffi::MPI_Finalize() };
}
