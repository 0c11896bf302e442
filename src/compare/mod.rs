//! Nothing is wrong in silence: what the ranks are about to do is compared before they do it, or [`samples`] of it afterwards.
//!
//! A collective is preceded by a small allreduce of a fingerprint, on the same communicator. A message
//! is preceded by another one that describes it, with the same envelope: MPI delivers the two in this
//! order, so the receiver reads the description first, also where it receives from any rank.

pub mod samples;
mod started;

use std::ffi::c_int;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::mem::{MaybeUninit, size_of};
use std::sync::OnceLock;

use mpi::ffi;

use crate::call::{Call, Phase};
use crate::error::{Cause, Error};
use crate::mpilib::{Tag, check, handle, wildcards};
use crate::ops::{Dtype, Op, Reduction};
use crate::record::recorder::{OpInfo, Record, Running};
use crate::transport::Ahead;
use crate::transport::matching::{Memory, exchange};

/// What is compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CheckLevel {
    Off,
    /// Samples, after the fact.
    #[default]
    Samples,
    /// Every operation, before it runs.
    Operations,
}

static CHECK: OnceLock<CheckLevel> = OnceLock::new();

/// Decides for the life of the process whether operations are checked before they run.
pub fn set_check(level: CheckLevel) {
    let _ = CHECK.set(level);
}

pub fn check_level() -> CheckLevel {
    CHECK.get().copied().unwrap_or_default()
}

/// Whether the ranks compare operations before they run.
pub fn is_checking() -> bool {
    check_level() == CheckLevel::Operations
}

/// Bytes of text that a rank contributes to an error.
const TEXT: usize = 240;

/// What precedes a message.
#[repr(C)]
#[derive(Clone, Copy)]
struct Header {
    magic: u64,
    count: u64,
    dtype: i32,
    /// Index of the operation in the table.
    op: u32,
    dest: i32,
    tag: i32,
    /// The sender's source line, padded with zeros.
    location: [u8; LOCATION],
}

const MAGIC: u64 = 0x6d70_6934_6a61_7831; // "mpi4jax1"
const LOCATION: usize = 56;
const _: () = assert!(size_of::<Header>() == 32 + LOCATION, "sent as bytes: no padding");

impl Header {
    fn new(call: &Call, record: &Record) -> Self {
        let line = record.info.location.as_bytes();
        let mut location = [0; LOCATION];
        let length = line.len().min(LOCATION);
        // Of a long name the end says more.
        location[..length].copy_from_slice(&line[line.len() - length..]);
        Self {
            magic: MAGIC,
            count: call.send.map_or(0, |buffer| buffer.count() as u64),
            dtype: call.send.map_or(0, |buffer| buffer.dtype().xla_code()),
            op: call.site.op as u32,
            dest: call.envelope.dest,
            tag: call.envelope.sendtag,
            location,
        }
    }
}

/// `send to 1, tag 0 (3 x float32), solver.py:81`
impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.magic != MAGIC {
            return f.write_str("a message that was not sent by mpi4jax under MPI4JAX_CHECK");
        }
        let op = Op::TABLE.get(self.op as usize).map_or("message", |row| row.name);
        let dtype = Dtype::from_xla(self.dtype).map_or("unknown", Dtype::name);
        write!(f, "{op} to {}, {} ({} x {dtype})", self.dest, Tag(self.tag), self.count)?;
        let line = String::from_utf8_lossy(&self.location);
        let line = line.trim_end_matches('\0');
        if line.is_empty() { Ok(()) } else { write!(f, ", {line}") }
    }
}

fn text(words: &str) -> [u8; TEXT] {
    let mut text = [0; TEXT];
    let mut length = words.len().min(TEXT);
    while !words.is_char_boundary(length) {
        length -= 1;
    }
    text[..length].copy_from_slice(&words.as_bytes()[..length]);
    text
}

/// Compares this call with those of the other ranks, or with the other end of its message. A receive
/// from any rank is narrowed to the rank whose description has come. `exact`: a message has to be as long as its
/// receive says, also where the program asks for its status.
///
/// What describes a message that is started is started too: it is looked at when that has ended.
pub fn compare(exact: bool, call: &mut Call, running: &Running) -> Result<Option<Box<dyn Ahead>>, Error> {
    let Some(record) = running.record() else { return Ok(None) };
    let result = if record.info.op.row().is_collective() {
        collective(call, &record).map(|()| None)
    } else if call.site.phase == Phase::Start {
        started::describe(call, record.clone())
    } else {
        message(exact, call, &record).map(|()| None)
    };
    result.map_err(|cause| call.site.error(cause))
}

/// Of what has to be the same on all ranks.
pub fn fingerprint(call: &Call, record: &Record) -> u64 {
    let OpInfo { op, reduction, .. } = &*record.info;
    let mut hasher = DefaultHasher::new();
    let count = if op.row().has_any_size() { 0 } else { record.count };
    (record.info.name(), record.sequence, count, record.dtype.map(Dtype::xla_code)).hash(&mut hasher);
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
        let (n, t, comm) = (1, ffi::RSMPI_UINT64_T, handle(call.site.comm.handle));
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
    let mine = text(&with_widths(call, record));
    let mut all = vec![0u8; TEXT * comm.size as usize];
    // SAFETY: as above; all ranks come here, because all of them have the same extremes.
    unsafe {
        let (n, t) = (TEXT as c_int, ffi::RSMPI_UINT8_T);
        let to = all.as_mut_ptr().cast();
        let code = ffi::MPI_Allgather(mine.as_ptr().cast(), n, t, to, n, t, handle(comm.handle));
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

fn message(exact: bool, call: &mut Call, record: &Record) -> Result<(), Cause> {
    let envelope = call.envelope;
    let (row, null) = (call.site.op.row(), wildcards().proc_null);
    let sends = row.sends() && envelope.dest != null;
    let receives = row.receives() && envelope.source != null;
    let out = Header::new(call, record);
    let mut into = MaybeUninit::<Header>::zeroed();
    let mut of_headers = envelope;
    if !sends {
        (of_headers.dest, of_headers.sendtag) = (null, 0);
    }
    if !receives {
        (of_headers.source, of_headers.recvtag) = (null, 0);
    }
    // SAFETY: a registered communicator, which is not freed; headers are plain bytes of the size given.
    let (into, status) = unsafe {
        let (count, datatype) = (size_of::<Header>() as c_int, ffi::RSMPI_UINT8_T);
        let from = Memory { data: (&raw const out).cast_mut().cast(), count, datatype };
        let to = Memory { data: into.as_mut_ptr().cast(), count, datatype };
        let name = "MPI message that describes the next one";
        let status = exchange(name, &call.site.comm, &of_headers, from, to)?;
        (into.assume_init(), status)
    };
    if !receives {
        return Ok(());
    }
    (call.envelope.source, call.envelope.recvtag) = (status.MPI_SOURCE, status.MPI_TAG);
    let expected = call.recv.map_or((0, 0), |buffer| (buffer.count() as u64, buffer.dtype().xla_code()));
    expect(&into, status.MPI_SOURCE, expected, call.status.is_some() && !exact, record)
}

/// Whether a message is what is received: how many, of which type.
fn expect(
    header: &Header,
    source: i32,
    (count, dtype): (u64, i32),
    may_be_short: bool,
    record: &Record,
) -> Result<(), Cause> {
    let fits = if may_be_short { header.count <= count } else { header.count == count };
    if header.magic == MAGIC && header.dtype == dtype && fits {
        return Ok(());
    }
    let world = |rank: i32| record.info.comm.world_rank(rank).unwrap_or(rank);
    Err(Cause::Mismatch {
        report: format!(
            "a message does not match its receive (MPI4JAX_CHECK)\n  expected rank {}: {record}\n  actual   rank {}: {header}",
            world(record.info.comm.rank),
            world(source)
        ),
    })
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

    #[test]
    fn long_texts_are_cut_between_characters() {
        let bytes = text(&format!("x{}", "é".repeat(TEXT)));
        assert!(std::str::from_utf8(&bytes).is_ok());
    }
}
