//! The table of data types: one row each.

use mpi::ffi::{self, MPI_Datatype};
use serde::Deserialize;

/// Which reductions make sense for a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    Bool,
    Integer,
    Float,
    /// Floats of 16 bits, which no MPI type has the meaning of: [`arithmetic`](super::arithmetic) reduces them.
    Half,
    Complex,
    /// Floats of 8 bits. They are moved as they are. XLA converts what is reduced to float32, and the result back: then sums and
    /// products are rounded once.
    Narrow,
}

macro_rules! dtypes {
    ($($dtype:ident $name:literal $code:literal $size:literal $class:ident $mpi:ident;)*) => {
        /// An element type that JAX has.
        ///
        /// As wide as a register: a `Buffer` with one byte of it among padding is copied in
        /// overlapping pieces, and the processor waits for each piece.
        #[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Hash)]
        #[serde(rename_all = "snake_case")]
        #[repr(usize)]
        pub enum Dtype { $($dtype),* }

        impl Dtype {
            pub const ALL: &[Dtype] = &[$(Dtype::$dtype),*];

            /// From XLA's `PrimitiveType`, which the FFI's `XLA_FFI_DataType` equals.
            #[inline]
            pub fn from_xla(code: i32) -> Option<Self> {
                match code {
                    $($code => Some(Dtype::$dtype),)*
                    _ => None,
                }
            }

            pub fn xla_code(self) -> i32 {
                match self { $(Dtype::$dtype => $code),* }
            }

            /// The name in NumPy or `ml_dtypes`.
            pub fn name(self) -> &'static str {
                match self { $(Dtype::$dtype => $name),* }
            }

            /// Bytes that one element takes in a buffer.
            #[inline]
            pub fn size(self) -> usize {
                match self { $(Dtype::$dtype => $size),* }
            }

            pub fn class(self) -> Class {
                match self { $(Dtype::$dtype => Class::$class),* }
            }

            /// The MPI type that carries values of this type: the same one where MPI has it, so that
            /// the message matches what another library's code on the other rank posts, else the
            /// unsigned integer of its size.
            #[inline]
            pub fn mpi(self) -> MPI_Datatype {
                // SAFETY: constants of the MPI shim, written once by its loader.
                unsafe { match self { $(Dtype::$dtype => ffi::$mpi),* } }
            }
        }
    };
}

dtypes! {
    // dtype           name                code size class MPI type
    Bool               "bool"               1   1  Bool    RSMPI_C_BOOL;
    Int8               "int8"               2   1  Integer RSMPI_INT8_T;
    Int16              "int16"              3   2  Integer RSMPI_INT16_T;
    Int32              "int32"              4   4  Integer RSMPI_INT32_T;
    Int64              "int64"              5   8  Integer RSMPI_INT64_T;
    Uint8              "uint8"              6   1  Integer RSMPI_UINT8_T;
    Uint16             "uint16"             7   2  Integer RSMPI_UINT16_T;
    Uint32             "uint32"             8   4  Integer RSMPI_UINT32_T;
    Uint64             "uint64"             9   8  Integer RSMPI_UINT64_T;
    Float8E3m4         "float8_e3m4"        29  1  Narrow  RSMPI_UINT8_T;
    Float8E4m3         "float8_e4m3"        28  1  Narrow  RSMPI_UINT8_T;
    Float8E4m3b11fnuz  "float8_e4m3b11fnuz" 23  1  Narrow  RSMPI_UINT8_T;
    Float8E4m3fn       "float8_e4m3fn"      20  1  Narrow  RSMPI_UINT8_T;
    Float8E4m3fnuz     "float8_e4m3fnuz"    25  1  Narrow  RSMPI_UINT8_T;
    Float8E5m2         "float8_e5m2"        19  1  Narrow  RSMPI_UINT8_T;
    Float8E5m2fnuz     "float8_e5m2fnuz"    24  1  Narrow  RSMPI_UINT8_T;
    Float8E8m0fnu      "float8_e8m0fnu"     33  1  Narrow  RSMPI_UINT8_T;
    Float16            "float16"            10  2  Half    RSMPI_UINT16_T;
    Bfloat16           "bfloat16"           16  2  Half    RSMPI_UINT16_T;
    Float32            "float32"            11  4  Float   RSMPI_FLOAT;
    Float64            "float64"            12  8  Float   RSMPI_DOUBLE;
    Complex64          "complex64"          15  8  Complex RSMPI_FLOAT_COMPLEX;
    Complex128         "complex128"         18  16 Complex RSMPI_DOUBLE_COMPLEX;
}

/// A type of less than a byte. XLA packs its arrays, so that a block of one may begin within a byte:
/// Python converts it to the type that carries it, which holds all its values, and back.
#[derive(Debug)]
pub struct Packed {
    pub name: &'static str,
    pub xla_code: i32,
    pub carrier: Dtype,
}

/// A narrow type is reduced in a wider carrier type. For integers the result is exact modulo
/// `2**bits`, because the conversion back wraps; floats are rounded once, in the conversion back.
pub const PACKED: &[Packed] = &[
    Packed { name: "int2", xla_code: 26, carrier: Dtype::Int8 },
    Packed { name: "int4", xla_code: 21, carrier: Dtype::Int8 },
    Packed { name: "uint2", xla_code: 27, carrier: Dtype::Uint8 },
    Packed { name: "uint4", xla_code: 22, carrier: Dtype::Uint8 },
    Packed { name: "float4_e2m1fn", xla_code: 32, carrier: Dtype::Bfloat16 },
];

impl Dtype {
    /// The type that is reduced in its place, which holds all its values.
    pub fn wider(self) -> Option<Self> {
        (self.class() == Class::Narrow).then_some(Self::Float32)
    }

    /// SUM and PROD.
    pub fn has_arithmetic(self) -> bool {
        !matches!(self.class(), Class::Bool | Class::Narrow)
    }

    /// MAX, MIN, MAXLOC and MINLOC.
    pub fn is_ordered(self) -> bool {
        !matches!(self.class(), Class::Complex | Class::Narrow)
    }

    /// BAND, BOR and BXOR, and LAND, LOR and LXOR: MPI defines both for the same types.
    pub fn has_bits(self) -> bool {
        matches!(self.class(), Class::Bool | Class::Integer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_names_are_distinct_and_round_trip() {
        for &dtype in Dtype::ALL {
            assert_eq!(Dtype::from_xla(dtype.xla_code()), Some(dtype));
            let name = format!("\"{}\"", dtype.name());
            assert_eq!(serde_json::from_str::<Dtype>(&name).unwrap(), dtype);
        }
        assert_eq!(Dtype::from_xla(17), None, "a token is no data type");
    }

    #[test]
    fn sizes_follow_from_names() {
        for &dtype in Dtype::ALL {
            let digits: String = dtype
                .name()
                .chars()
                .skip_while(|c| !c.is_ascii_digit())
                .take_while(char::is_ascii_digit)
                .collect();
            let bits: usize = digits.parse().unwrap_or(8);
            assert_eq!(dtype.size(), bits.div_ceil(8), "{}", dtype.name());
        }
    }
}
