//! Samples of what the ranks do are compared, after the fact and without a message, so that nothing is wrong in silence.
//!
//! What differs has to be proved: of a collective on a communicator of the user's, another rank may do its part
//! through mpi4py, and count otherwise from then on. So the samples are of the default communicator, as long as the program
//! has not asked for it: then mpi4jax alone communicates on it, and collectives of one number are one collective.
//! Each rank compares with its two neighbours. Nobody waits for anybody: whoever comes later sees both.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::compare::{self, Level};
use super::peers::{Peers, file};
use crate::call::Call;
use crate::record::recorder::Record;

/// Of how many collectives all are sampled; after them, those whose number is a power of two.
const FIRST: u64 = 64;

/// What a rank did.
#[derive(Clone, Debug, PartialEq)]
struct Sample {
    /// The number of the collective on its communicator.
    number: u64,
    /// Of what MPI requires to be the same on all ranks.
    print: u64,
    words: String,
}

static SAMPLES: Mutex<Vec<Sample>> = Mutex::new(Vec::new());
/// How many of them the others have been told of.
static TOLD: AtomicU64 = AtomicU64::new(0);
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
    samples().push(Sample { number: record.sequence, print, words });
}

fn parse(line: &str) -> Option<Sample> {
    let (number, rest) = line.split_once(' ')?;
    let (print, words) = rest.split_once(' ')?;
    let print = u64::from_str_radix(print, 16).ok()?;
    Some(Sample { number: number.parse().ok()?, print, words: words.into() })
}

/// What two ranks did differently first.
fn first_difference<'a>(ours: &'a [Sample], theirs: &'a [Sample]) -> Option<(&'a Sample, &'a Sample)> {
    let pairs =
        ours.iter().filter_map(|our| Some((our, theirs.iter().find(|its| its.number == our.number)?)));
    pairs.filter(|(our, its)| our.print != its.print).min_by_key(|(our, _)| our.number)
}

impl Peers {
    /// Tells the others what this rank did, and what it did otherwise than its neighbours, if anything.
    pub fn difference(&self) -> Option<String> {
        let ours = samples().clone();
        if ours.is_empty() || self.broken().is_some() {
            return None;
        }
        if TOLD.swap(ours.len() as u64, Ordering::Relaxed) != ours.len() as u64 {
            let line = |it: &Sample| format!("{} {:016x} {}\n", it.number, it.print, it.words);
            let _ = self.write(&file(self.rank, "did"), &ours.iter().map(line).collect::<String>());
        }
        [self.size - 1, 1]
            .into_iter()
            .find_map(|distance| self.difference_from((self.rank + distance) % self.size, &ours))
    }

    fn difference_from(&self, rank: i32, ours: &[Sample]) -> Option<String> {
        let theirs: Vec<Sample> = self.read(&file(rank, "did"))?.lines().filter_map(parse).collect();
        let (our, its) = first_difference(ours, &theirs)?;
        let mut both = [(self.rank, &our.words), (rank, &its.words)];
        both.sort();
        let lines = both.map(|(rank, words)| format!("\n  rank {rank}: {words}")).concat();
        Some(format!("the ranks did different things (MPI4JAX_CHECK=0: they are not compared){lines}"))
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
        let sample =
            |number, print: u64| Sample { number, print, words: format!("barrier #{number}, a.py:1") };
        let ours = [1, 2, 3].map(|number| sample(number, number));
        assert_eq!(first_difference(&ours, &ours[1..]), None);
        // Threads may remember in another order than they have begun in.
        let theirs = [sample(3, 7), sample(2, 7), sample(4, 7)];
        assert_eq!(first_difference(&ours, &theirs), Some((&ours[1], &theirs[1])));
        let line = format!("{} {:016x} {}", 3, 7, theirs[0].words);
        assert_eq!(parse(&line).as_ref(), Some(&theirs[0]));
    }
}
