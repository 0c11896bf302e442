//! Comparison of what the ranks call: collectives before they run, by a small allreduce of a fingerprint on the same communicator,
//! or by [`samples`] of them afterwards. A non-blocking collective is compared in its wait, since a start waits for no other rank.
//! Messages are compared by samples; their lengths are checked when they arrive.

pub(super) mod first;
pub(super) mod samples;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::OnceLock;

use mpi::ffi;

use crate::call::{Call, Site};
use crate::comm::{Comm, Comparison};
use crate::error::{Cause, Error};
use crate::mpilib::check;
use crate::ops::{Dtype, Reduction};
use crate::record::recorder::{Record, Running};

/// What is compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CheckLevel {
    Off,
    /// Samples, after the fact.
    #[default]
    Samples,
    /// Every collective, before it runs; of messages, samples.
    Operations,
}

static CHECK: OnceLock<CheckLevel> = OnceLock::new();

/// Decides for the life of the process what is compared. 0: nothing; 1: collectives, before they run; else samples, afterwards.
#[cfg_attr(feature = "python", pyo3::pyfunction)]
pub fn set_check(level: u8) {
    let _ = CHECK.set(match level {
        0 => CheckLevel::Off,
        1 => CheckLevel::Operations,
        _ => CheckLevel::Samples,
    });
}

pub fn check_level() -> CheckLevel {
    CHECK.get().copied().unwrap_or_default()
}

/// Compares a collective with those that the other ranks are about to call.
pub fn compare(call: &Call, running: &Running) -> Result<(), Error> {
    let Some(record) = running.record() else { return Ok(()) };
    collective(call, &record).map_err(|cause| call.site.error(cause))
}

/// The hash of what has to be the same on all ranks.
pub fn fingerprint(call: &Call, record: &Record) -> u64 {
    let Site { op, reduction, .. } = &*record.site;
    let mut hasher = DefaultHasher::new();
    let count = if op.row().has_any_size() { 0 } else { record.count };
    (record.name(), record.sequence, count, record.dtype.map(Dtype::xla_code)).hash(&mut hasher);
    if op.row().has_root {
        call.site.root.hash(&mut hasher);
    }
    match reduction {
        None => 0.hash(&mut hasher),
        Some(Reduction::Builtin(builtin)) => builtin.name().hash(&mut hasher),
        // Handles differ from rank to rank.
        Some(Reduction::User(_)) => 1.hash(&mut hasher),
    }
    call.site.reverse.hash(&mut hasher);
    call.site.halo.as_ref().map(|halo| halo.widths()).hash(&mut hasher);
    call.site.forms.boundary.hash(&mut hasher);
    call.others.iter().for_each(|(send, _)| send.dtype().hash(&mut hasher));
    hasher.finish()
}

/// The fingerprint of an operation and of what its message is made of.
fn with_forms(call: &Call, record: &Record) -> u64 {
    crate::comm::hash((fingerprint(call, record), &call.site.forms.sent))
}

fn collective(call: &Call, record: &Record) -> Result<(), Cause> {
    if !call.site.comm.agrees(with_forms(call, record))? {
        return disagree(call, record);
    }
    // All ranks are at the same operation. Messages of a halo exchange that differ in length are found when they come.
    call.site.parts.as_ref().map_or(Ok(()), |parts| parts.expect(&told(call, &parts.sent())?))
}

/// What each rank sends to this one, where this one sends so much to each.
fn told(call: &Call, sent: &[u64]) -> Result<Vec<u64>, Cause> {
    let mut to_me = vec![0; sent.len()];
    // SAFETY: a registered communicator, which is not freed, and an integer for and from each of its ranks.
    unsafe {
        let (n, t, comm) = (1, ffi::RSMPI_UINT64_T, call.site.comm.handle());
        let code = ffi::MPI_Alltoall(sent.as_ptr().cast(), n, t, to_me.as_mut_ptr().cast(), n, t, comm);
        check("MPI_Alltoall of counts", code)?;
    }
    Ok(to_me)
}

/// A record, with the ghost cells of a halo exchange: `..., widths 1+1 and 2+0`.
pub fn with_widths(call: &Call, record: &Record) -> String {
    let Some(halo) = &call.site.halo else { return record.to_string() };
    let widths = halo.widths().iter().map(|width| format!("{}+{}", width.low, width.high));
    format!("{record}, widths {}", widths.collect::<Vec<_>>().join(" and "))
}

/// Posts the description of a collective that is started, to be compared in its wait; waits for no other rank.
pub fn ask(call: &Call, running: &Running) -> Result<Option<Comparison>, Error> {
    let comm = &call.site.comm;
    if check_level() != CheckLevel::Operations || !call.site.op.row().is_collective() {
        return Ok(None);
    }
    let Some(record) = running.record() else { return Ok(None) };
    let mut words = with_widths(call, &record);
    if !call.site.forms.sent.is_empty() {
        words += &format!(", of {}", call.site.forms.sent);
    }
    words += &of_boundary(&call.site.forms.boundary);
    let asked = Comparison::start(comm, with_forms(call, &record), &words);
    asked.map(Some).map_err(|cause| call.site.error(cause))
}

/// Gathers the descriptions of different operations into an error, the same on all ranks.
#[cold]
fn disagree(call: &Call, record: &Record) -> Result<(), Cause> {
    let comm = &call.site.comm;
    let words = with_widths(call, record);
    let boundaries = comm.all_texts(&of_boundary(&call.site.forms.boundary))?;
    let mut lines = comm.all_texts(&words)?;
    if boundaries.iter().any(|boundary| *boundary != boundaries[0]) {
        lines = lines.iter().zip(boundaries).map(|(line, boundary)| line.to_owned() + &boundary).collect();
    } else if lines.iter().all(|line| *line == lines[0]) {
        lines = comm.all_texts(&format!("{words}, of {}", call.site.forms.sent))?;
    }
    Err(mismatch(comm, &lines))
}

/// What a report says of the `shard_map` that a collective is in.
fn of_boundary(boundary: &str) -> String {
    if boundary.is_empty() { String::new() } else { format!(", in shard_map of {boundary}") }
}

/// The error of ranks whose operations have these descriptions.
#[cold]
pub fn mismatch(comm: &Comm, lines: &[String]) -> Cause {
    if comm.rank != 0 {
        // Rank 0 reports for all, and ends the job.
        std::thread::sleep(std::time::Duration::from_secs(2));
    }
    Cause::Mismatch { report: disagreement(lines, &comm.world) }
}

/// What most ranks do is expected, anything else is not.
fn disagreement(lines: &[String], world: &[i32]) -> String {
    let votes = |line: &String| lines.iter().filter(|other| *other == line).count();
    // Of equally many, the lowest rank's.
    let expected = lines.iter().rev().max_by_key(|line| votes(line)).cloned().unwrap_or_default();
    let mut report = "the operations of the ranks do not match, before they run (MPI4JAX_CHECK)".to_owned();
    for (rank, line) in lines.iter().enumerate() {
        let word = if *line == expected { "expected" } else { "actual  " };
        report += &format!("\n  {word} rank {}: {line}", world.get(rank).copied().unwrap_or(rank as i32));
    }
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_majority_is_expected() {
        let lines = ["allreduce #1", "barrier #1", "allreduce #1"].map(String::from);
        let report = disagreement(&lines, &[4, 5, 6]);
        assert!(report.contains("expected rank 4: allreduce #1"), "{report}");
        assert!(report.contains("actual   rank 5: barrier #1"), "{report}");
        let report = disagreement(&lines[..2], &[0, 1]);
        assert!(report.contains("expected rank 0"), "{report}");
    }
}
