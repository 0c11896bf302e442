//! Whether all ranks of a communicator have the same number.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

use mpi::ffi::{self, MPI_Comm, MPI_Datatype, MPI_Op, MPI_Request};

use super::Comm;
use crate::error::Cause;
use crate::mpilib::{check, handle};

/// A number and its complement, of this rank, and the greatest of both of all ranks.
type Numbers = [[u64; 2]; 2];

/// A question to all ranks. MPI reads and writes its memory until all have answered.
pub struct Agreement(Box<Numbers>);

impl Agreement {
    fn of(number: u64) -> Self {
        Self(Box::new([[number, !number]; 2]))
    }

    fn arguments(&mut self) -> (*const c_void, *mut c_void, c_int, MPI_Datatype, MPI_Op) {
        let [own, greatest] = &mut *self.0;
        // SAFETY: constants of the MPI shim.
        let (kind, op) = unsafe { (ffi::RSMPI_UINT64_T, ffi::RSMPI_MAX) };
        (own.as_ptr().cast(), greatest.as_mut_ptr().cast(), own.len() as c_int, kind, op)
    }

    /// Asks, and goes on; the request is that of the answer.
    pub fn start(comm: &Comm, number: u64) -> Result<(Self, MPI_Request), Cause> {
        let (mut agreement, mut request) = (Self::of(number), MaybeUninit::uninit());
        let (from, to, n, kind, op) = agreement.arguments();
        // SAFETY: a registered communicator, which is not freed, and memory that stays where it is. The request is
        // written where there is no error.
        unsafe {
            let comm: MPI_Comm = handle(comm.handle);
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
        let mut agreement = Agreement::of(number);
        let (from, to, n, kind, op) = agreement.arguments();
        // SAFETY: a registered communicator, which is not freed, and two integers of the type that is named.
        let code = unsafe {
            let comm: MPI_Comm = handle(self.handle);
            ffi::MPI_Allreduce(from, to, n, kind, op, comm)
        };
        check("MPI_Allreduce of a fingerprint", code)?;
        Ok(agreement.is_reached())
    }
}
