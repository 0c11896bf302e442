//! The first run of a line waits for the comparison, on the default communicator and on one host: ranks that differ return no
//! wrong result.
//!
//! A rank announces what it is about to do, and only then reads what the others have announced: of two ranks that differ, one at
//! least sees it before its operation runs. It delays the operation until the [samples](super::samples) are compared, which ends
//! the job if the difference is proved. No rank waits for one that has announced nothing.
//!
//! Neighbours are enough where a result takes all ranks: one of them never comes. Where the data of one rank suffice, as in a
//! broadcast, the others look once more at what that rank has announced, before they return them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::samples::{PublishedSample, first_difference};
use crate::call::{Call, Phase};
use crate::record::samples::{Sample, is_ours, samples};
use crate::watch::job::host::HostFolder;
use crate::watch::settings::watchdog;
use crate::watch::watchdog;

/// How many of its last samples a rank compares: some operations do not wait for other ranks.
const LAST: usize = 16;
/// The delay of an operation, in which the job is ended if the difference is proved.
const LONGEST_DELAY: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_millis(50);

/// Whether a sampled operation of this rank waits for the comparison.
pub fn is_due(call: &Call) -> bool {
    let site = &call.site;
    site.runs.is_first()
        && site.phase == Phase::Whole
        && is_ours(&site.comm)
        && !IS_DOUBTFUL.load(Ordering::Relaxed)
}

fn last_samples() -> Vec<Sample> {
    let all = samples();
    all[all.len().saturating_sub(LAST)..].iter().filter(|sample| sample.is_ours).cloned().collect()
}

/// An operation of which a sample has been taken is about to run.
#[cold]
pub fn before(call: &Call) {
    let Some(host) = watchdog().map(|watchdog| &watchdog.host) else { return };
    let (row, own) = (call.site.op.row(), last_samples());
    let Some(sample) = own.last().filter(|_| row.is_collective() || row.sends()) else { return };
    host.announce(&PublishedSample::at_once(sample));
    if row.is_collective() {
        delay_if_different(host, &own, &sample.others);
    }
}

/// It has run.
#[cold]
pub fn after(call: &Call) {
    let Some(host) = watchdog().map(|watchdog| &watchdog.host) else { return };
    let (row, comm, own) = (call.site.op.row(), &call.site.comm, last_samples());
    if row.has_root && !call.site.is_root() {
        delay_if_different(host, &own, comm.world_rank(call.site.root).as_slice());
    } else if !row.is_collective()
        && row.receives()
        && let Some(sample) = own.last()
    {
        delay_if_different(host, &own, &sample.others[..1]);
    }
}

/// An operation was delayed, and the difference is not proved: threads of a rank use the communicator at once, for instance.
static IS_DOUBTFUL: AtomicBool = AtomicBool::new(false);

fn delay_if_different(host: &HostFolder, own: &[Sample], others: &[i32]) {
    let ours: Vec<_> = own.iter().map(PublishedSample::at_once).collect();
    let differs = |rank: i32| {
        let its: Vec<PublishedSample> = host.announced(rank);
        first_difference(&ours, &its).is_some()
    };
    let mut others = others.to_vec();
    others.dedup();
    let Some(other) = others.into_iter().find(|&rank| rank != host.rank && differs(rank)) else { return };
    let start = Instant::now();
    while start.elapsed() < LONGEST_DELAY {
        host.ask_to_compare(other);
        watchdog::compare(host);
        std::thread::sleep(PAUSE);
    }
    IS_DOUBTFUL.store(true, Ordering::Relaxed);
}
