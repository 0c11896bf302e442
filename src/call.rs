//! A decoded, validated operation.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mpi::ffi::MPI_Status;
use serde::Deserialize;
use smallvec::SmallVec;

use crate::comm::Comm;
use crate::error::{Cause, Error};
use crate::mpilib::Wildcards;
use crate::ops::{Buffer, Dtype, Extent, Extents, Halo, Op, Parts, Ragged, Reduction};

/// Destination, source and tags of a message.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Envelope {
    pub source: i32,
    pub recvtag: i32,
    pub dest: i32,
    pub sendtag: i32,
}

impl Envelope {
    /// In the place of what an operand says.
    pub const TRACED: i32 = i32::MIN;

    /// How many int32 an operand has that is one: source, recvtag, dest, sendtag.
    pub const LEN: usize = 4;

    #[inline]
    pub fn decode([source, recvtag, dest, sendtag]: [i32; Self::LEN]) -> Self {
        Self { source, recvtag, dest, sendtag }
    }
}

impl Default for Envelope {
    fn default() -> Self {
        Self { source: -1, recvtag: 0, dest: -1, sendtag: 0 }
    }
}

/// What an operand of int32, the last one, says at run time.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Operand {
    #[default]
    None,
    /// An [`Envelope`]
    Peers,
    /// An [`EagerCall`]
    Call,
}

impl Operand {
    /// How many numbers it has.
    pub fn len(self) -> usize {
        match self {
            Self::None => 0,
            Self::Peers => Envelope::LEN,
            Self::Call => EagerCall::LEN,
        }
    }

    pub fn is_empty(self) -> bool {
        self == Self::None
    }
}

/// What changes from one eager call of a program to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EagerCall {
    /// The call is made for its program to be compiled, and does nothing.
    Compile,
    Run {
        envelope: Envelope,
        /// Number of the communicator.
        comm: i32,
        /// Number of the user's line.
        line: i32,
        /// Address of an `MPI_Status` to fill, or 0.
        status: usize,
    },
}

impl EagerCall {
    /// How many int32 its operand has: the [`Envelope`], communicator, line, and the status, its lower half first. Those of
    /// [`Compile`](Self::Compile) are -1.
    pub const LEN: usize = 8;

    #[inline]
    pub fn decode([source, recvtag, dest, sendtag, comm, line, low, high]: [i32; Self::LEN]) -> Self {
        if comm < 0 {
            return Self::Compile;
        }
        let status = (u64::from(high as u32) << 32 | u64::from(low as u32)) as usize;
        Self::Run { envelope: Envelope { source, recvtag, dest, sendtag }, comm, line, status }
    }
}

/// Where a receive writes what MPI says of its message, if a program asks for that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status(usize);

impl Status {
    /// # Safety
    /// The address is 0, or that of an `MPI_Status` which lives as long as the program that names it.
    pub const unsafe fn at(address: usize) -> Self {
        Self(address)
    }

    #[inline]
    pub fn is_some(self) -> bool {
        self.0 != 0
    }

    #[inline]
    pub fn write(self, status: &MPI_Status) {
        if self.is_some() {
            // SAFETY: promised to `at`; MPI's functions write there too, without a lock.
            unsafe { (self.0 as *mut MPI_Status).write(*status) };
        }
    }
}

/// Which part of an operation a program asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    #[default]
    Whole,
    /// It is started, on memory of ours.
    Start,
    /// What was started has ended.
    Wait,
}

impl Op {
    /// What a phase of it is called.
    pub fn name_of(self, phase: Phase) -> &'static str {
        match (phase, &self.row().started) {
            (Phase::Start, Some(started)) => started.name,
            (Phase::Wait, Some(started)) => started.wait_name,
            _ => self.name(),
        }
    }
}

/// How often a site has run, if samples are taken of what it does.
#[derive(Debug, Default)]
pub struct Runs(AtomicU64);

impl Runs {
    /// Of how many runs all are sampled; after them, those whose number is a power of two.
    const FIRST: u64 = 16;

    /// Another one. Threads may count one run for two.
    #[inline]
    pub fn count(&self) {
        self.0.store(self.0.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Whether the last one is sampled.
    #[inline]
    pub fn is_sampled(&self) -> bool {
        let number = self.0.load(Ordering::Relaxed);
        (1..=Self::FIRST).contains(&number) || number.is_power_of_two()
    }
}

/// One operation in a compiled program: everything that is known before its buffers are. The flight recorder's records share
/// it, so that they can be read after the program is gone.
#[derive(Debug)]
pub struct Site {
    pub op: Op,
    pub phase: Phase,
    pub comm: Arc<Comm>,
    /// The name of the transport that carries it.
    pub transport: &'static str,
    /// `Some` for the operations that reduce.
    pub reduction: Option<Reduction>,
    /// A scan over the ranks from this one to the last.
    pub reverse: bool,
    /// `Some` for a halo exchange.
    pub halo: Option<Arc<Halo>>,
    /// `Some` for the operations that have parts.
    pub parts: Option<Arc<Parts>>,
    /// `Some` for the operations that take counts.
    pub ragged: Option<Arc<Ragged>>,
    /// Meaningless for operations without a root.
    pub root: i32,
    pub envelope: Envelope,
    pub operand: Operand,
    /// Whether a result takes what is learnt of what has come: source and tag of a message, or counts.
    pub envelope_result: bool,
    pub status: Status,
    /// The user's source line.
    pub location: Box<str>,
    pub runs: Runs,
}

impl Site {
    /// A site with nothing but an operation and a communicator.
    pub fn new(op: Op, comm: &Arc<Comm>) -> Self {
        Self {
            op,
            phase: Phase::Whole,
            comm: comm.clone(),
            transport: "",
            reduction: None,
            reverse: false,
            halo: None,
            parts: None,
            ragged: None,
            root: 0,
            envelope: Envelope::default(),
            operand: Operand::None,
            envelope_result: false,
            status: Status::default(),
            location: "".into(),
            runs: Runs::default(),
        }
    }

    /// Its name in Python.
    pub fn name(&self) -> &'static str {
        self.op.name_of(self.phase)
    }

    /// The function of MPI's that carries it out.
    pub fn mpi_name(&self) -> &'static str {
        match (self.phase, &self.op.row().started) {
            (Phase::Start, Some(started)) => started.mpi_name,
            (Phase::Wait, _) => "MPI_Wait",
            _ => self.op.mpi_name(),
        }
    }

    pub fn is_root(&self) -> bool {
        self.op.row().has_root && self.root == self.comm.rank
    }

    /// Whether a scan begins at this rank.
    pub fn is_first(&self) -> bool {
        self.comm.rank == if self.reverse { self.comm.size - 1 } else { 0 }
    }

    /// What this rank sends and receives.
    #[inline]
    pub fn extents(&self) -> Extents {
        let row = self.op.row();
        if self.is_root() { row.at_root } else { row.elsewhere }
    }

    /// Checks what does not depend on buffers.
    pub fn validated(self) -> Result<Self, Error> {
        let size = self.comm.size;
        let row = self.op.row();
        if row.has_root && !(0..size).contains(&self.root) {
            return Err(self.error(Cause::NoSuchRank { role: "root", rank: self.root, size }));
        }
        if row.has_reduction != self.reduction.is_some() {
            return Err(self.error(Cause::Reduction { expected: row.has_reduction }));
        }
        for (name, wanted, given) in [
            ("halo", row.has_blocks, self.halo.is_some()),
            ("parts", row.has_parts, self.parts.is_some()),
            ("ragged", row.is_ragged, self.ragged.is_some()),
        ] {
            if wanted != given {
                let [expected, actual] = [wanted, given].map(|there| if there { "some" } else { "none" });
                return Err(self.error(Cause::Attribute { name, expected, actual: actual.into() }));
            }
        }
        // MPI's wildcards and MPI_PROC_NULL are negative: the library judges those.
        for (role, rank) in [("source", self.envelope.source), ("destination", self.envelope.dest)] {
            if row.has_peer && rank >= size {
                return Err(self.error(Cause::NoSuchRank { role, rank, size }));
            }
        }
        Ok(self)
    }

    /// How many numbers say what has come, if a result takes that.
    #[inline]
    pub fn received(&self) -> usize {
        if self.envelope_result { self.ragged.as_ref().map_or(2, |ragged| ragged.ranks()) } else { 0 }
    }

    /// How many arrays it takes, where it takes any.
    #[inline]
    pub fn arrays(&self) -> usize {
        self.halo.as_ref().map_or(1, |halo| halo.operands())
    }

    /// An error of this operation, before or beside any transport.
    #[cold]
    pub fn error(&self, cause: Cause) -> Error {
        Error { op: Some(self.name()), rank: Some(self.comm.rank), transport: None, cause }
    }
}

/// A stream of XLA's or of ours, which CUDA's functions are called with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(*mut c_void);

impl Stream {
    /// On the CPU there are none.
    pub const NONE: Self = Self(null_mut());

    /// # Safety
    /// Null, or a stream of CUDA's that outlives the calls it is given to.
    pub const unsafe fn new(handle: *mut c_void) -> Self {
        Self(handle)
    }

    pub fn handle(self) -> *mut c_void {
        self.0
    }
}

/// Operands and results beyond the first.
pub type Blocks = SmallVec<[(Buffer, Buffer); 4]>;

/// One execution of a site. Its buffers have the sizes that the table of operations asks for.
#[derive(Clone, Debug)]
pub struct Call<'a> {
    pub site: &'a Site,
    pub send: Option<Buffer>,
    pub recv: Option<Buffer>,
    /// Of an operation on several arrays: those after the first.
    pub others: &'a [(Buffer, Buffer)],
    /// The site's, or what an operand replaced it with.
    pub envelope: Envelope,
    /// How many rows go to each rank; and how many come from each, if that is known.
    pub counts: &'a [i32],
    /// Where source and tag of the received message go, or the number of rows from each rank: int32.
    pub received: Option<Buffer>,
    /// The site's, or what an operand replaced it with.
    pub status: Status,
    pub stream: Stream,
}

impl<'a> Call<'a> {
    /// A call whose buffers are not known yet.
    #[inline(always)]
    pub fn of(site: &'a Site, stream: Stream) -> Self {
        let &Site { envelope, status, .. } = site;
        Self {
            site,
            send: None,
            recv: None,
            others: &[],
            envelope,
            counts: &[],
            received: None,
            status,
            stream,
        }
    }

    pub fn new(site: &'a Site, send: Option<Buffer>, recv: Option<Buffer>) -> Result<Self, Error> {
        let call = Self { send, recv, ..Self::of(site, Stream::NONE) };
        call.check()?;
        Ok(call)
    }

    /// What is sent.
    #[inline(always)]
    pub fn operand(&self) -> Result<&Buffer, Cause> {
        self.send.as_ref().ok_or_else(|| Cause::missing("operand"))
    }

    /// What is received into.
    #[inline(always)]
    pub fn result(&self) -> Result<&Buffer, Cause> {
        self.recv.as_ref().ok_or_else(|| Cause::missing("result"))
    }

    /// The parts of an operation that has some.
    pub fn parts(&self) -> Result<&'a Parts, Cause> {
        self.site.parts.as_deref().ok_or_else(|| Cause::missing("parts"))
    }

    /// Checks the buffers against the operation, the role of this rank, and the communicator.
    #[inline(always)]
    pub fn check(&self) -> Result<(), Error> {
        let site = self.site;
        let side = site.extents();
        let sent = self.block("operand", side.send, self.send)?;
        let received = self.block("result", side.recv, self.recv)?;
        if let Some(parts) = &site.parts {
            return parts.check(self.send, self.recv).map_err(|cause| site.error(cause));
        }
        // The two sides of a message are independent of each other, those of a halo exchange are one block.
        let row = site.op.row();
        let is_free = row.has_peer || side.send == Extent::Variable && !row.has_blocks;
        if let (Some(sent), Some(received)) = (sent, received)
            && sent != received
            && !is_free
        {
            return Err(site.error(Cause::Sides {
                sent: sent.0,
                sent_dtype: sent.1.name(),
                received: received.0,
                received_dtype: received.1.name(),
            }));
        }
        Ok(())
    }

    /// One rank's share of a buffer.
    #[inline(always)]
    fn block(
        &self,
        operand: &'static str,
        extent: Extent,
        buffer: Option<Buffer>,
    ) -> Result<Option<(usize, Dtype)>, Error> {
        let size = self.site.comm.size as usize;
        match (extent, buffer) {
            (Extent::None, None) => Ok(None),
            (Extent::One | Extent::Variable, Some(buffer)) => Ok(Some((buffer.count(), buffer.dtype()))),
            (Extent::PerRank, Some(buffer)) if buffer.count().is_multiple_of(size) => {
                Ok(Some((buffer.count() / size, buffer.dtype())))
            }
            (Extent::PerRank, Some(buffer)) => {
                Err(self.site.error(Cause::NotPerRank { operand, count: buffer.count(), size }))
            }
            (Extent::None, Some(_)) => {
                Err(self.site.error(Cause::Buffers { operand, expected: 0, actual: 1 }))
            }
            (Extent::One | Extent::Variable | Extent::PerRank, None) => {
                Err(self.site.error(Cause::Buffers { operand, expected: 1, actual: 0 }))
            }
        }
    }

    /// Checks an envelope that came with an operand: MPI would end the job.
    pub fn check_envelope(&self, wildcards: Wildcards) -> Result<(), Error> {
        let (row, size, limit) = (self.site.op.row(), self.site.comm.size, wildcards.tag_limit);
        let first = wildcards.derivative;
        let (sends, receives) = (row.elsewhere.send != Extent::None, row.elsewhere.recv != Extent::None);
        let both = sends && receives;
        let Envelope { source, recvtag, dest, sendtag } = self.envelope;
        let is_rank = |rank| (0..size).contains(&rank) || rank == wildcards.proc_null;
        let is_tag = |tag| (0..=limit).contains(&tag);
        let wrong = |argument: &'static str, value: i32, any: &str| {
            let expected = if argument == "source" || argument == "dest" {
                format!("a rank from 0 to {}{any} or MPI.PROC_NULL", size - 1)
            } else {
                format!("an integer from 0 to {}{any}", first - 1)
            };
            // Python has moved a program's tags that would be those of derivatives out of the way, below all others.
            let is_moved = argument.ends_with("tag") && value < -first;
            let value = if is_moved { (value - i32::MIN).saturating_add(first) } else { value };
            let line = self.site.location.clone();
            Err(self.site.error(Cause::Argument { argument, value: value.to_string(), expected, line }))
        };
        if receives && !is_rank(source) && source != wildcards.source {
            return wrong("source", source, " or MPI.ANY_SOURCE");
        }
        if receives && !is_tag(recvtag) && recvtag != wildcards.tag {
            return wrong(if both { "recvtag" } else { "tag" }, recvtag, " or MPI.ANY_TAG");
        }
        if sends && !is_rank(dest) {
            return wrong("dest", dest, "");
        }
        if sends && !is_tag(sendtag) {
            return wrong(if both { "sendtag" } else { "tag" }, sendtag, "");
        }
        Ok(())
    }

    /// The operands of an operation on several arrays, with their results.
    pub fn blocks(&self) -> impl Iterator<Item = (Buffer, Buffer)> + Clone {
        self.send.zip(self.recv).into_iter().chain(self.others.iter().copied())
    }

    /// The number of elements that a log line or an error calls the size of the operation: what this
    /// rank contributes, or what it receives where it contributes nothing.
    pub fn items(&self) -> usize {
        let side = self.site.extents();
        let size = self.site.comm.size as usize;
        let per_rank = |extent, buffer: Option<Buffer>| match extent {
            Extent::None => None,
            Extent::One | Extent::Variable => buffer.map(|b| b.count()),
            Extent::PerRank => buffer.map(|b| b.count() / size),
        };
        let others: usize = self.others.iter().map(|(send, _)| send.count()).sum();
        per_rank(side.send, self.send).or(per_rank(side.recv, self.recv)).unwrap_or(0) + others
    }
}
