//! A non-blocking operation, between its start and the wait for it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::mpi::Posted;
use super::progress::Pause;
use super::request_memory::RequestMemory;
use crate::call::{Call, Envelope, Site, Stream};
use crate::device::cuda::Event;
use crate::error::{Cause, Error};
use crate::ops::{Buffer, Dtype};
use crate::record::log;
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
    pub site: Arc<Site>,
    envelope: Envelope,
    /// Whether anything is communicated.
    pub communicates: bool,
    /// What was recorded when it was started; not of what communicates nothing.
    pub record: Option<Record>,
    /// What the wait gives: what was received, and the operand.
    results: [Option<(Dtype, usize)>; 2],
    /// Not locked during a wait.
    state: Mutex<State>,
}

impl Request {
    pub fn new(site: &Arc<Site>, envelope: Envelope, record: Option<Record>, state: State) -> Self {
        let memory = state.memory();
        let results = memory.map(RequestMemory::results).unwrap_or_default().map(|it| it.as_ref().map(form));
        let communicates = !matches!(state, State::Ended(_));
        Self { site: site.clone(), envelope, communicates, record, results, state: Mutex::new(state) }
    }

    /// Whether a wait has results of these types and sizes.
    pub fn gives(&self, results: &[Option<Buffer>; 2]) -> bool {
        self.results == results.each_ref().map(|it| it.as_ref().map(form))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets MPI go on with it; whether it has ended.
    pub fn test(&self) -> bool {
        let mut state = self.state();
        let ended = match &mut *state {
            State::Posted(posted, _) => posted.test(),
            State::OnStream(end, _) => return end.is_reached(),
            State::Ended(_) | State::Failed(_) | State::Taken => return true,
        };
        match ended {
            Ok(false) => return false,
            Ok(true) => {
                if let State::Posted(posted, memory) = std::mem::replace(&mut *state, State::Taken) {
                    *state = self.end(posted, memory).map_or_else(State::Failed, State::Ended);
                }
            }
            Err(cause) => *state = State::Failed(cause),
        }
        true
    }

    /// Waits for MPI.
    fn end(&self, mut posted: Posted, memory: RequestMemory) -> Result<RequestMemory, Cause> {
        let mut call = Call { envelope: self.envelope, ..Call::of(&self.site, Stream::NONE) };
        memory.lend(&mut call);
        posted.wait(&call)?;
        Ok(memory)
    }

    /// Waits for its end, or lets a stream wait for it; then `use_memory` is lent its memory.
    pub fn wait(
        &self,
        stream: Stream,
        use_memory: impl FnOnce(&RequestMemory) -> Result<(), Cause>,
    ) -> Result<(), Error> {
        let state = std::mem::replace(&mut *self.state(), State::Taken);
        let ended = match state {
            State::Posted(posted, memory) => {
                let _waiting = Pause::new();
                self.end(posted, memory)
            }
            State::OnStream(end, memory) => end.hold(stream).map(|()| memory),
            State::Ended(memory) => Ok(memory),
            State::Failed(cause) => Err(cause),
            State::Taken => Err(Cause::Request { message: "the request is being waited for".into() }),
        };
        let memory = ended.map_err(|cause| Error { transport: Some("mpi"), ..self.site.error(cause) })?;
        use_memory(&memory).and_then(|()| memory.give_back(stream)).map_err(|cause| self.site.error(cause))
    }

    /// Runs a wait for it between two log lines, where they are wanted.
    pub fn logged(&self, wait: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        if !log::is_enabled() {
            return wait();
        }
        let mut call = Call { envelope: self.envelope, ..Call::of(&self.site, Stream::NONE) };
        if let Some(memory) = self.state().memory() {
            memory.lend(&mut call);
        }
        log::logged("MPI_Wait", &call, |_| wait())
    }

    pub fn words(&self) -> String {
        self.record.as_ref().map_or_else(|| self.site.name().to_owned(), Record::to_string)
    }
}

impl State {
    fn memory(&self) -> Option<&RequestMemory> {
        match self {
            Self::Posted(_, memory) | Self::OnStream(_, memory) | Self::Ended(memory) => Some(memory),
            Self::Failed(_) | Self::Taken => None,
        }
    }
}

fn form(buffer: &Buffer) -> (Dtype, usize) {
    (buffer.dtype(), buffer.count())
}
