//! Libraries that are loaded when they are first needed, and tables of their functions.
//!
//! A process must not hold two copies of libcuda's or NCCL's state, so a library that JAX or the MPI library has already loaded
//! is preferred. Nothing is ever unloaded: compiled programs keep pointers.

use std::ffi::{CStr, OsString, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::sync::lock;

#[cfg(target_os = "linux")]
const RTLD_NOLOAD: c_int = libc::RTLD_NOLOAD;
#[cfg(not(target_os = "linux"))]
const RTLD_NOLOAD: c_int = 0x10;

/// The target of events.
const TARGET: &str = "mpi4jax::library";

/// A library by name.
#[derive(Clone, Copy, Debug)]
pub struct Name {
    pub soname: &'static str,
    /// Names a file to load, and nothing else is tried.
    pub variable: &'static str,
    /// For error messages.
    pub needed: &'static str,
}

impl Name {
    /// The error of a library that is too old.
    pub fn too_old(self, path: &str, found: &str) -> String {
        format!("{path} is version {found}, expected at least {}", self.needed)
    }
}

/// Directories of Python packages that have libraries; Python adds them.
static DIRECTORIES: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Adds directories to look into before the system's.
pub fn add_directories(directories: impl IntoIterator<Item = PathBuf>) {
    let mut known = lock(&DIRECTORIES);
    for directory in directories {
        if !known.contains(&directory) {
            known.push(directory);
        }
    }
}

/// The library that the environment names, else the one that is in the process already, else the first that is found; and its
/// path.
fn open(name: Name) -> Result<(Library, String), String> {
    if let Some(path) = std::env::var_os(name.variable).filter(|path| !path.is_empty()) {
        return open_first(name, &[path]);
    }
    // SAFETY: nothing is loaded, so nothing runs.
    if let Ok(library) = unsafe { Library::open(Some(name.soname), RTLD_NOW | RTLD_NOLOAD) } {
        tracing::info!(target: TARGET, name = name.soname, "in the process already");
        return Ok((library, name.soname.into()));
    }
    let known = lock(&DIRECTORIES).clone();
    let files = known.iter().map(|directory| directory.join(name.soname)).filter(|file| file.exists());
    let mut paths: Vec<OsString> = files.map(PathBuf::into_os_string).collect();
    paths.push(name.soname.into());
    open_first(name, &paths)
}

/// A library that stays loaded.
pub struct Found {
    name: Name,
    pub path: String,
    library: ManuallyDrop<Library>,
}

impl Found {
    pub fn open(name: Name) -> Result<Self, String> {
        let (library, path) = open(name)?;
        Ok(Self { name, path, library: ManuallyDrop::new(library) })
    }

    /// Where one of its functions is.
    pub fn address(&self, function: &str) -> Result<*const c_void, String> {
        // SAFETY: the address is only read, not used as a pointer to anything.
        let symbol = unsafe { self.library.get::<*const c_void>(function) };
        symbol.map(|symbol| *symbol).map_err(|_| {
            let (path, needed) = (&self.path, self.name.needed);
            format!("{path} has no function {function}: at least version {needed} is needed")
        })
    }
}

fn open_first(name: Name, paths: &[OsString]) -> Result<(Library, String), String> {
    let mut tried = Vec::new();
    for path in paths {
        // SAFETY: the constructors of these libraries are meant to be run by any program.
        match unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) } {
            Ok(library) => {
                let path: String = path.to_string_lossy().into();
                tracing::info!(target: TARGET, path, "loaded");
                return Ok((library, path));
            }
            // The loader's own words.
            Err(error) => {
                let error = std::error::Error::source(&error).map_or(error.to_string(), ToString::to_string);
                tracing::debug!(target: TARGET, path = %path.display(), error, "cannot be loaded");
                tried.push(error);
            }
        }
    }
    Err(format!("{} cannot be loaded ({})", name.soname, tried.join("; ")))
}

/// The path of the library that the code at `address` belongs to, and the exported symbol that it is in.
fn place_of(address: *const c_void) -> [Option<&'static CStr>; 2] {
    // SAFETY: dladdr takes any address, and says whether it knows it. The words live as long as the
    // library, and the callers do not keep them.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr(address, &mut info) == 0 {
            return [None; 2];
        }
        [info.dli_fname, info.dli_sname].map(|words| (!words.is_null()).then(|| CStr::from_ptr(words)))
    }
}

/// The library that the code at `address` belongs to.
pub fn file_of(address: usize) -> Option<PathBuf> {
    let [file, _] = place_of(address as *const c_void);
    Path::new(file?.to_str().ok()?).canonicalize().ok()
}

/// Whether the caller is called, directly or not, by an exported C function whose name has `part` in it.
pub fn is_called_by(part: &str) -> bool {
    let mut frames = [std::ptr::null_mut(); 64];
    // SAFETY: the array has space for as many addresses.
    let count = unsafe { libc::backtrace(frames.as_mut_ptr(), 64) };
    frames.iter().take(usize::try_from(count).unwrap_or(0)).any(|&address| {
        let [_, name] = place_of(address);
        name.is_some_and(|name| name.to_str().is_ok_and(|name| name.contains(part)))
    })
}

/// A function of a C header as its bindings declare it, whose code is an enum there. A newer library has codes that are not in
/// that enum, which would be undefined behavior: at an address that was found, it returns them as integers.
pub trait Declared {
    type At: Copy;

    /// # Safety
    /// A library's function of this signature is at the address.
    unsafe fn at(self, address: *const c_void) -> Self::At;
}

/// What a function of a C header returns, and what it is read as.
pub trait Returned {
    type As;
}

impl Returned for *const c_char {
    type As = Self;
}

/// A code: an enum of C's size.
macro_rules! codes {
    ($($code:ty),*) => { $(impl Returned for $code { type As = c_int; } const _: () = assert!(size_of::<$code>() == 4);)* };
}
codes!(cudarc::driver::sys::CUresult, cudarc::nccl::sys::ncclResult_t);

macro_rules! declared {
    ($($argument:ident)*) => {
        impl<$($argument,)* R: Returned> Declared for unsafe fn($($argument),*) -> R {
            type At = unsafe extern "C" fn($($argument),*) -> R::As;

            unsafe fn at(self, address: *const c_void) -> Self::At {
                // SAFETY: promised by the caller; both are pointers.
                unsafe { std::mem::transmute_copy(&address) }
            }
        }
    };
}
declared!();
declared!(A);
declared!(A B);
declared!(A B C);
declared!(A B C D);
declared!(A B C D E);
declared!(A B C D E F);
declared!(A B C D E F G);
declared!(A B C D E F G H);

/// Declares a struct of the addresses of a library's functions, and `load`, which finds them. A library without one of them is
/// refused. `get` gives the one table of the process, which its own `start` makes when it is first needed.
macro_rules! addresses {
    ($(#[$meta:meta])* $table:ident { $($function:ident)* }) => {
        $(#[$meta])*
        #[allow(non_snake_case)]
        pub struct $table {
            pub path: String,
            $(pub $function: *const ::std::ffi::c_void,)*
        }

        // SAFETY: the functions at these addresses are never unloaded, and any thread may call
        // them.
        unsafe impl Send for $table {}
        // SAFETY: as above.
        unsafe impl Sync for $table {}

        impl $table {
            pub fn get() -> Result<&'static Self, String> {
                static TABLE: ::std::sync::OnceLock<Result<$table, String>> = ::std::sync::OnceLock::new();
                TABLE.get_or_init(Self::start).as_ref().map_err(Clone::clone)
            }

            pub fn load(name: $crate::dynlib::Name) -> Result<Self, String> {
                let found = $crate::dynlib::Found::open(name)?;
                Self::of(found.path.clone(), |function| found.address(function))
            }

            /// The table of the addresses that a function gives for names.
            pub fn of(
                path: String,
                address: impl Fn(&str) -> Result<*const ::std::ffi::c_void, String>,
            ) -> Result<Self, String> {
                Ok(Self { $($function: address(stringify!($function))?,)* path })
            }
        }

        impl ::std::fmt::Debug for $table {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.debug_tuple(stringify!($table)).field(&self.path).finish()
            }
        }
    };
}

/// Calls a function at the address that a table has, with the signature that a module of bindings declares for that name.
macro_rules! call_declared {
    ($declared:path, $library:expr, $function:ident($($argument:expr),*)) => {{
        use $declared as declared;
        let function: unsafe fn($($crate::dynlib::any!($argument)),*) -> _ = declared::$function;
        ($crate::dynlib::Declared::at(function, $library.$function))($($argument),*)
    }};
}

/// A type that the compiler finds, for an argument.
macro_rules! any {
    ($argument:expr) => {
        _
    };
}

pub(crate) use {addresses, any, call_declared};

#[cfg(test)]
mod tests {
    use cudarc::driver::sys;

    use super::*;

    extern "C" fn newer(_: sys::CUstream) -> c_int {
        12345
    }

    extern "C" fn sum(
        _: *const c_void,
        _: *mut c_void,
        count: usize,
        kind: cudarc::nccl::sys::ncclDataType_t,
        op: cudarc::nccl::sys::ncclRedOp_t,
        _: cudarc::nccl::sys::ncclComm_t,
        _: cudarc::nccl::sys::cudaStream_t,
    ) -> c_int {
        count as c_int + kind as c_int + op as c_int
    }

    #[allow(non_snake_case)]
    struct Library {
        cuStreamSynchronize: *const c_void,
        ncclAllReduce: *const c_void,
    }

    #[test]
    fn a_code_that_a_header_does_not_have_is_an_integer() {
        use cudarc::nccl::sys::{ncclDataType_t, ncclRedOp_t};
        use std::ptr::{null, null_mut};

        let library = Library { cuStreamSynchronize: newer as _, ncclAllReduce: sum as _ };
        // SAFETY: functions of these signatures.
        unsafe {
            assert_eq!(call_declared!(cudarc::driver::sys, library, cuStreamSynchronize(null_mut())), 12345);
            let (kind, op) = (ncclDataType_t::ncclBfloat16, ncclRedOp_t::ncclMin);
            let code = call_declared!(
                cudarc::nccl::sys,
                library,
                ncclAllReduce(null(), null_mut(), 100, kind, op, null_mut(), null_mut())
            );
            assert_eq!(code, 100 + 9 + 3);
        }
    }
}
