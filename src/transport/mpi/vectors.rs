//! Parts of arrays as `MPI_Ialltoallw` takes them: with a type for each rank, so that no rank has to know whether the counts of
//! others are too large for an `int`. Each message begins with its length, since MPI does not tell a receiver that it was
//! shorter than expected. What a rank sends to itself is no message.

use std::ffi::c_int;
use std::mem::MaybeUninit;

use mpi::ffi::{self, MPI_Datatype};

use super::span::Span;
use crate::error::Cause;
use crate::mpilib::check;
use crate::ops::{Buffer, Dtype, Part};

/// Arguments of `MPI_Ialltoallw` for the parts that go to each rank, or come from it. MPI reads them until the operation has ended.
pub struct Vectors {
    pub counts: Vec<c_int>,
    pub starts: Vec<c_int>,
    pub types: Vec<MPI_Datatype>,
    /// The length in bytes in front of each message, which MPI reads, or writes where messages are received.
    lengths: Box<[u64]>,
    /// The length in bytes that this rank expects of each message, and the size of an element.
    expected: Vec<u64>,
    size: usize,
}

impl Vectors {
    /// The arguments for a buffer, which must stay where it is.
    ///
    /// There are at least `types` types: Open MPI up to 4.1.4 reads one for each neighbor in the
    /// communicator's topology, even if it has fewer ranks (pull request 10515 of open-mpi/ompi).
    pub fn new(
        (rank, ranks): (usize, usize),
        parts: &[Part],
        buffer: Option<Buffer>,
        types: usize,
    ) -> Result<Self, Cause> {
        let (data, dtype) = buffer.map_or((std::ptr::null_mut(), Dtype::Uint8), |it| (it.data(), it.dtype()));
        let size = dtype.size();
        let mut expected = vec![0; ranks];
        let others = || parts.iter().filter(|part| part.rank != rank);
        for part in others() {
            expected[part.rank] = (part.count * size) as u64;
        }
        let mut vectors = Self {
            counts: vec![0; ranks],
            starts: vec![0; ranks],
            types: vec![Dtype::Uint8.mpi(); ranks.max(types)],
            lengths: expected.clone().into(),
            expected,
            size,
        };
        for part in others() {
            let i = part.rank;
            let length = (&raw mut vectors.lengths[i]).addr().wrapping_sub(data.addr());
            vectors.types[i] = message(length as isize, (part.start * size) as isize, part.count * size)?;
            vectors.counts[i] = 1;
        }
        Ok(vectors)
    }

    /// An error unless all received messages had the expected lengths.
    pub fn check(&self) -> Result<(), Cause> {
        for (source, &expected) in self.expected.iter().enumerate() {
            // SAFETY: MPI has written it since the compiler saw it last.
            let received = unsafe { (&raw const self.lengths[source]).read_volatile() };
            if received != expected {
                return Err(Cause::Parts {
                    source_rank: source as i32,
                    received: received as usize / self.size,
                    expected: expected as usize / self.size,
                });
            }
        }
        Ok(())
    }
}

/// A length and that number of bytes, at these distances from a buffer.
fn message(length: isize, start: isize, bytes: usize) -> Result<MPI_Datatype, Cause> {
    let span = Span::new(bytes, Dtype::Uint8)?;
    let (n, t) = span.arguments();
    let mut whole = MaybeUninit::<MPI_Datatype>::uninit();
    // SAFETY: MPI copies the arrays, and takes references to the types.
    unsafe {
        let code = ffi::MPI_Type_create_struct(
            2,
            [size_of::<u64>() as c_int, n].as_ptr(),
            [length as ffi::MPI_Aint, start as ffi::MPI_Aint].as_ptr(),
            [Dtype::Uint8.mpi(), t].as_ptr(),
            whole.as_mut_ptr(),
        );
        check("MPI_Type_create_struct", code)?;
        let mut whole = whole.assume_init();
        check("MPI_Type_commit", ffi::MPI_Type_commit(&mut whole))?;
        Ok(whole)
    }
}

impl Drop for Vectors {
    fn drop(&mut self) {
        for (kind, _) in self.types.iter_mut().zip(&self.counts).filter(|(_, count)| **count > 0) {
            // SAFETY: made by `message`, and nobody else has it.
            unsafe { ffi::MPI_Type_free(kind) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_a_type_for_each_neighbour_of_a_topology() {
        let types = |neighbours| Vectors::new((0, 2), &[], None, neighbours).unwrap().types.len();
        let lengths = [0, 6].map(types);
        assert_eq!(lengths, [2, 6]);
    }
}
