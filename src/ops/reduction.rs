//! Reductions: MPI's own, and those that a user registered.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Mutex;

use super::Dtype;
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
    /// The handle of an `MPI_Op`.
    User(usize),
}

impl Reduction {
    /// From an attribute: MPI's name, or the key of a registered reduction.
    pub fn from_name(name: &str) -> Option<Self> {
        match Builtin::ALL.iter().find(|builtin| builtin.name() == name) {
            Some(&builtin) => Some(Self::Builtin(builtin)),
            None => users().get(name).map(|&handle| Self::User(handle)),
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

static USERS: Mutex<BTreeMap<Box<str>, usize>> = Mutex::new(BTreeMap::new());

fn users() -> std::sync::MutexGuard<'static, BTreeMap<Box<str>, usize>> {
    lock(&USERS)
}

/// Makes `key` name the `MPI_Op` with this handle.
///
/// # Safety
/// It is that of an `MPI_Op` which is never freed.
pub unsafe fn register_user(key: &str, handle: usize) {
    users().insert(key.into(), handle);
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
        unsafe { register_user("user#reduction-test", 7) };
        assert_eq!(Reduction::from_name("user#reduction-test"), Some(Reduction::User(7)));
    }

    #[test]
    fn nonsense_is_refused() {
        assert!(!Builtin::Max.allows(Dtype::Complex64));
        assert!(!Builtin::Sum.allows(Dtype::Bool));
        assert!(!Builtin::Band.allows(Dtype::Float32));
        assert!(Builtin::Prod.allows(Dtype::Bfloat16));
    }
}
