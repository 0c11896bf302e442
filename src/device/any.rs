//! A device that is known when a program runs.

use super::cuda::{Mark, Pointer};
use super::{CudaDevice, Device, HostDevice, Staging, Vram};
use crate::call::Stream;
use crate::error::Cause;

/// Where the arrays of a program are, and where memory for them is.
#[derive(Clone, Copy, Debug)]
pub enum AnyDevice {
    /// Both on the host.
    Host(HostDevice),
    /// Arrays on a GPU, memory on the host.
    Cuda(CudaDevice),
    /// Both on a GPU.
    Vram(Vram),
}

macro_rules! each {
    ($self:ident, $device:ident => $do:expr) => {
        match $self {
            Self::Host($device) => $do,
            Self::Cuda($device) => $do,
            Self::Vram($device) => $do,
        }
    };
}

impl Device for AnyDevice {
    type Staging = Box<dyn Staging>;
    /// None on the host.
    type Mark = Option<Mark>;

    fn allocate(&self, bytes: usize) -> Result<Self::Staging, Cause> {
        each!(self, device => Ok(Box::new(device.allocate(bytes)?)))
    }

    unsafe fn download(
        &self,
        from: *const u8,
        to: *mut u8,
        bytes: usize,
        stream: Stream,
    ) -> Result<(), Cause> {
        // SAFETY: promised by the caller.
        each!(self, device => unsafe { device.download(from, to, bytes, stream) })
    }

    unsafe fn upload(&self, from: *const u8, to: *mut u8, bytes: usize, stream: Stream) -> Result<(), Cause> {
        // SAFETY: promised by the caller.
        each!(self, device => unsafe { device.upload(from, to, bytes, stream) })
    }

    fn synchronize(&self, stream: Stream) -> Result<(), Cause> {
        each!(self, device => device.synchronize(stream))
    }

    fn mark(&self, stream: Stream) -> Result<Self::Mark, Cause> {
        match self {
            Self::Host(_) => Ok(None),
            Self::Cuda(device) => device.mark(stream).map(Some),
            Self::Vram(device) => device.mark(stream).map(Some),
        }
    }

    fn wait(&self, mark: Self::Mark) -> Result<(), Cause> {
        match (self, mark) {
            (Self::Cuda(device), Some(mark)) => device.wait(mark),
            (Self::Vram(device), Some(mark)) => device.wait(mark),
            _ => Ok(()),
        }
    }

    fn follow(&self, mark: Self::Mark, stream: Stream) -> Result<(), Cause> {
        match (self, mark) {
            (Self::Vram(device), Some(mark)) => device.follow(mark, stream),
            (_, mark) => self.wait(mark),
        }
    }
}

impl AnyDevice {
    /// Writes words of 32 bits, in the order of a stream.
    ///
    /// # Safety
    /// `to` is an aligned place for as many words in the memory of arrays.
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
                Self::Cuda(device) | Self::Vram(Vram(device)) => {
                    for (i, word) in words.into_iter().enumerate() {
                        let to = to.add(i * size_of::<u32>()) as Pointer;
                        device.driver().fill(to, word as i32, stream)?;
                    }
                }
            }
        }
        Ok(())
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
