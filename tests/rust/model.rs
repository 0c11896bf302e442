//! What a collective gives a rank, of what all ranks give it: from that, the suite computes what it expects.

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

/// How an operation is tested.
pub enum Model {
    /// Of blocks: the result on a rank, of all ranks' operands.
    Blocks(Made),
    /// How many rows go from a rank to another, given the root; and whether all get the same.
    Parts { rows: fn(usize, usize, usize) -> usize, is_same: bool },
    /// Rows, whose numbers are in an array.
    Ragged,
    /// Ghost cells.
    Ghosts,
    /// Messages to and from one rank.
    Message,
}

/// The model of each operation.
pub fn model(op: Op, at: Place) -> Model {
    let Place { rank, size, root, reverse } = at;
    let some = |from, to, _| (from + 2 * to + 1) % 3;
    Model::Blocks(match op {
        Op::Allgather | Op::Gather => Made::Of((0..size).map(|from| (from, 0)).collect()),
        Op::Allreduce | Op::Reduce => Made::Reduced(0..size, 0),
        Op::Alltoall => Made::Of((0..size).map(|from| (from, rank)).collect()),
        Op::Barrier => Made::Of(Vec::new()),
        Op::Bcast => Made::Of(vec![(root, 0)]),
        Op::Exscan => Made::Reduced(if reverse { rank + 1..size } else { 0..rank }, 0),
        Op::ReduceScatter | Op::ReduceScatterv => Made::Reduced(0..size, rank),
        Op::Scan => Made::Reduced(if reverse { rank..size } else { 0..rank + 1 }, 0),
        Op::Scatter => Made::Of(vec![(root, rank)]),
        Op::HaloExchange => return Model::Ghosts,
        Op::RaggedAlltoall => return Model::Ragged,
        Op::Recv | Op::Send | Op::Sendrecv => return Model::Message,
        Op::Allgatherv => return Model::Parts { rows: |from, _, _| (from + 1) % 3, is_same: true },
        Op::Alltoallv | Op::Permute => return Model::Parts { rows: some, is_same: false },
        Op::Gatherv => {
            let rows = |from, to, root| if to == root { (from + 2 * to + 1) % 3 } else { 0 };
            return Model::Parts { rows, is_same: false };
        }
        Op::Scatterv => {
            let rows = |from, to, root| if from == root { (from + 2 * to + 1) % 3 } else { 0 };
            return Model::Parts { rows, is_same: false };
        }
    })
}

/// The rows of a rank, of blocks that differ in size. Some ranks have none.
pub fn rows_of(rank: usize) -> usize {
    (rank + 1) % 3
}

/// Whether an operation goes from the last rank to the first, too.
pub fn reverses(op: Op) -> bool {
    let first = |reverse| match model(op, Place { rank: 0, size: 2, root: 0, reverse }) {
        Model::Blocks(made) => Some(made),
        _ => None,
    };
    first(false) != first(true)
}
