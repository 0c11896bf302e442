//! A device that is known when a program runs.

use super::cuda::Mark;
use super::{CudaDevice, Device, HostDevice, Staging};
use crate::call::Stream;
use crate::error::Cause;

/// Where the arrays of a program are.
#[derive(Clone, Copy, Debug)]
pub enum Place {
    Host(HostDevice),
    Cuda(CudaDevice),
}

impl Place {
    /// Writes words of 32 bits, in the order of a stream.
    ///
    /// # Safety
    /// `to` is an aligned place for as many words in this memory.
    pub unsafe fn fill<const N: usize>(
        &self,
        to: *mut u8,
        words: [u32; N],
        stream: Stream,
    ) -> Result<(), Cause> {
        // SAFETY: promised by the caller.
        unsafe {
            match self {
                Self::Host(_) => to.cast::<[u32; N]>().write_unaligned(words),
                Self::Cuda(device) => {
                    for (i, word) in words.into_iter().enumerate() {
                        device.fill(to.add(i * size_of::<u32>()), word, stream)?;
                    }
                }
            }
        }
        Ok(())
    }
}

impl Device for Place {
    type Staging = Box<dyn Staging>;
    type Mark = Option<Mark>;

    fn allocate(&self, bytes: usize) -> Result<Self::Staging, Cause> {
        Ok(match self {
            Self::Host(device) => Box::new(device.allocate(bytes)?),
            Self::Cuda(device) => Box::new(device.allocate(bytes)?),
        })
    }

    unsafe fn download(
        &self,
        from: *const u8,
        to: *mut u8,
        bytes: usize,
        stream: Stream,
    ) -> Result<(), Cause> {
        // SAFETY: promised by the caller.
        unsafe {
            match self {
                Self::Host(device) => device.download(from, to, bytes, stream),
                Self::Cuda(device) => device.download(from, to, bytes, stream),
            }
        }
    }

    unsafe fn upload(&self, from: *const u8, to: *mut u8, bytes: usize, stream: Stream) -> Result<(), Cause> {
        // SAFETY: promised by the caller.
        unsafe {
            match self {
                Self::Host(device) => device.upload(from, to, bytes, stream),
                Self::Cuda(device) => device.upload(from, to, bytes, stream),
            }
        }
    }

    fn synchronize(&self, stream: Stream) -> Result<(), Cause> {
        match self {
            Self::Host(device) => device.synchronize(stream),
            Self::Cuda(device) => device.synchronize(stream),
        }
    }

    fn mark(&self, stream: Stream) -> Result<Self::Mark, Cause> {
        match self {
            Self::Host(_) => Ok(None),
            Self::Cuda(device) => device.mark(stream).map(Some),
        }
    }

    fn wait(&self, mark: Self::Mark) -> Result<(), Cause> {
        match (self, mark) {
            (Self::Cuda(device), Some(mark)) => device.wait(mark),
            _ => Ok(()),
        }
    }
}

impl Staging for Box<dyn Staging> {
    fn data(&mut self) -> *mut u8 {
        self.as_mut().data()
    }

    fn capacity(&self) -> usize {
        self.as_ref().capacity()
    }
}
