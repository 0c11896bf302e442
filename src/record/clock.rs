//! The clock of the flight recorder: the processor's counter where that counts time, which takes a few nanoseconds to read.

use std::sync::LazyLock;
use std::time::{SystemTime, UNIX_EPOCH};

use quanta::Clock;

static CLOCK: LazyLock<Clock> = LazyLock::new(Clock::new);

/// The time, in units that [`seconds`] converts. Never 0.
#[inline]
pub fn ticks() -> u64 {
    CLOCK.raw()
}

/// Seconds from one time to another.
pub fn seconds(from: u64, to: u64) -> f64 {
    1e-9 * CLOCK.delta_as_nanos(from, to) as f64
}

/// Seconds from a time until now.
pub fn seconds_since(from: u64) -> f64 {
    seconds(from, ticks())
}

/// A time as seconds since 1970.
pub fn unix(at: u64) -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
    now - seconds_since(at)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn measures_a_pause() {
        let (before, start) = (Instant::now(), ticks());
        std::thread::sleep(Duration::from_millis(30));
        let seconds = seconds_since(start);
        // A busy machine may take longer, which the other clock shows too.
        let most = before.elapsed().as_secs_f64() + 0.01;
        assert!((0.029..most).contains(&seconds), "{seconds} of {most}");
    }
}
