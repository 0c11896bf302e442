//! Errors: their causes, and the operation in which they occur.

/// A failed operation.
#[derive(Debug, thiserror::Error)]
#[error("{}: {cause}", .op.unwrap_or("mpi4jax"))]
pub struct Error {
    pub op: Option<&'static str>,
    pub cause: Cause,
}

/// Why an operation failed.
#[derive(Debug, thiserror::Error)]
pub enum Cause {
    #[error("{function} returned error code {code}: {text}")]
    Mpi { function: &'static str, code: i32, text: Box<str> },
    #[error(
        "{function} received {received} items from rank {source_rank}, expected {expected}; \
         pass status= to accept shorter messages"
    )]
    ShortMessage { function: &'static str, received: usize, source_rank: i32, expected: usize },
    #[error(
        "received {received} bytes of ghost cells from rank {source_rank}, expected {expected}: the blocks of two \
         neighbors may differ only along the axis on which they are neighbors"
    )]
    MessageLength { received: usize, source_rank: i32, expected: usize },
    #[error(
        "received {received} elements from rank {source_rank}, expected {expected}: the counts of the two ranks \
         must agree"
    )]
    Parts { received: usize, source_rank: i32, expected: usize },
    #[error(
        "the counts differ between ranks: this one has {counts:?} (in elements); expected the same on all ranks"
    )]
    Counts { counts: Vec<u64> },
    #[error("the {operand} has {count} elements, expected {expected} by the counts")]
    TooFew { operand: &'static str, count: usize, expected: usize },
    #[error("not run, because MPI_Finalize has been called")]
    Finalized,
    #[error("communicator {key} has been freed")]
    FreedCommunicator { key: Box<str> },
    #[error("argument 'op', a reduction made with MPI.Op.Create, has been freed")]
    FreedReduction,
    #[error(
        "not run, because an earlier operation on communicator {key} failed on this rank, and the operations of its \
         ranks no longer match. Continue on a new communicator (comm.Dup()). First error: {first}"
    )]
    EarlierFailure { key: Box<str>, first: Box<str> },
    #[error(
        "no communicator {key} is registered in this process; before you call an exported program, give a \
         communicator this name with Set_name and use it in an op"
    )]
    UnknownCommunicator { key: Box<str> },
    #[error("no reduction {key} is registered")]
    UnknownReduction { key: Box<str> },
    #[error("{}", if *.expected { "expected a reduction, got none" }
        else { "expected no reduction, got one" })]
    Reduction { expected: bool },
    #[error("{role} {rank} is not a rank of a communicator of size {size}")]
    NoSuchRank { role: &'static str, rank: i32, size: i32 },
    #[error("expected {expected} {operand}(s), got {actual}")]
    Buffers { operand: &'static str, expected: usize, actual: usize },
    #[error("the last {operand} holds {count} elements of {dtype}, expected {expected} of int32")]
    Envelope { operand: &'static str, expected: usize, dtype: &'static str, count: usize },
    #[error("argument '{argument}' must be {expected}, got {value} when it ran{}",
        if .line.is_empty() { String::new() } else { format!(", {line}") })]
    Argument { argument: &'static str, value: String, expected: String, line: Box<str> },
    #[error("the {operand} has {count} elements, expected a multiple of the communicator's size {size}")]
    NotPerRank { operand: &'static str, count: usize, size: usize },
    #[error(
        "sends {sent} elements of {sent_dtype} per rank and receives {received} of {received_dtype}, \
         expected the same number of the same type"
    )]
    Sides { sent: usize, sent_dtype: &'static str, received: usize, received_dtype: &'static str },
    #[error("no buffer has the shape {dims:?}")]
    Shape { dims: Box<[i64]> },
    #[error("XLA data type {code} is not supported")]
    UnknownDtype { code: i32 },
    #[error("{reduction} is not defined for {dtype}")]
    UndefinedReduction { reduction: &'static str, dtype: &'static str },
    #[error("expected pairs of a value and an index, got an odd number of elements: {count}")]
    Pairs { count: usize },
    #[error("XLA packs arrays of {name}: convert them to {carrier}")]
    PackedDtype { name: &'static str, carrier: &'static str },
    #[error("{feature} is not supported: {reason}")]
    Unsupported { feature: String, reason: &'static str },
    #[error("attribute {name}: expected {expected}, got {actual}")]
    Attribute { name: &'static str, expected: &'static str, actual: String },
    #[error("{message}")]
    Setting { message: String },
    #[error("the transport {name} ({because}) cannot be used: {reason}. Of the others, {others}")]
    Unavailable { name: &'static str, because: Box<str>, reason: Box<str>, others: Box<str> },
    #[error("{function} returned error code {code}: {text}")]
    Library { function: &'static str, code: i32, text: Box<str> },
    #[error("communicator {key} has no counterpart: {reason}; choose MPI4JAX_TRANSPORT=staged")]
    NoCommunicator { key: Box<str>, reason: String },
    #[error("{message}")]
    Request { message: String },
    #[error("{report}")]
    Mismatch { report: String },
    #[error("{call}: {message}")]
    Xla { call: &'static str, message: String },
    #[error("panicked: {message}")]
    Panic { message: String },
}

impl Cause {
    #[cold]
    pub fn missing(operand: &'static str) -> Self {
        Self::Buffers { operand, expected: 1, actual: 0 }
    }

    /// After such an error the other ranks wait for a message that never comes: the job has to end.
    pub fn is_fatal(&self) -> bool {
        matches!(
            self,
            Self::Mpi { .. }
                | Self::Library { .. }
                | Self::ShortMessage { .. }
                | Self::MessageLength { .. }
                | Self::Parts { .. }
                | Self::Counts { .. }
                | Self::Mismatch { .. }
        )
    }

    /// The error code of MPI or of another library, 0 for errors that are ours.
    pub fn code(&self) -> i32 {
        if let Self::Mpi { code, .. } | Self::Library { code, .. } = self { *code } else { 0 }
    }
}

impl From<Cause> for Error {
    fn from(cause: Cause) -> Self {
        Self { op: None, cause }
    }
}
