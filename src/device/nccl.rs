//! NCCL's functions, which RCCL has too.

use std::ffi::{CStr, c_char, c_int};

pub use cudarc::nccl::sys;
pub use sys::{
    ncclComm_t as Handle, ncclDataType_t as DataType, ncclRedOp_t as RedOp, ncclUniqueId as UniqueId,
};

use crate::dynlib::addresses;
use crate::error::Cause;

/// `ncclResult_t`; a newer library has codes that we do not know.
pub type Code = c_int;

pub const IN_PROGRESS: Code = sys::ncclResult_t::ncclInProgress as Code;

/// The oldest version that is accepted, as NCCL numbers it: 10000 times the major version, 100 times the minor one, plus the patch level.
const OLDEST: c_int = 21800;

addresses! {
    /// libnccl's functions.
    Library {
        ncclGetVersion ncclGetErrorString ncclGetLastError
        ncclGetUniqueId ncclCommInitRank ncclCommGetAsyncError ncclCommDestroy ncclCommAbort
        ncclAllReduce ncclReduce ncclBroadcast ncclAllGather ncclReduceScatter
        ncclSend ncclRecv ncclGroupStart ncclGroupEnd
    }
}

/// Calls a function of NCCL with the signature in its header, and returns its code.
macro_rules! nccl_code {
    ($library:expr, $function:ident($($argument:expr),* $(,)?)) => {
        $crate::dynlib::call_declared!($crate::device::nccl::sys, $library, $function($($argument),*))
    };
}

/// As `nccl_code`, but returns an error for a code that is not 0.
macro_rules! nccl {
    ($library:expr, $function:ident($($argument:expr),* $(,)?)) => {
        $library.check(stringify!($function), $crate::device::nccl::nccl_code!($library, $function($($argument),*)))
    };
}

pub(crate) use {nccl, nccl_code};

/// A version, which NCCL gives as a number, in digits with dots.
pub fn version_name(version: c_int) -> String {
    format!("{}.{}.{}", version / 10000, version % 10000 / 100, version % 100)
}

impl Library {
    fn start() -> Result<Self, String> {
        let library = Self::load(super::vendor().nccl)?;
        let path = &library.path;
        let version = library.version().map_err(|cause| format!("{path}: {cause}"))?;
        if version < OLDEST {
            return Err(super::vendor().nccl.too_old(path, &version_name(version)));
        }
        Ok(library)
    }

    pub fn version(&self) -> Result<c_int, Cause> {
        let mut version = 0;
        // SAFETY: a place to write to.
        unsafe { nccl!(self, ncclGetVersion(&mut version)) }.map(|()| version)
    }

    /// An error of NCCL as one of ours, with the line that it logged last, which may be about something else.
    pub fn check(&self, function: &'static str, code: Code) -> Result<(), Cause> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: both are strings of NCCL's. The header's type of codes is an enum, which may not have this one; as an argument
        // it is an int too.
        let text = unsafe {
            let describe: unsafe extern "C" fn(Code) -> *const c_char =
                std::mem::transmute(self.ncclGetErrorString);
            let text = CStr::from_ptr(describe(code)).to_string_lossy();
            let last = nccl_code!(self, ncclGetLastError(std::ptr::null_mut()));
            if last.is_null() || *last == 0 {
                text.into()
            } else {
                format!("{text} (its last words: {})", CStr::from_ptr(last).to_string_lossy()).into()
            }
        };
        Err(Cause::Library { function, code, text })
    }
}
