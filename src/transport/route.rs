//! A transport that does not carry every call, and what carries the others, in the same order.

use std::sync::Arc;

use super::{Transport, Unfinished};
use crate::call::{Call, Peers, Stream};
use crate::comm::Comm;
use crate::error::{Cause, Error};
use crate::ops::Buffer;

/// A primary transport, and a fallback for what it does not take.
#[derive(Debug)]
pub struct Route<P> {
    primary: P,
    /// Why there is none, where a machine has no such device: then there are no such calls.
    fallback: Result<Box<dyn Transport>, String>,
}

impl<P: Transport> Route<P> {
    pub fn new(primary: P, fallback: Result<Box<dyn Transport>, String>) -> Self {
        Self { primary, fallback }
    }

    fn reader(&self) -> Result<&dyn Transport, Cause> {
        if self.primary.reads_operands() {
            return Ok(&self.primary);
        }
        self.fallback().map_err(|message| Cause::Setting { message })
    }

    fn takes(&self, call: &Call) -> Result<bool, Error> {
        let failed = |cause| Error { transport: Some(self.name()), ..call.site.error(cause) };
        self.primary.takes(call).map_err(failed)
    }
}

impl<P: Transport> Transport for Route<P> {
    fn name(&self) -> &'static str {
        self.primary.name()
    }

    #[inline]
    fn execute(&self, call: &Call) -> Result<(), Error> {
        if self.takes(call)? {
            return self.primary.execute(call);
        }
        let fallback = self.fallback().map_err(|message| call.site.error(Cause::Setting { message }));
        fallback?.execute(call)
    }

    fn own_stream(&self, call: &Call) -> Result<Option<Stream>, Error> {
        if self.takes(call)? { self.primary.own_stream(call) } else { Ok(None) }
    }

    fn read_peers(&self, peers: &Buffer, stream: Stream) -> Result<Option<Peers>, Cause> {
        if self.primary.knows_peers() {
            return Ok(None);
        }
        self.reader()?.read_peers(peers, stream)
    }

    fn read_numbers(&self, numbers: &Buffer, into: &mut [i32], stream: Stream) -> Result<(), Cause> {
        self.reader()?.read_numbers(numbers, into, stream)
    }

    fn fallback(&self) -> Result<&dyn Transport, String> {
        self.fallback.as_deref().map_err(String::clone)
    }

    fn attach(&self, comm: &Arc<Comm>) -> Result<(), Error> {
        self.primary.attach(comm)
    }

    fn has_exact_lengths(&self) -> bool {
        self.primary.has_exact_lengths()
    }

    fn unfinished(&self) -> Vec<Unfinished> {
        self.primary.unfinished()
    }

    fn stop(&self) {
        self.primary.stop();
    }
}
