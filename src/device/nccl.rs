//! NCCL's functions.

use std::ffi::{CStr, c_char, c_int, c_void};

use super::cuda::StreamHandle;
use crate::dynlib::{Name, checked, function_table};
use crate::error::Cause;

/// `ncclResult_t`; a newer library has codes that we do not know.
pub type Code = c_int;
pub type Handle = *mut c_void;

pub const IN_PROGRESS: Code = 7;

/// `ncclUniqueId`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId(pub [u8; 128]);

/// `ncclDataType_t`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum DataType {
    Int8 = 0,
    Uint8 = 1,
    Int32 = 2,
    Uint32 = 3,
    Int64 = 4,
    Uint64 = 5,
    Float16 = 6,
    Float32 = 7,
    Float64 = 8,
    Bfloat16 = 9,
}

/// `ncclRedOp_t`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum RedOp {
    Sum = 0,
    Prod = 1,
    Max = 2,
    Min = 3,
}

const LIBRARY: Name = Name { soname: "libnccl.so.2", variable: "MPI4JAX_LIBNCCL", needed: "2.18 of NCCL" };
/// As NCCL counts: 10000 times the major version, 100 times the minor one, and the patch level.
const OLDEST: c_int = 21800;

function_table! {
    /// libnccl's functions.
    Library {
        ncclGetVersion(*mut c_int) -> Code;
        ncclGetErrorString(Code) -> *const c_char;
        ncclGetLastError(Handle) -> *const c_char;
        ncclGetUniqueId(*mut UniqueId) -> Code;
        ncclCommInitRank(*mut Handle, c_int, UniqueId, c_int) -> Code;
        ncclCommGetAsyncError(Handle, *mut Code) -> Code;
        ncclCommDestroy(Handle) -> Code;
        ncclCommAbort(Handle) -> Code;
        ncclAllReduce(*const c_void, *mut c_void, usize, c_int, c_int, Handle, StreamHandle) -> Code;
        ncclReduce(*const c_void, *mut c_void, usize, c_int, c_int, c_int, Handle, StreamHandle) -> Code;
        ncclBroadcast(*const c_void, *mut c_void, usize, c_int, c_int, Handle, StreamHandle) -> Code;
        ncclAllGather(*const c_void, *mut c_void, usize, c_int, Handle, StreamHandle) -> Code;
        ncclReduceScatter(*const c_void, *mut c_void, usize, c_int, c_int, Handle, StreamHandle) -> Code;
        ncclSend(*const c_void, usize, c_int, c_int, Handle, StreamHandle) -> Code;
        ncclRecv(*mut c_void, usize, c_int, c_int, Handle, StreamHandle) -> Code;
        ncclGroupStart() -> Code;
        ncclGroupEnd() -> Code;
    }
}

impl Library {
    fn start() -> Result<Self, String> {
        let library = Self::load(LIBRARY)?;
        let (path, mut version) = (&library.path, 0);
        // SAFETY: a place to write to.
        unsafe { checked!(library, ncclGetVersion(&mut version)) }
            .map_err(|cause| format!("{path}: {cause}"))?;
        if version < OLDEST {
            let found = format!("{}.{}.{}", version / 10000, version % 10000 / 100, version % 100);
            return Err(LIBRARY.too_old(path, &found));
        }
        Ok(library)
    }

    /// An error of NCCL as one of ours, with the line that it logged last, which may be about something else.
    pub fn check(&self, function: &'static str, code: Code) -> Result<(), Cause> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: both are strings of NCCL's.
        let text = unsafe {
            let text = CStr::from_ptr((self.ncclGetErrorString)(code)).to_string_lossy();
            let last = (self.ncclGetLastError)(std::ptr::null_mut());
            if last.is_null() || *last == 0 {
                text.into()
            } else {
                format!("{text} (its last words: {})", CStr::from_ptr(last).to_string_lossy()).into()
            }
        };
        Err(Cause::Library { function, code, text })
    }
}
