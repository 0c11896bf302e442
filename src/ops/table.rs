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

/// A communicator of the same ranks, which this package makes of the program's where an operation first needs it. All ranks
/// make it together, so Python waits for that operation.
#[derive(Clone, Copy, Debug, Serialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Private {
    /// For messages of the operation's own: on the program's communicator, receives with wildcards would match them.
    Messages,
    /// With the ranks in reverse order, for the transpose.
    Reversed,
}

/// A row of the table.
#[derive(Debug)]
pub struct Row {
    pub op: Op,
    /// Name of the operation in Python and in the attributes of a custom call.
    pub name: &'static str,
    /// The name of the custom-call target, which Python registers with XLA: C never reads this string, so it ends without a nul.
    pub target: &'static str,
    pub mpi_name: &'static str,
    pub has_reduction: bool,
    /// Whether it reduces the operands of all ranks to one result, so that a mean is defined.
    pub has_mean: bool,
    pub has_root: bool,
    /// Whether it takes a source, a destination, or both.
    pub has_peer: bool,
    /// Whether it takes several arrays at once.
    pub has_blocks: bool,
    /// Whether it takes [`Parts`](super::Parts): which elements go to each rank, and which come from it.
    pub has_parts: bool,
    /// Whether an operand says at run time how many rows go to each rank.
    pub is_ragged: bool,
    /// The communicator that its blocking form needs besides the program's.
    pub private: Option<Private>,
    /// Extents on the root; equal to `elsewhere` where there is no root.
    pub at_root: Extents,
    pub elsewhere: Extents,
    /// Names of the nonblocking form, if there is one.
    pub started: Option<Started>,
}

/// Names of the nonblocking form of an operation.
#[derive(Debug)]
pub struct Started {
    /// The function in Python that starts it.
    pub name: &'static str,
    /// The name of the wait for it in records and reports.
    pub wait_name: &'static str,
    pub mpi_name: &'static str,
}

/// What an operation takes besides data and a communicator; and whether it sends messages of its own.
const NOTHING: u8 = 0;
const REDUCTION: u8 = 1;
const SCAN: u8 = 1 << 1;
const ROOT: u8 = 1 << 2;
const PEER: u8 = 1 << 3;
const BLOCKS: u8 = 1 << 4;
const PARTS: u8 = 1 << 5;
const RAGGED: u8 = 1 << 6;
const MESSAGES: u8 = 1 << 7;

macro_rules! ops {
    ($($op:ident $name:literal $mpi:literal ($takes:expr)
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
                has_reduction: $takes & (REDUCTION | SCAN) != 0,
                has_mean: $takes & REDUCTION != 0,
                has_root: $takes & ROOT != 0,
                has_peer: $takes & PEER != 0,
                has_blocks: $takes & BLOCKS != 0,
                has_parts: $takes & PARTS != 0,
                is_ragged: $takes & RAGGED != 0,
                private: match $takes & (SCAN | MESSAGES) {
                    0 => None,
                    SCAN => Some(Private::Reversed),
                    _ => Some(Private::Messages),
                },
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
    // op           name               MPI's name                  takes                on the root: (send -> recv)  elsewhere               MPI's name to start it
    Allgather      "allgather"       "MPI_Allgather"            (NOTHING)           (One -> PerRank)       (One -> PerRank)       "MPI_Iallgather";
    Allgatherv     "allgatherv"      "MPI_Allgatherv"           (PARTS)             (Variable -> Variable) (Variable -> Variable) "MPI_Iallgatherv";
    Allreduce      "allreduce"       "MPI_Allreduce"            (REDUCTION)         (One -> One)           (One -> One)           "MPI_Iallreduce";
    Alltoall       "alltoall"        "MPI_Alltoall"             (NOTHING)           (PerRank -> PerRank)   (PerRank -> PerRank)   "MPI_Ialltoall";
    Alltoallv      "alltoallv"       "MPI_Alltoallv"            (PARTS | MESSAGES)  (Variable -> Variable) (Variable -> Variable) "MPI_Ialltoallw";
    Barrier        "barrier"         "MPI_Barrier"              (NOTHING)           (None -> None)         (None -> None)         "MPI_Ibarrier";
    Bcast          "bcast"           "MPI_Bcast"                (ROOT)              (One -> None)          (None -> One)          "MPI_Ibcast";
    Exscan         "exscan"          "MPI_Exscan"               (SCAN)              (One -> One)           (One -> One)           "MPI_Iexscan";
    Gather         "gather"          "MPI_Gather"               (ROOT)              (One -> PerRank)       (One -> None)          "MPI_Igather";
    Gatherv        "gatherv"         "MPI_Gatherv"              (PARTS | ROOT)      (Variable -> Variable) (Variable -> None)     "MPI_Igatherv";
    HaloExchange   "halo_exchange"   "MPI_Wait"                 (BLOCKS | MESSAGES) (Variable -> Variable) (Variable -> Variable) -;
    Permute        "permute"         "MPI_Sendrecv"             (PARTS | MESSAGES)  (Variable -> Variable) (Variable -> Variable) "MPI_Ialltoallw";
    RaggedAlltoall "ragged_alltoall" "MPI_Alltoallv"            (RAGGED | MESSAGES) (Variable -> Variable) (Variable -> Variable) "MPI_Ialltoallw";
    Recv           "recv"            "MPI_Recv"                 (PEER)              (None -> One)          (None -> One)          "MPI_Irecv";
    Reduce         "reduce"          "MPI_Reduce"               (REDUCTION | ROOT)  (One -> One)           (One -> None)          "MPI_Ireduce";
    ReduceScatter  "reduce_scatter"  "MPI_Reduce_scatter_block" (REDUCTION)         (PerRank -> One)       (PerRank -> One)       "MPI_Ireduce_scatter_block";
    ReduceScatterv "reduce_scatterv" "MPI_Reduce_scatter"       (REDUCTION | PARTS) (Variable -> Variable) (Variable -> Variable) "MPI_Ireduce_scatter";
    Scan           "scan"            "MPI_Scan"                 (SCAN)              (One -> One)           (One -> One)           "MPI_Iscan";
    Scatter        "scatter"         "MPI_Scatter"              (ROOT)              (PerRank -> One)       (None -> One)          "MPI_Iscatter";
    Scatterv       "scatterv"        "MPI_Scatterv"             (PARTS | ROOT)      (Variable -> Variable) (None -> Variable)     "MPI_Iscatterv";
    Send           "send"            "MPI_Send"                 (PEER)              (One -> None)          (One -> None)          "MPI_Isend";
    Sendrecv       "sendrecv"        "MPI_Sendrecv"             (PEER)              (One -> One)           (One -> One)           -;
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
