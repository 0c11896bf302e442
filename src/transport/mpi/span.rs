//! Counts beyond 32 bits, as derived data types.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicUsize, Ordering};

use mpi::ffi::{self, MPI_Datatype};

use crate::error::Cause;
use crate::mpilib::check;
use crate::ops::{Buffer, Dtype};

/// The largest count handed to one MPI call.
static COUNT_LIMIT: AtomicUsize = AtomicUsize::new(c_int::MAX as usize);

/// Lowers the largest count handed to one MPI call, so that tests reach the code for large messages
/// with small ones. `None` restores the real limit.
#[cfg_attr(feature = "python", pyo3::pyfunction(signature = (limit)))]
pub fn set_count_limit(limit: Option<usize>) {
    let most = c_int::MAX as usize;
    COUNT_LIMIT.store(limit.unwrap_or(most).clamp(1, most), Ordering::Relaxed);
}

/// The largest count handed to one MPI call.
#[inline]
pub fn count_limit() -> usize {
    COUNT_LIMIT.load(Ordering::Relaxed)
}

/// `count` elements as one argument pair of an MPI call: the one place that decides between a plain
/// count and a derived type, which is freed with it: it is kept until MPI has been called. Its fields are private, since a
/// pattern that takes them from `Span::new(..)` would leave a type that has been freed.
pub struct Span {
    count: c_int,
    datatype: MPI_Datatype,
    derived: bool,
}

impl Span {
    #[inline]
    pub fn new(count: usize, dtype: Dtype) -> Result<Self, Cause> {
        let limit = count_limit();
        if count <= limit {
            return Ok(Self { count: count as c_int, datatype: dtype.mpi(), derived: false });
        }
        Self::derived(count, dtype, limit)
    }

    /// All elements of a buffer.
    #[inline]
    pub fn of(buffer: &Buffer) -> Result<Self, Cause> {
        Self::new(buffer.count(), buffer.dtype())
    }

    /// The count and the type, as MPI takes them while this lives.
    #[inline]
    pub fn arguments(&self) -> (c_int, MPI_Datatype) {
        (self.count, self.datatype)
    }

    /// One element of a type that is `count` elements long.
    #[cold]
    fn derived(count: usize, dtype: Dtype, limit: usize) -> Result<Self, Cause> {
        let base = dtype.mpi();
        let (chunks, rest) = (count / limit, count % limit);
        // SAFETY: MPI copies the arrays and takes references to the types, so that the intermediate type
        // may be freed; it is freed on the error path too. A chunk is at most i32::MAX elements, and with
        // the real limit there are fewer than 2^32 / 16 chunks in an address space.
        unsafe {
            let mut chunk = MaybeUninit::<MPI_Datatype>::uninit();
            check("MPI_Type_contiguous", ffi::MPI_Type_contiguous(limit as c_int, base, chunk.as_mut_ptr()))?;
            let mut chunk = chunk.assume_init();
            let mut whole = MaybeUninit::<MPI_Datatype>::uninit();
            let made = check(
                "MPI_Type_create_struct",
                ffi::MPI_Type_create_struct(
                    2,
                    [chunks as c_int, rest as c_int].as_ptr(),
                    [0, (chunks * limit * dtype.size()) as ffi::MPI_Aint].as_ptr(),
                    [chunk, base].as_ptr(),
                    whole.as_mut_ptr(),
                ),
            );
            ffi::MPI_Type_free(&mut chunk);
            made?;
            let mut span = Self { count: 1, datatype: whole.assume_init(), derived: true };
            check("MPI_Type_commit", ffi::MPI_Type_commit(&mut span.datatype))?;
            Ok(span)
        }
    }
}

impl Drop for Span {
    #[inline]
    fn drop(&mut self) {
        if self.derived {
            // SAFETY: made by `derived`, and MPI keeps it alive for communication that is under way.
            unsafe { ffi::MPI_Type_free(&mut self.datatype) };
        }
    }
}
