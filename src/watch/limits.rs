//! After how long a wait counts as hung: what the user has set for the job, or for a part of the program.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A limit that holds now. Numbers tell one from another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limit {
    pub number: u64,
    /// 0: none.
    pub seconds: f64,
}

impl Limit {
    /// How it is called, after "has not ended after".
    pub fn name(&self) -> String {
        let seconds = self.seconds;
        if self.number == 0 {
            format!("MPI4JAX_TIMEOUT={seconds} s")
        } else {
            format!("time_limit({seconds} s)")
        }
    }
}

/// Those of parts that the program is in, the innermost last.
static PARTS: Mutex<Vec<Limit>> = Mutex::new(Vec::new());

fn parts() -> MutexGuard<'static, Vec<Limit>> {
    PARTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A part begins; its number.
pub fn enter(seconds: f64) -> u64 {
    static COUNT: AtomicU64 = AtomicU64::new(1);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    parts().push(Limit { number, seconds });
    number
}

/// A part ends. Those of other threads may have begun after it.
pub fn leave(number: u64) {
    parts().retain(|limit| limit.number != number);
}

/// What holds now, in a job with this time-out.
pub fn current(job: f64) -> Limit {
    parts().last().copied().unwrap_or(Limit { number: 0, seconds: job })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_limit_holds() {
        assert_eq!(current(5.0), Limit { number: 0, seconds: 5.0 });
        let outer = enter(2.0);
        let inner = enter(0.0);
        assert_eq!(current(5.0).seconds, 0.0);
        leave(outer);
        assert_eq!(current(5.0).number, inner);
        leave(inner);
        assert_eq!(current(5.0).name(), "MPI4JAX_TIMEOUT=5 s");
    }
}
