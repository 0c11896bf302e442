//! A clock that costs a few nanoseconds to read.

use std::sync::OnceLock;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// A reading of all clocks at one moment.
struct Anchor {
    ticks: u64,
    instant: Instant,
    /// Whether the processor counts time at one rate, in all its states.
    counts: bool,
}

static ANCHOR: OnceLock<Anchor> = OnceLock::new();

#[cfg(all(target_arch = "x86_64", not(miri)))]
fn processor_counts_time() -> bool {
    use std::arch::x86_64::__cpuid;
    const POWER_MANAGEMENT: u32 = 0x8000_0007;
    const INVARIANT_TSC: u32 = 1 << 8;
    // Before Rust 1.94 an unsafe function, after it a safe one.
    #[allow(unused_unsafe)]
    // SAFETY: every x86-64 processor has the instruction, and the first call asks which leaves exist.
    unsafe {
        __cpuid(0x8000_0000).eax >= POWER_MANAGEMENT && __cpuid(POWER_MANAGEMENT).edx & INVARIANT_TSC != 0
    }
}

/// The architecture has such a counter, which programs may read.
#[cfg(all(target_arch = "aarch64", not(miri)))]
fn processor_counts_time() -> bool {
    true
}

#[cfg(not(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri))))]
fn processor_counts_time() -> bool {
    false
}

#[inline]
fn counter() -> u64 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: reads a register; Linux and macOS allow it to every process.
    return unsafe { std::arch::x86_64::_rdtsc() };
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    {
        let count;
        // SAFETY: reads a register; Linux and macOS allow it to every process.
        unsafe {
            std::arch::asm!("mrs {}, cntvct_el0", out(reg) count, options(nomem, nostack, preserves_flags))
        };
        count
    }
    #[cfg(not(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri))))]
    0
}

fn anchor() -> &'static Anchor {
    ANCHOR.get_or_init(|| Anchor {
        ticks: counter(),
        instant: Instant::now(),
        counts: processor_counts_time(),
    })
}

/// The time in units that [`seconds_since`] and [`Epoch`] know how to read. Never 0.
#[inline]
pub fn ticks() -> u64 {
    let anchor = anchor();
    if anchor.counts { counter() } else { anchor.instant.elapsed().as_nanos() as u64 + 2 }
}

/// Ticks against seconds, as good as the time is long since the first use of this clock.
pub struct Epoch {
    ticks: u64,
    /// Seconds since 1970 at `ticks`.
    unix: f64,
    per_second: f64,
}

impl Epoch {
    pub fn now() -> Self {
        let anchor = anchor();
        // A rate from a shorter time would be a guess.
        while anchor.counts && anchor.instant.elapsed().as_micros() < 1000 {
            std::hint::spin_loop();
        }
        let (now, elapsed) = (ticks(), anchor.instant.elapsed().as_secs_f64());
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
        let per_second = if anchor.counts { (now - anchor.ticks) as f64 / elapsed } else { 1e9 };
        Self { ticks: now, unix, per_second }
    }

    /// Seconds from `from` to `to`.
    pub fn seconds(&self, from: u64, to: u64) -> f64 {
        to.saturating_sub(from) as f64 / self.per_second
    }

    /// Seconds from `from` to the moment of this epoch.
    pub fn seconds_since(&self, from: u64) -> f64 {
        self.seconds(from, self.ticks)
    }

    /// Seconds since 1970.
    pub fn unix(&self, at: u64) -> f64 {
        self.unix - (self.ticks as f64 - at as f64) / self.per_second
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn measures_a_pause() {
        let start = ticks();
        std::thread::sleep(Duration::from_millis(30));
        let seconds = Epoch::now().seconds_since(start);
        assert!((0.029..1.0).contains(&seconds), "{seconds}");
    }
}
