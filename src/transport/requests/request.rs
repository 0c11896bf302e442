//! A nonblocking operation, between its start and the wait for it.

use std::sync::{Arc, Mutex, MutexGuard};

use super::super::mpi::Posted;
use super::memory::RequestMemory;
use super::progress::Pause;
use crate::board::own;
use crate::call::{Call, Envelope, Site, Stream};
use crate::comm::Comparison;
use crate::device::cuda::Event;
use crate::error::{Cause, Error};
use crate::ops::{Buffer, Dtype};
use crate::record::recorder::{self, Plain};
use crate::record::{events, log};
use crate::sync::lock;

/// A pending nonblocking operation, by what carries it.
pub enum UnderWay {
    /// Requests of MPI.
    Posted(Posted),
    /// Work on a stream, which has ended when this event is reached.
    OnStream(Event),
}

/// How far an operation has come.
pub enum RequestState {
    UnderWay(UnderWay, RequestMemory),
    /// The operation has ended, or communicates nothing.
    Ended(RequestMemory),
    /// The operation has failed: the wait for it raises this.
    Failed(Cause),
    /// A thread waits for the operation, or has waited.
    Taken,
}

/// A nonblocking operation.
pub struct Request {
    pub site: Arc<Site>,
    envelope: Envelope,
    /// Whether anything is communicated.
    pub communicates: bool,
    /// What was recorded when it was started; not of what communicates nothing.
    pub record: Option<Plain>,
    /// Types and sizes of the results of the wait: what was received, and the operand.
    results: [Option<(Dtype, usize)>; 2],
    /// The result of the check that all ranks initiated the same operation (`MPI4JAX_CHECK=1`). The
    /// lock is not held while waiting.
    comparison: Mutex<Option<Comparison>>,
    /// The lock is not held while waiting.
    state: Mutex<RequestState>,
}

impl Request {
    pub fn new(site: &Arc<Site>, envelope: Envelope, record: Option<Plain>, state: RequestState) -> Self {
        let memory = state.memory();
        let results = memory.map(RequestMemory::results).unwrap_or_default().map(|it| it.as_ref().map(form));
        let communicates = !matches!(state, RequestState::Ended(_));
        Self {
            site: site.clone(),
            envelope,
            communicates,
            record,
            results,
            comparison: Mutex::new(None),
            state: Mutex::new(state),
        }
    }

    /// The same, whose wait judges a comparison.
    pub fn compared(self, comparison: Option<Comparison>) -> Self {
        Self { comparison: Mutex::new(comparison), ..self }
    }

    /// Waits for what the other ranks say of the start: if they have started something else, what is known of it, by rank.
    pub fn difference(&self) -> Result<Option<Vec<(i32, String)>>, Error> {
        let comparison = self.comparison().take();
        comparison.map_or(Ok(None), |comparison| {
            let _waiting = Pause::new();
            comparison.wait(&self.site.comm).map_err(|cause| self.site.error(cause))
        })
    }

    fn comparison(&self) -> MutexGuard<'_, Option<Comparison>> {
        lock(&self.comparison)
    }

    /// Whether a wait has results of these types and sizes.
    pub fn gives(&self, results: &[Option<Buffer>; 2]) -> bool {
        self.results == results.each_ref().map(|it| it.as_ref().map(form))
    }

    fn state(&self) -> MutexGuard<'_, RequestState> {
        lock(&self.state)
    }

    /// Whether MPI carries it out, and it is not known to have ended.
    pub fn is_posted(&self) -> bool {
        matches!(*self.state(), RequestState::UnderWay(UnderWay::Posted(_), _))
    }

    /// Calls MPI for it, and returns whether it has ended.
    pub fn test(&self) -> bool {
        // An error comes again in the wait.
        if self.comparison().as_ref().is_some_and(|comparison| matches!(comparison.test(), Ok(false))) {
            return false;
        }
        let mut state = self.state();
        let ended = match &mut *state {
            RequestState::UnderWay(UnderWay::Posted(posted), _) => posted.test(),
            RequestState::UnderWay(UnderWay::OnStream(end), _) => return end.is_reached(),
            RequestState::Ended(_) | RequestState::Failed(_) | RequestState::Taken => return true,
        };
        match ended {
            Ok(false) => return false,
            Ok(true) => {
                let posted = std::mem::replace(&mut *state, RequestState::Taken);
                if let RequestState::UnderWay(UnderWay::Posted(posted), memory) = posted {
                    *state = self.end(posted, memory).map_or_else(RequestState::Failed, RequestState::Ended);
                }
            }
            Err(cause) => *state = RequestState::Failed(cause),
        }
        true
    }

    /// Waits for its end in MPI.
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
        let state = std::mem::replace(&mut *self.state(), RequestState::Taken);
        let ended = match state {
            RequestState::UnderWay(UnderWay::Posted(posted), memory) => {
                let _waiting = Pause::new();
                self.end(posted, memory)
            }
            RequestState::UnderWay(UnderWay::OnStream(end), memory) => end.hold(stream).map(|()| memory),
            RequestState::Ended(memory) => Ok(memory),
            RequestState::Failed(cause) => Err(cause),
            RequestState::Taken => Err(Cause::Request { message: "the request is being waited for".into() }),
        };
        let memory = ended.map_err(|cause| self.site.error(cause))?;
        use_memory(&memory).and_then(|()| memory.give_back(stream)).map_err(|cause| self.site.error(cause))
    }

    /// Runs a wait for it between two log lines, where they are wanted.
    pub fn logged(&self, wait: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        if !events::wants_calls() {
            return wait();
        }
        let mut call = Call { envelope: self.envelope, ..Call::of(&self.site, Stream::NONE) };
        if let Some(memory) = self.state().memory() {
            memory.lend(&mut call);
        }
        log::logged("MPI_Wait", &call, |_| wait())
    }

    /// The user's source line.
    pub fn location(&self) -> String {
        self.site.location.to_string()
    }

    pub fn words(&self) -> String {
        let record = self.record.as_ref().and_then(|record| recorder::record_of(record, own()));
        record.map_or_else(|| self.site.name().to_owned(), |record| record.to_string())
    }
}

impl RequestState {
    fn memory(&self) -> Option<&RequestMemory> {
        match self {
            Self::UnderWay(_, memory) | Self::Ended(memory) => Some(memory),
            Self::Failed(_) | Self::Taken => None,
        }
    }
}

fn form(buffer: &Buffer) -> (Dtype, usize) {
    (buffer.dtype(), buffer.count())
}
