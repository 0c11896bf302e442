//! Nonblocking operations: those that were started and not waited for yet.
//!
//! XLA may move its buffers between the start of an operation and the wait for it, so what MPI works on meanwhile is memory of
//! ours: the operand is copied into it, and the result out of it. A program names an operation by a *handle*, three numbers that an
//! array of float32 holds exactly, so that it can be carried by loops, and have a tangent and a cotangent, which are handles too.

mod memory;
mod progress;
mod request;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

pub use self::memory::{RequestLayout, RequestMemory};
use self::progress::Test;
pub use self::progress::check_setting;
use self::request::RequestState;
pub use self::request::{Request, UnderWay};
use super::{Transport, mpi};
use crate::call::{Call, Site, Stream};
use crate::comm::Comparison;
use crate::error::{Cause, Error};
use crate::ops::Buffer;
use crate::output;
use crate::record::recorder::{self, Plain};
use crate::sync::lock;

/// Length of a handle, in float32.
pub const HANDLE: usize = 3;

/// The number of an operation in two parts, each below 2^23; and a sum that the sum of two handles does not have. Zeros: what
/// was never started.
pub type Handle = [f32; HANDLE];

/// The number of operations whose handles have the same second part.
const PART: u64 = 1 << 23;
/// The most operations that may be under way.
const MOST: usize = 1 << 16;
/// The number of past waits that are remembered, for errors about a second wait for one operation.
const REMEMBERED: usize = 64;
/// How long a communicator's end waits for messages that were not waited for.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long the end of MPI waits for such collectives: all ranks come there, and one of them may not have begun it.
const PATIENCE_AT_END: Duration = Duration::from_secs(10);

/// Operations by their numbers, which begin at 1.
struct Table {
    under_way: BTreeMap<u64, Arc<Request>>,
    /// Numbers of operations that MPI carries out, and that are not known to have ended.
    posted: BTreeSet<u64>,
    last: u64,
    /// The last operations that were waited for.
    past: VecDeque<(u64, Arc<Request>)>,
}

static TABLE: Mutex<Table> =
    Mutex::new(Table { under_way: BTreeMap::new(), posted: BTreeSet::new(), last: 0, past: VecDeque::new() });

fn table() -> MutexGuard<'static, Table> {
    lock(&TABLE)
}

fn handle_of(number: u64) -> Handle {
    let (low, high) = (number % PART, number / PART);
    let sum = (low * 7919 + high * 104_729 + 1) % 8_388_593;
    [low as f32, high as f32, sum as f32]
}

/// The number of the operation that a handle names; `None` if it is no handle.
fn number_of(handle: Handle) -> Option<u64> {
    let number = (handle[1] as u64).checked_mul(PART)?.checked_add(handle[0] as u64)?;
    (handle_of(number) == handle).then_some(number)
}

impl Table {
    fn add(&mut self, request: Arc<Request>) -> Handle {
        self.last += 1;
        if request.is_posted() {
            self.posted.insert(self.last);
        }
        self.under_way.insert(self.last, request);
        handle_of(self.last)
    }
}

/// Returns an error if no more operations can be initiated. Must be called before an operation does
/// anything, so that a refused operation has communicated nothing. `n` threads that call it at once
/// may exceed the limit by `n`.
pub fn check_room() -> Result<(), Cause> {
    if table().under_way.len() < MOST {
        return Ok(());
    }
    let message = format!("{MOST} operations have been started and not waited for: call mpi4jax.wait");
    Err(Cause::Request { message })
}

/// Starts an operation of a site on memory that holds its operand. `record` is of this call, and so is what the other ranks were
/// asked.
///
/// # Safety
/// The call's buffers are those that `memory` has lent it.
pub unsafe fn start(
    transport: &impl Transport,
    site: &Arc<Site>,
    call: &Call,
    own: Option<Stream>,
    memory: RequestMemory,
    record: Option<Plain>,
    comparison: Option<Comparison>,
) -> Result<Handle, Error> {
    // SAFETY: promised by the caller; the memory goes into the state.
    let under_way = unsafe { transport.start(call, own)? };
    let request = Request::new(site, call.envelope, record, RequestState::UnderWay(under_way, memory));
    let handle = add(request.compared(comparison));
    progress::notify();
    Ok(handle)
}

/// Lets MPI begin an operation.
///
/// # Safety
/// The call's buffers stay until what is returned has ended.
pub(super) unsafe fn post(call: &Call) -> Result<UnderWay, Error> {
    progress::prepare(next_posted).map_err(|cause| call.site.error(cause))?;
    // SAFETY: promised by the caller.
    Ok(UnderWay::Posted(unsafe { mpi::start(call) }.map_err(|cause| call.site.error(cause))?))
}

/// Keeps the memory of an operation that communicates nothing until the wait for it.
pub fn keep(site: &Arc<Site>, memory: RequestMemory) -> Handle {
    add(Request::new(site, site.envelope, None, RequestState::Ended(memory)))
}

fn add(request: Request) -> Handle {
    let comm = &request.site.comm;
    if request.communicates {
        let Ok(_) = comm.attach(|| Ok::<_, Infallible>(Outstanding { comm: comm.number }));
    }
    table().add(Arc::new(request))
}

/// The next operation that MPI carries out, in turn after the one of a number: its number, and what lets MPI go on with it.
fn next_posted(after: u64) -> Option<(u64, Test)> {
    let table = table();
    let number = *table.posted.range(after + 1..).next().or_else(|| table.posted.first())?;
    let request = table.under_way.get(&number)?.clone();
    let test = move || {
        let ended = request.test();
        if ended {
            self::table().posted.remove(&number);
        }
        ended
    };
    Some((number, Box::new(test)))
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
            "no nonblocking operation has this request: {handle:?}; pass a request on unchanged, and wait for it once"
        ));
    };
    let Some(request) = table.under_way.get(&number) else {
        let past = table.past.iter().find(|(past, _)| *past == number);
        let what = past.map(|(_, past)| format!(" ({})", past.words())).unwrap_or_default();
        return wrong(format!("the request{what} has been waited for before"));
    };
    if !request.gives(results) {
        return wrong("the nonblocking operation has a result of another type or size than the wait".into());
    }
    let request = request.clone();
    table.under_way.remove(&number);
    table.posted.remove(&number);
    table.past.push_back((number, request.clone()));
    let forgotten = if table.past.len() > REMEMBERED { table.past.pop_front() } else { None };
    // It may be the last to hold its communicator, whose end looks into the table.
    drop(table);
    drop(forgotten);
    if let Some(record) = &request.record {
        recorder::release(record);
    }
    Ok(Some(request))
}

/// Operations that communicate and have not been waited for.
fn unwaited() -> Vec<Arc<Request>> {
    table().under_way.values().filter(|request| request.communicates).cloned().collect()
}

/// How a report names the freeing of a communicator.
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
        let mut lines = BTreeMap::<String, (i32, String, &str, u64)>::new();
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
            let at = request.location();
            lines
                .entry(at)
                .and_modify(|(.., others)| *others += 1)
                .or_insert_with(|| (request.site.comm.rank, request.words(), missed, 0));
        }
        // One line for each of the program's, however many were started there.
        for (rank, words, missed, others) in lines.into_values() {
            let more = if others == 0 { String::new() } else { format!(", nor were {others} others") };
            output::print(&format!("r{rank} | mpi4jax: {words} was {missed} (mpi4jax.wait){more}\n"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::HostMpi;
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
        let transport = Box::leak(Box::new(HostMpi::default()));
        let streams = (Stream::NONE, None);
        // SAFETY: an array of one float32.
        let memory = unsafe { RequestMemory::new(transport, site.op, &LAYOUT, Some(&operand), streams) };
        keep(&site, memory.unwrap())
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
        let add = || add(Request::new(&site, site.envelope, None, RequestState::Taken));
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
            assert!(waited(wrong).unwrap_err().contains("no nonblocking operation has"), "{wrong:?}");
        }
        assert!(take(Handle::default(), &[None; 2]).unwrap().is_none());
        assert_eq!([waited(a), waited(b)], [Ok(1.0), Ok(2.0)]);
    }
}
