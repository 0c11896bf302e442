//! Which rank leads a host: the lowest one that runs. A process may get no time although it is not stopped: a cgroup is frozen, or
//! the machine swaps. Ranks that wait notice, and the next one leads meanwhile.

use std::collections::HashMap;

use crate::watch::job::host::HostFolder;

/// After how many seconds without time a process is woken, and after how many it counts as frozen. One that leads ranks that wait
/// runs more often by itself.
const SUSPECT: f64 = 4.0;
const FROZEN: f64 = 8.0;
/// How often that is looked at, and for how long it is remembered where no rank waits or wakes this one.
const LOOK: f64 = 1.0;
const KEEP: f64 = 10.0;

/// How often ranks have been seen to get time, and when that was first seen.
#[derive(Default)]
pub struct Succession {
    seen: HashMap<i32, (u64, f64)>,
    looked: Option<f64>,
    leader: Option<i32>,
    until: f64,
}

impl Succession {
    /// The rank that leads. `matters`: this rank waits, or another one has woken it.
    pub fn leader(&mut self, host: &HostFolder, matters: bool, now: f64) -> i32 {
        let is_recent = self.looked.is_some_and(|at| now - at < LOOK);
        if let Some(leader) = self.leader.filter(|_| is_recent) {
            return leader;
        }
        if matters {
            self.until = now + KEEP;
        } else if now > self.until {
            // Those that nobody wakes sleep.
            *self = Self::default();
            return host.leader(|_| false);
        }
        let leader = host.leader(|rank| {
            let still = self.still(rank, host.runs(rank), now);
            if still >= SUSPECT {
                host.wake(rank);
            }
            still >= FROZEN
        });
        (self.looked, self.leader) = (Some(now), Some(leader));
        leader
    }

    /// For how long a rank has had no time; `runs`: how often it has, if that is known.
    fn still(&mut self, rank: i32, runs: Option<u64>, now: f64) -> f64 {
        let Some(runs) = runs else { return 0.0 };
        let seen = self.seen.entry(rank).or_insert((runs, now));
        if seen.0 != runs {
            *seen = (runs, now);
        }
        now - seen.1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_gets_no_time_is_passed_over_until_it_does() {
        let mut succession = Succession::default();
        let mut still = |runs, now| succession.still(0, runs, now);
        assert_eq!([still(Some(5), 1.0), still(Some(5), 9.0)], [0.0, 8.0]);
        assert_eq!([still(Some(6), 10.0), still(Some(6), 12.0)], [0.0, 2.0]);
        assert_eq!(still(None, 99.0), 0.0, "this system does not say");
    }
}
