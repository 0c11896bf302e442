//! The memory that arrays are copied to and from.

use std::alloc::{Layout, alloc_zeroed, dealloc};

use super::cuda::{Driver, Mark, Pointer};
use crate::call::Stream;
use crate::error::Cause;

/// What is in staging memory of the host at first, in builds for tests: a test that reads what was not copied sees it.
const UNWRITTEN: u8 = 0xA5;

/// Where arrays are, and where the memory is that they are copied to and from. Calls are made in the context of their stream.
#[derive(Clone, Copy, Debug)]
pub enum Device {
    /// Both on the host: what is done for a GPU can be tested, and timed, without one.
    Host,
    /// Arrays on a GPU, memory on the host, which the GPU copies to and from by itself.
    Gpu(&'static Driver),
    /// Both on a GPU: for operations that do not go through the host.
    WithinGpu(&'static Driver),
}

impl Device {
    pub fn allocate(self, bytes: usize) -> Result<Staging, Cause> {
        // An empty allocation is an error to CUDA, and undefined on the host.
        let capacity = bytes.max(1);
        let data = match self {
            Self::Host => host_memory(capacity)?,
            Self::Gpu(driver) => driver.allocate_pinned(capacity)?,
            Self::WithinGpu(driver) => driver.allocate(capacity)? as *mut u8,
        };
        Ok(Staging { device: self, data, capacity })
    }

    /// Starts to copy from an array, in the order of a stream.
    ///
    /// # Safety
    /// Both places hold so many bytes until the stream has come past it, and do not overlap.
    pub unsafe fn download(
        self,
        from: *const u8,
        to: *mut u8,
        bytes: usize,
        stream: Stream,
    ) -> Result<(), Cause> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: promised by the caller.
        unsafe {
            match self {
                Self::Host => to.copy_from_nonoverlapping(from, bytes),
                Self::Gpu(driver) => driver.download(from as Pointer, to, bytes, stream)?,
                Self::WithinGpu(driver) => driver.copy(from as Pointer, to as Pointer, bytes, stream)?,
            }
        }
        Ok(())
    }

    /// The same to an array.
    ///
    /// # Safety
    /// As for `download`.
    pub unsafe fn upload(
        self,
        from: *const u8,
        to: *mut u8,
        bytes: usize,
        stream: Stream,
    ) -> Result<(), Cause> {
        // SAFETY: promised by the caller.
        unsafe {
            match self {
                Self::Gpu(driver) if bytes > 0 => driver.upload(from, to as Pointer, bytes, stream),
                // On the host, and within a GPU, there is no difference.
                _ => self.download(from, to, bytes, stream),
            }
        }
    }

    /// Writes words of 32 bits to an array, in the order of a stream.
    ///
    /// # Safety
    /// `to` is an aligned place for as many words.
    pub unsafe fn fill<const N: usize>(
        self,
        to: *mut u8,
        words: [u32; N],
        stream: Stream,
    ) -> Result<(), Cause> {
        // SAFETY: promised by the caller.
        unsafe {
            match self {
                Self::Host => to.cast::<[u32; N]>().write_unaligned(words),
                Self::Gpu(driver) | Self::WithinGpu(driver) => {
                    for (i, word) in words.into_iter().enumerate() {
                        driver.fill(to.add(i * size_of::<u32>()) as Pointer, word as i32, stream)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Waits for all that was started on a stream, where the host touches what it did.
    pub fn synchronize(self, stream: Stream) -> Result<(), Cause> {
        match self {
            Self::Gpu(driver) => driver.synchronize(stream),
            Self::Host | Self::WithinGpu(_) => Ok(()),
        }
    }

    /// The place in a stream that has been reached so far. None on the host.
    pub fn mark(self, stream: Stream) -> Result<Option<Mark>, Cause> {
        match self {
            Self::Host => Ok(None),
            Self::Gpu(driver) | Self::WithinGpu(driver) => driver.mark_on(stream).map(Some),
        }
    }

    /// Lets what comes on a stream from now on wait for a mark: the host does, if it touches the memory too.
    pub fn follow(self, mark: &Mark, stream: Stream) -> Result<(), Cause> {
        if let Self::WithinGpu(_) = self { mark.hold(stream) } else { mark.wait() }
    }
}

fn host_memory(bytes: usize) -> Result<*mut u8, Cause> {
    // A program may ask for more than there is. Vec would end the process.
    let too_large = || Cause::Shape { dims: [bytes as i64].into() };
    let layout = Layout::array::<u8>(bytes).map_err(|_| too_large())?;
    // SAFETY: of a size that is not zero; so many bytes are written.
    unsafe {
        let data = alloc_zeroed(layout);
        if data.is_null() {
            return Err(too_large());
        }
        if cfg!(debug_assertions) {
            data.write_bytes(UNWRITTEN, bytes);
        }
        Ok(data)
    }
}

/// A piece of the memory that a device copies to and from.
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
        // SAFETY: made by `allocate`, in a context where that is needed; a pool knows when the device is done with it.
        unsafe {
            match self.device {
                Device::Host => dealloc(self.data, Layout::array::<u8>(self.capacity).unwrap_unchecked()),
                Device::Gpu(driver) => driver.free_pinned(self.data),
                Device::WithinGpu(driver) => driver.free(self.data as Pointer),
            }
        }
    }
}
