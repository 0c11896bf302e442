//! How operations are carried out. To add a transport: a module, a variant of `AnyTransport`, and a row
//! of `TRANSPORTS`.

mod mpi;

use std::sync::OnceLock;

use enum_dispatch::enum_dispatch;

use crate::error::{Cause, Error};
use crate::ops::Call;

pub use self::mpi::{Mpi, MpiInfo, abort, has_cuda_support, info, prepare_comm, set_count_limit};
pub(crate) use self::mpi::{check, handle};

/// Carries out operations.
#[enum_dispatch]
pub trait Transport {
    fn name(&self) -> &'static str;

    /// Blocks until the call's buffers hold the result and may be reused.
    fn execute(&self, call: &Call) -> Result<(), Error>;
}

/// Every transport that this build has.
#[enum_dispatch(Transport)]
#[derive(Debug)]
pub enum AnyTransport {
    Mpi(Mpi),
}

/// What `MPI4JAX_TRANSPORT` may say; the first is the default.
const TRANSPORTS: &[(&str, fn() -> AnyTransport)] = &[("mpi", || Mpi.into())];

/// The transport that the environment selects, the same one for the life of the process.
pub fn selected() -> Result<&'static AnyTransport, Error> {
    static SELECTED: OnceLock<AnyTransport> = OnceLock::new();
    if let Some(transport) = SELECTED.get() {
        return Ok(transport);
    }
    let transport = match std::env::var("MPI4JAX_TRANSPORT") {
        Err(_) => TRANSPORTS[0].1(),
        Ok(name) => by_name(&name)?,
    };
    Ok(SELECTED.get_or_init(|| transport))
}

fn by_name(name: &str) -> Result<AnyTransport, Error> {
    match TRANSPORTS.iter().find(|(known, _)| *known == name) {
        Some((_, make)) => Ok(make()),
        None => {
            let valid = TRANSPORTS.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
            Err(Cause::UnknownTransport { name: name.into(), valid }.into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_named_as_their_transports() {
        for (name, make) in TRANSPORTS {
            assert_eq!(make().name(), *name);
        }
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_valid_ones() {
        let message = by_name("pigeon").unwrap_err().to_string();
        assert!(message.contains("pigeon") && message.contains("mpi"), "{message}");
    }
}
