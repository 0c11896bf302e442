//! Memory of arrays, on the host or a GPU, and staging memory of the host for copies of them.

use std::mem::ManuallyDrop;

use super::cuda::{CU_MEMHOSTALLOC_PORTABLE, Driver, Pointer, cuda, cuda_code};
use crate::call::Stream;
use crate::error::Cause;
use crate::ops::Buffer;

/// Every byte of new staging memory, in builds with debug assertions: a test that reads bytes which were never copied fails.
const UNWRITTEN: u8 = 0xA5;

/// The memory that arrays are in. Functions for GPUs are called while the context of the stream is current.
#[derive(Clone, Copy, Debug)]
pub enum Device {
    Host,
    Gpu(&'static Driver),
}

impl Device {
    /// Allocates staging memory of the host; for a GPU it is page-locked.
    pub fn allocate(self, bytes: usize) -> Result<Staging, Cause> {
        // CUDA refuses an empty allocation, and on the host it is undefined.
        let bytes = bytes.max(1);
        let (data, capacity) = match self {
            Self::Host => host_memory(bytes)?,
            Self::Gpu(driver) => {
                let mut data = std::ptr::null_mut();
                // SAFETY: a place to write to.
                unsafe { cuda!(driver, cuMemHostAlloc(&mut data, bytes, CU_MEMHOSTALLOC_PORTABLE))? };
                (data.cast(), bytes)
            }
        };
        Ok(Staging { device: self, data, capacity })
    }

    /// Starts to copy between arrays and staging memory, in either direction, in the order of a stream.
    ///
    /// # Safety
    /// Both places hold this number of bytes until the stream has passed the copy, and do not
    /// overlap.
    pub unsafe fn copy(
        self,
        from: *const u8,
        to: *mut u8,
        bytes: usize,
        stream: Stream,
    ) -> Result<(), Cause> {
        // SAFETY: promised by the caller.
        match self {
            _ if bytes == 0 => Ok(()),
            Self::Host => {
                unsafe { to.copy_from_nonoverlapping(from, bytes) };
                Ok(())
            }
            Self::Gpu(driver) => unsafe {
                cuda!(driver, cuMemcpyAsync(to as Pointer, from as Pointer, bytes, stream.handle()))
            },
        }
    }

    /// Fills an array with zeros, in the order of a stream.
    ///
    /// # Safety
    /// It is an array of the device until the stream has come past it.
    pub unsafe fn clear(self, array: &Buffer, stream: Stream) -> Result<(), Cause> {
        // SAFETY: promised by the caller.
        match self {
            _ if array.bytes() == 0 => Ok(()),
            Self::Host => {
                unsafe { array.data().write_bytes(0, array.bytes()) };
                Ok(())
            }
            Self::Gpu(driver) => unsafe {
                cuda!(driver, cuMemsetD8Async(array.data() as Pointer, 0, array.bytes(), stream.handle()))
            },
        }
    }

    /// Writes words of 32 bits to an array of as many, in the order of a stream.
    ///
    /// # Safety
    /// It is an array of the device until the stream has come past it.
    pub unsafe fn write(self, words: &[u32], array: &Buffer, stream: Stream) -> Result<(), Cause> {
        if array.bytes() < size_of_val(words) {
            let (expected, actual) = (words.len(), array.count());
            return Err(Cause::Buffers { operand: "result", expected, actual });
        }
        let to = array.data();
        // SAFETY: promised by the caller; it has this number of bytes.
        unsafe {
            match self {
                Self::Host => to.copy_from_nonoverlapping(words.as_ptr().cast(), size_of_val(words)),
                Self::Gpu(driver) => {
                    for (i, &word) in words.iter().enumerate() {
                        let place = to.add(i * size_of::<u32>()) as Pointer;
                        cuda!(driver, cuMemsetD32Async(place, word, 1, stream.handle()))?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Waits on the host for all that was put on a stream.
    pub fn synchronize(self, stream: Stream) -> Result<(), Cause> {
        match self {
            Self::Host => Ok(()),
            Self::Gpu(driver) => driver.synchronize(stream),
        }
    }
}

/// The address of new memory of the host, and its capacity: at least this many bytes.
fn host_memory(bytes: usize) -> Result<(*mut u8, usize), Cause> {
    let mut memory = ManuallyDrop::new(Vec::new());
    // A program may ask for more than there is, where other ways to allocate would end the process.
    memory.try_reserve_exact(bytes).map_err(|_| Cause::Shape { dims: [bytes as i64].into() })?;
    if cfg!(debug_assertions) {
        memory.resize(bytes, UNWRITTEN);
    }
    Ok((memory.as_mut_ptr(), memory.capacity()))
}

/// Staging memory, which is freed when this is dropped.
#[derive(Debug)]
pub struct Staging {
    device: Device,
    data: *mut u8,
    capacity: usize,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for Staging {}

impl Staging {
    pub fn data(&self) -> *mut u8 {
        self.data
    }

    /// In bytes.
    pub fn capacity(&self) -> usize {
        self.capacity
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // SAFETY: made by `allocate`. The owner drops it once nothing on a stream uses it any more.
        unsafe {
            match self.device {
                Device::Host => drop(Vec::from_raw_parts(self.data, 0, self.capacity)),
                // An error changes nothing here.
                Device::Gpu(driver) => _ = cuda_code!(driver, cuMemFreeHost(self.data.cast())),
            }
        }
    }
}
