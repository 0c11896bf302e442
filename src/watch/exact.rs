//! The exact comparison of `MPI4JAX_CHECK=1`: of the collectives of all ranks, before they run, by an allreduce of a fingerprint and of
//! its complement on the same communicator: of both the smallest one.

use std::collections::HashMap;
use std::time::Duration;

use super::compare::{CheckLevel, check_level, print_of};
use crate::call::Call;
use crate::comm::{Comm, Comparison, Group};
use crate::error::{Cause, Error};
use crate::ops::{Dtype, Forms};
use crate::record::recorder::{Record, Running};

/// Compares a collective with those that the other ranks are about to call.
pub fn compare_all(call: &Call, running: &Running) -> Result<(), Error> {
    let Some(record) = running.record() else { return Ok(()) };
    collective(call, &record).map_err(|cause| call.site.error(cause))
}

/// The fingerprint of an operation and of what its message is made of.
fn fingerprint(call: &Call, record: &Record) -> u64 {
    let (print, _) = print_of(call, record.count as usize);
    let dtype = record.dtype.map(Dtype::xla_code);
    crate::comm::hash((print, dtype, record.sequence, &call.site.forms.sent))
}

fn collective(call: &Call, record: &Record) -> Result<(), Cause> {
    if !call.site.comm.agrees(fingerprint(call, record))? {
        return disagree(call, record);
    }
    // All ranks are at the same operation.
    let Some([sent, expected]) = call.site.counts() else { return Ok(()) };
    let mut told = vec![0u64; sent.len()];
    Group::Of(&call.site.comm).exchange_counts(&sent, &mut told)?;
    let differs = (0..).zip(told.iter().zip(&expected)).find(|(_, (sent, expected))| sent != expected);
    differs.map_or(Ok(()), |(source_rank, (&sent, &expected))| {
        Err(Cause::Parts { source_rank, received: sent as usize, expected: expected as usize })
    })
}

/// Posts the description of a collective that is started, to be compared in its wait; waits for no other rank.
pub fn ask(call: &Call, running: &Running) -> Result<Option<Comparison>, Error> {
    let comm = &call.site.comm;
    if check_level() != CheckLevel::Operations || !call.site.op.row().is_collective() {
        return Ok(None);
    }
    let Some(record) = running.record() else { return Ok(None) };
    let mut words = record.to_string();
    if !call.site.forms.sent.is_empty() {
        words += &format!(", of {}", call.site.forms.sent);
    }
    words += &call.site.forms.belongs_to();
    let asked = Comparison::start(comm, fingerprint(call, &record), words);
    asked.map(Some).map_err(|cause| call.site.error(cause))
}

/// Gathers the descriptions of different operations into an error, the same on all ranks. What an operation belongs to, or is made
/// of, is said where ranks differ in that.
#[cold]
fn disagree(call: &Call, record: &Record) -> Result<(), Cause> {
    let (comm, forms) = (&call.site.comm, &call.site.forms);
    let own = [record.to_string(), forms.belongs_to(), format!(", of {}", forms.sent)];
    let all = Group::Of(comm).all_bytes(&serde_json::to_vec(&own).unwrap_or_default())?;
    let all: Vec<[String; 3]> =
        all.iter().map(|text| serde_json::from_slice(text).unwrap_or_default()).collect();
    let differs = |part: usize| all.iter().any(|words| words[part] != all[0][part]);
    let detail = [1, 2].into_iter().find(|&part| differs(part) && (part == 1 || !differs(0)));
    let line = |words: &[String; 3]| detail.map_or(words[0].clone(), |part| words[0].clone() + &words[part]);
    let mut lines: Vec<String> = all.iter().map(line).collect();
    Forms::without_equal_arguments(&mut lines);
    Err(mismatch(comm, &(0..).zip(lines).collect::<Vec<_>>()))
}

/// The error of ranks whose operations have these descriptions, by rank, as far as they are known.
#[cold]
pub fn mismatch(comm: &Comm, lines: &[(i32, String)]) -> Cause {
    if comm.rank != 0 {
        // Rank 0 reports for all ranks, and aborts the job.
        std::thread::sleep(Duration::from_secs(2));
    }
    Cause::Mismatch { report: disagreement(lines, &comm.world) }
}

/// What most ranks do is expected, anything else is not.
fn disagreement(lines: &[(i32, String)], world: &[i32]) -> String {
    let mut votes = HashMap::<&str, usize>::new();
    lines.iter().for_each(|(_, line)| *votes.entry(line).or_default() += 1);
    // If several are equally frequent, the one of the lowest rank is expected.
    let expected = lines.iter().rev().max_by_key(|(_, line)| votes[&**line]).map(|(_, line)| line);
    let mut report = "the operations of the ranks do not match, before they run (MPI4JAX_CHECK)".to_owned();
    for (rank, line) in lines {
        let word = if Some(line) == expected { "expected" } else { "actual  " };
        report += &format!("\n  {word} rank {}: {line}", world.get(*rank as usize).unwrap_or(rank));
    }
    if lines.len() < world.len() {
        report += "\n  the other ranks have not waited for the operation yet";
    }
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_majority_is_expected() {
        let lines = [(0, "allreduce #1"), (1, "barrier #1"), (2, "allreduce #1")];
        let lines = lines.map(|(rank, line)| (rank, line.to_owned()));
        let report = disagreement(&lines, &[4, 5, 6]);
        assert!(report.contains("expected rank 4: allreduce #1"), "{report}");
        assert!(report.contains("actual   rank 5: barrier #1"), "{report}");
        assert!(!report.contains("other ranks"), "{report}");
        let report = disagreement(&lines[..2], &[0, 1, 2]);
        assert!(report.contains("expected rank 0"), "{report}");
        assert!(report.ends_with("\n  the other ranks have not waited for the operation yet"), "{report}");
    }
}
