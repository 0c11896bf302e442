//! An operation of a compiled program, before its buffers are known.

use std::sync::{Arc, OnceLock};

use super::envelope::{Envelope, Operand};
use super::status::Status;
use crate::board::{Entry, Slot};
use crate::comm::Comm;
use crate::error::{Cause, Error};
use crate::ops::{Dtype, Extents, Forms, Halo, Op, Parts, Ragged, Reduction};

/// Which part of an operation a program asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    #[default]
    Whole,
    /// The operation is started, on memory of this package.
    Start,
    /// The program waits for an operation that was started.
    Wait,
}

impl Op {
    /// The name of the function in Python that asks for this phase.
    pub fn name_of(self, phase: Phase) -> &'static str {
        match (phase, &self.row().started) {
            (Phase::Start, Some(started)) => started.name,
            (Phase::Wait, Some(started)) => started.wait_name,
            _ => self.name(),
        }
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
    /// Whether a scan goes over the ranks from this one to the last.
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
    /// Whether there is a result for the source, tag and length of a received message, or for received counts.
    pub envelope_result: bool,
    /// Whether the program sees how long a message is: it may be shorter than the result.
    pub may_be_short: bool,
    pub status: Status,
    pub forms: Forms,
    /// The user's source line.
    pub location: Box<str>,
    /// What ranks compare of it, and where its line and its forms are on the board.
    pub base: OnceLock<(u64, u64)>,
    pub words: Entry,
    pub checked: OnceLock<Checked>,
    pub reducer: OnceLock<PreparedReduction>,
}

/// Data type and number of elements of the operand and of the result, once a run has passed all checks. XLA gives an operation of a
/// compiled program arrays of the same shapes each time, so later runs need no checks.
pub type Checked = [Option<(Dtype, usize)>; 2];

/// What MPI needs for the reduction of a site: its data type and operation, as numbers, and how many elements one item has.
#[derive(Clone, Copy, Debug)]
pub struct PreparedReduction {
    pub of: Dtype,
    pub datatype: usize,
    pub op: usize,
    pub width: usize,
}

impl Site {
    /// Length of the result that describes a received message: source, tag, and number of elements, as int32.
    pub const ENVELOPE_LEN: usize = 3;

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
            may_be_short: false,
            status: Status::default(),
            forms: Forms::default(),
            location: "".into(),
            checked: OnceLock::new(),
            reducer: OnceLock::new(),
            base: OnceLock::new(),
            words: Entry::default(),
        }
    }

    /// Its name in Python.
    pub fn name(&self) -> &'static str {
        self.op.name_of(self.phase)
    }

    /// How many elements go to each rank, and how many come from each, if that is known here.
    pub fn counts(&self) -> Option<[Vec<u64>; 2]> {
        match (&self.parts, &self.halo) {
            (Some(parts), _) => Some(parts.counts()),
            (None, halo) => Some(halo.as_ref()?.counts(self.comm.size as usize)),
        }
    }

    /// Where its line and its forms are in the slot of this rank.
    #[inline]
    pub fn line(&self, slot: &Slot) -> u32 {
        self.words.number(&slot.text, || format!("{}{}", self.location, self.forms.behind_line()))
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

    /// Length of the result that describes what was received, if there is one.
    #[inline]
    pub fn received(&self) -> usize {
        if self.envelope_result {
            self.ragged.as_ref().map_or(Self::ENVELOPE_LEN, |ragged| ragged.ranks())
        } else {
            0
        }
    }

    /// How many arrays it takes, where it takes any.
    #[inline]
    pub fn arrays(&self) -> usize {
        self.halo.as_ref().map_or(1, |halo| halo.operands())
    }

    /// An error of this operation, in the name of the function that the user has called.
    #[cold]
    pub fn error(&self, cause: Cause) -> Error {
        let is_migrate = self.ragged.as_ref().is_some_and(|ragged| ragged.has_owners());
        Error { op: Some(if is_migrate { "migrate" } else { self.name() }), cause }
    }
}
