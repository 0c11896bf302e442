//! Transports for host memory, applied to the memory of a device.

use std::ffi::c_void;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use super::Transport;
use crate::error::{Cause, Error};
use crate::ops::{Buffer, Call};

/// Memory that a host transport cannot reach, and how to copy from and to it.
pub trait Device: Send + Sync + fmt::Debug {
    /// Host memory that the device copies to and from quickly.
    type Staging: Staging;

    fn allocate(&self, bytes: usize) -> Result<Self::Staging, Cause>;

    /// Starts to copy from the device, on a stream of XLA's.
    ///
    /// # Safety
    /// Both places hold so many bytes until the next `synchronize`.
    unsafe fn download(
        &self,
        from: *const u8,
        to: *mut u8,
        bytes: usize,
        stream: *mut c_void,
    ) -> Result<(), Cause>;

    /// Starts to copy to the device, on a stream of XLA's.
    ///
    /// # Safety
    /// Both places hold so many bytes until the next `synchronize`.
    unsafe fn upload(
        &self,
        from: *const u8,
        to: *mut u8,
        bytes: usize,
        stream: *mut c_void,
    ) -> Result<(), Cause>;

    /// Waits for all that was started on a stream.
    fn synchronize(&self, stream: *mut c_void) -> Result<(), Cause>;
}

/// A piece of host memory. It is freed when it is dropped.
pub trait Staging: Send {
    fn data(&mut self) -> *mut u8;
    fn capacity(&self) -> usize;
}

/// Runs the calls of a device on a transport for host memory.
///
/// Written once for all operations: what an operation reads is what its call has as `send`, what it
/// writes is `recv`, and no more than that is copied.
#[derive(Debug)]
pub struct Staged<D: Device, T> {
    name: &'static str,
    device: D,
    host: T,
    pool: Pool<D::Staging>,
}

impl<D: Device, T: Transport> Staged<D, T> {
    pub fn new(name: &'static str, device: D, host: T) -> Self {
        Self { name, device, host, pool: Pool::default() }
    }

    fn staging(&self, bytes: usize) -> Result<Lease<'_, D::Staging>, Cause> {
        let buffer = match self.pool.take(bytes) {
            Some(buffer) => buffer,
            // A power of two, so that calls of similar sizes share buffers.
            None => self.device.allocate(bytes.next_power_of_two())?,
        };
        Ok(Lease { pool: &self.pool, buffer: Some(buffer) })
    }

    /// The call on staging memory, between the copies.
    fn run(&self, call: &Call) -> Result<Result<(), Error>, Cause> {
        let stream = call.stream;
        let mut down = call.send.map(|buffer| self.staging(buffer.bytes())).transpose()?;
        let mut up = call.recv.map(|buffer| self.staging(buffer.bytes())).transpose()?;
        let on_host = |buffer: Option<Buffer>, staging: &mut Option<Lease<D::Staging>>| {
            buffer.zip(staging.as_mut()).map(|(buffer, lease)| Buffer { data: lease.data(), ..buffer })
        };
        let (send, recv) = (on_host(call.send, &mut down), on_host(call.recv, &mut up));
        if let (Some(from), Some(to)) = (call.send, send) {
            // SAFETY: the staging buffer is at least as large, and is kept until after `synchronize`.
            unsafe { self.device.download(from.data, to.data, from.bytes(), stream)? };
        }
        // Also where nothing is read: `recv` may still be read by what runs before us on the stream.
        self.device.synchronize(stream)?;
        let mut received = [0; 2];
        let host_call =
            Call { send, recv, received: call.received.map(|_| &raw mut received), ..call.clone() };
        if let Err(error) = self.host.execute(&host_call) {
            return Ok(Err(error));
        }
        // SAFETY: as above, and the pair is two int32 on both sides.
        unsafe {
            if let (Some(from), Some(to)) = (recv, call.recv) {
                self.device.upload(from.data, to.data, to.bytes(), stream)?;
            }
            if let Some(to) = call.received {
                self.device.upload(
                    (&raw const received).cast(),
                    to.cast(),
                    size_of_val(&received),
                    stream,
                )?;
            }
        }
        self.device.synchronize(stream)?;
        Ok(Ok(()))
    }
}

impl<D: Device, T: Transport> Transport for Staged<D, T> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn execute(&self, call: &Call) -> Result<(), Error> {
        let located = |cause| Error { transport: Some(self.name), ..call.site.error(cause) };
        self.run(call).map_err(located)?
    }

    fn read_pair(&self, pair: *const [i32; 2], stream: *mut c_void) -> Result<[i32; 2], Cause> {
        let mut read = [0; 2];
        // SAFETY: promised by the caller, and `read` is here until after `synchronize`.
        unsafe {
            let to = (&raw mut read).cast();
            self.device.download(pair.cast(), to, size_of_val(&read), stream)?;
        }
        self.device.synchronize(stream)?;
        Ok(read)
    }
}

/// Staging buffers that are not in use.
#[derive(Debug)]
struct Pool<B>(Mutex<Vec<B>>);

/// No program needs more at a time than operations that run at once, times two; what is beyond is freed.
const POOLED: usize = 8;

impl<B> Default for Pool<B> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<B: Staging> Pool<B> {
    /// The smallest buffer that is large enough.
    fn take(&self, bytes: usize) -> Option<B> {
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = free.iter().enumerate().filter(|(_, buffer)| buffer.capacity() >= bytes);
        let (index, _) = fits.min_by_key(|(_, buffer)| buffer.capacity())?;
        Some(free.swap_remove(index))
    }

    /// Keeps a buffer, and drops the smallest where there are too many.
    fn give(&self, buffer: B) {
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        free.push(buffer);
        if free.len() > POOLED {
            let smallest = free.iter().enumerate().min_by_key(|(_, buffer)| buffer.capacity());
            if let Some((index, _)) = smallest {
                free.swap_remove(index);
            }
        }
    }
}

/// A buffer in use; it goes back to the pool.
struct Lease<'a, B: Staging> {
    pool: &'a Pool<B>,
    buffer: Option<B>,
}

impl<B: Staging> Lease<'_, B> {
    fn data(&mut self) -> *mut u8 {
        self.buffer.as_mut().map_or(std::ptr::null_mut(), Staging::data)
    }
}

impl<B: Staging> Drop for Lease<'_, B> {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.pool.give(buffer);
        }
    }
}

/// Host memory in the part of a device: what `Staged` does can be tested, and timed, without one.
#[derive(Clone, Copy, Debug)]
pub struct HostDevice;

impl Device for HostDevice {
    type Staging = Box<[u8]>;

    fn allocate(&self, bytes: usize) -> Result<Self::Staging, Cause> {
        Ok(vec![0; bytes].into())
    }

    unsafe fn download(
        &self,
        from: *const u8,
        to: *mut u8,
        bytes: usize,
        _stream: *mut c_void,
    ) -> Result<(), Cause> {
        if bytes > 0 {
            // SAFETY: promised by the caller.
            unsafe { to.copy_from_nonoverlapping(from, bytes) };
        }
        Ok(())
    }

    unsafe fn upload(
        &self,
        from: *const u8,
        to: *mut u8,
        bytes: usize,
        stream: *mut c_void,
    ) -> Result<(), Cause> {
        // SAFETY: promised by the caller. On the host there is no difference.
        unsafe { self.download(from, to, bytes, stream) }
    }

    fn synchronize(&self, _stream: *mut c_void) -> Result<(), Cause> {
        Ok(())
    }
}

impl Staging for Box<[u8]> {
    fn data(&mut self) -> *mut u8 {
        self.as_mut_ptr()
    }

    fn capacity(&self) -> usize {
        self.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pool_gives_the_smallest_that_fits_and_stays_bounded() {
        let pool = Pool::<Box<[u8]>>::default();
        for size in [8, 64, 16] {
            pool.give(vec![0; size].into());
        }
        assert_eq!(pool.take(10).map(|buffer| buffer.len()), Some(16));
        assert_eq!(pool.take(10).map(|buffer| buffer.len()), Some(64));
        assert!(pool.take(10).is_none());
        for size in 0..3 * POOLED {
            pool.give(vec![0; size].into());
        }
        assert_eq!(pool.0.lock().unwrap().len(), POOLED);
        assert!(pool.take(3 * POOLED - 1).is_some(), "the largest are kept");
    }
}
