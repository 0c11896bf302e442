//! The program's `MPI_Status`.

use mpi::ffi::MPI_Status;

/// Where a receive writes what MPI says of its message, if a program asks for that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status(usize);

impl Status {
    /// # Safety
    /// The address is 0, or points to an `MPI_Status` which lives as long as the program that names
    /// it.
    pub const unsafe fn at(address: usize) -> Self {
        Self(address)
    }

    #[inline]
    pub fn is_some(self) -> bool {
        self.0 != 0
    }

    #[inline]
    pub fn write(self, status: &MPI_Status) {
        if self.is_some() {
            // SAFETY: promised to `at`; MPI's functions write there too, without a lock.
            unsafe { (self.0 as *mut MPI_Status).write(*status) };
        }
    }
}
