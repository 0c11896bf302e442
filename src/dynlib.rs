//! Libraries that are loaded when they are first needed, and tables of their functions.
//!
//! A process must not hold two copies of libcuda's or NCCL's state, so a library that somebody (JAX, the
//! MPI library) has already loaded is preferred. Nothing is ever unloaded: compiled programs keep pointers.

use std::ffi::{CStr, OsString, c_int, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

#[cfg(target_os = "linux")]
const RTLD_NOLOAD: c_int = libc::RTLD_NOLOAD;
#[cfg(not(target_os = "linux"))]
const RTLD_NOLOAD: c_int = 0x10;

/// Why a library cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    #[error("{library} cannot be loaded ({tried})")]
    Absent { library: &'static str, tried: String },
    #[error("{path} has no function {symbol}: at least version {needed} is needed")]
    MissingSymbol { path: String, symbol: &'static str, needed: &'static str },
    #[error("{path} is version {found}, expected at least {needed}")]
    TooOld { path: String, found: String, needed: &'static str },
    #[error("{path}: {reason}")]
    Unusable { path: String, reason: String },
}

/// A library by name.
#[derive(Clone, Copy, Debug)]
pub struct Name {
    pub soname: &'static str,
    /// Names a file to load, and nothing else is tried.
    pub variable: &'static str,
    /// For error messages.
    pub needed: &'static str,
}

/// Where Python packages keep libraries, as Python told us.
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

/// A loaded library.
pub struct Loaded {
    library: Library,
    pub path: String,
}

impl Loaded {
    /// The library that the environment names, else the one that is in the process already, else the
    /// first that is found.
    pub fn open(name: Name) -> Result<Self, LoadError> {
        if let Some(path) = std::env::var_os(name.variable).filter(|path| !path.is_empty()) {
            return Self::open_first(name, &[path]);
        }
        // SAFETY: nothing is loaded, so nothing runs.
        if let Ok(library) = unsafe { Library::open(Some(name.soname), RTLD_NOW | RTLD_NOLOAD) } {
            return Ok(Self { library, path: name.soname.into() });
        }
        let known = DIRECTORIES.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let files = known.iter().map(|directory| directory.join(name.soname)).filter(|file| file.exists());
        let mut paths: Vec<OsString> = files.map(PathBuf::into_os_string).collect();
        paths.push(name.soname.into());
        Self::open_first(name, &paths)
    }

    fn open_first(name: Name, paths: &[OsString]) -> Result<Self, LoadError> {
        let mut tried = Vec::new();
        for path in paths {
            // SAFETY: the constructors of these libraries are meant to be run by any program.
            match unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) } {
                Ok(library) => return Ok(Self { library, path: path.to_string_lossy().into() }),
                Err(error) => tried.push(reason(&error)),
            }
        }
        Err(LoadError::Absent { library: name.soname, tried: tried.join("; ") })
    }

    /// The address of a function, or null.
    pub fn symbol(&self, symbol: &CStr) -> *const c_void {
        // SAFETY: only the address is taken.
        match unsafe { self.library.get::<*const c_void>(symbol.to_bytes_with_nul()) } {
            Ok(address) => address.into_raw().cast_const().cast(),
            Err(_) => std::ptr::null(),
        }
    }

    /// Keeps it for the rest of the process.
    pub fn keep(self) -> String {
        std::mem::forget(self.library);
        self.path
    }
}

impl fmt::Debug for Loaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Loaded").field(&self.path).finish()
    }
}

/// The loader's own words.
fn reason(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
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

/// Declares a struct of function pointers and `load`, which fills it. A library without one of the first
/// list is refused; those of the second are `None` where they are missing. A library may have a function under
/// another name: CUDA's headers rename some to a newer version of them.
macro_rules! function_table {
    ($(#[$meta:meta])* $table:ident {
        $($function:ident $(= $renamed:literal)? ($($argument:ty),*) $(-> $result:ty)?;)*
    } optional {
        $($option:ident = $symbol:literal ($($optional:ty),*) $(-> $returned:ty)?;)*
    }) => {
        $(#[$meta])*
        #[allow(non_snake_case)]
        pub struct $table {
            pub path: String,
            $(pub $function: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            $(pub $option: Option<unsafe extern "C" fn($($optional),*) $(-> $returned)?>,)*
        }

        impl $table {
            pub fn load(name: $crate::dynlib::Name) -> Result<Self, $crate::dynlib::LoadError> {
                let library = $crate::dynlib::Loaded::open(name)?;
                $(
                    #[allow(non_snake_case)]
                    let $function = {
                        const SYMBOL: &str = concat!($crate::dynlib::symbol_of!($function $($renamed)?), "\0");
                        // The name without its nul.
                        let symbol = SYMBOL.split_at(SYMBOL.len() - 1).0;
                        let address = ::std::ffi::CStr::from_bytes_with_nul(SYMBOL.as_bytes())
                            .map_or(::std::ptr::null(), |name| library.symbol(name));
                        if address.is_null() {
                            return Err($crate::dynlib::LoadError::MissingSymbol {
                                path: library.path.clone(),
                                symbol,
                                needed: name.needed,
                            });
                        }
                        // SAFETY: the library's function of that name has this signature.
                        unsafe {
                            ::std::mem::transmute::<
                                *const ::std::ffi::c_void,
                                unsafe extern "C" fn($($argument),*) $(-> $result)?,
                            >(address)
                        }
                    };
                )*
                $(
                    let address = library.symbol($symbol);
                    // SAFETY: as above; null is None.
                    let $option = unsafe {
                        ::std::mem::transmute::<
                            *const ::std::ffi::c_void,
                            Option<unsafe extern "C" fn($($optional),*) $(-> $returned)?>,
                        >(address)
                    };
                )*
                Ok(Self { path: library.keep(), $($function,)* $($option,)* })
            }
        }

        impl ::std::fmt::Debug for $table {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.debug_tuple(stringify!($table)).field(&self.path).finish()
            }
        }
    };
}

/// The symbol of a function: its name, or another one that follows it.
macro_rules! symbol_of {
    ($name:ident $symbol:literal) => {
        $symbol
    };
    ($name:ident) => {
        stringify!($name)
    };
}

pub(crate) use {function_table, symbol_of};
