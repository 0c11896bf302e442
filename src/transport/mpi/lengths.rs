//! The lengths of the blocks of a `gatherv` or a `scatterv`, which a rank compares with the lengths that it expects.

use std::ffi::c_void;

use crate::call::Call;
use crate::error::Cause;
use crate::ops::Op;

/// The lengths of the blocks, in elements, as their senders have them: one of this rank, and on the root one of each rank.
pub struct Lengths(Box<[u64]>);

impl Lengths {
    pub fn new(call: &Call) -> Result<Self, Cause> {
        let parts = call.parts()?;
        let is_gather = call.site.op == Op::Gatherv;
        let mut lengths = vec![0; 1 + if call.site.is_root() { parts.size() } else { 0 }];
        let [send, _] = parts.both();
        for part in send {
            let own = part.rank == call.site.root as usize && is_gather;
            lengths[if own { 0 } else { 1 + part.rank }] = part.count as u64;
        }
        Ok(Self(lengths.into()))
    }

    /// The length of this rank and the lengths of all ranks, as MPI reads or writes them.
    pub fn pointers(&mut self) -> (*mut c_void, *mut c_void) {
        let own = self.0.as_mut_ptr();
        (own.cast(), own.wrapping_add(1).cast())
    }

    /// An error unless this rank expects the lengths that it has received.
    pub fn check(&self, call: &Call) -> Result<(), Cause> {
        let (parts, rank) = (call.parts()?, call.site.comm.rank as usize);
        let is_root = call.site.is_root();
        let (first, received) = match (call.site.op, is_root) {
            (Op::Gatherv, true) => (0, &self.0[1..]),
            (Op::Scatterv, false) => (call.site.root as usize, &self.0[..1]),
            _ => return Ok(()),
        };
        let mut expected = parts.both()[1].iter().peekable();
        for (source, length) in (first..).zip(received) {
            let part = expected.next_if(|part| part.rank == source);
            let expected = part.map_or(0, |part| part.count);
            // SAFETY: MPI has written it since the compiler saw it last.
            let received = unsafe { (&raw const *length).read_volatile() } as usize;
            if received != expected && source != rank {
                return Err(Cause::Parts { source_rank: source as i32, received, expected });
            }
        }
        Ok(())
    }
}
