//! Nothing is wrong in silence: collectives are compared before they run, by a small allreduce of a fingerprint on the same
//! communicator, or [`samples`] of them afterwards. Of messages there are samples: their length is checked when they arrive.

pub mod samples;

use std::ffi::c_int;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::OnceLock;

use mpi::ffi;

use crate::call::{Call, Site};
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

/// Bytes of text that a rank contributes to an error.
const TEXT: usize = 240;

/// Compares a collective with those that the other ranks are about to call.
pub fn compare(call: &Call, running: &Running) -> Result<(), Error> {
    let Some(record) = running.record() else { return Ok(()) };
    collective(call, &record).map_err(|cause| call.site.error(cause))
}

/// Of what has to be the same on all ranks.
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
    call.others.iter().for_each(|(send, _)| send.dtype().hash(&mut hasher));
    hasher.finish()
}

fn collective(call: &Call, record: &Record) -> Result<(), Cause> {
    if !call.site.comm.agrees(fingerprint(call, record))? {
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

/// Ranks are about to do different things: tells all of them what.
#[cold]
fn disagree(call: &Call, record: &Record) -> Result<(), Cause> {
    let comm = &call.site.comm;
    let mut mine = with_widths(call, record).into_bytes();
    mine.resize(TEXT, 0);
    let mut all = vec![0u8; TEXT * comm.size as usize];
    // SAFETY: as above; all ranks come here, because all of them have the same extremes.
    unsafe {
        let (n, t) = (TEXT as c_int, ffi::RSMPI_UINT8_T);
        let to = all.as_mut_ptr().cast();
        let code = ffi::MPI_Allgather(mine.as_ptr().cast(), n, t, to, n, t, comm.handle());
        check("MPI_Allgather of operations", code)?;
    }
    let lines: Vec<String> = all
        .chunks(TEXT)
        .map(|bytes| String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned())
        .collect();
    if comm.rank != 0 {
        // Rank 0 speaks for all, and ends the job.
        std::thread::sleep(std::time::Duration::from_secs(2));
    }
    Err(Cause::Mismatch { report: disagreement(&lines, &comm.world) })
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
