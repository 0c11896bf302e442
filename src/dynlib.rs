//! Libraries that are loaded when they are first needed, and tables of their functions.
//!
//! A process must not hold two copies of libcuda's or NCCL's state, so a library that JAX or the MPI library has already loaded
//! is preferred. Nothing is ever unloaded: compiled programs keep pointers.

use std::ffi::{CStr, OsString, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

#[cfg(target_os = "linux")]
const RTLD_NOLOAD: c_int = libc::RTLD_NOLOAD;
#[cfg(not(target_os = "linux"))]
const RTLD_NOLOAD: c_int = 0x10;

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
    let mut known = DIRECTORIES.lock().unwrap_or_else(PoisonError::into_inner);
    for directory in directories {
        if !known.contains(&directory) {
            known.push(directory);
        }
    }
}

/// The library that the environment names, else the one that is in the process already, else the first that is found; and its
/// path.
pub fn open(name: Name) -> Result<(Library, String), String> {
    if let Some(path) = std::env::var_os(name.variable).filter(|path| !path.is_empty()) {
        return open_first(name, &[path]);
    }
    // SAFETY: nothing is loaded, so nothing runs.
    if let Ok(library) = unsafe { Library::open(Some(name.soname), RTLD_NOW | RTLD_NOLOAD) } {
        return Ok((library, name.soname.into()));
    }
    let known = DIRECTORIES.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let files = known.iter().map(|directory| directory.join(name.soname)).filter(|file| file.exists());
    let mut paths: Vec<OsString> = files.map(PathBuf::into_os_string).collect();
    paths.push(name.soname.into());
    open_first(name, &paths)
}

fn open_first(name: Name, paths: &[OsString]) -> Result<(Library, String), String> {
    let mut tried = Vec::new();
    for path in paths {
        // SAFETY: the constructors of these libraries are meant to be run by any program.
        match unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) } {
            Ok(library) => return Ok((library, path.to_string_lossy().into())),
            // The loader's own words.
            Err(error) => {
                tried.push(std::error::Error::source(&error).map_or(error.to_string(), ToString::to_string));
            }
        }
    }
    Err(format!("{} cannot be loaded ({})", name.soname, tried.join("; ")))
}

/// The library that the code at `address` belongs to.
pub fn file_of(address: usize) -> Option<PathBuf> {
    // SAFETY: dladdr takes any address, and says whether it knows it.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr(address as *const c_void, &mut info) == 0 || info.dli_fname.is_null() {
            return None;
        }
        let file = CStr::from_ptr(info.dli_fname).to_str().ok()?;
        Path::new(file).canonicalize().ok()
    }
}

/// Declares a struct of function pointers, and `load`, which fills it. A library without one of them is refused. `get` gives the
/// one table of the process, which its own `start` makes when it is first needed.
macro_rules! function_table {
    ($(#[$meta:meta])* $table:ident {
        $($function:ident($($argument:ty),*) $(-> $result:ty)?;)*
    }) => {
        $(#[$meta])*
        #[allow(non_snake_case)]
        pub struct $table {
            pub path: String,
            $(pub $function: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl $table {
            pub fn get() -> Result<&'static Self, String> {
                static TABLE: ::std::sync::OnceLock<Result<$table, String>> = ::std::sync::OnceLock::new();
                TABLE.get_or_init(Self::start).as_ref().map_err(Clone::clone)
            }

            pub fn load(name: $crate::dynlib::Name) -> Result<Self, String> {
                let (library, path) = $crate::dynlib::open(name)?;
                let missing = |function: &str| {
                    format!("{path} has no function {function}: at least version {} is needed", name.needed)
                };
                let functions = Self {
                    // SAFETY: the library's function of that name has this signature.
                    $($function: unsafe {
                        let symbol = library.get(stringify!($function).as_bytes());
                        *symbol.map_err(|_| missing(stringify!($function)))?
                    },)*
                    path: path.clone(),
                };
                std::mem::forget(library);
                Ok(functions)
            }
        }

        impl ::std::fmt::Debug for $table {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.debug_tuple(stringify!($table)).field(&self.path).finish()
            }
        }
    };
}

/// Calls a function of a table, whose `check` makes an error of its code and its name.
macro_rules! checked {
    ($library:expr, $function:ident($($argument:expr),* $(,)?)) => {
        $library.check(stringify!($function), ($library.$function)($($argument),*))
    };
}

pub(crate) use {checked, function_table};
