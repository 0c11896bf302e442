//! Operations whose calls return before they have ended, so that XLA goes on with what does not depend on them.
//!
//! XLA's future stands for the end of the call: what depends on the results or on the token waits for it, and the
//! program ends after it. A thread of ours carries the operation out and sets the future. XLA then goes on with what
//! has waited *on that thread*, be it computation or the next operation. So no operation waits for a thread that is busy
//! with another one: there are as many threads as there are operations under way, and idle ones are kept.

use std::collections::VecDeque;
use std::mem::offset_of;
use std::ptr::null_mut;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;

use super::c_api::{self, Api, CallFrame, FfiError, Future};
use super::errors::{caught, check};
use super::handler::{self, Bound, Sites, State, carry_out, get_state, guard, judged, kind, usable};
use super::{frame, pages};
use crate::call::{Blocks, Call, Stream};
use crate::comm::{Calling, Kept};
use crate::error::Error;
use crate::mpilib;
use crate::ops::Counts;
use crate::transport::{AnyTransport, Transport};

const CPU: u8 = kind::CPU;

/// Computation of XLA's runs on our threads, which therefore have stacks like those of its own.
const STACK: usize = 8 << 20;

/// The execute stage of the targets whose calls return before their operations have ended.
///
/// # Safety
/// Called by XLA with a frame of its own making. XLA keeps the buffers and the program until the future is set.
pub unsafe extern "C" fn execute(frame: *mut CallFrame) -> *mut FfiError {
    // SAFETY: promised by the caller.
    unsafe {
        let mut found = Found::Nothing;
        let error = guard::<CPU>(frame, |frame| {
            found = prepare(frame)?;
            Ok(())
        });
        match found {
            Found::Nothing => error,
            Found::Here => handler::execute::<CPU>(frame),
            Found::Job(job) => {
                (*frame).future = job.future;
                submit(job);
                null_mut()
            }
        }
    }
}

/// What is to be done with a frame.
enum Found {
    /// Nothing is left: it was a question, or wrong.
    Nothing,
    /// The operation, before the call returns.
    Here,
    Job(Job),
}

/// # Safety
/// As `execute`.
unsafe fn prepare(frame: &CallFrame) -> Result<Found, Box<Error>> {
    // SAFETY: promised by the caller. References to what lives until the future is set are not used after that.
    unsafe {
        let &State { transport, ref site, .. } = get_state(frame)?;
        let Sites::One(bound) = site else { return Ok(Found::Here) };
        let knows_futures =
            (*frame.api).struct_size >= offset_of!(Api, future_set_error) + size_of::<usize>();
        if !knows_futures || transport.name() != "mpi" || !mpilib::any_thread_may_call() {
            return Ok(Found::Here);
        }
        let bound: &'static Bound = &*std::ptr::from_ref(bound);
        let Bound { site, watched } = bound;
        let kept = usable(site)?;
        let parts = Box::into_raw(Box::default());
        let mut job = Job {
            call: Call::of(site, Stream::NONE),
            parts,
            kept: Some(kept),
            bound,
            transport,
            api: frame.api,
            future: null_mut(),
        };
        let (others, counts) = &mut *parts;
        let filled = frame::fill(&mut job.call, frame, transport, (others, counts));
        judged(site, watched, filled.map_err(Box::new))?;
        let mut args = c_api::FutureCreateArgs {
            struct_size: size_of::<c_api::FutureCreateArgs>(),
            extension_start: null_mut(),
            future: null_mut(),
        };
        check(frame.api, "XLA_FFI_Future_Create", ((*frame.api).future_create)(&mut args))
            .map_err(|cause| site.error(cause))?;
        job.future = args.future;
        Ok(Found::Job(job))
    }
}

/// An operation to be carried out, and the future that stands for its end.
struct Job {
    call: Call<'static>,
    /// What the call refers to, of the job's own.
    parts: *mut (Blocks, Counts),
    kept: Option<Kept>,
    bound: &'static Bound,
    transport: &'static AnyTransport,
    api: *const Api,
    future: *mut Future,
}

// SAFETY: one thread at a time has it, and MPI takes calls from any.
unsafe impl Send for Job {}

impl Drop for Job {
    fn drop(&mut self) {
        // SAFETY: made by `prepare`; the call is not used any more.
        drop(unsafe { Box::from_raw(self.parts) });
    }
}

impl Job {
    /// Carries the operation out and sets the future, upon which XLA goes on in this thread with what has waited.
    fn run(mut self) {
        let (api, future) = (self.api, self.future);
        // SAFETY: XLA's, as `prepare` has found them. Nothing of the program is used after the future is set.
        unsafe {
            let error = caught(api, || {
                let _calling = Calling::new();
                let _kept = self.kept.take();
                let Bound { site, watched } = self.bound;
                pages::prepare(&self.call);
                judged(site, watched, carry_out(&mut self.call, self.transport, watched))
            });
            drop(self);
            settle(api, future, error);
        }
    }
}

/// # Safety
/// The future and the error are of this XLA. The error may be null.
unsafe fn settle(api: *const Api, future: *mut Future, error: *mut FfiError) {
    // SAFETY: promised by the caller.
    let answer = unsafe {
        if error.is_null() {
            let mut args = c_api::FutureSetAvailableArgs {
                struct_size: size_of::<c_api::FutureSetAvailableArgs>(),
                extension_start: null_mut(),
                future,
            };
            check(api, "XLA_FFI_Future_SetAvailable", ((*api).future_set_available)(&mut args))
        } else {
            let mut args = c_api::FutureSetErrorArgs {
                struct_size: size_of::<c_api::FutureSetErrorArgs>(),
                extension_start: null_mut(),
                future,
                error,
            };
            check(api, "XLA_FFI_Future_SetError", ((*api).future_set_error)(&mut args))
        }
    };
    if let Err(cause) = answer {
        // The program would wait for ever. XLA refuses nothing but structs of an unknown size.
        eprintln!("mpi4jax: {cause}");
        std::process::abort();
    }
}

#[derive(Default)]
struct Threads {
    /// Each has an idle thread that will take it.
    jobs: VecDeque<Job>,
    idle: usize,
}

static THREADS: Mutex<Threads> = Mutex::new(Threads { jobs: VecDeque::new(), idle: 0 });
static MORE: Condvar = Condvar::new();

fn threads() -> MutexGuard<'static, Threads> {
    THREADS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Gives a job to an idle thread, or to a new one.
fn submit(job: Job) {
    let mut threads = threads();
    threads.jobs.push_back(job);
    if threads.idle >= threads.jobs.len() {
        MORE.notify_one();
        return;
    }
    // A new one counts as idle: it takes a job first.
    threads.idle += 1;
    let made = Builder::new().name("mpi4jax-call".into()).stack_size(STACK).spawn(work);
    if made.is_err() {
        threads.idle -= 1;
        let job = threads.jobs.pop_back();
        drop(threads);
        if let Some(job) = job {
            job.run(); // as if it were not detached
        }
    }
}

fn work() {
    loop {
        let mut threads = threads();
        let job = loop {
            match threads.jobs.pop_front() {
                Some(job) => break job,
                None => threads = MORE.wait(threads).unwrap_or_else(PoisonError::into_inner),
            }
        };
        threads.idle -= 1;
        drop(threads);
        job.run();
        self::threads().idle += 1;
    }
}
