//! Staging memory that is used again.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::call::Stream;
use crate::device::{Device, Staging};
use crate::error::Cause;

/// Bytes of staging memory that are kept for later calls at most, unless the environment says otherwise.
const MOST: usize = 512 << 20;

pub const STAGING_BYTES: &str = "MPI4JAX_STAGING_BYTES";

/// Reads a number of bytes, which may end in K, M or G.
fn parse_bytes(text: &str) -> Option<usize> {
    let text = text.trim();
    let (digits, shift) = match text.chars().last()?.to_ascii_uppercase() {
        'K' => (&text[..text.len() - 1], 10),
        'M' => (&text[..text.len() - 1], 20),
        'G' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    digits.trim().parse::<usize>().ok()?.checked_mul(1 << shift)
}

pub fn bytes_to_keep() -> Result<usize, String> {
    match std::env::var(STAGING_BYTES) {
        Ok(text) if !text.is_empty() => parse_bytes(&text).ok_or_else(|| {
            format!("{STAGING_BYTES}={text}: expected a number of bytes, such as 536870912 or 512M")
        }),
        _ => Ok(MOST),
    }
}

/// Up to a quarter more, so that calls of similar sizes share buffers. Never nothing: memory of no bytes has an address
/// that MPI may take for `MPI_IN_PLACE`.
fn rounded(bytes: usize) -> usize {
    bytes.max(1).next_multiple_of((bytes.next_power_of_two() / 8).max(1))
}

/// A staging buffer that is not in use.
#[derive(Debug)]
struct Free<D: Device> {
    buffer: D::Staging,
    /// The device may still read from it.
    busy_until: Option<D::Mark>,
}

/// Staging buffers for one call after another. What is kept and in use is together no more than what was once in use at
/// the same time; the buffers that were not used for the longest time are freed first.
pub struct Pool<D: Device> {
    /// How many bytes are kept at most.
    keep: usize,
    state: Mutex<State<D>>,
}

struct State<D: Device> {
    /// The one that was used last at the end.
    free: Vec<Free<D>>,
    /// Bytes in use, and the most that ever were.
    used: usize,
    peak: usize,
}

impl<D: Device> fmt::Debug for Pool<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool of {} bytes", self.keep)
    }
}

impl<D: Device> Pool<D> {
    pub fn new(keep: usize) -> Self {
        Self { keep, state: Mutex::new(State { free: Vec::new(), used: 0, peak: 0 }) }
    }

    fn state(&self) -> MutexGuard<'_, State<D>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A buffer of at least so many bytes.
    pub fn lease<'a>(&'a self, device: &'a D, bytes: usize) -> Result<Lease<'a, D>, Cause> {
        let (lease, busy_until) = self.lease_busy(device, bytes)?;
        busy_until.map(|mark| device.wait(mark)).transpose()?;
        Ok(lease)
    }

    /// A buffer of at least so many bytes, for what comes on a stream from now on.
    pub fn lease_on<'a>(
        &'a self,
        device: &'a D,
        bytes: usize,
        stream: Stream,
    ) -> Result<Lease<'a, D>, Cause> {
        let (lease, busy_until) = self.lease_busy(device, bytes)?;
        busy_until.map(|mark| device.follow(mark, stream)).transpose()?;
        Ok(lease)
    }

    /// A buffer, and until when the device uses it.
    fn lease_busy<'a>(
        &'a self,
        device: &'a D,
        bytes: usize,
    ) -> Result<(Lease<'a, D>, Option<D::Mark>), Cause> {
        let (buffer, busy_until) = match self.take(bytes) {
            Some(Free { buffer, busy_until }) => (buffer, busy_until),
            None => (device.allocate(rounded(bytes))?, None),
        };
        self.count(buffer.capacity());
        Ok((Lease { pool: self, device, buffer: Some(buffer), busy_until: None, settled: false }, busy_until))
    }

    /// The smallest buffer that is large enough.
    fn take(&self, bytes: usize) -> Option<Free<D>> {
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
    fn give(&self, buffer: Free<D>) -> Vec<Free<D>> {
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
pub struct Lease<'a, D: Device> {
    pool: &'a Pool<D>,
    device: &'a D,
    buffer: Option<D::Staging>,
    busy_until: Option<D::Mark>,
    pub settled: bool,
}

impl<D: Device> Lease<'_, D> {
    /// The device is done with it when the stream comes past a mark.
    pub fn until(&mut self, mark: D::Mark) {
        (self.busy_until, self.settled) = (Some(mark), true);
    }

    /// The device is done with it when it has done what is on a stream so far.
    pub fn until_now(&mut self, stream: Stream) -> Result<(), Cause> {
        let mark = self.device.mark(stream)?;
        self.until(mark);
        Ok(())
    }

    /// Copies so many bytes to the memory of the device, in the order of a stream.
    ///
    /// # Safety
    /// Both places hold so many bytes until the stream has come past it.
    pub unsafe fn upload(&mut self, to: *mut u8, bytes: usize, stream: Stream) -> Result<(), Cause> {
        // Where this fails, nobody knows until when it is in use.
        self.settled = false;
        let from = self.data();
        // SAFETY: promised by the caller.
        unsafe { self.device.upload(from, to, bytes, stream)? };
        self.until_now(stream)
    }

    pub fn data(&mut self) -> *mut u8 {
        self.buffer.as_mut().map_or(std::ptr::null_mut(), Staging::data)
    }
}

impl<D: Device> Drop for Lease<'_, D> {
    fn drop(&mut self) {
        let Some(buffer) = self.buffer.take() else { return };
        if !self.settled {
            self.pool.state().used -= buffer.capacity();
            std::mem::forget(buffer);
        } else {
            for Free { buffer, busy_until } in
                self.pool.give(Free { buffer, busy_until: self.busy_until.take() })
            {
                // The device may still read from what is to be freed.
                if busy_until.is_some_and(|mark| self.device.wait(mark).is_err()) {
                    std::mem::forget(buffer);
                }
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::device::HostDevice;

    /// A device that does nothing, and what it was asked for.
    #[derive(Clone, Debug, Default)]
    pub struct Logged(Arc<Mutex<Vec<&'static str>>>);

    pub struct Block(usize, Logged);

    impl Logged {
        pub fn log(&self, what: &'static str) -> Result<(), Cause> {
            self.0.lock().unwrap().push(what);
            Ok(())
        }

        pub fn logged(&self) -> Vec<&'static str> {
            std::mem::take(&mut *self.0.lock().unwrap())
        }
    }

    impl Device for Logged {
        type Staging = Block;
        type Mark = ();

        fn allocate(&self, bytes: usize) -> Result<Block, Cause> {
            self.log("allocate").map(|()| Block(bytes, self.clone()))
        }

        unsafe fn download(&self, _: *const u8, _: *mut u8, _: usize, _: Stream) -> Result<(), Cause> {
            self.log("download")
        }

        unsafe fn upload(&self, _: *const u8, _: *mut u8, _: usize, _: Stream) -> Result<(), Cause> {
            self.log("upload")
        }

        fn synchronize(&self, _: Stream) -> Result<(), Cause> {
            self.log("synchronize")
        }

        fn mark(&self, _: Stream) -> Result<(), Cause> {
            Ok(())
        }

        fn wait(&self, (): ()) -> Result<(), Cause> {
            self.log("wait")
        }
    }

    impl Staging for Block {
        fn data(&mut self) -> *mut u8 {
            std::ptr::null_mut()
        }

        fn capacity(&self) -> usize {
            self.0
        }
    }

    impl Drop for Block {
        fn drop(&mut self) {
            let _ = self.1.log("free");
        }
    }

    #[test]
    fn what_the_device_may_still_read_is_freed_when_it_has() {
        let (device, pool) = (Logged::default(), Pool::<Logged>::new(100));
        for (bytes, expected) in
            [(101, &["allocate", "wait", "free"][..]), (80, &["allocate"]), (80, &["wait"])]
        {
            let mut lease = pool.lease(&device, bytes).unwrap();
            lease.until(());
            drop(lease);
            assert_eq!(device.logged(), expected, "{bytes}");
        }
    }

    #[test]
    fn sizes_are_rounded_by_a_quarter_at_most() {
        assert_eq!([0, 1, 7, 9, 1000, 130 << 20].map(rounded), [1, 1, 7, 10, 1024, 160 << 20]);
    }

    #[test]
    fn the_pool_gives_the_smallest_that_fits_and_stays_bounded() {
        let pool = Pool::<HostDevice>::new(100);
        let give = |sizes: &[usize]| {
            sizes.iter().for_each(|&size| pool.count(size));
            sizes.iter().for_each(|&size| {
                pool.give(Free { buffer: vec![0; size].into(), busy_until: None });
            });
        };
        let take = |size| pool.take(size).map(|free| free.buffer.len());
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
        let pool = Pool::<HostDevice>::new(1000);
        for size in [10, 20, 30, 40] {
            pool.count(size);
            pool.give(Free { buffer: vec![0; size].into(), busy_until: None });
        }
        let kept = || pool.state().free.iter().map(|free| free.buffer.len()).sum::<usize>();
        assert_eq!(kept(), 40);
        pool.count(40);
        assert_eq!(pool.take(1).map(|free| free.buffer.len()), Some(40));
        pool.count(25);
        pool.give(Free { buffer: vec![0; 25].into(), busy_until: None });
        assert_eq!(kept(), 25, "40 and 25 were in use at once");
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!(parse_bytes("12"), Some(12));
        assert_eq!(parse_bytes("256M"), Some(256 << 20));
        assert_eq!(parse_bytes(" 1 g "), Some(1 << 30));
        for text in ["", "M", "-1", "1.5G", "99999999999999G"] {
            assert_eq!(parse_bytes(text), None, "{text}");
        }
    }
}
