//! Comparison of what the ranks call, before they run it: every collective of every communicator
//! with the collectives of two neighbors on the host, by its number. [`exact`](super::exact)
//! compares all ranks.
//!
//! A rank notes what it is about to do, and only then looks at its neighbors: of two ranks that differ, one at least sees it, and
//! holds its operation. On the default communicator, which this package alone uses, that aborts the
//! job. On another one, a rank may take part through mpi4py, which shifts its numbers: there a
//! difference is certain if all members stay in collectives that differ. Otherwise there is a line,
//! and the job goes on.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::between::Between;
use super::{end, read, settings};
use crate::board::cell::{DOUBT, MIXED, Print, THREADS};
use crate::board::{Cell, Once, board, mix};
use crate::call::{Call, Phase, Site};
use crate::comm::{self, Comm, CommId};
use crate::error::{Cause, Error};
use crate::ops::{Dtype, Forms, Op, Reduction};
use crate::output::print;
use crate::record::messages::{self, Difference};
use crate::record::recorder::{self, Record, Running};
use crate::system::signal;

/// What is compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CheckLevel {
    Off,
    /// Collectives are compared with the collectives of two neighbors on the host.
    #[default]
    Neighbors,
    /// Collectives of all ranks are compared before they run.
    Operations,
}

/// The job's exit status where ranks did different things.
pub const DIFFERENT: i32 = 1;
/// For how long an operation that differs is held: on the default communicator, until it is clear that no second thread uses the
/// communicator; on another communicator, until all members have had time to come.
const HOLD: [Duration; 2] = [Duration::from_millis(300), Duration::from_secs(3)];
/// The shortest and the longest interval at which it is looked whether such an operation goes on.
const PAUSES: [Duration; 2] = [Duration::from_micros(50), Duration::from_millis(10)];

static CHECK: OnceLock<CheckLevel> = OnceLock::new();
/// The program has asked for the default communicator, and may use it through mpi4py.
static SHARED: AtomicBool = AtomicBool::new(false);

/// Sets, once for this process, what is compared. 0: nothing; 1: the collectives of all ranks; else
/// the collectives of neighbors.
#[cfg_attr(feature = "python", pyo3::pyfunction)]
pub fn set_check(level: u8) {
    let _ = CHECK.set(match level {
        0 => CheckLevel::Off,
        1 => CheckLevel::Operations,
        _ => CheckLevel::Neighbors,
    });
}

#[inline]
pub fn check_level() -> CheckLevel {
    CHECK.get().copied().unwrap_or_default()
}

/// From now on the program may communicate on the default communicator by itself.
#[cfg_attr(feature = "python", pyo3::pyfunction(name = "watch_share_default"))]
pub fn share_default() {
    SHARED.store(true, Ordering::Relaxed);
}

/// Whether this package alone communicates on a communicator.
fn is_ours(comm: &Comm) -> bool {
    comm.is_default() && !SHARED.load(Ordering::Relaxed)
}

// ---- What is compared

/// The hash of what must be equal on all ranks in each call of a site, and the form of its messages.
fn base(site: &Site) -> (u64, u64) {
    let mut hasher = DefaultHasher::new();
    // XLA packs ghost cells on some ranks, and the core does on others.
    let op = if site.forms.ghosts.is_empty() { site.op } else { Op::HaloExchange };
    (op.name_of(site.phase), site.reverse, site.forms.belongs_to()).hash(&mut hasher);
    if site.op.row().has_root {
        site.root.hash(&mut hasher);
    }
    match site.reduction {
        None => 0.hash(&mut hasher),
        Some(Reduction::Builtin(builtin)) => builtin.name().hash(&mut hasher),
        // Handles differ from rank to rank.
        Some(Reduction::User(_)) => 1.hash(&mut hasher),
    }
    (hasher.finish(), messages::form(site))
}

/// The hash of what must be equal on all ranks in a call of `count` elements, and the form of its message.
#[inline]
pub fn print_of(call: &Call, count: usize) -> (u64, u64) {
    let site = call.site;
    let &(base, form) = site.base.get_or_init(|| base(site));
    let dtype = call.send.or(call.recv).map(|buffer| buffer.dtype());
    let bytes = if site.op.row().has_any_size() { 0 } else { count * dtype.map_or(1, Dtype::size) };
    // The blocks of a halo exchange have one data type, and are one operand where XLA packs them.
    let others = if call.others.is_empty() || site.halo.is_some() {
        0
    } else {
        call.others.iter().fold(0, |sum, (send, _)| mix(sum, send.dtype().xla_code() as u64))
    };
    (mix(base ^ others, bytes as u64) << DTYPE | dtype.map_or(0, |dtype| dtype.xla_code() as u64 + 1), form)
}

/// How many bits of a print are the data type.
const DTYPE: u32 = 8;

/// Whether the operations of two ranks differ in the data type alone.
fn are_alike(one: &Print, other: &Print) -> bool {
    one.print >> DTYPE == other.print >> DTYPE
}

// ---- With neighbors

/// The next or the previous rank on the same board, and its cell of a communicator, if it has used the communicator.
#[inline]
fn neighbor(comm: &Comm, which: usize, number: u64) -> Option<(i32, &'static Cell)> {
    let known = comm.near[which].load(Ordering::Relaxed) - 1;
    // A rank may come later: it is looked for at some of the calls.
    let is_looked_for = || number.is_power_of_two() || number % 64 == 0;
    let rank =
        if known >= 0 { known } else { is_looked_for().then(|| find_neighbor(comm, which, number))?? };
    Some((rank, comm.cell_of(rank)?))
}

#[cold]
fn find_neighbor(comm: &Comm, which: usize, number: u64) -> Option<i32> {
    let step = |distance| if which == 0 { comm.rank + distance } else { comm.rank - distance + comm.size };
    let mut around = (1..comm.size).filter_map(|distance| comm.world_rank(step(distance) % comm.size));
    let rank = around.find(|&rank| board().slot(rank).is_some())?;
    comm.near[which].store(rank + 1, Ordering::Relaxed);
    if number > 1 {
        comm.cell().unchecked.fetch_or(1 << which, Ordering::Relaxed);
    }
    Some(rank)
}

/// A collective is about to run, and has been noted.
#[inline]
pub fn before(call: &Call, running: &Running) -> Result<(), Error> {
    let (comm, number) = (&*call.site.comm, running.sequence());
    let own = comm.cell();
    if own.has(THREADS | MIXED) {
        return Ok(());
    }
    let Some(ours) = own.print(number) else { return Ok(()) };
    for which in 0..comm.neighbors() {
        if let Some((rank, cell)) = neighbor(comm, which, number)
            && !check_print(call, running, &ours, (rank, cell))?
        {
            own.unchecked.fetch_or(1 << which, Ordering::Relaxed);
        }
    }
    if own.unchecked.load(Ordering::Relaxed) == 0 { Ok(()) } else { check_past(call, running) }
}

/// Compares all collectives up to now with the neighbors for which some could not be compared one
/// by one, because one rank was far ahead. That is possible when both ranks are at the same
/// collective, or this rank is one ahead.
#[cold]
fn check_past(call: &Call, running: &Running) -> Result<(), Error> {
    let (comm, number) = (&*call.site.comm, running.sequence());
    let own = comm.cell();
    let is_unchecked = |which: &usize| own.unchecked.load(Ordering::Relaxed) & 1 << which != 0;
    for which in (0..comm.neighbors()).filter(is_unchecked) {
        let Some((rank, cell)) = neighbor(comm, which, number) else { continue };
        let same = |number| Some(cell.past(number)? == own.own_past(number));
        let Some(is_same) = [number, number - 1].into_iter().find_map(same) else { continue };
        if !is_same {
            past_differs(call, running, (rank, cell))?;
        }
        own.unchecked.fetch_and(!(1 << which), Ordering::Relaxed);
    }
    Ok(())
}

/// A collective that was not compared when it ran differs from another rank's collective.
#[cold]
fn past_differs(call: &Call, running: &Running, (rank, cell): (i32, &Cell)) -> Result<(), Error> {
    let comm = &*call.site.comm;
    let is_ours = is_ours(comm) && !settings::builds_differ();
    if is_ours {
        std::thread::sleep(HOLD[0]);
    }
    if comm.cell().has(THREADS | MIXED | DOUBT) || cell.has(THREADS | MIXED | DOUBT) {
        return Ok(());
    }
    let me = comm.world_rank(comm.rank).unwrap_or(0);
    let of = |rank| records_of(rank, comm.comm_id());
    let found = first_difference(&of(me), &of(rank));
    let unknown = || format!("a collective before #{} on {}", running.sequence(), comm.key);
    let [one, other] = found.unwrap_or_else(|| [unknown(), unknown()]);
    let texts = [(me, one), (rank, other)];
    if is_ours {
        return Err(call.site.error(Cause::Mismatch { report: end_with(&texts) }));
    }
    doubt(comm, &texts);
    Ok(())
}

/// The first collectives of the same number that differ, in words.
fn first_difference(own: &[Record], its: &[Record]) -> Option<[String; 2]> {
    own.iter().find_map(|one| {
        let other = its.iter().find(|other| other.sequence == one.sequence)?;
        (kind_of(one) != kind_of(other)).then(|| [one.to_string(), other.to_string()])
    })
}

/// A collective has run. One that needs the data of its root alone may have run before the root noted it, and is compared with the
/// root's now.
#[inline]
pub fn after(call: &Call, running: &Running) -> Result<(), Error> {
    let site = call.site;
    if !site.op.row().has_root || site.is_root() || site.phase != Phase::Whole {
        return Ok(());
    }
    let (comm, number) = (&*site.comm, running.sequence());
    let ours = comm.cell().print(number).filter(|_| !comm.cell().has(THREADS | MIXED));
    let root = comm.world_rank(site.root).and_then(|root| Some((root, comm.cell_of(root)?)));
    match (ours, root) {
        (Some(ours), Some(root)) => check_print(call, running, &ours, root).map(|_| ()),
        _ => Ok(()),
    }
}

/// Compares a collective with another rank's collective. Returns false if the other rank is so far
/// ahead that this was not possible.
#[inline]
fn check_print(
    call: &Call,
    running: &Running,
    ours: &Print,
    (rank, cell): (i32, &Cell),
) -> Result<bool, Error> {
    let number = running.sequence();
    if cell.repeats(number, ours) {
        return Ok(true);
    }
    match cell.print(number) {
        // Where numbers may be shifted, only a difference in the data type alone is likely to be a mistake.
        Some(its) if its.print != ours.print => {
            let is_alike = are_alike(ours, &its);
            if is_alike || !call.site.comm.cell().has(DOUBT) {
                hold(call, running, (rank, cell), is_alike)?;
            }
        }
        Some(its) if !messages::are_forms_equal(its.form, ours.form) => other_form(call, running, rank),
        Some(_) => {}
        None => return Ok(!cell.has_come(number)),
    }
    Ok(true)
}

/// The operation differs from another rank's operation: holds it until the difference is certain,
/// or turns out to be something else.
#[cold]
fn hold(call: &Call, running: &Running, (rank, cell): (i32, &Cell), is_alike: bool) -> Result<(), Error> {
    let (comm, number, start) = (&*call.site.comm, running.sequence(), Instant::now());
    let ours = is_ours(comm);
    // Other builds may compare other things.
    if settings::builds_differ() {
        comm.cell().set(MIXED);
        return Ok(());
    }
    recorder::keep_words();
    if let Some(slot) = board().slot(rank) {
        signal::ring(&slot.bell); // its watchdog does the same
    }
    let mut pause = PAUSES[0];
    loop {
        if comm.cell().has(THREADS | MIXED) || cell.has(THREADS | MIXED) {
            return Ok(());
        }
        let has_passed = cell.number.load(Ordering::Acquire) > number || !cell.is_running();
        let held = start.elapsed();
        if is_other_exchange(call, running, (rank, cell))
            || ours && held > HOLD[0]
            || held > HOLD[1] && are_all_in(comm) && (is_alike || is_certain(call, running, rank))
        {
            return Err(call.site.error(Cause::Mismatch { report: end_with(&texts(call, running, rank)) }));
        }
        if !ours && (has_passed || held > HOLD[1]) {
            doubt(comm, &texts(call, running, rank));
            return Ok(());
        }
        std::thread::sleep(pause);
        pause = (2 * pause).min(PAUSES[1]);
    }
}

/// Whether two ranks exchange the rows of different plans, ghost cells of different axes, or blocks of different transforms, and the
/// collective before was the same. Then mpi4py has not shifted the numbers, because mpi4py does none of this.
fn is_other_exchange(call: &Call, running: &Running, (rank, cell): (i32, &Cell)) -> bool {
    let before = running.sequence() - 1;
    let print = |cell: &Cell| cell.print(before).map(|it| it.print);
    let its = its_record(call, running, rank).map(|its| its.forms).unwrap_or_default();
    let belong = [&*call.site.forms.belongs_to(), Forms::found_in(&its)];
    belong.iter().all(|words| Forms::are_of_this_package(words))
        && belong[0] != belong[1]
        && (before == 0 || print(call.site.comm.cell()) == print(cell))
}

/// Whether no part of mpi4py's explains the difference. Nobody gets past what waits for all ranks before this rank is in it; a rank may
/// have done its part of anything else, be in a later operation, and wait for this one, which is held.
fn is_certain(call: &Call, running: &Running, rank: i32) -> bool {
    let waits_for_all = |it: &Record| {
        let op = matches!(
            it.op,
            // With counts, nobody gets past a rank that has rows of its own.
            Op::Allgather | Op::Allgatherv | Op::Allreduce | Op::Alltoall | Op::ReduceScatter
        );
        it.phase == Phase::Whole && (op && it.count > 0 || it.op == Op::Barrier)
    };
    let both = [running.record(), its_record(call, running, rank)];
    both.iter().all(|it| it.as_ref().is_some_and(waits_for_all))
}

/// Whether all members are on this host, and each is in a collective on the communicator.
fn are_all_in(comm: &Comm) -> bool {
    let is_in = |cell: &Cell| cell.is_running() && !cell.has(THREADS);
    comm.world.iter().all(|&rank| comm.cell_of(rank).is_some_and(is_in))
}

/// The record of another rank's collective of this number.
fn its_record(call: &Call, running: &Running, rank: i32) -> Option<Record> {
    record_of(rank, running.sequence(), call.site.comm.comm_id())
}

/// The record of a rank's collective of this number on a communicator.
fn record_of(rank: i32, number: u64, comm: CommId) -> Option<Record> {
    records_of(rank, comm).into_iter().rev().find(|record| record.sequence == number)
}

/// The records of a rank's collectives on a communicator.
fn records_of(rank: i32, comm: CommId) -> Vec<Record> {
    let is_of = |it: &Record| it.comm.id == comm && it.op.row().is_collective() && it.phase != Phase::Wait;
    let records = board().slot(rank).map(recorder::records).unwrap_or_default();
    records.into_iter().filter(is_of).collect()
}

/// What must be equal in the records of two ranks.
fn kind_of(it: &Record) -> (Op, Phase, Option<&str>, i32, Option<Dtype>, u64) {
    let row = it.op.row();
    let root = if row.has_root { it.root } else { 0 };
    let count = if row.has_any_size() { 0 } else { it.count };
    (it.op, it.phase, it.reduction.as_deref(), root, it.dtype, count)
}

/// The operations of this rank and of another one, in words.
fn texts(call: &Call, running: &Running, rank: i32) -> [(i32, String); 2] {
    let comm = &*call.site.comm;
    let own = running.record().map_or_else(String::new, |record| record.to_string());
    let (its, forms) = its_record(call, running, rank)
        .map_or_else(|| ("another operation".into(), String::new()), |its| (its.to_string(), its.forms));
    let belong = [&*call.site.forms.belongs_to(), Forms::found_in(&forms)];
    let [own, its] = match belong[0] == belong[1] {
        true => [own, its],
        false => {
            let mut both = [own + belong[0], its + belong[1]];
            Forms::without_equal_arguments(&mut both);
            both
        }
    };
    [(comm.world_rank(comm.rank).unwrap_or(0), own), (rank, its)]
}

fn listed(texts: &[(i32, String)]) -> String {
    let mut texts = texts.to_vec();
    texts.sort();
    let lines: String = texts.iter().map(|(rank, text)| format!("\n  rank {rank}: {text}")).collect();
    let [(_, one), (_, other)] = &texts[..] else { return lines };
    if Forms::are_of_other_axes(one, other) { lines + OTHER_ORDER } else { lines }
}

const OTHER_ORDER: &str = "\n  The ranks run collectives over the axes of the mesh in different orders: write the names of the axes in \
     a list. A loop over a set of names has another order in each process";
const OFF: &str = "(set MPI4JAX_CHECK=0 to disable this check)";
const WHY_MIXED: &str = "ranks may also use the communicator through mpi4py, so the job goes on; from now on, only the data types of \
     equal operations are compared on it";
const WHY_MESSAGE: &str = "ranks may also use the communicator through mpi4py, so the job goes on";
const WHY_FORM: &str =
    "leaves of different names or shapes have the same bytes and may be confused, so the job goes on";

/// Aborts the job because these operations differ. Returns the report if the job was not aborted.
fn end_with(texts: &[(i32, String)]) -> String {
    let report = format!("the operations of the ranks do not match {OFF}{}", listed(texts));
    end_different(&report, &texts.iter().map(|(rank, _)| *rank).collect::<Vec<_>>());
    report
}

/// These operations differ, on the default communicator or on another one.
fn end_or_doubt(texts: &[(i32, String)], is_default: bool) {
    if is_default && !SHARED.load(Ordering::Relaxed) {
        end_with(texts);
    } else {
        say_doubt(texts, WHY_MESSAGE);
    }
}

/// Aborts the job for a difference between these ranks, unless another rank does. Returns if the
/// job was not aborted.
pub fn end_different(report: &str, ranks: &[i32]) {
    if board().is_first_to(Once::Differs) {
        let exceptions = read::exceptions(ranks);
        print(&format!("r{} | mpi4jax: {report}{exceptions}\n", board().rank));
        end::end_job(DIFFERENT);
    }
    std::thread::sleep(Duration::from_secs(10));
}

/// The collectives of this number differ between a rank of this host and one of another, which does this, as far as is known.
pub fn between_hosts(found: &Between, other: &str) {
    let Some(cell) = board().slot(found.near).and_then(|slot| slot.cell(found.comm)) else { return };
    let record = record_of(found.near, found.number, CommId::of_cell(cell));
    let near = record.map_or_else(|| format!("collective #{}", found.number), |record| record.to_string());
    let texts = [(found.near, near), (found.far, other.to_owned())];
    end_or_doubt(&texts, comm::is_default(CommId::of_cell(cell).class));
}

/// The collectives of a communicator may not match: says so once, and goes on.
#[cold]
fn doubt(comm: &Comm, texts: &[(i32, String)]) {
    comm.cell().set(DOUBT);
    if board().is_first_doubt(comm.shared_id()) {
        print_doubt(texts, WHY_MIXED);
    }
}

fn say_doubt(texts: &[(i32, String)], why: &str) {
    if board().is_first_to(Once::Doubt) {
        print_doubt(texts, why);
    }
}

fn print_doubt(texts: &[(i32, String)], why: &str) {
    let (rank, lines) = (board().rank, listed(texts));
    print(&format!("r{rank} | mpi4jax: the operations of the ranks may not match {OFF}: {why}{lines}\n"));
}

#[cold]
fn other_form(call: &Call, running: &Running, rank: i32) {
    let [(own, text), (other, its)] = texts(call, running, rank);
    let its_forms = its_record(call, running, rank).map(|its| its.forms).unwrap_or_default();
    let forms = &call.site.forms;
    let text = format!("{text}, of {}{}", forms.sent, forms.belongs_to());
    say_doubt(&[(own, text), (other, format!("{its}, of {its_forms}"))], WHY_FORM);
}

/// The two ends of a message differ, which this rank has received.
#[cold]
pub fn message(found: &Difference) {
    if settings::builds_differ() {
        return;
    }
    let rank = board().rank as i32;
    let texts = [(rank, found.words.clone()), (found.sender, found.sent.clone())];
    if found.is_form {
        say_doubt(&texts, WHY_FORM);
    } else {
        end_or_doubt(&texts, found.is_default);
    }
}

#[cfg(test)]
mod tests;
