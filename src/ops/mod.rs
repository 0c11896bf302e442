//! Tables of operations and data types, and what operations do to arrays, apart from communication.

mod arithmetic;
mod buffer;
mod dtypes;
mod forms;
mod halo;
mod line;
mod parts;
mod ragged;
mod reduction;
mod region;
mod table;

pub use arithmetic::{Combine, combine};
pub use buffer::Buffer;
pub use dtypes::{Class, Dtype, PACKED, Packed};
pub use forms::Forms;
pub use halo::{Face, Halo, HaloFields};
pub use line::{add as add_line, name as name_line, named as named_line, numbered as numbered_line};
pub use parts::{Ints, Part, Parts, PartsFields, Wire};
pub use ragged::{Counts, Ragged, RaggedFields};
pub use reduction::{Builtin, Reduction, register_user as register_reduction};
pub use table::{Extent, Extents, Op, Private, Row, Started};
