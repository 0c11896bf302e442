//! The table of operations: one row each. Handlers, log lines, tests and Python's checks walk it.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How much data one side of an operation holds, in units of what one rank contributes.
#[derive(Clone, Copy, Debug, Serialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Extent {
    /// No buffer at all.
    None,
    /// One rank's block.
    One,
    /// As much as the parts, the counts or the blocks of the operation say.
    Variable,
    /// One block for every rank of the communicator.
    #[serde(rename = "per rank")]
    PerRank,
}

/// What a rank sends and receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extents {
    pub send: Extent,
    pub recv: Extent,
}

/// A row of the table.
#[derive(Debug)]
pub struct Row {
    pub op: Op,
    /// Name of the operation in Python and in the attributes of a custom call.
    pub name: &'static str,
    /// The custom-call target, nul-terminated for C.
    pub target: &'static str,
    pub mpi_name: &'static str,
    pub has_reduction: bool,
    /// Reduces the operands of all ranks, so that there is a mean.
    pub has_mean: bool,
    pub has_root: bool,
    /// Takes a source, a destination, or both.
    pub has_peer: bool,
    /// Takes several arrays at once.
    pub has_blocks: bool,
    /// Has parts: which elements go to each rank, and which come from it.
    pub has_parts: bool,
    /// Takes an array that says, when it runs, how many rows go to each rank.
    pub is_ragged: bool,
    /// Extents on the root; equal to `elsewhere` where there is no root.
    pub at_root: Extents,
    pub elsewhere: Extents,
    /// For what can be started, and waited for later.
    pub started: Option<Started>,
}

/// How an operation is called that is started, and waited for later.
#[derive(Debug)]
pub struct Started {
    /// What starts it, in Python.
    pub name: &'static str,
    /// The wait for it, in records.
    pub wait_name: &'static str,
    pub mpi_name: &'static str,
}

/// What an operation takes besides data and a communicator.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Takes {
    Nothing,
    Reduction,
    Scan,
    Root,
    ReductionAndRoot,
    ReductionAndParts,
    Peer,
    Neighbours,
    Ragged,
    Parts,
    PartsAndRoot,
}

impl Takes {
    const fn has_mean(self) -> bool {
        matches!(self, Self::Reduction | Self::ReductionAndRoot | Self::ReductionAndParts)
    }
}

macro_rules! ops {
    ($($op:ident $name:literal $mpi:literal $takes:ident
       ($root_send:ident -> $root_recv:ident) ($send:ident -> $recv:ident) $start:tt;)*) => {
        /// An operation.
        #[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Hash)]
        #[serde(rename_all = "snake_case")]
        pub enum Op { $($op),* }

        impl Op {
            /// Every operation, in alphabetical order.
            pub const TABLE: &[Row] = &[$(Row {
                op: Op::$op,
                name: $name,
                target: concat!("mpi4jax_", $name),
                mpi_name: $mpi,
                has_reduction: Takes::$takes.has_mean() || matches!(Takes::$takes, Takes::Scan),
                has_mean: Takes::$takes.has_mean(),
                has_root: matches!(
                    Takes::$takes,
                    Takes::Root | Takes::ReductionAndRoot | Takes::PartsAndRoot
                ),
                has_peer: matches!(Takes::$takes, Takes::Peer),
                has_blocks: matches!(Takes::$takes, Takes::Neighbours),
                has_parts: matches!(
                    Takes::$takes,
                    Takes::Parts | Takes::PartsAndRoot | Takes::ReductionAndParts
                ),
                is_ragged: matches!(Takes::$takes, Takes::Ragged),
                at_root: Extents { send: Extent::$root_send, recv: Extent::$root_recv },
                elsewhere: Extents { send: Extent::$send, recv: Extent::$recv },
                started: started!($name, $start),
            }),*];
        }
    };
}

macro_rules! started {
    ($name:literal, -) => {
        None
    };
    ($name:literal, $mpi:literal) => {
        Some(Started { name: concat!("i", $name), wait_name: concat!("wait for i", $name), mpi_name: $mpi })
    };
}

ops! {
    //  op        name        MPI's name      takes            (on the root: send -> recv) (elsewhere) MPI's name to start it
    Allgather "allgather" "MPI_Allgather" Nothing          (One -> PerRank)     (One -> PerRank) "MPI_Iallgather";
    Allgatherv "allgatherv" "MPI_Allgatherv" Parts         (Variable -> Variable)         (Variable -> Variable) "MPI_Iallgatherv";
    Allreduce "allreduce" "MPI_Allreduce" Reduction        (One -> One)         (One -> One) "MPI_Iallreduce";
    Alltoall  "alltoall"  "MPI_Alltoall"  Nothing          (PerRank -> PerRank) (PerRank -> PerRank) "MPI_Ialltoall";
    Alltoallv "alltoallv" "MPI_Alltoallv" Parts            (Variable -> Variable)         (Variable -> Variable) "MPI_Ialltoallw";
    Barrier   "barrier"   "MPI_Barrier"   Nothing          (None -> None)       (None -> None) "MPI_Ibarrier";
    Bcast     "bcast"     "MPI_Bcast"     Root             (One -> None)        (None -> One) "MPI_Ibcast";
    Exscan    "exscan"    "MPI_Exscan"    Scan             (One -> One)         (One -> One) "MPI_Iexscan";
    Gather    "gather"    "MPI_Gather"    Root             (One -> PerRank)     (One -> None) "MPI_Igather";
    Gatherv   "gatherv"   "MPI_Gatherv"   PartsAndRoot     (Variable -> Variable)         (Variable -> None) "MPI_Ialltoallw";
    HaloExchange "halo_exchange" "MPI_Wait" Neighbours (Variable -> Variable)      (Variable -> Variable) -;
    Permute   "permute"   "MPI_Sendrecv"  Parts            (Variable -> Variable)         (Variable -> Variable) "MPI_Ialltoallw";
    RaggedAlltoall "ragged_alltoall" "MPI_Alltoallv" Ragged (Variable -> Variable)        (Variable -> Variable) "MPI_Ialltoallw";
    Recv      "recv"      "MPI_Recv"      Peer             (None -> One)        (None -> One) "MPI_Irecv";
    Reduce    "reduce"    "MPI_Reduce"    ReductionAndRoot (One -> One)         (One -> None) "MPI_Ireduce";
    ReduceScatter "reduce_scatter" "MPI_Reduce_scatter_block" Reduction (PerRank -> One) (PerRank -> One) "MPI_Ireduce_scatter_block";
    ReduceScatterv "reduce_scatterv" "MPI_Reduce_scatter" ReductionAndParts (Variable -> Variable) (Variable -> Variable) "MPI_Ireduce_scatter";
    Scan      "scan"      "MPI_Scan"      Scan             (One -> One)         (One -> One) "MPI_Iscan";
    Scatter   "scatter"   "MPI_Scatter"   Root             (PerRank -> One)     (None -> One) "MPI_Iscatter";
    Scatterv  "scatterv"  "MPI_Scatterv"  PartsAndRoot     (Variable -> Variable)         (None -> Variable) "MPI_Ialltoallw";
    Send      "send"      "MPI_Send"      Peer             (One -> None)        (One -> None) "MPI_Isend";
    Sendrecv  "sendrecv"  "MPI_Sendrecv"  Peer             (One -> One)         (One -> One) -;
}

impl Row {
    /// Whether all ranks of the communicator take part.
    pub fn is_collective(&self) -> bool {
        !self.has_peer
    }

    /// Whether a message leaves this rank, to a named destination.
    pub fn sends(&self) -> bool {
        self.has_peer && self.elsewhere.send != Extent::None
    }

    /// Whether a message comes to this rank, from a source.
    pub fn receives(&self) -> bool {
        self.has_peer && self.elsewhere.recv != Extent::None
    }

    /// Whether ranks may have arrays of different sizes.
    pub fn has_any_size(&self) -> bool {
        [self.at_root, self.elsewhere].iter().any(|side| [side.send, side.recv].contains(&Extent::Variable))
    }
}

impl Op {
    #[inline]
    pub fn row(self) -> &'static Row {
        &Self::TABLE[self as usize]
    }

    pub fn name(self) -> &'static str {
        self.row().name
    }

    pub fn mpi_name(self) -> &'static str {
        self.row().mpi_name
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_stand_at_their_ops_index_and_in_order() {
        for (i, row) in Op::TABLE.iter().enumerate() {
            assert_eq!(row.op as usize, i);
            let name = format!("\"{}\"", row.name);
            assert_eq!(serde_json::from_str::<Op>(&name).unwrap(), row.op);
            assert_eq!(row.target, format!("mpi4jax_{}", row.name));
        }
        assert!(Op::TABLE.is_sorted_by_key(|row| row.name));
    }

    #[test]
    fn variable_extents_have_their_sizes_from_somewhere() {
        for row in Op::TABLE {
            let is_variable = row.has_blocks || row.has_parts || row.is_ragged;
            assert_eq!(row.has_any_size(), is_variable, "{}", row.name);
        }
    }

    #[test]
    fn only_rooted_ops_differ_between_root_and_others() {
        for row in Op::TABLE {
            assert!(row.has_root || row.at_root == row.elsewhere, "{}", row.name);
        }
    }
}
