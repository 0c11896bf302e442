//! MPI on arrays of the host, with a count and an event of each call.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Base, Descriptor, HostMpi, TARGET, Transport, UnderWay, Unfinished};
use crate::call::{Call, Envelope, Stream};
use crate::comm::Comm;
use crate::device::Platform;
use crate::error::{Cause, Error};
use crate::ops::Buffer;

pub const DESCRIPTOR: Descriptor = Descriptor {
    name: "traced",
    takes: |platform| platform == Platform::Cpu,
    start: |_| Ok(Traced::default().into()),
    ..Descriptor::DEFAULT
};

/// Counts the calls of another transport, and tells the log of each.
#[derive(Debug, Default)]
pub struct Traced {
    inner: HostMpi,
    calls: AtomicU64,
}

impl Traced {
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }
}

impl Transport for Traced {
    fn base(&self) -> &Base {
        self.inner.base()
    }

    fn name(&self) -> &'static str {
        DESCRIPTOR.name
    }

    fn execute(&self, call: &Call) -> Result<(), Error> {
        let number = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        let result = self.inner.execute(call);
        tracing::debug!(target: TARGET, op = call.site.name(), number, failed = result.is_err(), "call");
        result
    }

    fn own_stream(&self, call: &Call) -> Result<Option<Stream>, Error> {
        self.inner.own_stream(call)
    }

    unsafe fn start(&self, call: &Call, own: Option<Stream>) -> Result<UnderWay, Error> {
        let number = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        // SAFETY: promised by the caller.
        let result = unsafe { self.inner.start(call, own) };
        tracing::debug!(target: TARGET, op = call.site.name(), number, failed = result.is_err(), "start");
        result
    }

    fn read_envelope(&self, from: &Buffer, stream: Stream) -> Result<Option<Envelope>, Cause> {
        self.inner.read_envelope(from, stream)
    }

    fn read_numbers(&self, numbers: &Buffer, into: &mut [i32], stream: Stream) -> Result<(), Cause> {
        self.inner.read_numbers(numbers, into, stream)
    }

    fn join(&self, comm: &Arc<Comm>) -> Result<(), Error> {
        self.inner.join(comm)
    }

    fn unfinished(&self) -> Vec<Unfinished> {
        self.inner.unfinished()
    }

    fn stop(&self) {
        tracing::info!(target: TARGET, calls = self.calls(), "stopped");
        self.inner.stop();
    }
}
