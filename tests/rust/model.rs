//! What a collective gives a rank, of what all ranks give it: the one statement of it for the tests in Rust.
//!
//! The suite computes from it what it expects, and the loopback transport what it delivers.

use std::ops::Range;

use _native::ops::Op;

/// A rank of a communicator, and what else a result depends on.
#[derive(Clone, Copy)]
pub struct Place {
    pub rank: usize,
    pub size: usize,
    pub root: usize,
    pub reverse: bool,
}

/// What a result is made of.
#[derive(PartialEq, Eq)]
pub enum Made {
    /// Blocks, one after the other: whose, and which of that rank's.
    Of(Vec<(usize, usize)>),
    /// The reduction of these ranks' blocks of that number; of no ranks, zeros.
    Reduced(Range<usize>, usize),
}

/// The result of a collective, where it has one; `None`: not all ranks' data meet in it.
pub fn collective(op: Op, at: Place) -> Option<Made> {
    let Place { rank, size, root, reverse } = at;
    Some(match op {
        Op::Allgather | Op::Gather => Made::Of((0..size).map(|from| (from, 0)).collect()),
        Op::Allreduce | Op::Reduce => Made::Reduced(0..size, 0),
        Op::Alltoall => Made::Of((0..size).map(|from| (from, rank)).collect()),
        Op::Barrier => Made::Of(Vec::new()),
        Op::Bcast => Made::Of(vec![(root, 0)]),
        Op::Exscan => Made::Reduced(if reverse { rank + 1..size } else { 0..rank }, 0),
        Op::ReduceScatter => Made::Reduced(0..size, rank),
        Op::Scan => Made::Reduced(if reverse { rank..size } else { 0..rank + 1 }, 0),
        Op::Scatter => Made::Of(vec![(root, rank)]),
        Op::HaloExchange | Op::RaggedAlltoall | Op::Recv | Op::Send | Op::Sendrecv => return None,
        // As their parts say: `Suite::parts`.
        Op::Allgatherv | Op::Alltoallv | Op::Gatherv | Op::Permute | Op::Scatterv => return None,
    })
}

/// Whether an operation goes from the last rank to the first, too.
pub fn reverses(op: Op) -> bool {
    let first = |reverse| collective(op, Place { rank: 0, size: 2, root: 0, reverse });
    first(false) != first(true)
}
