//! Staging memory that is used again.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::call::Stream;
use crate::device::cuda::Mark;
use crate::device::{Device, Staging};
use crate::error::Cause;
use crate::ops::Buffer;

/// Bytes that are kept for later calls at most.
const KEEP: usize = 512 << 20;

/// Up to a quarter more, so that calls of similar sizes share buffers. Never nothing: memory of no bytes has an address
/// that MPI may take for `MPI_IN_PLACE`.
fn rounded(bytes: usize) -> usize {
    bytes.max(1).next_multiple_of((bytes.next_power_of_two() / 8).max(1))
}

/// A staging buffer that is not in use.
#[derive(Debug)]
struct Free {
    buffer: Staging,
    /// The device may still read from it.
    busy_until: Option<Mark>,
}

/// Staging buffers for one call after another. What is kept and in use is together no more than what was once in use at
/// the same time; the buffers that were not used for the longest time are freed first.
#[derive(Debug)]
pub struct Pool {
    device: Device,
    /// How many bytes are kept at most.
    keep: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The one that was used last at the end.
    free: Vec<Free>,
    /// Bytes in use, and the most that ever were.
    used: usize,
    peak: usize,
}

impl Pool {
    pub fn new(device: Device) -> Self {
        Self { device, keep: KEEP, state: Mutex::default() }
    }

    pub fn device(&self) -> Device {
        self.device
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A buffer of at least so many bytes, for the host and for what comes on a stream from now on.
    pub fn lease(&self, bytes: usize, stream: Stream) -> Result<Lease<'_>, Cause> {
        let (buffer, busy_until) = match self.take(bytes) {
            Some(Free { buffer, busy_until }) => (buffer, busy_until),
            None => (self.device.allocate(rounded(bytes))?, None),
        };
        self.count(buffer.capacity());
        let lease = Lease { pool: self, buffer: Some(buffer), busy_until: None, settled: false };
        busy_until.map(|mark| self.device.follow(&mark, stream)).transpose()?;
        Ok(lease)
    }

    /// Fills an array with zeros, in the order of a stream. The memory is the host's.
    ///
    /// # Safety
    /// It is an array of the device until the stream has come past it.
    pub unsafe fn clear(&self, array: &Buffer, stream: Stream) -> Result<(), Cause> {
        let mut lease = self.lease(array.bytes(), stream)?;
        // SAFETY: promised by the caller; so many bytes were leased.
        unsafe {
            lease.data().write_bytes(0, array.bytes());
            lease.upload(array.data(), array.bytes(), stream)
        }
    }

    /// Writes numbers of 32 bits to an array of the device, in the order of a stream.
    pub fn write<const N: usize>(&self, numbers: [f32; N], to: &Buffer, stream: Stream) -> Result<(), Cause> {
        if to.bytes() < size_of_val(&numbers) {
            return Err(Cause::Buffers { operand: "result", expected: N, actual: to.count() });
        }
        // SAFETY: it has so many bytes.
        unsafe { self.device.fill(to.data(), numbers.map(f32::to_bits), stream) }
    }

    /// The smallest buffer that is large enough.
    fn take(&self, bytes: usize) -> Option<Free> {
        let free = &mut self.state().free;
        let fits = free.iter().enumerate().filter(|(_, free)| free.buffer.capacity() >= bytes);
        let (index, _) = fits.min_by_key(|(_, free)| free.buffer.capacity())?;
        Some(free.remove(index))
    }

    /// So many bytes are in use from now on.
    fn count(&self, bytes: usize) {
        let mut state = self.state();
        state.used += bytes;
        state.peak = state.peak.max(state.used);
    }

    /// Takes a buffer back; those that are to be freed for it.
    fn give(&self, buffer: Free) -> Vec<Free> {
        let State { free, used, peak } = &mut *self.state();
        *used -= buffer.buffer.capacity();
        free.push(buffer);
        let mut total: usize = free.iter().map(|free| free.buffer.capacity()).sum();
        let mut gone = 0;
        while total > self.keep.min(*peak - *used) {
            total -= free[gone].buffer.capacity();
            gone += 1;
        }
        free.drain(..gone).collect()
    }
}

/// A buffer in use. It goes back to the pool, once it is known when the device is done with it: after an error
/// of the device nobody knows, and it is lost.
#[derive(Debug)]
pub struct Lease<'a> {
    pool: &'a Pool,
    buffer: Option<Staging>,
    busy_until: Option<Mark>,
    pub settled: bool,
}

impl Lease<'_> {
    /// The device is done with it when it has done what is on a stream so far.
    pub fn until_now(&mut self, stream: Stream) -> Result<(), Cause> {
        self.busy_until = self.pool.device.mark(stream)?;
        self.settled = true;
        Ok(())
    }

    /// Copies so many bytes to the memory of the device, in the order of a stream.
    ///
    /// # Safety
    /// Both places hold so many bytes until the stream has come past it.
    pub unsafe fn upload(&mut self, to: *mut u8, bytes: usize, stream: Stream) -> Result<(), Cause> {
        // Where this fails, nobody knows until when it is in use.
        self.settled = false;
        // SAFETY: promised by the caller.
        unsafe { self.pool.device.upload(self.data(), to, bytes, stream)? };
        self.until_now(stream)
    }

    pub fn data(&self) -> *mut u8 {
        self.buffer.as_ref().map_or(std::ptr::null_mut(), Staging::data)
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        let Some(buffer) = self.buffer.take() else { return };
        if !self.settled {
            self.pool.state().used -= buffer.capacity();
            std::mem::forget(buffer);
            return;
        }
        for Free { buffer, busy_until } in self.pool.give(Free { buffer, busy_until: self.busy_until.take() })
        {
            // The device may still read from what is to be freed.
            if busy_until.is_some_and(|mark| mark.wait().is_err()) {
                std::mem::forget(buffer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn free(bytes: usize) -> Free {
        Free { buffer: Device::Host.allocate(bytes).unwrap(), busy_until: None }
    }

    #[test]
    fn sizes_are_rounded_by_a_quarter_at_most() {
        assert_eq!([0, 1, 7, 9, 1000, 130 << 20].map(rounded), [1, 1, 7, 10, 1024, 160 << 20]);
    }

    #[test]
    fn the_pool_gives_the_smallest_that_fits_and_stays_bounded() {
        let pool = Pool { keep: 100, ..Pool::new(Device::Host) };
        let give = |sizes: &[usize]| {
            sizes.iter().for_each(|&size| pool.count(size));
            sizes.iter().for_each(|&size| {
                pool.give(free(size));
            });
        };
        let take = |size| pool.take(size).map(|free| free.buffer.capacity());
        give(&[8, 64, 16]);
        assert_eq!(take(10), Some(16));
        assert_eq!(take(10), Some(64));
        assert_eq!(take(10), None);
        give(&[60, 30, 20]);
        assert_eq!(take(40), None, "the oldest went, for the total to be at most 100");
        assert_eq!(take(20), Some(20));
        give(&[101]);
        assert_eq!(take(1), None, "nor is anything kept that is larger than the bound");
    }

    #[test]
    fn no_more_is_kept_than_was_in_use_at_once() {
        let pool = Pool { keep: 1000, ..Pool::new(Device::Host) };
        for size in [10, 20, 30, 40] {
            pool.count(size);
            pool.give(free(size));
        }
        let kept = || pool.state().free.iter().map(|free| free.buffer.capacity()).sum::<usize>();
        assert_eq!(kept(), 40);
        pool.count(40);
        assert_eq!(pool.take(1).map(|free| free.buffer.capacity()), Some(40));
        pool.count(25);
        pool.give(free(25));
        assert_eq!(kept(), 25, "40 and 25 were in use at once");
    }
}
