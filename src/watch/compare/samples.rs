//! Samples of the ranks' operations are compared afterwards, without a message, to report mismatches that MPI does not detect.
//!
//! Each rank writes its own, and reads those of the ranks that it exchanged messages with, and of its two neighbours on each
//! communicator. No rank waits for another: the one that comes later sees both samples.
//!
//! The two ends of a message are matched by content, collectives by their number. Numbers are reliable on the default
//! communicator as long as the program has not asked for it: mpi4jax alone communicates there. On another one, a rank may take
//! part through mpi4py, and its numbers differ from then on. Collectives there are therefore compared only at the end, or where
//! both ranks wait in one, and only if both did the same operations on as many bytes, from the first one to the last.
//!
//! Two threads of a rank may take their numbers in another order than they call MPI in. A difference on the default communicator
//! is therefore a proof only if the operation ran alone on both ranks; otherwise it is a warning.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};

use crate::call::{Call, Phase, Stream};
use crate::comm::{Comm, hash};
use crate::ops::Dtype;
use crate::record::recorder::{self, Record, Running};
use crate::record::samples::{Collective, Sample, add, is_ours, samples, sent};
use crate::sync::lock;
use crate::watch::job::host::HostFolder;

/// The number of first collectives of a communicator that are all sampled; a later one is if its number is a power of two.
const FIRST: u64 = 64;
/// After this many seconds in a collective it counts as the last one of this rank.
const LONG: f64 = 0.9;
/// The most ranks that one rank compares with.
const RANKS: usize = 16;

/// A sample as a rank publishes it for the others.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct PublishedSample {
    key: u64,
    print: u64,
    form: Box<str>,
    boundary: Box<str>,
    /// Why a difference is no proof: an index of [`DOUBTS`].
    doubt: usize,
    words: String,
}

const DOUBTS: [&str; 4] = [
    "",
    "several threads of a rank used the communicator at the same time, so the job goes on",
    "it is the program's communicator, which other code may use too, so the job goes on",
    "leaves of different names or shapes have the same bytes and may be confused, so the job goes on",
];
/// Of those, that of operations which differ in their forms alone.
const FORMS: usize = 3;

/// A difference between two ranks.
#[derive(Debug, PartialEq)]
pub struct Difference {
    pub is_proved: bool,
    pub report: String,
}

fn is_early(number: u64) -> bool {
    number <= FIRST || number.is_power_of_two()
}

/// Whether a call that begins is sampled: those with early numbers, and the first ones of each line.
#[inline]
pub fn is_due(call: &Call, running: &Running) -> bool {
    let runs = &call.site.runs;
    if call.site.op.row().is_collective() {
        runs.count();
        return is_early(running.sequence()) || runs.is_sampled();
    }
    // The content of messages is looked at here.
    if call.stream != Stream::NONE {
        return false;
    }
    runs.count();
    runs.is_sampled()
}

/// Takes a sample of an operation that is about to run.
#[cold]
pub fn take(call: &Call, running: &Running) {
    let row = call.site.op.row();
    if row.sends() {
        sent(call);
    }
    if row.is_collective()
        && let Some(record) = running.record()
    {
        take_collective(call, &record);
    }
}

fn take_collective(call: &Call, record: &Record) {
    let (comm, number) = (&call.site.comm, record.sequence);
    let is_beside = |other: &Record| other.ticket != record.ticket && Arc::ptr_eq(&other.site.comm, comm);
    let alone = !running_collectives().any(|other| is_beside(&other));
    let size = if call.site.op.row().has_any_size() { 0 } else { record.dtype.map_or(0, Dtype::size) };
    let neighbour = |distance| comm.world_rank((comm.rank + distance) % comm.size).unwrap_or(-1);
    let size = size as u64 * record.count;
    let sample = Sample {
        comm: comm.clone(),
        is_ours: is_ours(comm),
        key: hash((comm.id, comm.generation, number)),
        print: super::fingerprint(call, record),
        form: call.site.forms.sent.clone(),
        boundary: call.site.forms.boundary.clone(),
        others: [neighbour(1), neighbour(comm.size - 1)],
        words: super::with_widths(call, record),
        collective: Some(Collective { number, alone, name: record.name(), size }),
    };
    add(&mut samples(), sample);
}

/// The collectives that run now. What has been started, and is waited for, was one before.
fn running_collectives() -> impl Iterator<Item = Record> {
    let is_one = |record: &Record| record.site.op.row().is_collective() && record.phase() != Phase::Wait;
    recorder::running().into_iter().filter(is_one)
}

/// A collective of which a sample has been taken has ended, or is looked at.
#[cold]
pub fn end(comm: &Arc<Comm>, number: u64) {
    if comm.collectives.load(Ordering::Relaxed) == number {
        return;
    }
    let mut samples = samples();
    let of_comm = samples.iter_mut().rev().filter(|sample| Arc::ptr_eq(&sample.comm, comm));
    let found = of_comm.filter_map(|sample| sample.collective.as_mut()).find(|it| it.number == number);
    if let Some(collective) = found {
        collective.alone = false;
    }
}

/// Whether this communicator may have another number on other ranks: it has no name, and is one of several.
fn is_ambiguous(comm: &Arc<Comm>, all: &[Sample]) -> bool {
    let is_another = |other: &Arc<Comm>| !Arc::ptr_eq(other, comm) && other.class == comm.class;
    !comm.has_own_name() && all.iter().any(|other| is_another(&other.comm) && !other.comm.has_own_name())
}

/// Of the collectives that this rank did on a communicator: how many, and of those that all ranks sample, in their order,
/// names and sizes.
fn course(comm: &Arc<Comm>, all: &[Sample]) -> u64 {
    let of_comm = all.iter().filter(|sample| Arc::ptr_eq(&sample.comm, comm));
    let early = of_comm.filter_map(|sample| sample.collective.as_ref()).filter(|it| is_early(it.number));
    let course: Vec<_> = early.map(|it| (it.number, it.name, it.size)).collect();
    hash((comm.collectives.load(Ordering::Relaxed), course))
}

impl PublishedSample {
    /// Of an operation on the default communicator that is about to run, or has just run.
    pub fn at_once(sample: &Sample) -> Self {
        let Sample { key, print, form, boundary, words, .. } = sample.clone();
        Self { key, print, form, boundary, doubt: 0, words }
    }

    /// None for what cannot be compared, or not yet.
    fn of(sample: &Sample, all: &[Sample], is_settled: bool) -> Option<Self> {
        let Sample { comm, is_ours, key, print, form, boundary, words, collective, .. } = sample;
        let (key, doubt) = match collective {
            None => (*key, if *is_ours { 0 } else { 2 }),
            Some(Collective { alone, .. }) if *is_ours => (*key, usize::from(!alone)),
            Some(Collective { alone: true, name, size, .. }) if is_settled && !is_ambiguous(comm, all) => {
                (hash((key, name, size, course(comm, all))), 2)
            }
            Some(_) => return None,
        };
        let (form, boundary) = (form.clone(), boundary.clone());
        Some(Self { key, print: *print, form, boundary, doubt, words: words.clone() })
    }
}

/// What two ranks did differently first; if there is some, what is proved.
pub(super) fn first_difference<'a>(
    ours: &'a [PublishedSample],
    theirs: &'a [PublishedSample],
) -> Option<(&'a PublishedSample, &'a PublishedSample)> {
    let is_same = |our: &PublishedSample, its: &PublishedSample| its.print == our.print;
    pairs(ours, theirs, is_same).min_by_key(|(our, its)| our.doubt.max(its.doubt) > 0)
}

/// What two ranks did first with the same bytes of other leaves.
fn first_other_form<'a>(
    ours: &'a [PublishedSample],
    theirs: &'a [PublishedSample],
) -> Option<(&'a PublishedSample, &'a PublishedSample)> {
    let is_same = |our: &PublishedSample, its: &PublishedSample| {
        its.form == our.form || its.form.is_empty() || our.form.is_empty()
    };
    pairs(ours, theirs, is_same).next()
}

/// What two ranks have of one operation or message, if none of what the other one has is the same.
fn pairs<'a>(
    ours: &'a [PublishedSample],
    theirs: &'a [PublishedSample],
    is_same: impl Fn(&PublishedSample, &PublishedSample) -> bool,
) -> impl Iterator<Item = (&'a PublishedSample, &'a PublishedSample)> {
    ours.iter().filter_map(move |our| {
        let mut found = theirs.iter().filter(|its| its.key == our.key);
        let its = found.next()?;
        (!is_same(our, its) && !found.any(|other| is_same(our, other))).then_some((our, its))
    })
}

/// Publishes what this rank did, and returns a difference from the other ranks, if there is one. One that is no proof is returned
/// on one rank, once. `is_end`: this rank has done its last operation.
pub fn difference(host: &HostFolder, is_end: bool) -> Option<Difference> {
    /// What has been published.
    static TOLD: Mutex<Vec<PublishedSample>> = Mutex::new(Vec::new());
    for record in running_collectives() {
        end(&record.site.comm, record.sequence);
    }
    if host.broken().is_some() {
        return None;
    }
    let running = recorder::running();
    let waits_on = |comm: &Arc<Comm>| {
        let is_long = |record: &Record| record.seconds() > LONG;
        let mut of_comm = running.iter().filter(|record| Arc::ptr_eq(&record.site.comm, comm));
        of_comm.any(|record| record.site.op.row().is_collective() && is_long(record))
    };
    let all = samples();
    let line = |sample| PublishedSample::of(sample, &all, is_end || waits_on(&sample.comm));
    let ours: Vec<PublishedSample> = all.iter().filter_map(line).collect();
    let mut others = Vec::new();
    for rank in all.iter().flat_map(|sample| sample.others) {
        if rank != host.rank && !others.contains(&rank) && others.len() < RANKS {
            others.push(rank);
        }
    }
    drop(all);
    let mut told = lock(&TOLD);
    if *told != ours {
        host.publish_samples(&ours);
        told.clone_from(&ours);
    }
    let differences = others.into_iter().filter_map(|rank| difference_from(host, rank, &ours));
    differences.min_by_key(|difference| !difference.is_proved)
}

fn difference_from(host: &HostFolder, rank: i32, ours: &[PublishedSample]) -> Option<Difference> {
    let theirs: Vec<PublishedSample> = host.samples(rank)?;
    let difference = first_difference(ours, &theirs);
    let of_forms = || first_other_form(ours, &theirs).map(|(our, its)| (our, its, FORMS));
    let (our, its, doubt) =
        difference.map(|(our, its)| (our, its, our.doubt.max(its.doubt))).or_else(of_forms)?;
    let words = |line: &PublishedSample| match doubt {
        FORMS => format!("{}, of {}", line.words, line.form),
        _ if our.boundary != its.boundary => line.words.clone() + &super::of_boundary(&line.boundary),
        _ => line.words.clone(),
    };
    let mut both = [(host.rank, words(our)), (rank, words(its))];
    both.sort();
    let lines = both.map(|(rank, words)| format!("\n  rank {rank}: {words}")).concat();
    let (may, why) = match doubt {
        0 => ("do", String::new()),
        doubt => ("may", format!("\n  {}", DOUBTS[doubt])),
    };
    let report = format!(
        "the operations of the ranks {may} not match (MPI4JAX_CHECK=0: they are not compared){lines}{why}"
    );
    Some(Difference { is_proved: doubt == 0, report })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_64_and_powers_of_two_are_sampled() {
        let sampled: Vec<u64> = (1..1000).filter(|&number| is_early(number)).collect();
        assert_eq!(sampled[..64], (1..=64).collect::<Vec<u64>>());
        assert_eq!(sampled[64..], [128, 256, 512]);
    }

    #[test]
    fn collectives_on_a_programs_communicator_are_compared_at_the_end_alone() {
        let ranks = [0, 1].map(|rank| Arc::new(Comm::new("comm#1", rank, 2)));
        let sample = |comm: &Arc<Comm>, number, print, name| {
            comm.collectives.store(number, Ordering::Relaxed);
            let (comm, words, others) = (comm.clone(), String::new(), [0; 2]);
            let collective = Some(Collective { number, alone: true, name, size: 4 });
            let (form, boundary) = ("".into(), "".into());
            Sample { comm, is_ours: false, key: number, print, form, boundary, others, words, collective }
        };
        let told = |all: &[Sample], is_end| -> Vec<PublishedSample> {
            all.iter().filter_map(|sample| PublishedSample::of(sample, all, is_end)).collect()
        };
        let mut all = ranks.each_ref().map(|comm| vec![sample(comm, 1, 5, "scan")]);
        all[0].push(sample(&ranks[0], 2, 6, "scan"));
        all[1].push(sample(&ranks[1], 2, 7, "scan"));
        assert!(told(&all[0], false).is_empty());
        let lines = all.each_ref().map(|all| told(all, true));
        assert_eq!(first_difference(&lines[0], &lines[1]), Some((&lines[0][1], &lines[1][1])));
        assert_eq!(lines[0][1].doubt, 2);
        // One rank did more than the other, or something else meanwhile.
        for name in ["scan", "bcast"] {
            all[0].push(sample(&ranks[0], 3, 6, name));
            assert_eq!(first_difference(&told(&all[0], true), &lines[1]), None);
            all[1].push(sample(&ranks[1], 3, 6, "scan"));
            let differ = first_difference(&told(&all[0], true), &told(&all[1], true)).is_some();
            assert_eq!(differ, name == "scan");
            all.iter_mut().for_each(|all| drop(all.pop()));
        }
        // Two without a name of their own: ranks may number them otherwise.
        all[0].push(sample(&Arc::new(Comm::new("comm#2", 0, 2)), 1, 5, "scan"));
        assert!(told(&all[0], true).is_empty());
    }

    #[test]
    fn what_differs_first_is_found_by_keys() {
        let line = |key, print, doubt| PublishedSample {
            key,
            print,
            form: "".into(),
            boundary: "".into(),
            doubt,
            words: format!("barrier #{key}, a.py:1"),
        };
        let ours = [1, 2, 3].map(|number| line(number, number, 0));
        assert_eq!(first_difference(&ours, &ours[1..]), None);
        // Threads may remember in another order than they have begun in.
        let theirs = [line(3, 7, 0), line(2, 7, 0), line(4, 7, 0)];
        assert_eq!(first_difference(&ours, &theirs), Some((&ours[1], &theirs[1])));
        // What ran beside another one may have had another number.
        let beside = [line(3, 7, 0), line(2, 7, 1)];
        assert_eq!(first_difference(&ours, &beside), Some((&ours[2], &beside[0])));
        assert_eq!(first_difference(&ours, &beside[1..]), Some((&ours[1], &beside[1])));
        // One content was sent in two types, and received so.
        let twice = [line(1, 5, 2), line(1, 1, 2)];
        assert_eq!(first_difference(&ours, &twice), None);
    }
    #[test]
    fn forms_differ_where_both_are_known() {
        let line = |key, form: &str| PublishedSample {
            key,
            print: 1,
            form: form.into(),
            boundary: "".into(),
            doubt: 0,
            words: String::new(),
        };
        let ours = [line(1, "(2)"), line(2, ""), line(3, "(2)")];
        assert_eq!(first_other_form(&ours, &[line(1, "(2)"), line(2, "(3)"), line(3, "")]), None);
        let theirs = [line(3, "(3)")];
        assert_eq!(first_other_form(&ours, &theirs), Some((&ours[2], &theirs[0])));
        assert_eq!(first_other_form(&ours, &[line(3, "(3)"), line(3, "(2)")]), None);
        assert_eq!(first_difference(&ours, &theirs), None);
    }
}
