//! Samples of what the ranks do are compared, after the fact and without a message, so that nothing is wrong in silence.
//!
//! What differs has to be proved: of a collective on a communicator of the user's, another rank may do its part
//! through mpi4py, and count otherwise from then on. So the samples are of the default communicator, as long as the program
//! has not asked for it: then mpi4jax alone communicates on it, and collectives of one number are one collective.
//! Each rank compares with its two neighbours. Nobody waits for anybody: whoever comes later sees both.
//!
//! Two threads of a rank may take their numbers in another order than MPI sees them in. So what differs is proved only if
//! it was alone on both ranks; else it is said, and the job goes on.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::compare::{self, Level};
use super::peers::{Peers, file};
use crate::call::Call;
use crate::comm::Comm;
use crate::record::recorder::{self, Record};

/// Of how many collectives all are sampled; after them, those whose number is a power of two.
const FIRST: u64 = 64;

/// What a rank did.
#[derive(Clone, Debug, PartialEq)]
struct Sample {
    /// The number of the collective on its communicator.
    number: u64,
    /// Of what MPI requires to be the same on all ranks.
    print: u64,
    /// No other collective on the communicator ran at the same time.
    alone: bool,
    words: String,
}

/// What ranks did differently.
#[derive(Debug, PartialEq)]
pub struct Difference {
    pub is_proved: bool,
    pub report: String,
}

static SAMPLES: Mutex<Vec<Sample>> = Mutex::new(Vec::new());
/// What the others have been told of them.
static TOLD: Mutex<String> = Mutex::new(String::new());
/// The program has the default communicator too.
static SHARED: AtomicBool = AtomicBool::new(false);

fn samples() -> MutexGuard<'static, Vec<Sample>> {
    SAMPLES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on the program may communicate on the default communicator by itself.
pub fn share_default() {
    SHARED.store(true, Ordering::Relaxed);
}

#[inline]
pub fn is_sampled(number: u64) -> bool {
    number <= FIRST || number.is_power_of_two()
}

/// Remembers a collective on the default communicator, which is about to run.
#[cold]
pub fn take(call: &Call, record: &Record) {
    if SHARED.load(Ordering::Relaxed) {
        return;
    }
    let print = compare::fingerprint(Level::Operations, call, record);
    let words = compare::with_widths(call, record);
    let is_beside = |other: &Record| {
        other.ticket != record.ticket
            && other.what.op.row().is_collective()
            && Arc::ptr_eq(&other.what.comm, &record.what.comm)
    };
    let alone = !recorder::running().iter().any(is_beside);
    samples().push(Sample { number: record.sequence, print, alone, words });
}

/// A collective on the default communicator of which a sample may have been taken has ended, or is looked at.
#[cold]
pub fn end(comm: &Comm, number: u64) {
    if comm.collectives.load(Ordering::Relaxed) != number
        && let Some(sample) = samples().iter_mut().rev().find(|sample| sample.number == number)
    {
        sample.alone = false;
    }
}

/// What is still running.
fn look() {
    for record in recorder::running().iter().filter(|record| record.what.comm.is_default()) {
        end(&record.what.comm, record.sequence);
    }
}

fn parse(line: &str) -> Option<Sample> {
    let (number, rest) = line.split_once(' ')?;
    let (print, rest) = rest.split_once(' ')?;
    let (alone, words) = rest.split_once(' ')?;
    let print = u64::from_str_radix(print, 16).ok()?;
    Some(Sample { number: number.parse().ok()?, print, alone: alone == "alone", words: words.into() })
}

impl fmt::Display for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, print, alone, words } = self;
        write!(f, "{number} {print:016x} {} {words}", if *alone { "alone" } else { "beside" })
    }
}

/// What two ranks did differently first; if there is some, what is proved.
fn first_difference<'a>(ours: &'a [Sample], theirs: &'a [Sample]) -> Option<(&'a Sample, &'a Sample)> {
    let pairs =
        ours.iter().filter_map(|our| Some((our, theirs.iter().find(|its| its.number == our.number)?)));
    pairs
        .filter(|(our, its)| our.print != its.print)
        .min_by_key(|(our, its)| (!(our.alone && its.alone), our.number))
}

impl Peers {
    /// Tells the others what this rank did, and what it did otherwise than its neighbours, if anything.
    pub fn difference(&self) -> Option<Difference> {
        look();
        let ours = samples().clone();
        if ours.is_empty() || self.broken().is_some() {
            return None;
        }
        let text: String = ours.iter().map(|sample| format!("{sample}\n")).collect();
        let mut told = TOLD.lock().unwrap_or_else(PoisonError::into_inner);
        if *told != text {
            let _ = self.write(&file(self.rank, "did"), &text);
            *told = text;
        }
        [self.size - 1, 1]
            .into_iter()
            .find_map(|distance| self.difference_from((self.rank + distance) % self.size, &ours))
    }

    fn difference_from(&self, rank: i32, ours: &[Sample]) -> Option<Difference> {
        let theirs: Vec<Sample> = self.read(&file(rank, "did"))?.lines().filter_map(parse).collect();
        let (our, its) = first_difference(ours, &theirs)?;
        let mut both = [(self.rank, &our.words), (rank, &its.words)];
        both.sort();
        let lines = both.map(|(rank, words)| format!("\n  rank {rank}: {words}")).concat();
        let is_proved = our.alone && its.alone;
        let may = if is_proved { "did" } else { "may have done" };
        let report =
            format!("the ranks {may} different things (MPI4JAX_CHECK=0: they are not compared){lines}");
        Some(Difference { is_proved, report })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_64_and_powers_of_two_are_sampled() {
        let sampled: Vec<u64> = (1..1000).filter(|&number| is_sampled(number)).collect();
        assert_eq!(sampled[..64], (1..=64).collect::<Vec<u64>>());
        assert_eq!(sampled[64..], [128, 256, 512]);
    }

    #[test]
    fn what_differs_first_is_found_by_numbers() {
        let sample = |number, print, alone| Sample {
            number,
            print,
            alone,
            words: format!("barrier #{number}, a.py:1"),
        };
        let ours = [1, 2, 3].map(|number| sample(number, number, true));
        assert_eq!(first_difference(&ours, &ours[1..]), None);
        // Threads may remember in another order than they have begun in.
        let theirs = [sample(3, 7, true), sample(2, 7, true), sample(4, 7, true)];
        assert_eq!(first_difference(&ours, &theirs), Some((&ours[1], &theirs[1])));
        // What ran beside another one may have had another number.
        let beside = [sample(3, 7, true), sample(2, 7, false)];
        assert_eq!(first_difference(&ours, &beside), Some((&ours[2], &beside[0])));
        assert_eq!(first_difference(&ours, &beside[1..]), Some((&ours[1], &beside[1])));
        for sample in beside {
            assert_eq!(parse(&sample.to_string()), Some(sample));
        }
    }
}
