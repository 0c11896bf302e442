//! The table of data types: one row each.

use mpi::ffi::{self, MPI_Datatype};
use serde::Deserialize;

/// Which reductions make sense for a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    Bool,
    Integer,
    Float,
    Complex,
    /// Floats of 8 bits. They are moved as they are. Only Python reduces them, as another type.
    Narrow,
}

/// What reduces values of a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduced {
    /// The MPI library, as values of the type that carries them.
    Natively,
    /// [`arithmetic`](super::arithmetic): no MPI type has these values' meaning.
    ByUs,
    /// XLA converts them, and their results back: then sums and products are rounded once.
    AsFloat32,
}

macro_rules! dtypes {
    ($($dtype:ident $name:literal $code:literal $size:literal $class:ident $mpi:ident $reduced:ident;)*) => {
        /// An element type that JAX has.
        ///
        /// As wide as a register: a `Buffer` with one byte of it among padding is copied in pieces that overlap,
        /// each of which the processor waits for.
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

            /// numpy's name, or that of `ml_dtypes`.
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

            #[inline]
            pub fn reduced(self) -> Reduced {
                match self { $(Dtype::$dtype => Reduced::$reduced),* }
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
    // dtype           name                code size class MPI type             reduced
    Bool               "bool"               1   1  Bool    RSMPI_C_BOOL         Natively;
    Int8               "int8"               2   1  Integer RSMPI_INT8_T         Natively;
    Int16              "int16"              3   2  Integer RSMPI_INT16_T        Natively;
    Int32              "int32"              4   4  Integer RSMPI_INT32_T        Natively;
    Int64              "int64"              5   8  Integer RSMPI_INT64_T        Natively;
    Uint8              "uint8"              6   1  Integer RSMPI_UINT8_T        Natively;
    Uint16             "uint16"             7   2  Integer RSMPI_UINT16_T       Natively;
    Uint32             "uint32"             8   4  Integer RSMPI_UINT32_T       Natively;
    Uint64             "uint64"             9   8  Integer RSMPI_UINT64_T       Natively;
    Float8E3m4         "float8_e3m4"        29  1  Narrow  RSMPI_UINT8_T        AsFloat32;
    Float8E4m3         "float8_e4m3"        28  1  Narrow  RSMPI_UINT8_T        AsFloat32;
    Float8E4m3b11fnuz  "float8_e4m3b11fnuz" 23  1  Narrow  RSMPI_UINT8_T        AsFloat32;
    Float8E4m3fn       "float8_e4m3fn"      20  1  Narrow  RSMPI_UINT8_T        AsFloat32;
    Float8E4m3fnuz     "float8_e4m3fnuz"    25  1  Narrow  RSMPI_UINT8_T        AsFloat32;
    Float8E5m2         "float8_e5m2"        19  1  Narrow  RSMPI_UINT8_T        AsFloat32;
    Float8E5m2fnuz     "float8_e5m2fnuz"    24  1  Narrow  RSMPI_UINT8_T        AsFloat32;
    Float8E8m0fnu      "float8_e8m0fnu"     33  1  Narrow  RSMPI_UINT8_T        AsFloat32;
    Float16            "float16"            10  2  Float   RSMPI_UINT16_T       ByUs;
    Bfloat16           "bfloat16"           16  2  Float   RSMPI_UINT16_T       ByUs;
    Float32            "float32"            11  4  Float   RSMPI_FLOAT          Natively;
    Float64            "float64"            12  8  Float   RSMPI_DOUBLE         Natively;
    Complex64          "complex64"          15  8  Complex RSMPI_FLOAT_COMPLEX  Natively;
    Complex128         "complex128"         18  16 Complex RSMPI_DOUBLE_COMPLEX Natively;
}

/// A type of less than a byte. XLA packs its arrays, so that a block of one may begin within a byte:
/// Python converts it to the type that carries it, which holds all its values, and back.
#[derive(Debug)]
pub struct Packed {
    pub name: &'static str,
    pub xla_code: i32,
    pub carrier: Dtype,
}

/// Integers wrap when they are converted back, so that the carrier's reductions are theirs; sums and
/// products of floats are rounded once, when they are converted back.
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
        (self.reduced() == Reduced::AsFloat32).then_some(Self::Float32)
    }

    /// SUM and PROD.
    pub fn has_arithmetic(self) -> bool {
        !matches!(self.class(), Class::Bool | Class::Narrow)
    }

    /// MAX, MIN, MAXLOC and MINLOC.
    pub fn is_ordered(self) -> bool {
        !matches!(self.class(), Class::Complex | Class::Narrow)
    }

    /// BAND, BOR and BXOR.
    pub fn has_bits(self) -> bool {
        matches!(self.class(), Class::Bool | Class::Integer)
    }

    /// LAND, LOR and LXOR: MPI defines them for the types that it defines the bitwise ones for.
    pub fn is_logical(self) -> bool {
        self.has_bits()
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
