//! Streams of CUDA, on which work is put.

use std::ptr::null_mut;

use cudarc::driver::sys::CUstream;

/// A stream of XLA or of this package.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(CUstream);

impl Stream {
    /// The null handle, for calls on the CPU.
    pub const NONE: Self = Self(null_mut());

    /// # Safety
    /// Null, or a stream of CUDA's that outlives the calls it is given to.
    pub const unsafe fn new(handle: CUstream) -> Self {
        Self(handle)
    }

    pub fn handle(self) -> CUstream {
        self.0
    }
}
