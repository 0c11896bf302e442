//! Reductions: MPI's own, and those that a user registered.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Mutex;

use mpi::ffi::MPI_Op;

use super::Dtype;
use crate::mpilib::{self, handle_value};
use crate::sync::lock;

macro_rules! reductions {
    ($($reduction:ident $name:literal $allowed:ident;)*) => {
        /// One of MPI's predefined reductions.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Builtin { $($reduction),* }

        impl Builtin {
            pub const ALL: &[Builtin] = &[$(Builtin::$reduction),*];

            /// MPI's name without the prefix.
            pub fn name(self) -> &'static str {
                match self { $(Builtin::$reduction => $name),* }
            }

            /// Whether it makes sense for values of this type.
            pub fn allows(self, dtype: Dtype) -> bool {
                match self { $(Builtin::$reduction => dtype.$allowed()),* }
            }
        }
    };
}

reductions! {
    Sum    "SUM"    has_arithmetic;
    Prod   "PROD"   has_arithmetic;
    Max    "MAX"    is_ordered;
    Min    "MIN"    is_ordered;
    Land   "LAND"   has_bits;
    Lor    "LOR"    has_bits;
    Lxor   "LXOR"   has_bits;
    Band   "BAND"   has_bits;
    Bor    "BOR"    has_bits;
    Bxor   "BXOR"   has_bits;
    Minloc "MINLOC" is_ordered;
    Maxloc "MAXLOC" is_ordered;
}

/// What an operation reduces with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    Builtin(Builtin),
    User(User),
}

/// A reduction of the user's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct User {
    /// The handle of an `MPI_Op`.
    pub handle: usize,
    /// Where mpi4py keeps the handle, until the `MPI_Op` is freed; 0: it is never freed.
    address: usize,
}

impl User {
    /// Whether the user has freed it.
    #[inline]
    pub fn is_freed(&self) -> bool {
        // SAFETY: registered as the address of a handle, in memory that stays.
        self.address != 0
            && handle_value(unsafe { (self.address as *const MPI_Op).read_volatile() }) != self.handle
    }
}

impl Reduction {
    /// From an attribute: MPI's name, or the key of a registered reduction.
    pub fn from_name(name: &str) -> Option<Self> {
        match Builtin::ALL.iter().find(|builtin| builtin.name() == name) {
            Some(&builtin) => Some(Self::Builtin(builtin)),
            None => users().get(name).map(|&user| Self::User(user)),
        }
    }
}

impl fmt::Display for Reduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Builtin(builtin) => f.write_str(builtin.name()),
            Self::User(_) => f.write_str("user-defined reduction"),
        }
    }
}

static USERS: Mutex<BTreeMap<Box<str>, User>> = Mutex::new(BTreeMap::new());

fn users() -> std::sync::MutexGuard<'static, BTreeMap<Box<str>, User>> {
    lock(&USERS)
}

/// Makes `key` name the `MPI_Op` with this handle.
///
/// # Safety
/// At the address is the handle, and another one once the `MPI_Op` has been freed. The memory stays. Address 0: the `MPI_Op` is never
/// freed.
pub unsafe fn register_user(key: &str, handle: usize, address: usize) {
    // mpi4py extends the sign of handles that are integers of 32 bits, as MPICH's are.
    // SAFETY: the handle is one of an `MPI_Op`.
    let handle = handle_value(unsafe { mpilib::handle::<MPI_Op>(handle) });
    users().insert(key.into(), User { handle, address });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_resolve() {
        for &builtin in Builtin::ALL {
            assert_eq!(Reduction::from_name(builtin.name()), Some(Reduction::Builtin(builtin)));
        }
        assert_eq!(Reduction::from_name("user#reduction-test"), None);
        // SAFETY: nothing is reduced.
        unsafe { register_user("user#reduction-test", 7, 0) };
        let Some(Reduction::User(user)) = Reduction::from_name("user#reduction-test") else { panic!() };
        assert_eq!((user.handle, user.is_freed()), (7, false));
    }

    #[test]
    fn a_freed_reduction_is_known_by_its_handle() {
        // SAFETY: all-zero is a handle, which is not used.
        let memory: MPI_Op = unsafe { std::mem::zeroed() };
        let user = User { handle: handle_value(memory), address: &raw const memory as usize };
        assert!(!user.is_freed());
        assert!(User { handle: user.handle + 1, ..user }.is_freed());
    }

    #[test]
    fn nonsense_is_refused() {
        assert!(!Builtin::Max.allows(Dtype::Complex64));
        assert!(!Builtin::Sum.allows(Dtype::Bool));
        assert!(!Builtin::Band.allows(Dtype::Float32));
        assert!(Builtin::Prod.allows(Dtype::Bfloat16));
    }
}
