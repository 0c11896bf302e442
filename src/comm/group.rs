//! Small collective exchanges, by which the ranks of a communicator agree on bits, numbers or bytes.

use mpi::ffi::{self, MPI_Comm};
use mpi::raw::AsRaw;
use mpi::traits::Equivalence;

use super::Comm;
use crate::error::Cause;
use crate::mpilib::{check, handle, in_place};

/// The ranks that take part in an exchange.
#[derive(Clone, Copy, Debug)]
pub enum Group<'a> {
    /// All ranks of the job.
    World,
    /// A communicator that is not registered yet, by its [`handle_value`](crate::mpilib::handle_value).
    Handle(usize),
    Of(&'a Comm),
}

impl Group<'_> {
    fn handle(self) -> MPI_Comm {
        // SAFETY: a constant of the MPI shim; the others are handles of communicators.
        unsafe {
            match self {
                Self::World => ffi::RSMPI_COMM_WORLD,
                Self::Handle(value) => handle(value),
                Self::Of(comm) => comm.handle(),
            }
        }
    }

    pub fn size(self) -> Result<usize, Cause> {
        let mut size = 0;
        // SAFETY: MPI is initialized, the communicator is live.
        check("MPI_Comm_size", unsafe { ffi::MPI_Comm_size(self.handle(), &mut size) })?;
        Ok(size as usize)
    }

    /// The rank of this process in it.
    pub fn rank(self) -> Result<i32, Cause> {
        let mut rank = 0;
        // SAFETY: MPI is initialized, the communicator is live.
        check("MPI_Comm_rank", unsafe { ffi::MPI_Comm_rank(self.handle(), &mut rank) })?;
        Ok(rank)
    }

    /// The bits that every rank has set. Collective.
    pub fn common_bits(self, bits: u64) -> Result<u64, Cause> {
        // SAFETY: constants of the MPI shim.
        self.reduced(bits, unsafe { ffi::RSMPI_BAND })
    }

    /// The largest of the ranks' numbers. Collective.
    pub fn largest(self, number: u64) -> Result<u64, Cause> {
        // SAFETY: constants of the MPI shim.
        self.reduced(number, unsafe { ffi::RSMPI_MAX })
    }

    fn reduced(self, number: u64, op: ffi::MPI_Op) -> Result<u64, Cause> {
        let mut result = 0u64;
        // SAFETY: one element each way, of the type that is named.
        let code = unsafe {
            ffi::MPI_Allreduce(
                (&raw const number).cast(),
                (&raw mut result).cast(),
                1,
                ffi::RSMPI_UINT64_T,
                op,
                self.handle(),
            )
        };
        check("MPI_Allreduce", code)?;
        Ok(result)
    }

    /// Gives each rank the number at its place in `ours`, and gets theirs. Collective.
    pub fn exchange_counts<T: Equivalence>(self, ours: &[T], theirs: &mut [T]) -> Result<(), Cause> {
        debug_assert_eq!(ours.len(), theirs.len());
        let (to, t) = (theirs.as_mut_ptr().cast(), T::equivalent_datatype().as_raw());
        // SAFETY: one element for each rank, of the type that is named.
        let code = unsafe { ffi::MPI_Alltoall(ours.as_ptr().cast(), 1, t, to, 1, t, self.handle()) };
        check("MPI_Alltoall", code)
    }

    /// The two numbers of each rank. Collective.
    ///
    /// It is a reduction in which each rank has zeros at the places of the others. Open MPI sends messages in the first call of each
    /// kind of collective on a communicator, and programs call `MPI_Allreduce` anyway.
    pub fn all_pairs(self, ours: [u64; 2]) -> Result<Vec<[u64; 2]>, Cause> {
        let mut all = vec![[0u64; 2]; self.size()?];
        all[self.rank()? as usize] = ours;
        // SAFETY: two numbers for each rank, of the type that is named; constants of the MPI shim.
        let code = unsafe {
            let (to, n) = (all.as_mut_ptr().cast(), 2 * all.len() as i32);
            let (t, or) = (ffi::RSMPI_UINT64_T, ffi::RSMPI_BOR);
            ffi::MPI_Allreduce(in_place(), to, n, t, or, self.handle())
        };
        check("MPI_Allreduce", code)?;
        Ok(all)
    }

    /// The bytes of each rank, which may differ in number. Collective.
    pub fn all_bytes(self, ours: &[u8]) -> Result<Vec<Box<[u8]>>, Cause> {
        let longest = self.largest(ours.len() as u64)? as usize;
        // Each block: the length, then the bytes, then padding.
        let block = longest + size_of::<u64>();
        let mut send = (ours.len() as u64).to_ne_bytes().to_vec();
        send.extend_from_slice(ours);
        send.resize(block, 0);
        let mut recv = vec![0u8; block * self.size()?];
        // SAFETY: `send` holds one block, `recv` one per rank.
        let code = unsafe {
            let byte = ffi::RSMPI_UINT8_T;
            let (n, to) = (block as i32, recv.as_mut_ptr().cast());
            ffi::MPI_Allgather(send.as_ptr().cast(), n, byte, to, n, byte, self.handle())
        };
        check("MPI_Allgather", code)?;
        let whole = recv.chunks_exact(block).map(|block| {
            let (length, bytes) = block.split_at(size_of::<u64>());
            let length = length.try_into().map_or(0, u64::from_ne_bytes) as usize;
            bytes[..length.min(longest)].into()
        });
        Ok(whole.collect())
    }
}
