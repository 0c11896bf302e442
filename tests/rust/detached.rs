//! Operations whose calls return before they have ended, driven as XLA drives them.

use std::collections::HashSet;
use std::mem::offset_of;
use std::ptr::null_mut;
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Duration;

use _native::comm::{self, Comm};
use _native::xla::c_api::{self, Api, FfiError, Future};
use _native::xla::targets;

use super::program::{F32, Program, Value, api, buffer, buffers, no_attrs, outcome};
use Value::{Integer, String as Text};

/// What an operation has come to, and in which thread.
type End = (Result<(), String>, ThreadId);

/// XLA's future.
#[derive(Default)]
struct Promise {
    end: Mutex<Option<End>>,
    came: Condvar,
    /// What XLA goes on with.
    then: Mutex<Option<Box<dyn FnOnce()>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Promise {
    fn wait(&self) -> End {
        let is_open = |end: &mut Option<End>| end.is_none();
        let found = self.came.wait_timeout_while(lock(&self.end), PATIENCE, is_open);
        let (mut end, _) = found.unwrap_or_else(PoisonError::into_inner);
        end.take().expect("an operation that ends")
    }
}

unsafe extern "C" fn create(args: *mut c_api::FutureCreateArgs) -> *mut FfiError {
    // SAFETY: as XLA's function is called. It is leaked: this is a test.
    unsafe { (*args).future = Box::into_raw(Box::<Promise>::default()).cast() };
    null_mut()
}

/// # Safety
/// The future is one of `create`'s.
unsafe fn settle(future: *mut Future, result: Result<(), String>) -> *mut FfiError {
    // SAFETY: promised by the caller.
    let promise = unsafe { &*future.cast::<Promise>() };
    *lock(&promise.end) = Some((result, thread::current().id()));
    promise.came.notify_all();
    let then = lock(&promise.then).take();
    then.into_iter().for_each(|then| then());
    null_mut()
}

unsafe extern "C" fn set_available(args: *mut c_api::FutureSetAvailableArgs) -> *mut FfiError {
    // SAFETY: as XLA's function is called.
    unsafe { settle((*args).future, Ok(())) }
}

unsafe extern "C" fn set_error(args: *mut c_api::FutureSetErrorArgs) -> *mut FfiError {
    // SAFETY: as XLA's function is called.
    unsafe { settle((*args).future, outcome((*args).error)) }
}

const KEY: &str = "detached";
const PATIENCE: Duration = Duration::from_secs(60);

/// An operation whose call has returned. XLA keeps its arrays until it has ended.
struct Running {
    /// None: it had ended by then.
    promise: Option<&'static Promise>,
    _x: Box<[f32; 1]>,
    y: Box<[f32; 1]>,
}

impl Running {
    /// Calls an operation: the attributes that differ from those of an op without parameters.
    fn call(api: &'static Api, changed: &[(&str, Value)]) -> Result<Self, String> {
        let Text(op) = changed[0].1 else { panic!("the first one is the operation") };
        let name = format!("mpi4jax_{op}_detached");
        let target = targets().find(|target| target.name == name).expect("a target");
        let mut program = Program::new(api, changed)?;
        let (mut x, mut y) = (Box::new([1.0]), Box::new([f32::NAN]));
        let (operand, result) = (buffer(F32, &mut *x, &[1]), buffer(F32, &mut *y, &[1]));
        let args = [&raw const operand];
        let args = if op == "recv" { &[] } else { &args[..] };
        let rets = [&raw const result];
        let mut frame = program.frame(3, buffers(args), buffers(&rets), no_attrs());
        // SAFETY: a frame as XLA makes them.
        outcome(unsafe { (target.execute)(&mut frame) })?;
        // SAFETY: null, or one of `create`'s.
        let promise = unsafe { frame.future.cast::<Promise>().as_ref() };
        Ok(Self { promise, _x: x, y })
    }

    /// A message that this rank sends to itself.
    fn recv(api: &'static Api, comm: &Comm, tag: i64) -> Self {
        let source = Integer(comm.rank.into());
        let changed =
            [("op", Text("recv")), ("comm", Text(KEY)), ("source", source), ("recvtag", Integer(tag))];
        Self::call(api, &changed).expect("a call that returns")
    }

    fn promise(&self) -> &'static Promise {
        self.promise.expect("a future")
    }

    fn is_under_way(&self) -> bool {
        lock(&self.promise().end).is_none()
    }

    /// The number that has come, and the thread that took it.
    fn wait(&self) -> (f32, ThreadId) {
        let (result, thread) = self.promise().wait();
        result.expect("no error");
        (self.y[0], thread)
    }
}

/// Sends a number to this rank itself.
fn send(api: &'static Api, comm: &Comm, tag: i64, mut x: f32) {
    let dest = Integer(comm.rank.into());
    let changed = [("op", Text("send")), ("comm", Text(KEY)), ("dest", dest), ("sendtag", Integer(tag))];
    let operand = buffer(F32, std::slice::from_mut(&mut x), &[1]);
    let mut program = Program::new(api, &changed).expect("compiles");
    program.execute(&[&operand], &[]).expect("runs");
}

fn allreduce(reduction: &str) -> [(&str, Value<'_>); 3] {
    [("op", Text("allreduce")), ("comm", Text(KEY)), ("reduction", Text(reduction))]
}

/// An XLA that has no futures, or a transport that takes calls from one thread, gets the result at once.
fn without_futures(comm: &Comm) {
    let old = Api { struct_size: offset_of!(Api, future_set_error), ..api::<4>() };
    let running = Running::call(Box::leak(Box::new(old)), &allreduce("SUM")).expect("runs");
    assert!(running.promise.is_none());
    assert_eq!(running.y[0], comm.size as f32);
}

/// Where the system gives no thread, the one that calls carries the operation out.
fn without_threads(api: &'static Api, comm: &Comm) {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages: libc::rlim_t = statm.split(' ').next().and_then(|pages| pages.parse().ok()).expect("pages");
    let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let set = |limit| {
        // SAFETY: a plain call.
        assert_eq!(0, unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) });
    };
    // SAFETY: as above.
    assert_eq!(0, unsafe { libc::getrlimit(libc::RLIMIT_AS, &mut before) });
    // There is memory for MPI, but none for another stack.
    set(libc::rlimit { rlim_cur: 4096 * pages + (4 << 20), ..before });
    let (release, released) = channel::<()>();
    let released = Arc::new(Mutex::new(released));
    let park = || {
        let released = released.clone();
        thread::Builder::new().stack_size(8 << 20).spawn(move || lock(&released).recv())
    };
    // These take the stacks that the C library has kept.
    let parked: Vec<_> = std::iter::from_fn(|| park().ok()).collect();
    let running = Running::call(api, &allreduce("SUM")).expect("runs");
    set(before);
    drop(release);
    parked.into_iter().for_each(|thread| drop(thread.join()));
    assert!(!running.is_under_way());
    assert_eq!(running.wait(), (comm.size as f32, thread::current().id()));
}

const MANY: i64 = 3;

/// Each has a thread of its own, whose end waits for no other one.
fn end_in_any_order(api: &'static Api, comm: &Comm) {
    let begin = |tag| {
        let running = Running::recv(api, comm, tag);
        thread::sleep(Duration::from_millis(20)); // its thread has it by then
        running
    };
    let all: Vec<Running> = (0..MANY).map(begin).collect();
    let mut threads = HashSet::from([thread::current().id()]);
    for (tag, running) in all.iter().enumerate().rev() {
        assert!(all[..=tag].iter().all(Running::is_under_way));
        send(api, comm, tag as i64, 0.5 + tag as f32);
        let (y, thread) = running.wait();
        assert_eq!(y, 0.5 + tag as f32);
        assert!(threads.insert(thread), "one of {threads:?}");
    }
}

/// XLA goes on in the thread in which an operation has ended, for as long as it likes.
fn what_has_waited_keeps_its_thread(api: &'static Api, comm: &'static Comm) {
    let first = Running::recv(api, comm, 0);
    let (tell, told) = channel();
    *lock(&first.promise().then) = Some(Box::new(move || {
        let next = Running::recv(api, comm, 1);
        assert!(next.is_under_way());
        send(api, comm, 1, 2.5);
        tell.send((next.wait(), thread::current().id())).expect("somebody who listens");
    }));
    send(api, comm, 0, 1.5);
    let (y, thread) = first.wait();
    assert_eq!(y, 1.5);
    let ((y, other), here) = told.recv_timeout(PATIENCE).expect("an operation that ends");
    assert_eq!((y, here), (2.5, thread));
    assert_ne!(other, here);
}

/// Idle threads are kept, and take what comes next.
fn threads_are_few(api: &'static Api, comm: &Comm) {
    let mut threads = HashSet::new();
    for i in 0..100 {
        let running = Running::recv(api, comm, 0);
        send(api, comm, 0, i as f32);
        let (y, thread) = running.wait();
        assert_eq!(y, i as f32);
        threads.insert(thread);
    }
    // One that is about to be idle when the next operation comes is not idle yet.
    assert!(threads.len() < 20, "{} threads for 100 operations, one at a time", threads.len());
}

/// The future gets an error of the operation. The next call is refused before it has one.
fn errors(api: &'static Api) {
    let wrong = Running::call(api, &allreduce("BAND")).expect("a call that returns");
    let (result, _) = wrong.promise().wait();
    let error = result.expect_err("an error");
    assert!(error.contains("allreduce") && error.contains("BAND"), "{error}");
    let next = Running::call(api, &allreduce("SUM")).map(drop).expect_err("an error");
    assert!(next.contains("earlier operation") && next.contains("BAND"), "{next}");
}

pub fn run(comm: &Comm) {
    let comm = Box::leak(Box::new(Comm::new(KEY, comm.handle, comm.rank, comm.size)));
    comm::register(Comm::new(KEY, comm.handle, comm.rank, comm.size));
    let api = Box::leak(Box::new(Api {
        future_create: create,
        future_set_available: set_available,
        future_set_error: set_error,
        ..api::<4>()
    }));
    without_futures(comm);
    // While there is no thread that could be idle.
    without_threads(api, comm);
    end_in_any_order(api, comm);
    what_has_waited_keeps_its_thread(api, comm);
    threads_are_few(api, comm);
    errors(api);
    comm::free(KEY);
}
