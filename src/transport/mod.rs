//! How operations are carried out. To add a transport: a module, a variant of `AnyTransport`, and a row
//! of `TRANSPORTS`.

mod loopback;
mod mpi;
mod staged;

use std::ffi::c_void;
use std::sync::OnceLock;

use enum_dispatch::enum_dispatch;

use crate::error::{Cause, Error};
use crate::ops::{Buffer, Call};

pub use self::loopback::Loopback;
pub use self::mpi::{
    Mpi, MpiInfo, Wildcards, abort, handle_value, has_cuda_support, info, prepare_comm, set_count_limit,
    wildcards,
};
pub(crate) use self::mpi::{check, handle};
pub use self::staged::{Device, HostDevice, Staged, Staging};

/// Carries out operations.
#[enum_dispatch]
pub trait Transport {
    fn name(&self) -> &'static str;

    /// Blocks until the call's buffers hold the result and may be reused.
    fn execute(&self, call: &Call) -> Result<(), Error>;

    /// Reads an operand of two int32 in the memory that this transport's calls are in.
    fn read_pair(&self, pair: *const [i32; 2], stream: *mut c_void) -> Result<[i32; 2], Cause> {
        let _ = stream;
        // SAFETY: an operand that the frame's decoder has checked, in host memory.
        Ok(unsafe { pair.read_unaligned() })
    }
}

/// Every transport that this build has.
#[enum_dispatch(Transport)]
#[derive(Debug)]
pub enum AnyTransport {
    Mpi(Mpi),
    Staged(Staged<HostDevice, Mpi>),
}

/// What `MPI4JAX_TRANSPORT` may say; the first is the default.
const TRANSPORTS: &[(&str, fn() -> AnyTransport)] =
    &[("mpi", || Mpi.into()), ("staged", || Staged::new("staged", HostDevice, Mpi).into())];

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

/// A message that has been received.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrived {
    pub source: i32,
    pub tag: i32,
    /// In elements of the type that was asked for.
    pub count: usize,
}

/// What every transport does with a message, once it is in the result's memory: says who it is from, and
/// compares its length with what was asked for.
#[inline]
pub(crate) fn arrive(call: &Call, message: &Arrived) -> Result<(), Cause> {
    if let Some(received) = call.received {
        // SAFETY: a result of two int32, checked by the frame's decoder.
        unsafe { received.write_unaligned([message.source, message.tag]) };
    }
    match &call.recv {
        Some(recv) if message.count != recv.count => short(call, recv, message),
        _ => Ok(()),
    }
}

#[cold]
fn short(call: &Call, recv: &Buffer, message: &Arrived) -> Result<(), Cause> {
    // A rank at the end of a chain receives from nobody, and whoever asks for a status can see the length.
    if call.site.status == 0 && call.envelope.source != wildcards().proc_null {
        return Err(Cause::ShortMessage {
            function: call.site.op.mpi_name(),
            received: message.count,
            source_rank: message.source,
            expected: recv.count,
        });
    }
    let size = recv.dtype.size();
    // SAFETY: no transport lets more arrive than fits, so `message.count < recv.count`. Results must not
    // show uninitialised memory.
    unsafe { recv.data.add(message.count * size).write_bytes(0, (recv.count - message.count) * size) };
    Ok(())
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
