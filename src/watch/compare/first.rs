//! Nothing wrong comes out of the first run of a line, on the default communicator and on one host.
//!
//! A rank tells the others what it is about to do, and only then looks at what they have told: of two ranks that differ one at
//! least sees it before its operation runs. It holds the operation until the [samples](super::samples) are compared, which ends
//! the job if the difference is proved. No rank waits for one that has told nothing.
//!
//! Neighbours are enough where a result takes all ranks: one of them never comes. Where the data of one rank suffice, as in a
//! broadcast, the others look once more at what that rank has told, before they return them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::samples::{PublishedSample, first_difference};
use crate::call::{Call, Phase, Stream};
use crate::record::samples::{Sample, is_ours, samples};
use crate::watch::job::host::HostFolder;
use crate::watch::settings::watchdog;
use crate::watch::watchdog;

/// How many of its last samples a rank compares: some operations do not wait for other ranks.
const LAST: usize = 16;
/// For how long an operation is held, in which the job is ended if the difference is proved.
const HELD: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_millis(50);

/// Whether a sampled operation of this rank waits for the comparison.
pub fn is_due(call: &Call) -> bool {
    let site = &call.site;
    let is_first = site.runs.is_first() && site.phase == Phase::Whole && call.stream == Stream::NONE;
    is_first && is_ours(&site.comm) && !IS_DOUBTFUL.load(Ordering::Relaxed)
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
    host.tell(&PublishedSample::at_once(sample));
    if row.is_collective() {
        hold_if_different(host, &own, &sample.others);
    }
}

/// It has run.
#[cold]
pub fn after(call: &Call) {
    let Some(host) = watchdog().map(|watchdog| &watchdog.host) else { return };
    let (row, comm, own) = (call.site.op.row(), &call.site.comm, last_samples());
    if row.has_root && !call.site.is_root() {
        hold_if_different(host, &own, comm.world_rank(call.site.root).as_slice());
    } else if !row.is_collective()
        && row.receives()
        && let Some(sample) = own.last()
    {
        hold_if_different(host, &own, &sample.others[..1]);
    }
}

/// An operation was held, and the difference is not proved: threads of a rank use the communicator at once, for instance.
static IS_DOUBTFUL: AtomicBool = AtomicBool::new(false);

fn hold_if_different(host: &HostFolder, own: &[Sample], others: &[i32]) {
    let ours: Vec<_> = own.iter().map(PublishedSample::at_once).collect();
    let differs = |rank: i32| {
        let its: Vec<PublishedSample> = host.told(rank);
        first_difference(&ours, &its).is_some()
    };
    let mut others = others.to_vec();
    others.dedup();
    let Some(other) = others.into_iter().find(|&rank| rank != host.rank && differs(rank)) else { return };
    let start = Instant::now();
    while start.elapsed() < HELD {
        host.ask_to_compare(other);
        watchdog::compare(host);
        std::thread::sleep(PAUSE);
    }
    IS_DOUBTFUL.store(true, Ordering::Relaxed);
}
