//! Memory of a GPU in the part of staging memory: for operations that do not go through the host.

use super::cuda::{Driver, Mark, Pointer};
use super::{CudaDevice, Device, Staging};
use crate::call::Stream;
use crate::error::Cause;

/// The memory of a GPU. Calls are made in the context of their stream.
#[derive(Clone, Copy, Debug)]
pub struct Vram(pub CudaDevice);

impl Device for Vram {
    type Staging = Block;
    type Mark = Mark;

    fn allocate(&self, bytes: usize) -> Result<Block, Cause> {
        let driver = self.0.driver();
        Ok(Block { driver, pointer: driver.allocate(bytes.max(1))?, capacity: bytes })
    }

    unsafe fn download(
        &self,
        from: *const u8,
        to: *mut u8,
        bytes: usize,
        stream: Stream,
    ) -> Result<(), Cause> {
        // SAFETY: promised by the caller.
        unsafe { self.0.driver().copy(from as Pointer, to as Pointer, bytes, stream) }
    }

    unsafe fn upload(&self, from: *const u8, to: *mut u8, bytes: usize, stream: Stream) -> Result<(), Cause> {
        // SAFETY: promised by the caller. Within a device there is no difference.
        unsafe { self.download(from, to, bytes, stream) }
    }

    /// The host touches none of it.
    fn synchronize(&self, _stream: Stream) -> Result<(), Cause> {
        Ok(())
    }

    fn mark(&self, stream: Stream) -> Result<Mark, Cause> {
        self.0.mark(stream)
    }

    fn wait(&self, mark: Mark) -> Result<(), Cause> {
        self.0.wait(mark)
    }

    fn follow(&self, mark: Mark, stream: Stream) -> Result<(), Cause> {
        mark.hold(stream)
    }
}

/// A piece of a GPU's memory.
#[derive(Debug)]
pub struct Block {
    driver: &'static Driver,
    pointer: Pointer,
    capacity: usize,
}

impl Staging for Block {
    fn data(&mut self) -> *mut u8 {
        self.pointer as *mut u8
    }

    fn capacity(&self) -> usize {
        self.capacity
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: made by `allocate`, and a pool knows when the device is done with it. Calls are made in a context.
        unsafe { self.driver.free(self.pointer) };
    }
}
