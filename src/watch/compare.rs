//! Comparison of what the ranks call, before they run it: every collective of every communicator with those of two neighbors on the
//! host, by its number. [`exact`](super::exact) compares all ranks.
//!
//! A rank notes what it is about to do, and only then looks at its neighbors: of two ranks that differ, one at least sees it, and
//! holds its operation. On the default communicator, which this package alone uses, that ends the job. On another one, a rank may
//! take part through mpi4py, which shifts its numbers: there a difference is certain if all members stay in collectives that
//! differ. Otherwise there is a line, and the job goes on.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::between::Between;
use super::{end, settings, watchdog};
use crate::board::slot::{MIXED, Print, THREADS};
use crate::board::{Cell, Once, Slot, board, mix, own};
use crate::call::{Call, Phase, Site};
use crate::comm::{self, Comm, CommId};
use crate::error::{Cause, Error};
use crate::ops::{Dtype, Forms, Op, Reduction};
use crate::output::print;
use crate::record::messages::{self, Difference};
use crate::record::recorder::{self, Record, Running};

/// What is compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CheckLevel {
    Off,
    /// Collectives are compared with those of two neighbors on the host.
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
const PAUSE: Duration = Duration::from_millis(10);

static CHECK: OnceLock<CheckLevel> = OnceLock::new();
/// The program has asked for the default communicator, and may use it through mpi4py.
static SHARED: AtomicBool = AtomicBool::new(false);

/// Sets, once for this process, what is compared. 0: nothing; 1: the collectives of all ranks; else those of neighbors.
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
    let widths = site.widths();
    let op = if widths.is_some() { Op::HaloExchange } else { site.op };
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
    widths.hash(&mut hasher);
    (hasher.finish(), messages::form(site))
}

/// The hash of what must be equal on all ranks in a call of `count` elements, and the form of its message.
#[inline]
pub fn print_of(call: &Call, count: usize) -> (u64, u64) {
    let site = call.site;
    let &(base, form) = site.base.get_or_init(|| base(site));
    let dtype = call.send.or(call.recv).map_or(0, |buffer| buffer.dtype().xla_code() as u64 + 1);
    let count = if site.op.row().has_any_size() { 0 } else { count as u64 };
    // The blocks of a halo exchange have one data type, and are one operand where XLA packs them.
    let others = if call.others.is_empty() || site.halo.is_some() {
        0
    } else {
        call.others.iter().fold(0, |sum, (send, _)| mix(sum, send.dtype().xla_code() as u64))
    };
    (mix(base ^ dtype << 56 ^ others, count), form)
}

// ---- With neighbors

/// The next or the previous rank on the same board, and its cell of a communicator, if it has used the communicator.
#[inline]
fn neighbor(comm: &Comm, which: usize, number: u64) -> Option<(i32, &'static Cell)> {
    let known = comm.neighbors[which].load(Ordering::Relaxed) - 1;
    // A rank may come later: it is looked for at some of the calls.
    let is_looked_for = || number.is_power_of_two() || number % 64 == 0;
    let rank = if known >= 0 { known } else { is_looked_for().then(|| find_neighbor(comm, which))?? };
    Some((rank, cell_of(comm, rank)?))
}

#[cold]
fn find_neighbor(comm: &Comm, which: usize) -> Option<i32> {
    let step = |distance| if which == 0 { comm.rank + distance } else { comm.rank - distance + comm.size };
    let mut around = (1..comm.size).filter_map(|distance| comm.world_rank(step(distance) % comm.size));
    let rank = around.find(|&rank| board().slot(rank).is_some())?;
    comm.neighbors[which].store(rank + 1, Ordering::Relaxed);
    Some(rank)
}

/// The cell of a communicator of another rank. `None` if the two ranks may have counted different duplicates of `MPI_COMM_WORLD`.
#[inline]
fn cell_of(comm: &Comm, rank: i32) -> Option<&'static Cell> {
    let slot = board().slot(rank)?;
    let copies = |slot: &Slot| slot.copies.load(Ordering::Relaxed);
    let is_sure = comm.has_one_origin() || copies(slot) == copies(own());
    if is_sure { slot.cell(comm.shared_id()) } else { None }
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
    // In a communicator of two ranks, both neighbors are the same rank.
    for which in 0..comm.size.min(3) as usize - 1 {
        if let Some((rank, cell)) = neighbor(comm, which, number) {
            check_print(call, running, &ours, (rank, cell))?;
        }
    }
    Ok(())
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
    let root = comm.world_rank(site.root).and_then(|root| Some((root, cell_of(comm, root)?)));
    match (ours, root) {
        (Some(ours), Some(root)) => check_print(call, running, &ours, root),
        _ => Ok(()),
    }
}

#[inline]
fn check_print(
    call: &Call,
    running: &Running,
    ours: &Print,
    (rank, cell): (i32, &Cell),
) -> Result<(), Error> {
    let number = running.sequence();
    if cell.repeats(number, ours) {
        return Ok(());
    }
    match cell.print(number) {
        Some(its) if its.print != ours.print => hold(call, running, (rank, cell)),
        Some(its) if !messages::are_forms_equal(its.form, ours.form) => {
            other_form(call, running, rank);
            Ok(())
        }
        _ => Ok(()),
    }
}

/// The operation differs from that of another rank: holds it until that is certain, or turns out to be something else.
#[cold]
fn hold(call: &Call, running: &Running, (rank, cell): (i32, &Cell)) -> Result<(), Error> {
    let (comm, number, start) = (&*call.site.comm, running.sequence(), Instant::now());
    let ours = is_ours(comm);
    // Other builds may compare other things.
    if settings::builds_differ() {
        comm.cell().set(MIXED);
        return Ok(());
    }
    loop {
        if comm.cell().has(THREADS | MIXED) || cell.has(THREADS | MIXED) {
            return Ok(());
        }
        if is_other_plan(call, running, (rank, cell)) {
            return different(call, running, rank);
        }
        let has_passed =
            cell.number.load(Ordering::Acquire) > number || cell.running.load(Ordering::Acquire) == 0;
        let held = start.elapsed();
        if ours && held > HOLD[0] || (held > HOLD[1] && are_all_in(comm) && is_certain(call, running, rank)) {
            return different(call, running, rank);
        }
        if !ours && (has_passed || held > HOLD[1]) {
            comm.cell().set(MIXED);
            // Two that differ in the data type alone are hardly two that mpi4py's have shifted.
            if !has_passed || are_alike(call, running, rank) {
                say_doubt(&texts(call, running, rank), WHY_MIXED);
            }
            return Ok(());
        }
        std::thread::sleep(PAUSE);
    }
}

/// Whether two ranks exchange the rows of different plans, and the collective before was the same. Then mpi4py has not shifted
/// the numbers, because mpi4py exchanges no rows of plans.
fn is_other_plan(call: &Call, running: &Running, (rank, cell): (i32, &Cell)) -> bool {
    let before = running.sequence() - 1;
    let print = |cell: &Cell| cell.print(before).map(|it| it.print);
    let its = its_record(call, running, rank).map(|its| its.forms).unwrap_or_default();
    let belong = [&*call.site.forms.belongs_to(), Forms::found_in(&its)];
    belong.iter().all(|words| Forms::are_of_plan(words))
        && belong[0] != belong[1]
        && (before == 0 || print(call.site.comm.cell()) == print(cell))
}

/// Whether no part of mpi4py's explains the difference. Nobody gets past what waits for all ranks before this rank is in it; a rank may
/// have done its part of anything else, be in a later operation, and wait for this one, which is held. What differs in the data
/// type alone is taken for a mistake.
fn is_certain(call: &Call, running: &Running, rank: i32) -> bool {
    let waits_for_all = |it: &Record| {
        let op = matches!(it.op, Op::Allgather | Op::Allreduce | Op::Alltoall | Op::ReduceScatter);
        it.phase == Phase::Whole && (op && it.count > 0 || it.op == Op::Barrier)
    };
    let both = [running.record(), its_record(call, running, rank)];
    both.iter().all(|it| it.as_ref().is_some_and(waits_for_all)) || are_alike(call, running, rank)
}

/// Whether all members are on this host, and each is in a collective on the communicator.
fn are_all_in(comm: &Comm) -> bool {
    let is_in = |cell: &Cell| cell.running.load(Ordering::Acquire) > 0;
    comm.world
        .iter()
        .all(|&rank| board().slot(rank).and_then(|slot| slot.cell(comm.shared_id())).is_some_and(is_in))
}

/// The record of another rank's collective of this number.
fn its_record(call: &Call, running: &Running, rank: i32) -> Option<Record> {
    record_of(rank, running.sequence(), call.site.comm.comm_id())
}

/// The record of a rank's collective of this number on a communicator.
fn record_of(rank: i32, number: u64, comm: CommId) -> Option<Record> {
    let is_it = |record: &Record| {
        record.sequence == number
            && record.comm.id == comm
            && record.op.row().is_collective()
            && record.phase != Phase::Wait
    };
    let records = board().slot(rank).map(recorder::records).unwrap_or_default();
    records.into_iter().rev().find(is_it)
}

/// Whether the operations of two ranks differ in the data type alone.
fn are_alike(call: &Call, running: &Running, rank: i32) -> bool {
    let of = |it: Record| {
        let size = it.dtype.map_or(0, Dtype::size) as u64;
        let root = if it.op.row().has_root { it.root } else { 0 };
        (it.op, it.phase, it.reduction, root, it.count * size)
    };
    let (own, its) = (running.record(), its_record(call, running, rank));
    own.is_some() && own.map(of) == its.map(of)
}

/// The operations of this rank and of another one, in words.
fn texts(call: &Call, running: &Running, rank: i32) -> [(i32, String); 2] {
    let comm = &*call.site.comm;
    let own = running.record().map_or_else(String::new, |record| with_widths(call, &record));
    let (its, forms) = its_record(call, running, rank)
        .map_or_else(|| ("another operation".into(), String::new()), |its| (its.to_string(), its.forms));
    let belong = [&*call.site.forms.belongs_to(), Forms::found_in(&forms)];
    let (own, its) = match belong[0] == belong[1] {
        true => (own, its),
        false => (own + belong[0], its + belong[1]),
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
const OFF: &str = "(MPI4JAX_CHECK=0: they are not compared)";
const WHY_MIXED: &str = "ranks may also use the communicator through mpi4py, so the job goes on";
const WHY_FORM: &str =
    "leaves of different names or shapes have the same bytes and may be confused, so the job goes on";

/// The operations of two ranks differ, which is certain.
#[cold]
fn different(call: &Call, running: &Running, rank: i32) -> Result<(), Error> {
    Err(call.site.error(Cause::Mismatch { report: end_with(&texts(call, running, rank)) }))
}

/// Aborts the job because these operations differ. Returns the report if nothing has ended the job.
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
        say_doubt(texts, WHY_MIXED);
    }
}

/// Aborts the job for a difference between these ranks, unless another rank does. Returns if nothing has ended the job.
pub fn end_different(report: &str, ranks: &[i32]) {
    if board().is_first_to(Once::Differs) {
        let exceptions = watchdog::exceptions(ranks);
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

fn say_doubt(texts: &[(i32, String)], why: &str) {
    if board().is_first_to(Once::Doubt) {
        let rank = board().rank;
        let lines = listed(texts);
        print(&format!("r{rank} | mpi4jax: the operations of the ranks may not match {OFF}: {why}{lines}\n"));
    }
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

/// A record, with the ghost cells of a halo exchange: `..., widths 1+1 and 2+0`.
pub fn with_widths(call: &Call, record: &Record) -> String {
    let Some(widths) = call.site.widths() else { return record.to_string() };
    let widths = widths.iter().map(|width| format!("{}+{}", width.low, width.high));
    format!("{record}, widths {}", widths.collect::<Vec<_>>().join(" and "))
}
