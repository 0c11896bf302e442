//! Messages between the leaders of the hosts, through MPI, where it lets any thread call it at any time.
//!
//! They travel on a communicator of their own, made together with the default one, and a thread of its own carries them, which
//! never waits for another rank: if MPI blocks it all the same, only the link is lost. What is sent, and what becomes of it, is
//! the matter of [`Mail`]. Jobs of one host have no link: its ranks see one folder.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mpi::ffi::{self, MPI_Comm, MPI_Request, MPI_Status};

use super::mail::{Heard, Hosts, Mail, Message, Question};
use super::status::World;
use crate::comm::Calling;
use crate::error::Cause;
use crate::mpilib::{any_thread_may_call, at_finalize, check, handle, handle_value};

/// How often a leader looks for messages, and how often while there are some.
const PERIODS: [Duration; 2] = [Duration::from_secs(1), Duration::from_millis(50)];
/// For how long after a message more are expected.
const EXPECTS: Duration = Duration::from_secs(10);
/// How often the end of the other ranks is looked for, at most and at least.
const PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(50)];
const TAG: c_int = 0;

#[derive(Default)]
struct Link {
    is_open: bool,
    /// This rank is the leader of its host.
    leads: bool,
    mail: Mail,
}

static LINK: LazyLock<Mutex<Link>> = LazyLock::new(Mutex::default);
/// The link has been opened or closed, this rank has become the leader, or there is something to be sent.
static CHANGED: Condvar = Condvar::new();
/// Locked by the thread that calls MPI for the link.
static ENDPOINT: Mutex<Option<Endpoint>> = Mutex::new(None);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn change(f: impl FnOnce(&mut Link)) {
    f(&mut lock(&LINK));
    CHANGED.notify_all();
}

/// Seconds by the clock of this process.
pub fn now() -> f64 {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    START.elapsed().as_secs_f64()
}

/// Whether messages reach the other hosts.
pub fn is_open() -> bool {
    lock(&LINK).is_open
}

/// The place of this host among those of the job, and how many there are.
pub fn place() -> (usize, usize) {
    lock(&LINK).mail.place()
}

/// This rank is the leader of its host, or not any more.
pub fn lead(leads: bool) {
    if lock(&LINK).leads != leads {
        change(|link| link.leads = leads);
    }
}

/// Asks the other hosts. A later question makes an earlier one void.
pub fn ask(question: &Question) {
    if is_open() {
        change(|link| link.mail.ask(question));
    }
}

/// Asks the hosts that have not answered once more.
pub fn ask_again() {
    change(|link| link.mail.ask_again());
}

/// What the ranks of other hosts have answered to the last question, and whether all hosts have.
pub fn answers() -> (World, bool) {
    let link = lock(&LINK);
    if link.is_open { link.mail.answers() } else { (World::new(), true) }
}

/// The questions of other hosts since this was called last, each with the rank that has asked.
pub fn take_questions() -> Vec<(i32, Question)> {
    lock(&LINK).mail.take_questions()
}

pub fn answer(to: i32, answer: Message) {
    change(|link| link.mail.answer(to, answer));
}

/// When leaders of other hosts asked, by the clock of [`now`].
pub fn heard() -> Heard {
    lock(&LINK).mail.heard()
}

/// What of MPI's belongs to the link.
struct Endpoint {
    /// A communicator of ours, never freed: it is needed until `MPI_Finalize`.
    comm: usize,
    /// Wakes the thread that answers questions.
    wake: fn(),
    /// What is under way; MPI reads the bytes until the request is done.
    sends: Vec<(MPI_Request, Vec<u8>)>,
    receive: Option<(MPI_Request, Vec<u8>, i32)>,
}

// SAFETY: MPI's handles belong to the process, not to a thread, and the link is open only where any thread
// may use them.
unsafe impl Send for Endpoint {}

/// Opens the link, unless the MPI of a rank forbids it, or all are on one host. Collective over a
/// communicator of all ranks. `host` is what the ranks of a host have in common, and no others.
///
/// # Safety
/// `comm` is the handle of a live communicator, with the ranks of `MPI_COMM_WORLD`.
pub unsafe fn open(comm: usize, host: u64, (rank, size): (i32, i32), wake: fn()) -> Result<(), Cause> {
    // A host that no rank is on says that there is to be none.
    let own = if any_thread_may_call() { host.max(1) } else { 0 };
    let mut names = vec![0u64; size as usize];
    // SAFETY: promised by the caller; a number from each rank.
    let comm = unsafe {
        let comm: MPI_Comm = handle(comm);
        let (from, to, t) = ((&raw const own).cast(), names.as_mut_ptr().cast(), ffi::RSMPI_UINT64_T);
        check("MPI_Allgather", ffi::MPI_Allgather(from, 1, t, to, 1, t, comm))?;
        if names.contains(&0) || names.iter().all(|name| *name == own) {
            return Ok(());
        }
        let mut link = MaybeUninit::<MPI_Comm>::uninit();
        check("MPI_Comm_dup", ffi::MPI_Comm_dup(comm, link.as_mut_ptr()))?;
        let link = link.assume_init();
        check("MPI_Comm_set_errhandler", ffi::MPI_Comm_set_errhandler(link, ffi::RSMPI_ERRORS_RETURN))?;
        at_finalize(end)?;
        handle_value(link)
    };
    let hosts = Hosts::new(&names, rank);
    let leads = hosts.own().and_then(super::ranks::Ranks::first) == Some(rank);
    *lock(&ENDPOINT) = Some(Endpoint { comm, wake, sends: Vec::new(), receive: None });
    change(|link| *link = Link { is_open: true, leads, mail: Mail::new(rank, hosts) });
    // The endpoint stays without a thread too: MPI_Finalize is collective, and so is what `close` does.
    if std::thread::Builder::new().name("mpi4jax-link".into()).spawn(run).is_err() {
        change(|link| *link = Link::default());
    }
    Ok(())
}

fn run() {
    let mut busy: Option<Instant> = None;
    loop {
        // The endpoint is taken away when MPI ends, and stays unlocked during the pause.
        let step = || {
            let _calling = Calling::new();
            lock(&ENDPOINT).as_mut().map(Endpoint::step)
        };
        match step() {
            Some(Ok(true)) => busy = Some(Instant::now()),
            Some(Ok(false)) => {}
            None | Some(Err(_)) => break,
        }
        let expects = busy.is_some_and(|at| at.elapsed() < EXPECTS);
        let is_idle = |link: &mut Link| {
            let has_messages = link.leads || expects || link.mail.has_outgoing();
            link.is_open && !has_messages
        };
        let link = CHANGED.wait_while(lock(&LINK), is_idle).unwrap_or_else(PoisonError::into_inner);
        if !link.mail.has_outgoing() {
            drop(CHANGED.wait_timeout(link, PERIODS[usize::from(expects)]));
        }
    }
    change(|link| *link = Link::default());
}

fn end() {
    // Locked, it keeps the thread from MPI. An error ends the link as well.
    let endpoint = lock(&ENDPOINT).take();
    let _ = endpoint.map(Endpoint::close);
    change(|link| *link = Link::default());
}

fn is_done(request: &mut MPI_Request) -> Result<Option<MPI_Status>, Cause> {
    let (mut done, mut status) = (0, MaybeUninit::<MPI_Status>::zeroed());
    // SAFETY: a request of ours; all-zero is a value of the status.
    unsafe {
        check("MPI_Test", ffi::MPI_Test(request, &mut done, status.as_mut_ptr()))?;
        Ok((done != 0).then(|| status.assume_init()))
    }
}

impl Endpoint {
    fn comm(&self) -> MPI_Comm {
        // SAFETY: from `handle_value`, in `open`.
        unsafe { handle(self.comm) }
    }

    /// Sends and receives what there is, without waiting; whether there was something.
    fn step(&mut self) -> Result<bool, Cause> {
        let mut is_busy = !self.sends.is_empty();
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
            is_busy = true;
            if let Ok(message) = serde_json::from_slice(&bytes) {
                lock(&LINK).mail.receive(from, message, now());
                (self.wake)();
            }
        }
        let outgoing = lock(&LINK).mail.take_outbox();
        for (to, message) in outgoing {
            is_busy = true;
            self.send(to, &message)?;
        }
        Ok(is_busy)
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

    /// Answers until all ranks are here, in `MPI_Finalize`, from where on no rank asks.
    fn close(mut self) -> Result<(), Cause> {
        let mut all_here = MaybeUninit::<MPI_Request>::uninit();
        // SAFETY: a request of ours.
        let mut all_here = unsafe {
            check("MPI_Ibarrier", ffi::MPI_Ibarrier(self.comm(), all_here.as_mut_ptr()))?;
            all_here.assume_init()
        };
        let mut pause = PAUSES[0];
        while is_done(&mut all_here)?.is_none() {
            self.step()?;
            std::thread::sleep(pause);
            pause = (2 * pause).min(PAUSES[1]);
        }
        // A message that is not received any more must stay where MPI may read it.
        std::mem::forget((self.sends, self.receive));
        Ok(())
    }
}
