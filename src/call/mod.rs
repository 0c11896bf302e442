//! A decoded, validated operation: a [`Site`] of a program, and a [`Call`] each time that it runs.

mod envelope;
mod site;
mod status;
mod stream;

use smallvec::SmallVec;

pub use self::envelope::{EagerCall, Envelope, Operand};
pub use self::site::{Checked, Phase, PreparedReduction, Site};
pub use self::status::Status;
pub use self::stream::Stream;
use crate::error::{Cause, Error};
use crate::mpilib::{Wildcards, wildcards};
use crate::ops::{Buffer, Dtype, Extent, Op, Parts};

/// Operands and results beyond the first.
pub type Blocks = SmallVec<[(Buffer, Buffer); 4]>;

/// One execution of a site. Its buffers have the sizes that the table of operations asks for.
#[derive(Clone, Debug)]
pub struct Call<'a> {
    pub site: &'a Site,
    pub send: Option<Buffer>,
    pub recv: Option<Buffer>,
    /// Operands and results after the first, of an operation on several arrays.
    pub others: &'a [(Buffer, Buffer)],
    /// The envelope of the site, or of an operand which gives one at run time.
    pub envelope: Envelope,
    /// The number of rows that go to each rank; then the number that come from each, if that is known.
    pub counts: &'a [i32],
    /// The result of int32 that takes source, tag and length of the received message, or the number of rows from each rank.
    pub received: Option<Buffer>,
    /// The status of the site, or of an operand which gives one at run time.
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

    /// Whether the program can see the length of what it receives.
    #[inline]
    pub fn may_be_short(&self) -> bool {
        self.status.is_some() || self.site.may_be_short
    }

    /// The buffer that is sent from; an error if there is none.
    #[inline(always)]
    pub fn operand(&self) -> Result<&Buffer, Cause> {
        self.send.as_ref().ok_or_else(|| Cause::missing("operand"))
    }

    /// The buffer that is received into; an error if there is none.
    #[inline(always)]
    pub fn result(&self) -> Result<&Buffer, Cause> {
        self.recv.as_ref().ok_or_else(|| Cause::missing("result"))
    }

    /// The parts of the operation; an error if it has none.
    pub fn parts(&self) -> Result<&'a Parts, Cause> {
        self.site.parts.as_deref().ok_or_else(|| Cause::missing("parts"))
    }

    /// Checks the buffers against the operation, the role of this rank, and the communicator.
    #[inline(always)]
    pub fn check(&self) -> Result<(), Error> {
        let site = self.site;
        let side = site.extents();
        let sent = self.block("operand", side.send, self.send.as_ref())?;
        let received = self.block("result", side.recv, self.recv.as_ref())?;
        if let Some(parts) = &site.parts {
            return parts.check(self.send, self.recv).map_err(|cause| site.error(cause));
        }
        // The two sides of a message are independent of each other; the two sides of a halo
        // exchange are one block.
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
        buffer: Option<&Buffer>,
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

    /// Checks an envelope that came with an operand, because MPI would abort the job for an invalid
    /// one.
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
            // Python has moved a program's tags that would collide with derivatives' tags out of
            // the way, below all others.
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
    #[inline(always)]
    pub fn items(&self) -> usize {
        let side = self.site.extents();
        let size = self.site.comm.size as usize;
        let per_rank = |extent, buffer: &Option<Buffer>| match (extent, buffer) {
            (Extent::None, _) | (_, None) => None,
            (Extent::One | Extent::Variable, Some(buffer)) => Some(buffer.count()),
            (Extent::PerRank, Some(buffer)) => Some(buffer.count() / size),
        };
        let others: usize = self.others.iter().map(|(send, _)| send.count()).sum();
        per_rank(side.send, &self.send).or_else(|| per_rank(side.recv, &self.recv)).unwrap_or(0) + others
    }

    /// How many messages this rank sends, to other ranks. `None` for collectives whose messages the MPI library chooses.
    #[cold]
    pub fn messages(&self) -> Option<usize> {
        let (site, me) = (self.site, self.site.comm.rank as usize);
        let to_others =
            |counts: &[u64]| (0..).zip(counts).filter(|&(rank, &count)| rank != me && count > 0).count();
        match site.op {
            Op::Alltoallv | Op::HaloExchange | Op::Permute => site.counts().map(|[sent, _]| to_others(&sent)),
            Op::RaggedAlltoall => {
                let sent: Vec<u64> =
                    self.counts.iter().take(site.comm.size as usize).map(|&count| count as u64).collect();
                Some(to_others(&sent))
            }
            op if op.row().has_peer => {
                Some(usize::from(op.row().sends() && self.envelope.dest != wildcards().proc_null))
            }
            _ => None,
        }
    }
}
