//! Staging memory that is used again.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use crate::device::{Device, Staging};
use crate::error::Cause;

/// Bytes of staging memory that are kept for later calls, unless the environment says otherwise.
const KEPT: usize = 256 << 20;

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
            format!("{STAGING_BYTES}={text}: expected a number of bytes, such as 268435456 or 256M")
        }),
        _ => Ok(KEPT),
    }
}

/// A staging buffer that is not in use.
#[derive(Debug)]
struct Free<D: Device> {
    buffer: D::Staging,
    /// The device may still read from it.
    busy_until: Option<D::Mark>,
}

/// Staging buffers that are not in use, the one that was used last at the end.
pub struct Pool<D: Device> {
    /// In bytes; the buffers that were not used for the longest time are freed when there are more.
    keep: usize,
    free: Mutex<Vec<Free<D>>>,
}

impl<D: Device> fmt::Debug for Pool<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool of {} bytes", self.keep)
    }
}

impl<D: Device> Pool<D> {
    pub fn new(keep: usize) -> Self {
        Self { keep, free: Mutex::default() }
    }

    /// A buffer of at least so many bytes.
    pub fn lease(&self, device: &D, bytes: usize) -> Result<Lease<'_, D>, Cause> {
        let buffer = match self.take(bytes) {
            Some(Free { buffer, busy_until }) => {
                busy_until.map(|mark| device.wait(mark)).transpose()?;
                buffer
            }
            // A power of two, so that calls of similar sizes share buffers.
            None => device.allocate(bytes.next_power_of_two())?,
        };
        Ok(Lease { pool: self, buffer: Some(buffer), busy_until: None, settled: false })
    }

    /// The smallest buffer that is large enough.
    fn take(&self, bytes: usize) -> Option<Free<D>> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = free.iter().enumerate().filter(|(_, free)| free.buffer.capacity() >= bytes);
        let (index, _) = fits.min_by_key(|(_, free)| free.buffer.capacity())?;
        Some(free.remove(index))
    }

    fn give(&self, buffer: Free<D>) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.push(buffer);
        let mut total: usize = free.iter().map(|free| free.buffer.capacity()).sum();
        while total > self.keep {
            total -= free.remove(0).buffer.capacity();
        }
    }
}

/// A buffer in use. It goes back to the pool, once it is known when the device is done with it: after an error
/// of the device nobody knows, and it is lost.
pub struct Lease<'a, D: Device> {
    pool: &'a Pool<D>,
    buffer: Option<D::Staging>,
    busy_until: Option<D::Mark>,
    pub settled: bool,
}

impl<D: Device> Lease<'_, D> {
    /// The device is done with it when the stream comes past a mark.
    pub fn until(&mut self, mark: D::Mark) {
        (self.busy_until, self.settled) = (Some(mark), true);
    }

    pub fn data(&mut self) -> *mut u8 {
        self.buffer.as_mut().map_or(std::ptr::null_mut(), Staging::data)
    }
}

impl<D: Device> Drop for Lease<'_, D> {
    fn drop(&mut self) {
        let Some(buffer) = self.buffer.take() else { return };
        if !self.settled {
            std::mem::forget(buffer);
        } else {
            self.pool.give(Free { buffer, busy_until: self.busy_until.take() });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::HostDevice;

    #[test]
    fn the_pool_gives_the_smallest_that_fits_and_stays_bounded() {
        let pool = Pool::<HostDevice>::new(100);
        let give = |size| pool.give(Free { buffer: vec![0; size].into(), busy_until: None });
        let take = |size| pool.take(size).map(|free| free.buffer.len());
        for size in [8, 64, 16] {
            give(size);
        }
        assert_eq!(take(10), Some(16));
        assert_eq!(take(10), Some(64));
        assert_eq!(take(10), None);
        for size in [60, 30, 20] {
            give(size);
        }
        assert_eq!(take(40), None, "the oldest went, for the total to be at most 100");
        assert_eq!(take(20), Some(20));
        give(101);
        assert_eq!(take(1), None, "nor is anything kept that is larger than the bound");
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
