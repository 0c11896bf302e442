//! What the ranks tell each other through MPI, where it lets any thread call it at any time.
//!
//! Files ([`super::peers`]) reach as far as a file system does; these messages reach every rank. They travel on
//! a communicator of their own, made together with the default one, and a thread of its own carries them,
//! which never waits for another rank: should MPI keep it all the same, only the link is lost.
//!
//! What is sent, and what becomes of it, is the [`Desk`]'s matter. Messages are small enough to be sent eagerly, so a
//! rank that is gone leaves nobody waiting.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mpi::ffi::{self, MPI_Comm, MPI_Request, MPI_Status};

use super::desk::{Desk, Message};
use super::questions::Answer;
use crate::comm::Calling;
use crate::error::Cause;
use crate::mpilib::{any_thread_may_call, at_finalize, check, handle, handle_value};

/// How often messages are looked for.
const PERIOD: Duration = Duration::from_millis(50);
const TAG: c_int = 0;

static OPEN: AtomicBool = AtomicBool::new(false);
static DESK: Mutex<Option<Desk>> = Mutex::new(None);
/// Held by whoever calls MPI for the link.
static PORT: Mutex<Option<Port>> = Mutex::new(None);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn with_desk<T>(f: impl FnOnce(&mut Desk) -> T) -> T {
    f(lock(&DESK).get_or_insert_default())
}

/// Whether messages reach the other ranks.
pub fn is_open() -> bool {
    OPEN.load(Ordering::Relaxed)
}

/// Asks all ranks for their state. A later question makes an earlier one void.
pub fn ask(word: &str, hung: bool, rank: i32, size: i32) {
    if !is_open() {
        return;
    }
    with_desk(|desk| desk.ask(word, hung, rank, size));
}

pub fn answer_of(rank: i32, word: &str) -> Option<Answer> {
    with_desk(|desk| desk.answer_of(rank, word))
}

/// Another rank that has begun to report, in this time, that an operation hangs.
pub fn reporter(within: Duration) -> Option<i32> {
    with_desk(|desk| desk.reporter(within, Instant::now()))
}

/// Another rank that has begun to say, in this time, what it waits for.
pub fn teller(within: Duration) -> Option<i32> {
    with_desk(|desk| desk.teller(within, Instant::now()))
}

/// One end of the link.
struct Port {
    /// A communicator of ours, never freed: it is needed until `MPI_Finalize`.
    comm: usize,
    /// Finds out what this rank is doing.
    respond: fn(&str) -> Answer,
    /// What is under way; MPI reads the bytes until the request is done.
    sends: Vec<(MPI_Request, Vec<u8>)>,
    receive: Option<(MPI_Request, Vec<u8>, i32)>,
}

// SAFETY: MPI's handles belong to the process, not to a thread, and the link is open only where any thread
// may use them.
unsafe impl Send for Port {}

/// Makes the link, unless a rank does not want it or its MPI forbids it. Collective over a communicator of all ranks.
///
/// # Safety
/// `comm` is the handle of a live communicator, with the ranks of `MPI_COMM_WORLD`.
pub unsafe fn open(comm: usize, wanted: bool, respond: fn(&str) -> Answer) -> Result<(), Cause> {
    let able = u8::from(wanted && any_thread_may_call());
    let mut all = 0u8;
    // SAFETY: promised by the caller; one byte each way.
    let link = unsafe {
        let comm: MPI_Comm = handle(comm);
        let (from, to) = ((&raw const able).cast(), (&raw mut all).cast());
        let code = ffi::MPI_Allreduce(from, to, 1, ffi::RSMPI_UINT8_T, ffi::RSMPI_BAND, comm);
        check("MPI_Allreduce", code)?;
        if all == 0 {
            return Ok(());
        }
        let mut link = MaybeUninit::<MPI_Comm>::uninit();
        check("MPI_Comm_dup", ffi::MPI_Comm_dup(comm, link.as_mut_ptr()))?;
        let link = link.assume_init();
        check("MPI_Comm_set_errhandler", ffi::MPI_Comm_set_errhandler(link, ffi::RSMPI_ERRORS_RETURN))?;
        at_finalize(end)?;
        handle_value(link)
    };
    *lock(&PORT) = Some(Port { comm: link, respond, sends: Vec::new(), receive: None });
    let thread = std::thread::Builder::new().name("mpi4jax-link".into()).spawn(run);
    // The port stays without a thread too: MPI_Finalize is collective, and so is what `close` does.
    OPEN.store(thread.is_ok(), Ordering::Relaxed);
    Ok(())
}

fn run() {
    // The port is taken away when MPI ends, and stays unlocked during the pause.
    let step = || {
        let _calling = Calling::new();
        lock(&PORT).as_mut().map(Port::step)
    };
    while let Some(Ok(())) = step() {
        std::thread::sleep(PERIOD);
    }
    OPEN.store(false, Ordering::Relaxed);
}

fn end() {
    // Held, it keeps the thread from MPI. An error ends the link as well.
    let port = lock(&PORT).take();
    let _ = port.map(Port::close);
    OPEN.store(false, Ordering::Relaxed);
}

fn is_done(request: &mut MPI_Request) -> Result<Option<MPI_Status>, Cause> {
    let (mut done, mut status) = (0, MaybeUninit::<MPI_Status>::zeroed());
    // SAFETY: a request of ours; all-zero is a value of the status.
    unsafe {
        check("MPI_Test", ffi::MPI_Test(request, &mut done, status.as_mut_ptr()))?;
        Ok((done != 0).then(|| status.assume_init()))
    }
}

impl Port {
    fn comm(&self) -> MPI_Comm {
        // SAFETY: from `handle_value`, in `open`.
        unsafe { handle(self.comm) }
    }

    /// Carries what there is. Waits for nobody.
    fn step(&mut self) -> Result<(), Cause> {
        for (to, message) in with_desk(Desk::sent) {
            self.send(to, &message)?;
        }
        let mut error = None;
        self.sends.retain_mut(|(request, _)| match is_done(request) {
            Ok(status) => status.is_none(),
            Err(cause) => {
                error = Some(cause);
                true
            }
        });
        if let Some(cause) = error {
            return Err(cause);
        }
        while let Some((from, bytes)) = self.next()? {
            let taken = Message::decode(&bytes)
                .and_then(|message| with_desk(|desk| desk.take_in(from, message, Instant::now())));
            if let Some(word) = taken {
                // Without the desk: it may take a while.
                let answer = (self.respond)(&word);
                self.send(from, &Message::Answer { word, answer })?;
            }
        }
        Ok(())
    }

    fn send(&mut self, to: i32, message: &Message) -> Result<(), Cause> {
        let bytes = message.encode();
        let mut request = MaybeUninit::<MPI_Request>::uninit();
        // SAFETY: the bytes stay where they are until the request is done.
        unsafe {
            let (from, n) = (bytes.as_ptr().cast(), bytes.len() as c_int);
            let (byte, comm) = (ffi::RSMPI_UINT8_T, self.comm());
            check("MPI_Isend", ffi::MPI_Isend(from, n, byte, to, TAG, comm, request.as_mut_ptr()))?;
            self.sends.push((request.assume_init(), bytes));
        }
        Ok(())
    }

    /// The next message that has arrived, and from whom.
    fn next(&mut self) -> Result<Option<(i32, Vec<u8>)>, Cause> {
        if self.receive.is_none() {
            let (mut found, mut status) = (0, MaybeUninit::<MPI_Status>::zeroed());
            // SAFETY: all-zero is a value of the status; the buffer has the size of the message that was found, and
            // stays where it is until the request is done.
            unsafe {
                let (byte, comm) = (ffi::RSMPI_UINT8_T, self.comm());
                let any = ffi::RSMPI_ANY_SOURCE;
                check("MPI_Iprobe", ffi::MPI_Iprobe(any, TAG, comm, &mut found, status.as_mut_ptr()))?;
                if found == 0 {
                    return Ok(None);
                }
                let (status, mut n) = (status.assume_init(), 0);
                check("MPI_Get_count", ffi::MPI_Get_count(&status, byte, &mut n))?;
                let mut bytes = vec![0u8; usize::try_from(n).unwrap_or(0)];
                let (to, from) = (bytes.as_mut_ptr().cast(), status.MPI_SOURCE);
                let mut request = MaybeUninit::<MPI_Request>::uninit();
                check("MPI_Irecv", ffi::MPI_Irecv(to, n, byte, from, TAG, comm, request.as_mut_ptr()))?;
                self.receive = Some((request.assume_init(), bytes, from));
            }
        }
        let Some((mut request, bytes, from)) = self.receive.take() else { return Ok(None) };
        if is_done(&mut request)?.is_some() {
            return Ok(Some((from, bytes)));
        }
        self.receive = Some((request, bytes, from));
        Ok(None)
    }

    /// Answers until all ranks are here, in `MPI_Finalize`, from where on nobody asks.
    fn close(mut self) -> Result<(), Cause> {
        let mut all_here = MaybeUninit::<MPI_Request>::uninit();
        // SAFETY: a request of ours.
        let mut all_here = unsafe {
            check("MPI_Ibarrier", ffi::MPI_Ibarrier(self.comm(), all_here.as_mut_ptr()))?;
            all_here.assume_init()
        };
        while is_done(&mut all_here)?.is_none() {
            self.step()?;
            std::thread::sleep(Duration::from_millis(1));
        }
        // What nobody receives any more must stay where MPI may read it.
        std::mem::forget((self.sends, self.receive));
        Ok(())
    }
}
