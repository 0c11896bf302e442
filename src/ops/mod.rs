//! What an operation is, apart from how it is carried out and from who asks for it.

mod arithmetic;
mod call;
mod comm;
mod dtypes;
mod halo;
mod reduction;
mod table;

pub use arithmetic::{Combine, combine};
pub use call::{Blocks, Buffer, Call, Envelope, EnvelopeOperand, Site, Stream};
pub use comm::{Comm, free as free_comm, lookup as lookup_comm, register as register_comm};
pub use dtypes::{Class, Dtype, PACKED, Packed, Reduced};
pub use halo::{Block, Halo, Runs, Width, Wire, copy_runs};
pub use reduction::{Builtin, Reduction, register_user as register_reduction};
pub use table::{Extent, Op, Row, Side};
