//! Pools of staging memory of the host, which calls use again.

use std::mem::ManuallyDrop;
use std::sync::{Mutex, MutexGuard, OnceLock};

use super::TARGET;
use crate::device::{Device, Staging};
use crate::error::Cause;
use crate::sync::lock;
use crate::system::variable;

const KEEP_MIB: &str = "MPI4JAX_STAGING_MIB";
/// The most that a pool keeps for later calls, in MiB, where the environment does not say.
const DEFAULT_MIB: usize = 512;

static KEEP: OnceLock<usize> = OnceLock::new();

/// The most bytes that a pool keeps, by the environment's setting.
fn keep_by(setting: &str) -> Result<usize, Cause> {
    let mib = if setting.is_empty() { Some(DEFAULT_MIB) } else { setting.parse().ok() };
    mib.and_then(|mib| mib.checked_mul(1 << 20)).ok_or_else(|| Cause::Setting {
        message: format!("{KEEP_MIB}={setting} is not understood: expected a number of MiB"),
    })
}

/// Reads the environment, once.
pub fn read_setting() -> Result<(), Cause> {
    let keep = keep_by(&variable(KEEP_MIB).unwrap_or_default())?;
    KEEP.get_or_init(|| keep);
    Ok(())
}

/// The capacity of a new buffer: up to a quarter more than asked for, so that calls of similar sizes share buffers, and at
/// least one byte, because the address of an empty allocation may equal `MPI_IN_PLACE`.
fn rounded(bytes: usize) -> usize {
    bytes.max(1).next_multiple_of((bytes.next_power_of_two() / 8).max(1))
}

/// Staging buffers for one call after another. What is kept and in use is together no more than what was once in use at
/// the same time; the buffers that were not used for the longest time are freed first.
#[derive(Debug)]
pub struct Pool {
    pub device: Device,
    /// The most bytes that are kept.
    keep: usize,
    state: Mutex<Buffers>,
}

#[derive(Debug, Default)]
struct Buffers {
    /// Buffers that no call uses, in the order of their last use.
    free: Vec<Staging>,
    /// Bytes in use, and the most that ever were.
    used: usize,
    peak: usize,
}

impl Pool {
    pub fn new(device: Device) -> Self {
        Self { device, keep: *KEEP.get_or_init(|| DEFAULT_MIB << 20), state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, Buffers> {
        lock(&self.state)
    }

    /// A buffer of at least `bytes` bytes: the smallest that is large enough, or a new one.
    pub fn lease(&self, bytes: usize) -> Result<Lease<'_>, Cause> {
        let found = {
            let free = &mut self.state().free;
            let fits = free.iter().enumerate().filter(|(_, buffer)| buffer.capacity() >= bytes);
            fits.min_by_key(|(_, buffer)| buffer.capacity()).map(|(i, _)| i).map(|i| free.remove(i))
        };
        let is_new = found.is_none();
        let buffer = found.map_or_else(|| self.device.allocate(rounded(bytes)), Ok)?;
        let mut state = self.state();
        state.used += buffer.capacity();
        state.peak = state.peak.max(state.used);
        if is_new {
            let (bytes, used, peak) = (buffer.capacity(), state.used, state.peak);
            drop(state);
            tracing::debug!(target: TARGET, bytes, used, peak, "allocated memory for copies");
        }
        Ok(Lease { pool: self, buffer: ManuallyDrop::new(buffer) })
    }

    /// Takes a buffer back, and returns buffers that the caller has to free, without the lock.
    fn give_back(&self, buffer: Staging) -> Vec<Staging> {
        let Buffers { free, used, peak } = &mut *self.state();
        *used -= buffer.capacity();
        free.push(buffer);
        let mut total: usize = free.iter().map(Staging::capacity).sum();
        let mut excess = 0;
        while total > self.keep.min(*peak - *used) {
            total -= free[excess].capacity();
            excess += 1;
        }
        free.drain(..excess).collect()
    }
}

/// A buffer in use. It goes back to the pool when it is dropped: where the device may still use it, it is forgotten
/// instead.
#[derive(Debug)]
pub struct Lease<'a> {
    pool: &'a Pool,
    buffer: ManuallyDrop<Staging>,
}

impl Lease<'_> {
    pub fn data(&self) -> *mut u8 {
        self.buffer.data()
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        // SAFETY: the lease ends here.
        let buffer = unsafe { ManuallyDrop::take(&mut self.buffer) };
        drop(self.pool.give_back(buffer));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(pool: &Pool) -> Vec<usize> {
        pool.state().free.iter().map(Staging::capacity).collect()
    }

    #[test]
    fn the_setting_is_a_number_of_mib() {
        assert_eq!(["", "0", "3"].map(|it| keep_by(it).unwrap()), [512 << 20, 0, 3 << 20]);
        for wrong in ["-1", "1GB", "99999999999999999"] {
            assert!(keep_by(wrong).unwrap_err().to_string().contains(wrong));
        }
    }

    #[test]
    fn sizes_are_rounded_by_a_quarter_at_most() {
        assert_eq!([0, 1, 7, 9, 1000, 130 << 20].map(rounded), [1, 1, 7, 10, 1024, 160 << 20]);
    }

    #[test]
    fn the_pool_gives_the_smallest_that_fits_and_stays_bounded() {
        let pool = Pool { keep: 100, ..Pool::new(Device::Host) };
        let lease = |size| pool.lease(size).unwrap();
        let at_once = |sizes: &[usize]| drop(sizes.iter().map(|&size| lease(size)).collect::<Vec<_>>());
        at_once(&[8, 64, 16]);
        let (first, second) = (lease(10), lease(10));
        assert_eq!([&first, &second].map(|lease| lease.buffer.capacity()), [16, 64]);
        assert_eq!(kept(&pool), [8]);
        drop((second, first));
        at_once(&[60, 30, 20]);
        assert!(kept(&pool).iter().sum::<usize>() <= 100);
        at_once(&[101]);
        assert!(kept(&pool).is_empty(), "nor is anything kept that is larger than the bound");
    }

    #[test]
    fn no_more_is_kept_than_was_in_use_at_once() {
        let pool = Pool { keep: 1000, ..Pool::new(Device::Host) };
        for size in [10, 20, 30, 40] {
            drop(pool.lease(size));
        }
        assert_eq!(kept(&pool), [40]);
        let large = pool.lease(1).unwrap();
        assert_eq!(large.buffer.capacity(), 40);
        let small = pool.lease(24).unwrap();
        drop(small);
        assert_eq!(kept(&pool), [24], "40 and 24 were in use at once");
    }
}
