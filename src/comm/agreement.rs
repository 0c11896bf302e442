//! Whether all ranks of a communicator have the same number.

use std::ffi::c_int;
use std::mem::MaybeUninit;

use mpi::ffi::{self, MPI_Comm, MPI_Request};

use super::Comm;
use crate::error::Cause;
use crate::mpilib::check;

/// A number and its complement, of this rank, and the greatest of both of all ranks.
type Numbers = [[u64; 2]; 2];

/// A question to all ranks. MPI reads and writes its memory until all have answered.
pub struct Agreement(Box<Numbers>);

impl Agreement {
    /// Asks, and goes on; the request is that of the answer.
    pub fn start(comm: &Comm, number: u64) -> Result<(Self, MPI_Request), Cause> {
        let mut agreement = Self(Box::new([[number, !number]; 2]));
        let [own, greatest] = &mut *agreement.0;
        let (from, to, n) = (own.as_ptr().cast(), greatest.as_mut_ptr().cast(), own.len() as c_int);
        let mut request = MaybeUninit::uninit();
        // SAFETY: a registered communicator, which is not freed, constants of the MPI shim, and memory that stays where it
        // is. The request is written where there is no error.
        unsafe {
            let comm: MPI_Comm = comm.handle();
            let (kind, op) = (ffi::RSMPI_UINT64_T, ffi::RSMPI_MAX);
            let code = ffi::MPI_Iallreduce(from, to, n, kind, op, comm, request.as_mut_ptr());
            check("MPI_Iallreduce of a fingerprint", code)?;
            Ok((agreement, request.assume_init()))
        }
    }

    /// Whether all ranks have the same number, once they have answered.
    pub fn is_reached(&self) -> bool {
        // SAFETY: MPI has written it since the compiler saw it last.
        let greatest = unsafe { (&raw const self.0[1]).read_volatile() };
        // The greatest number is also the least one if all are equal.
        greatest[0] == !greatest[1]
    }
}

impl Comm {
    /// Whether all ranks have the same number. Collective.
    pub fn agrees(&self, number: u64) -> Result<bool, Cause> {
        let (agreement, mut request) = Agreement::start(self, number)?;
        let mut status = MaybeUninit::uninit();
        // SAFETY: a request that is under way.
        unsafe { check("MPI_Wait", ffi::MPI_Wait(&mut request, status.as_mut_ptr()))? };
        Ok(agreement.is_reached())
    }
}
