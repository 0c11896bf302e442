//! Operands that are read at run time: source, destination and tags of a message, and what differs between eager calls.

use serde::Deserialize;

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
    /// Stands for a rank or a tag that an operand gives at run time.
    pub const TRACED: i32 = i32::MIN;

    /// Length of an operand that holds an envelope: source, recvtag, dest and sendtag, as int32.
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

/// The meaning of the last operand, of int32, which is read at run time.
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
    /// Its length, in int32.
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
    /// How many int32 its operand has: the [`Envelope`], communicator, line, and the status, its
    /// lower half first. For [`Compile`](Self::Compile) it is -1.
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
