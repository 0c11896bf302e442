//! What a transport does not carry goes through the host, in order.

use std::sync::Arc;

use super::{AnyTransport, Transport, Unfinished};
use crate::call::{Call, Peers, Stream};
use crate::comm::Comm;
use crate::error::{Cause, Error};

/// A transport that does not carry every call.
pub trait Partial: Transport {
    /// Whether it carries a call.
    fn takes(&self, call: &Call) -> Result<bool, Cause>;

    /// How an operand with the peers of a message is read.
    fn pairs(&self) -> Pairs;
}

/// How an operand with the peers of a message is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairs {
    /// It is in the memory of the host.
    Here,
    /// As the host reads a device's memory.
    ByHost,
    /// Not at all: it says nothing new.
    Known,
}

/// A transport, and what carries the calls that it does not take.
#[derive(Debug)]
pub struct OrHost<T> {
    transport: T,
    /// Why there is none, where a machine has no such device: then there are no such calls.
    host: Result<Box<AnyTransport>, String>,
}

impl<T> OrHost<T> {
    pub fn new(transport: T, host: Result<AnyTransport, String>) -> Self {
        Self { transport, host: host.map(Box::new) }
    }

    fn host_of(&self, call: &Call) -> Result<&AnyTransport, Error> {
        let host = self.host.as_ref().map(|host| &**host);
        host.map_err(|reason| call.site.error(Cause::Setting { message: reason.clone() }))
    }
}

impl<T: Partial> Transport for OrHost<T> {
    fn name(&self) -> &'static str {
        self.transport.name()
    }

    #[inline]
    fn execute(&self, call: &Call) -> Result<(), Error> {
        match self.transport.takes(call) {
            Ok(true) => self.transport.execute(call),
            Ok(false) => self.host_of(call)?.execute(call),
            Err(cause) => Err(Error { transport: Some(self.name()), ..call.site.error(cause) }),
        }
    }

    fn own_stream(&self, call: &Call) -> Result<Option<Stream>, Error> {
        match self.transport.takes(call) {
            Ok(true) => self.transport.own_stream(call),
            Ok(false) => Ok(None),
            Err(cause) => Err(Error { transport: Some(self.name()), ..call.site.error(cause) }),
        }
    }

    unsafe fn read_peers(&self, peers: *const Peers, stream: Stream) -> Result<Option<Peers>, Cause> {
        // SAFETY: promised by the caller.
        unsafe {
            match (self.transport.pairs(), &self.host) {
                (Pairs::Here, _) => self.transport.read_peers(peers, stream),
                (Pairs::ByHost, Ok(host)) => host.read_peers(peers, stream),
                (Pairs::ByHost, Err(reason)) => Err(Cause::Setting { message: reason.clone() }),
                (Pairs::Known, _) => Ok(None),
            }
        }
    }

    unsafe fn read_numbers(
        &self,
        numbers: *const i32,
        into: &mut [i32],
        stream: Stream,
    ) -> Result<(), Cause> {
        // SAFETY: promised by the caller.
        unsafe {
            match (self.transport.pairs(), &self.host) {
                (Pairs::Here, _) => self.transport.read_numbers(numbers, into, stream),
                (_, Ok(host)) => host.read_numbers(numbers, into, stream),
                (_, Err(reason)) => Err(Cause::Setting { message: reason.clone() }),
            }
        }
    }

    fn host(&self) -> Result<&AnyTransport, String> {
        self.host.as_ref().map(|host| &**host).map_err(String::clone)
    }

    fn attach(&self, comm: &Arc<Comm>) -> Result<(), Error> {
        self.transport.attach(comm)
    }

    fn attaches_late(&self) -> bool {
        self.transport.attaches_late()
    }

    fn has_exact_lengths(&self) -> bool {
        self.transport.has_exact_lengths()
    }

    fn unfinished(&self) -> Vec<Unfinished> {
        self.transport.unfinished()
    }

    fn stop(&self) {
        self.transport.stop();
    }
}
