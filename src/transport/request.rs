//! A non-blocking operation, between its start and the wait for it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::mpi::Posted;
use super::progress::{Pause, UnderWay};
use super::request_memory::{RequestLayout, RequestMemory};
use crate::call::{Call, Envelope, Phase, Site, Stream};
use crate::comm::Comm;
use crate::device::cuda::Mark;
use crate::error::{Cause, Error};
use crate::record::recorder::Record;

/// Something that goes ahead of an operation that is started, and is looked at when that has ended.
pub trait Ahead: Send {
    fn finish(self: Box<Self>) -> Result<(), Cause>;
}

/// What carries out a non-blocking operation.
pub enum Work {
    /// MPI.
    Posted(Posted, Option<Box<dyn Ahead>>),
    /// A stream, which comes to its end at this mark.
    OnStream(Mark),
    /// Nobody: nothing is communicated, or it has ended, or somebody waits for it.
    Nothing,
}

/// What a request has until somebody waits for it.
struct State {
    work: Work,
    memory: RequestMemory,
    /// What a test or the end has said: an error that whoever waits is told.
    failure: Option<Cause>,
}

/// A non-blocking operation.
pub struct Request {
    site: Site,
    envelope: Envelope,
    pub layout: RequestLayout,
    /// What was recorded when it was started; not of what communicates nothing.
    pub record: Option<Record>,
    /// Not locked by who waits.
    state: Mutex<State>,
}

impl Request {
    pub fn new(
        call: &Call,
        layout: RequestLayout,
        record: Option<Record>,
        work: Work,
        memory: RequestMemory,
    ) -> Self {
        let state = Mutex::new(State { work, memory, failure: None });
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

    fn call(&self, memory: &RequestMemory) -> Call<'_> {
        let mut call = Call { envelope: self.envelope, ..Call::of(&self.site, Stream::NONE) };
        memory.lend(&mut call, &self.layout);
        call
    }

    /// Waits for the end of what was taken out of the state.
    fn end(&self, work: Work, memory: &mut RequestMemory, stream: Stream) -> Result<(), Cause> {
        match work {
            Work::Nothing => Ok(()),
            Work::OnStream(end) => memory.follow(&end, stream),
            Work::Posted(mut posted, ahead) => {
                let _waiting = Pause::new();
                let ended = ahead.map_or(Ok(()), |ahead| ahead.finish());
                ended.and_then(|()| posted.wait(&self.call(memory)))
            }
        }
    }

    /// Waits for its end, or lets a stream wait for it; then `use_memory` is given its memory.
    pub fn wait(
        &self,
        stream: Stream,
        use_memory: impl FnOnce(&mut RequestMemory) -> Result<(), Cause>,
    ) -> Result<(), Error> {
        let (work, mut memory, failure) = {
            let mut state = self.state();
            let work = std::mem::replace(&mut state.work, Work::Nothing);
            (work, std::mem::take(&mut state.memory), state.failure.take())
        };
        let ended = failure.map_or_else(|| self.end(work, &mut memory, stream), Err);
        match ended {
            Ok(()) => use_memory(&mut memory).map_err(|cause| self.site.error(cause)),
            Err(cause) => {
                // MPI may still use it.
                std::mem::forget(memory);
                Err(Error { transport: Some("mpi"), ..self.site.error(cause) })
            }
        }
    }

    /// Ends what has ended in MPI, before the communicator is freed: whoever waits later gets the result. Not what is
    /// still under way.
    pub fn settle(&self) {
        let mut state = self.state();
        if state.test() && matches!(state.work, Work::Posted(..)) {
            let work = std::mem::replace(&mut state.work, Work::Nothing);
            let mut memory = std::mem::take(&mut state.memory);
            let ended = self.end(work, &mut memory, Stream::NONE);
            state.memory = memory;
            state.failure = state.failure.take().or(ended.err());
        }
    }

    /// The call of a wait, for a log line.
    pub fn with_call<T>(&self, use_call: impl FnOnce(&Call) -> T) -> T {
        let site = Site { phase: Phase::Wait, ..self.site.clone() };
        let mut call = Call { envelope: self.envelope, ..Call::of(&site, Stream::NONE) };
        self.state().memory.lend(&mut call, &self.layout);
        use_call(&call)
    }

    pub fn words(&self) -> String {
        self.record.as_ref().map_or_else(|| self.site.name().to_owned(), Record::to_string)
    }
}

impl State {
    /// Lets MPI go on with it; whether it has ended.
    fn test(&mut self) -> bool {
        self.failure.is_some()
            || match &mut self.work {
                Work::Nothing => true,
                Work::OnStream(end) => end.is_reached(),
                Work::Posted(posted, _) => posted.test().unwrap_or_else(|cause| {
                    self.failure = Some(cause);
                    true
                }),
            }
    }
}

impl UnderWay for Request {
    fn test(&self) -> bool {
        self.state().test()
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let is_used = match &state.work {
            Work::Posted(posted, _) => !posted.is_empty(),
            Work::OnStream(_) => true,
            Work::Nothing => false,
        };
        if is_used {
            // MPI or a stream may still use it.
            std::mem::forget(std::mem::take(&mut state.memory));
        }
    }
}
