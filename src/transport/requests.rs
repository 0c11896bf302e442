//! Operations that were started and not waited for yet.
//!
//! XLA may move its buffers between the start of an operation and the wait for it, so what MPI works on meanwhile is memory of
//! ours: the operand is copied into it, and the result out of it. A program names an operation by a *handle*, three numbers that an
//! array of float32 holds exactly, so that it can be carried by loops, and have a tangent and a cotangent, which are handles too.

use std::collections::{BTreeMap, VecDeque};
use std::io::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::dispatch::Transport;
use super::request::{Request, State};
use super::request_memory::RequestMemory;
use super::{mpi, progress};
use crate::call::{Call, Site, Stream};
use crate::device::Device;
use crate::error::{Cause, Error};
use crate::ops::Buffer;
use crate::record::recorder::Record;

/// How many numbers a handle has.
pub const HANDLE: usize = 3;

/// The number of an operation in two parts, each below 2^23; and a sum that the sum of two handles does not have. Zeros: what
/// was never started.
pub type Handle = [f32; HANDLE];

/// Numbers with the same second part.
const PART: u64 = 1 << 23;
/// How many operations may be under way.
const MOST: usize = 1 << 16;
/// Of how many operations an error can name what was waited for.
const REMEMBERED: usize = 64;
/// How long a communicator's end waits for messages that were not waited for.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long the end of MPI waits for such collectives: all ranks come there, and one of them may not have begun it.
const PATIENCE_AT_END: Duration = Duration::from_secs(10);

/// Operations by their numbers, which begin at 1.
struct Table {
    under_way: BTreeMap<u64, Arc<Request>>,
    last: u64,
    /// The last ones that were waited for.
    past: VecDeque<(u64, Arc<Request>)>,
}

static TABLE: Mutex<Table> = Mutex::new(Table { under_way: BTreeMap::new(), last: 0, past: VecDeque::new() });

fn table() -> MutexGuard<'static, Table> {
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn handle_of(number: u64) -> Handle {
    let (low, high) = (number % PART, number / PART);
    let sum = (low * 7919 + high * 104_729 + 1) % 8_388_593;
    [low as f32, high as f32, sum as f32]
}

/// The number that a handle has, if it is one.
fn number_of(handle: Handle) -> Option<u64> {
    let number = (handle[1] as u64).checked_mul(PART)?.checked_add(handle[0] as u64)?;
    (handle_of(number) == handle).then_some(number)
}

impl Table {
    fn add(&mut self, request: Arc<Request>) -> Result<Handle, Cause> {
        if self.under_way.len() >= MOST {
            let message =
                format!("{MOST} operations have been started and not waited for: call mpi4jax.wait");
            return Err(Cause::Request { message });
        }
        self.last += 1;
        self.under_way.insert(self.last, request);
        Ok(handle_of(self.last))
    }
}

/// Starts an operation of a site on memory that holds its operand: through MPI, or on a stream of the transport's own, which
/// goes on from where that of the call is. `record` is of this call.
///
/// # Safety
/// The call's buffers are those that `memory` has lent it.
pub unsafe fn start(
    transport: &Transport,
    site: &Arc<Site>,
    call: &Call,
    own: Option<Stream>,
    memory: RequestMemory,
    record: Option<Record>,
) -> Result<Handle, Error> {
    let located = |cause| site.error(cause);
    if let (Some(own), Device::Gpu(driver)) = (own, transport.device()) {
        let event_on = |stream| {
            let event = driver.event()?;
            event.record(stream).map(|()| event)
        };
        event_on(call.stream).and_then(|here| here.hold(own)).map_err(located)?;
        transport.execute(&Call { stream: own, ..call.clone() })?;
        let state = State::OnStream(event_on(own).map_err(located)?, memory);
        return add(Request::new(site, call.envelope, record, state))
            .map(|(_, handle)| handle)
            .map_err(located);
    }
    progress::prepare().map_err(located)?;
    let failed = |cause| Error { transport: Some("mpi"), ..located(cause) };
    // SAFETY: promised by the caller; the memory goes into the state.
    let posted = unsafe { mpi::start(call) }.map_err(failed)?;
    let state = State::Posted(posted, memory);
    let (request, handle) = add(Request::new(site, call.envelope, record, state)).map_err(located)?;
    progress::follow(move || request.test());
    Ok(handle)
}

/// Keeps the memory of an operation that communicates nothing until the wait for it.
pub fn keep(site: &Arc<Site>, memory: RequestMemory) -> Result<Handle, Error> {
    let request = Request::new(site, site.envelope, None, State::Ended(memory));
    add(request).map(|(_, handle)| handle).map_err(|cause| site.error(cause))
}

fn add(request: Request) -> Result<(Arc<Request>, Handle), Cause> {
    let comm = &request.site.comm;
    if request.communicates {
        comm.attach(|| Ok(Outstanding { comm: comm.number }))?;
    }
    let request = Arc::new(request);
    let handle = table().add(request.clone())?;
    Ok((request, handle))
}

/// The operation that a handle is of, which cannot be waited for again; None: nothing was started. It has to give the results
/// of the wait.
pub fn take(handle: Handle, results: &[Option<Buffer>; 2]) -> Result<Option<Arc<Request>>, Cause> {
    if handle == Handle::default() {
        return Ok(None);
    }
    let wrong = |message| Err(Cause::Request { message });
    let mut table = table();
    let Some(number) = number_of(handle).filter(|number| (1..=table.last).contains(number)) else {
        return wrong(format!(
            "no started operation has this request: {handle:?}; pass a request on unchanged, and wait for it once"
        ));
    };
    let Some(request) = table.under_way.get(&number) else {
        let past = table.past.iter().find(|(past, _)| *past == number);
        let what = past.map(|(_, past)| format!(" ({})", past.words())).unwrap_or_default();
        return wrong(format!("the request{what} has been waited for before"));
    };
    if !request.gives(results) {
        return wrong("the started operation has a result of another type or size than the wait".into());
    }
    let request = request.clone();
    table.under_way.remove(&number);
    table.past.push_back((number, request.clone()));
    let forgotten = if table.past.len() > REMEMBERED { table.past.pop_front() } else { None };
    // It may be the last to hold its communicator, whose end looks into the table.
    drop(table);
    drop(forgotten);
    Ok(Some(request))
}

/// What communicates, and has not been waited for.
fn unwaited() -> Vec<Arc<Request>> {
    table().under_way.values().filter(|request| request.communicates).cloned().collect()
}

/// What was recorded of what communicates, and has not been waited for, in the order of the starts.
pub fn outstanding() -> Vec<Record> {
    unwaited().iter().filter_map(|request| request.record.clone()).collect()
}

/// What a report calls the freeing of a communicator.
pub fn freeing(key: &str) -> String {
    let of_comm = |request: &&Arc<Request>| *request.site.comm.key == *key && !request.site.comm.is_freed();
    let what = match unwaited().iter().filter(of_comm).count() {
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
        let began = Instant::now();
        for request in unwaited().into_iter().filter(|request| request.site.comm.number == self.comm) {
            // All ranks take part in a collective, and in the freeing, before which it has to end: Open MPI would go
            // on with it and crash, as Intel MPI would in MPI_Finalize. A message may still have to leave, or never
            // come. MPICH fails where a request is left: what has ended is no request any more, and a later wait gets the
            // result.
            let freed = request.site.comm.is_freed();
            let patience = match (request.site.op.row().is_collective(), freed) {
                (true, true) => Duration::MAX,
                (true, false) => PATIENCE_AT_END,
                (false, _) => PATIENCE,
            };
            while !request.test() && began.elapsed() < patience {
                std::thread::sleep(Duration::from_micros(100));
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
    use super::super::RequestLayout;
    use super::*;
    use crate::comm::Comm;
    use crate::ops::{Dtype, Op};

    const LAYOUT: RequestLayout =
        RequestLayout { sends: false, keeps: true, initial: false, gives: None, local: true };

    fn started(comm: &Arc<Comm>, value: f32) -> Handle {
        let mut site = Site::new(Op::Allreduce, comm);
        site.location = "a.py:1".into();
        let site = Arc::new(site);
        let mut value = [value];
        // SAFETY: an array of one float32.
        let operand = unsafe { Buffer::new(value.as_mut_ptr().cast(), Dtype::Float32, 1) };
        let transport = Box::leak(Box::new(Transport::mpi()));
        let streams = (Stream::NONE, None);
        // SAFETY: an array of one float32.
        let memory = unsafe { RequestMemory::new(transport, site.op, &LAYOUT, Some(&operand), streams) };
        keep(&site, memory.unwrap()).unwrap()
    }

    fn waited(handle: Handle) -> Result<f32, String> {
        let mut value = [0_f32];
        // SAFETY: an array of one float32.
        let result = unsafe { Buffer::new(value.as_mut_ptr().cast(), Dtype::Float32, 1) };
        let results = [None, Some(result)];
        let request =
            take(handle, &results).map_err(|cause| cause.to_string())?.ok_or("nothing was started")?;
        let copied = request.wait(Stream::NONE, |memory| {
            let [received, operand] = memory.results();
            assert!(received.is_none());
            // SAFETY: both are of one float32.
            unsafe { memory.copy(&operand.unwrap(), &result, Stream::NONE) }
        });
        copied.map_err(|error| error.to_string()).map(|()| value[0])
    }

    #[test]
    fn each_request_is_waited_for_once_and_has_its_own_memory() {
        let comm = Arc::new(Comm::new("requests", 0, 1));
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
        let comm = Arc::new(Comm::new("requests-freed", 0, 1));
        let kept = started(&comm, 1.0);
        assert_eq!(freeing("requests-freed"), "the freeing of communicator requests-freed");
        let site = Arc::new(Site::new(Op::Barrier, &comm));
        let add = || add(Request::new(&site, site.envelope, None, State::Taken)).unwrap().1;
        let one = add();
        assert!(freeing("requests-freed").ends_with(" (an operation was started on it and not waited for)"));
        let two = add();
        assert!(freeing("requests-freed").ends_with(" (operations were started on it and not waited for)"));
        assert_eq!(freeing("requests-other"), "the freeing of communicator requests-other");
        for handle in [one, two] {
            take(handle, &[None; 2]).unwrap();
        }
        assert_eq!(waited(kept), Ok(1.0));
        assert_eq!(freeing("requests-freed"), "the freeing of communicator requests-freed");
    }

    #[test]
    fn what_is_no_handle_is_refused() {
        let comm = Arc::new(Comm::new("requests-wrong", 0, 1));
        let (a, b) = (started(&comm, 1.0), started(&comm, 2.0));
        let sum = std::array::from_fn(|i| a[i] + b[i]);
        for wrong in [sum, [f32::NAN; HANDLE], [-1.0; HANDLE], [1e30; HANDLE], [a[0], a[1], a[2] + 1.0]] {
            assert!(waited(wrong).unwrap_err().contains("no started operation has"), "{wrong:?}");
        }
        assert!(take(Handle::default(), &[None; 2]).unwrap().is_none());
        assert_eq!([waited(a), waited(b)], [Ok(1.0), Ok(2.0)]);
    }
}
