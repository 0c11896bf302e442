//! What an operation is, apart from how it is carried out and from who asks for it.

mod arithmetic;
mod call;
mod comm;
mod dtypes;
mod halo;
mod line;
mod reduction;
mod table;

pub use arithmetic::{Combine, combine};
pub use call::{Blocks, Buffer, Call, Envelope, Operand, Peers, Site, Stream, Wildcards};
pub use comm::{
    Comm, free as free_comm, lookup as lookup_comm, numbered as numbered_comm, register as register_comm,
};
pub use dtypes::{Class, Dtype, PACKED, Packed, Reduced};
pub use halo::{Block, Halo, Runs, Width, Wire, copy_runs};
pub use line::{add as add_line, numbered as numbered_line};
pub use reduction::{Builtin, Reduction, register_user as register_reduction};
pub use table::{Extent, Op, Row, Side};
