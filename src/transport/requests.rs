//! Operations that were started and not waited for yet.
//!
//! XLA may move its buffers between the start of an operation and the wait for it, so what MPI works on meanwhile is memory of
//! ours: the operand is copied into it, and the result out of it. A program knows an operation by a *handle*, three numbers that an
//! array of float32 holds exactly, so that it can be carried by loops, and have a tangent and a cotangent, which are handles too.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::held::{Held, Memory};
use super::mpi::{self, Posted};
use super::progress;
use super::{AnyTransport, Transport};
use crate::call::{Call, Envelope, Phase, Site, Stream};
use crate::comm::Comm;
use crate::device::Device;
use crate::device::cuda::Mark;
use crate::error::{Cause, Error};
use crate::record::recorder::Record;

/// How many numbers a handle has.
pub const HANDLE: usize = 3;

/// The number of a place in the table, from 1; how often that has been used; and a sum that the sum of two handles does not
/// have. All are below 2^24. Zeros: what was never started.
pub type Handle = [f32; HANDLE];

/// How many operations may be under way.
const MOST: usize = 1 << 16;
/// How many places wait until one of them is used again: so long it is known what was there.
const REMEMBERED: usize = 64;
const GENERATIONS: u32 = 1 << 20;
/// How long a communicator's end waits for messages that nobody has waited for.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long the end of MPI waits for such collectives: all ranks come there, and one of them may not have begun it.
const PATIENCE_AT_END: Duration = Duration::from_secs(10);

/// Something that goes ahead of an operation that is started, and is looked at when that has ended.
pub trait Ahead: Send {
    fn finish(self: Box<Self>) -> Result<(), Cause>;
}

/// What is under way.
#[derive(Default)]
struct Work {
    posted: Posted,
    /// Where it ends on a stream, if it was put on one.
    end: Option<Mark>,
    memory: Memory,
    ahead: Option<Box<dyn Ahead>>,
    /// Nothing is left for MPI to do.
    ended: bool,
    /// What a test or the end has said: an error that whoever waits is told.
    failure: Option<Cause>,
}

impl Work {
    /// Lets MPI go on with it; whether it has ended.
    fn test(&mut self) -> bool {
        if self.failure.is_none() {
            if let Some(end) = &self.end {
                return end.is_reached();
            }
            match self.posted.test() {
                Ok(ended) => return ended,
                Err(cause) => self.failure = Some(cause),
            }
        }
        true
    }
}

/// An operation that was started.
pub struct Request {
    site: Site,
    envelope: Envelope,
    pub held: Held,
    /// What was recorded when it was started; not of what communicates nothing.
    pub record: Option<Record>,
    work: Mutex<Work>,
}

impl Request {
    fn new(call: &Call, held: Held, record: Option<Record>, work: Work) -> Self {
        Self { site: call.site.clone(), envelope: call.envelope, held, record, work: Mutex::new(work) }
    }

    pub fn comm(&self) -> &Arc<Comm> {
        &self.site.comm
    }

    fn work(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets MPI go on with it; whether that is not needed any more. Where somebody waits, it is not.
    pub fn test(&self) -> bool {
        self.work.try_lock().map_or(true, |mut work| work.test())
    }

    /// Waits for its end in MPI, once.
    fn end(&self, work: &mut Work) -> Result<(), Cause> {
        if let Some(cause) = work.failure.take() {
            return Err(cause);
        }
        if std::mem::replace(&mut work.ended, true) || work.end.is_some() {
            return Ok(());
        }
        let mut call = Call::of(&self.site, Stream::NONE);
        call.envelope = self.envelope;
        work.memory.lend(&mut call, &self.held);
        let _waiting = progress::Pause::new();
        work.ahead.take().map_or(Ok(()), |ahead| ahead.finish()).and_then(|()| work.posted.wait(&call))
    }

    /// Waits for its end, or lets a stream wait for it; then `use_memory` is given its memory.
    pub fn wait(
        &self,
        stream: Stream,
        use_memory: impl FnOnce(&mut Memory) -> Result<(), Cause>,
    ) -> Result<(), Error> {
        let mut work = self.work();
        let ended = self.end(&mut work);
        let mut memory = std::mem::take(&mut work.memory);
        let end = work.end.take();
        drop(work);
        let ended = ended.and_then(|()| end.map_or(Ok(()), |end| memory.follow(&end, stream)));
        match ended {
            Ok(()) => use_memory(&mut memory).map_err(|cause| self.site.error(cause)),
            Err(cause) => {
                // MPI may still use it.
                std::mem::forget(memory);
                Err(Error { transport: Some("mpi"), ..self.site.error(cause) })
            }
        }
    }

    /// The call of a wait, for a log line.
    pub fn with_call<T>(&self, use_call: impl FnOnce(&Call) -> T) -> T {
        let site = Site { phase: Phase::Wait, ..self.site.clone() };
        let mut call = Call::of(&site, Stream::NONE);
        call.envelope = self.envelope;
        let work = self.work();
        work.memory.lend(&mut call, &self.held);
        drop(work);
        use_call(&call)
    }

    fn words(&self) -> String {
        self.record.as_ref().map_or_else(|| self.site.name().to_owned(), Record::to_string)
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        let work = self.work.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !work.posted.is_empty() || work.end.is_some() {
            // MPI or a stream may still use it.
            std::mem::forget(std::mem::take(&mut work.memory));
        }
    }
}

#[derive(Default)]
struct Place {
    generation: u32,
    request: Option<Arc<Request>>,
    /// What was waited for there last.
    past: Option<Arc<Request>>,
}

#[derive(Default)]
struct Table {
    places: Vec<Place>,
    free: VecDeque<usize>,
}

static TABLE: Mutex<Table> = Mutex::new(Table { places: Vec::new(), free: VecDeque::new() });

fn table() -> MutexGuard<'static, Table> {
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn handle_of(place: usize, generation: u32) -> Handle {
    let number = place as u32 + 1;
    let sum = (u64::from(number) * 7919 + u64::from(generation) * 104_729 + 1) % 8_388_593;
    [number as f32, generation as f32, sum as f32]
}

impl Table {
    fn requests(&self) -> impl Iterator<Item = &Arc<Request>> {
        self.places.iter().filter_map(|place| place.request.as_ref())
    }

    fn add(&mut self, request: Arc<Request>) -> Result<Handle, Cause> {
        let used = self.places.len() - self.free.len();
        if used >= MOST {
            let message = format!("{MOST} operations have been started and not waited for (mpi4jax.wait)");
            return Err(Cause::Request { message });
        }
        let reused = if self.free.len() > REMEMBERED { self.free.pop_front() } else { None };
        let place = reused.unwrap_or_else(|| {
            self.places.push(Place::default());
            self.places.len() - 1
        });
        let there = &mut self.places[place];
        there.generation = there.generation % (GENERATIONS - 1) + 1;
        there.request = Some(request);
        Ok(handle_of(place, there.generation))
    }

    fn take(&mut self, handle: Handle, expected: &Held) -> Result<Arc<Request>, Cause> {
        let place = (handle[0] as usize).wrapping_sub(1);
        let generation = handle[1] as u32;
        let known = self.places.get_mut(place).filter(|there| {
            (1..=there.generation).contains(&generation) && handle_of(place, generation) == handle
        });
        let Some(there) = known else {
            let message = format!(
                "the request is not one that was started: {handle:?}; a request is passed on as it is, and waited for once"
            );
            return Err(Cause::Request { message });
        };
        let is_last = there.generation == generation;
        let gives = |held: &Held| (held.gives, held.keeps);
        if is_last && there.request.as_ref().is_some_and(|request| gives(&request.held) != gives(expected)) {
            let message = "what was started gives another result than is waited for".into();
            return Err(Cause::Request { message });
        }
        if is_last && let Some(request) = there.request.take() {
            there.past = Some(request.clone());
            self.free.push_back(place);
            return Ok(request);
        }
        let what = there.past.as_ref().filter(|_| is_last).map(|past| format!(" ({})", past.words()));
        let message = format!("the request{} has been waited for before", what.unwrap_or_default());
        Err(Cause::Request { message })
    }
}

/// Starts an operation on memory that holds its operand. `record` is of this call.
pub fn start(
    call: &Call,
    held: Held,
    memory: Memory,
    record: Option<Record>,
    ahead: Option<Box<dyn Ahead>>,
) -> Result<Handle, Error> {
    let located = |cause| call.site.error(cause);
    let mut work = Work { memory, ahead, ..Work::default() };
    if !held.local {
        progress::prepare().map_err(located)?;
        work.posted =
            mpi::start(call).map_err(|cause| Error { transport: Some("mpi"), ..call.site.error(cause) })?;
        let comm = &call.site.comm;
        comm.attach(|| Ok(Outstanding { comm: comm.number })).map_err(located)?;
    }
    let request = Arc::new(Request::new(call, held, record, work));
    let handle = table().add(request.clone()).map_err(located)?;
    if !held.local {
        progress::follow(request);
    }
    Ok(handle)
}

/// The same on a stream of the transport's own, which goes on from where that of the call is.
pub fn start_on(
    own: Stream,
    transport: &AnyTransport,
    call: &Call,
    held: Held,
    memory: Memory,
    record: Option<Record>,
) -> Result<Handle, Error> {
    let located = |cause| call.site.error(cause);
    let device = super::device().map_err(|message| located(Cause::Setting { message }))?;
    device.mark(call.stream).and_then(|here| here.hold(own)).map_err(located)?;
    let ended = transport
        .execute(&Call { stream: own, ..call.clone() })
        .and_then(|()| device.mark(own).map_err(located));
    let end = match ended {
        Ok(end) => end,
        Err(error) => {
            // Nobody knows whether it is in use.
            std::mem::forget(memory);
            return Err(error);
        }
    };
    let comm = &call.site.comm;
    let work = Work { memory, end: Some(end), ..Work::default() };
    let request = Arc::new(Request::new(call, held, record, work));
    comm.attach(|| Ok(Outstanding { comm: comm.number })).map_err(located)?;
    table().add(request).map_err(located)
}

/// The operation that a handle is of, which nobody can wait for again; None: nothing was started. It has to give what is
/// `expected`.
pub fn take(handle: Handle, expected: &Held) -> Result<Option<Arc<Request>>, Cause> {
    if handle == Handle::default() { Ok(None) } else { table().take(handle, expected).map(Some) }
}

/// What was started and communicates, and has not been waited for.
pub fn outstanding() -> Vec<Record> {
    table()
        .requests()
        .filter(|request| !request.held.local)
        .filter_map(|request| request.record.clone())
        .collect()
}

/// What a report calls the freeing of a communicator.
pub fn freeing(key: &str) -> String {
    let of_comm = |request: &&Arc<Request>| *request.comm().key == *key && !request.comm().is_freed();
    let left = table().requests().filter(|request| !request.held.local).filter(of_comm).count();
    let what = match left {
        0 => "",
        1 => " (an operation was started on it and not waited for)",
        _ => " (operations were started on it and not waited for)",
    };
    format!("the freeing of communicator {key}{what}")
}

/// Attached to a communicator: at its end it names what was started there, and not waited for.
struct Outstanding {
    comm: i32,
}

impl Drop for Outstanding {
    fn drop(&mut self) {
        let of_comm = |request: &&Arc<Request>| request.site.comm.number == self.comm && !request.held.local;
        let left: Vec<_> = table().requests().filter(of_comm).cloned().collect();
        let began = Instant::now();
        for request in left {
            // All ranks take part in a collective, and in the freeing, before which it has to end: Open MPI would go
            // on with it and crash, as Intel MPI would in MPI_Finalize. A message may still have to leave, or never
            // come.
            let freed = request.comm().is_freed();
            let patience = match (request.site.op.row().is_collective(), freed) {
                (true, true) => Duration::MAX,
                (true, false) => PATIENCE_AT_END,
                (false, _) => PATIENCE,
            };
            while !request.work().test() && began.elapsed() < patience {
                std::thread::sleep(Duration::from_micros(100));
            }
            if freed {
                // MPICH fails where a request is left. Whoever waits later gets the result.
                let mut work = request.work();
                if work.test() {
                    work.failure = request.end(&mut work).err();
                }
            }
            let missed =
                if freed { "not waited for before its communicator was freed" } else { "never waited for" };
            let line = format!(
                "r{} | mpi4jax: {} was {missed} (mpi4jax.wait)\n",
                request.site.comm.rank,
                request.words()
            );
            let _ = std::io::stderr().lock().write_all(line.as_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{Buffer, Dtype, Op};
    use crate::transport::{Platform, home};

    const KEPT: Held = Held { sends: false, keeps: true, initial: false, gives: None, local: true };

    fn started(comm: &Arc<Comm>, value: f32) -> Handle {
        let mut site = Site::new(Op::Allreduce, comm);
        site.location = "a.py:1".into();
        let held = KEPT;
        let mut value = [value];
        let operand = Buffer { data: value.as_mut_ptr().cast(), dtype: Dtype::Float32, count: 1 };
        let home = home(Platform::Cpu).unwrap();
        // SAFETY: an array of one float32.
        let memory = unsafe { Memory::of(home, site.op, &held, Some(&operand), Stream::NONE) }.unwrap();
        start(&Call::of(&site, Stream::NONE), held, memory, None, None).unwrap()
    }

    fn waited(handle: Handle) -> Result<f32, String> {
        let request = take(handle, &KEPT).map_err(|cause| cause.to_string())?.ok_or("nothing was started")?;
        let mut found = None;
        let result = request.wait(Stream::NONE, |memory| {
            let [received, kept] = memory.results(&KEPT);
            assert!(received.is_none());
            // SAFETY: memory of one float32, which was copied there.
            found = kept.map(|kept| unsafe { kept.data.cast::<f32>().read_unaligned() });
            Ok(())
        });
        result.map_err(|error| error.to_string())?;
        found.ok_or_else(|| "nothing is kept".into())
    }

    #[test]
    fn each_request_is_waited_for_once_and_has_its_own_memory() {
        let comm = Arc::new(Comm::new("requests", 1, 0, 1));
        let handles: Vec<Handle> = (0..200).map(|i| started(&comm, i as f32)).collect();
        for (i, &handle) in handles.iter().enumerate().rev() {
            assert_eq!(waited(handle), Ok(i as f32));
        }
        assert!(waited(handles[7]).unwrap_err().contains("waited for before"));
        let again = started(&comm, 8.0);
        assert!(handles.iter().all(|&handle| handle != again));
        assert_eq!(waited(again), Ok(8.0));
    }

    #[test]
    fn a_freeing_is_said_to_wait_only_for_what_was_started() {
        let comm = Arc::new(Comm::new("requests-freed", 1, 0, 1));
        let kept = started(&comm, 1.0);
        assert_eq!(freeing("requests-freed"), "the freeing of communicator requests-freed");
        let site = Site::new(Op::Barrier, &comm);
        let held = Held { local: false, ..KEPT };
        let add = || {
            let request = Request::new(&Call::of(&site, Stream::NONE), held, None, Work::default());
            table().add(Arc::new(request)).unwrap()
        };
        let one = add();
        assert!(freeing("requests-freed").ends_with(" (an operation was started on it and not waited for)"));
        let two = add();
        assert!(freeing("requests-freed").ends_with(" (operations were started on it and not waited for)"));
        assert_eq!(freeing("requests-other"), "the freeing of communicator requests-other");
        for handle in [one, two] {
            take(handle, &held).unwrap();
        }
        assert_eq!(waited(kept), Ok(1.0));
        assert_eq!(freeing("requests-freed"), "the freeing of communicator requests-freed");
    }

    #[test]
    fn what_is_no_handle_is_refused() {
        let comm = Arc::new(Comm::new("requests-wrong", 1, 0, 1));
        let (a, b) = (started(&comm, 1.0), started(&comm, 2.0));
        let sum = std::array::from_fn(|i| a[i] + b[i]);
        for wrong in [sum, [f32::NAN; HANDLE], [-1.0; HANDLE], [1e30; HANDLE], [a[0], a[1], a[2] + 1.0]] {
            assert!(waited(wrong).unwrap_err().contains("not one that was started"), "{wrong:?}");
        }
        assert!(take(Handle::default(), &KEPT).unwrap().is_none());
        assert_eq!([waited(a), waited(b)], [Ok(1.0), Ok(2.0)]);
    }
}
