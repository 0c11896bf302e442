//! A non-blocking operation, between its start and the wait for it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::mpi::Posted;
use super::progress::Pause;
use super::request_memory::{RequestLayout, RequestMemory};
use crate::call::{Call, Envelope, Phase, Site, Stream};
use crate::comm::Comm;
use crate::device::cuda::Event;
use crate::error::{Cause, Error};
use crate::record::recorder::Record;

/// How far an operation has come.
pub enum State {
    /// MPI carries it out.
    Posted(Posted, RequestMemory),
    /// A stream does, which comes to its end at this event.
    OnStream(Event, RequestMemory),
    /// It has ended, or nothing is communicated.
    Ended(RequestMemory),
    /// The wait for it raises this.
    Failed(Cause),
    /// It is being waited for, or has been.
    Taken,
}

/// A non-blocking operation.
pub struct Request {
    site: Site,
    envelope: Envelope,
    pub layout: RequestLayout,
    /// What was recorded when it was started; not of what communicates nothing.
    pub record: Option<Record>,
    /// Not locked during a wait.
    state: Mutex<State>,
}

impl Request {
    pub fn new(call: &Call, layout: RequestLayout, record: Option<Record>, state: State) -> Self {
        let state = Mutex::new(state);
        Self { site: call.site.clone(), envelope: call.envelope, layout, record, state }
    }

    pub fn comm(&self) -> &Arc<Comm> {
        &self.site.comm
    }

    pub fn is_collective(&self) -> bool {
        self.site.op.row().is_collective()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets MPI go on with it; whether it has ended.
    pub fn test(&self) -> bool {
        self.state().test()
    }

    /// Waits for the end, or lets a stream wait for it.
    fn end(&self, state: State, stream: Stream) -> Result<RequestMemory, Cause> {
        match state {
            State::Posted(mut posted, memory) => {
                let _waiting = Pause::new();
                let mut call = Call { envelope: self.envelope, ..Call::of(&self.site, Stream::NONE) };
                memory.lend(&mut call, &self.layout);
                posted.wait(&call)?;
                Ok(memory)
            }
            State::OnStream(end, memory) => end.hold(stream).map(|()| memory),
            State::Ended(memory) => Ok(memory),
            State::Failed(cause) => Err(cause),
            State::Taken => Err(Cause::Request { message: "the request is being waited for".into() }),
        }
    }

    /// Waits for its end, or lets a stream wait for it; then `use_memory` is lent its memory.
    pub fn wait(
        &self,
        stream: Stream,
        use_memory: impl FnOnce(&RequestMemory) -> Result<(), Cause>,
    ) -> Result<(), Error> {
        let state = std::mem::replace(&mut *self.state(), State::Taken);
        let failed = |cause| Error { transport: Some("mpi"), ..self.site.error(cause) };
        let memory = self.end(state, stream).map_err(failed)?;
        use_memory(&memory).and_then(|()| memory.give_back(stream)).map_err(|cause| self.site.error(cause))
    }

    /// Ends what has ended in MPI, before the communicator is freed: a later wait gets the result. Not what is still under
    /// way.
    pub fn settle(&self) {
        let mut state = self.state();
        if state.test() && matches!(*state, State::Posted(..)) {
            let posted = std::mem::replace(&mut *state, State::Taken);
            *state = self.end(posted, Stream::NONE).map_or_else(State::Failed, State::Ended);
        }
    }

    /// The call of a wait, for a log line.
    pub fn with_call<T>(&self, use_call: impl FnOnce(&Call) -> T) -> T {
        let site = Site { phase: Phase::Wait, ..self.site.clone() };
        let mut call = Call { envelope: self.envelope, ..Call::of(&site, Stream::NONE) };
        if let State::Posted(_, memory) | State::OnStream(_, memory) | State::Ended(memory) = &*self.state() {
            memory.lend(&mut call, &self.layout);
        }
        use_call(&call)
    }

    pub fn words(&self) -> String {
        self.record.as_ref().map_or_else(|| self.site.name().to_owned(), Record::to_string)
    }
}

impl State {
    /// Lets MPI go on with it; whether it has ended.
    fn test(&mut self) -> bool {
        match self {
            Self::Posted(posted, _) => posted.test().unwrap_or_else(|cause| {
                *self = Self::Failed(cause);
                true
            }),
            Self::OnStream(end, _) => end.is_reached(),
            Self::Ended(_) | Self::Failed(_) | Self::Taken => true,
        }
    }
}
