//! Messages between hosts, through MPI with `MPI_THREAD_MULTIPLE`.
//!
//! They are sent on a communicator of their own, made together with the default one, by a thread of their own, which never waits
//! for another rank, and answers questions. If MPI blocks this thread nevertheless, only the link is lost. [`Mail`] decides what is
//! sent. Jobs of one host have no link: its ranks see one board.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mpi::ffi::{self, MPI_Comm, MPI_Request, MPI_Status};

use super::hosts::{Mail, Message, QuestionKind};
use super::read;
use super::state::World;
use crate::comm::Calling;
use crate::error::Cause;
use crate::finalize::at_finalize;
use crate::mpilib::{any_thread_may_call, check, handle, handle_value};
use crate::sync::lock;

/// How often a rank that answers for its host polls for messages, and how often after a message has arrived.
const PERIODS: [Duration; 2] = [Duration::from_secs(1), Duration::from_millis(50)];
/// For how long after a message more are expected.
const EXPECTS: Duration = Duration::from_secs(10);
/// The shortest and the longest interval at which a rank that ends looks whether the other ranks have ended.
const PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(50)];
/// For how long answers are waited for.
pub const ANSWER_TIME: Duration = Duration::from_secs(5);
const TAG: c_int = 0;

/// While the link is closed, there are no other hosts.
static MAIL: LazyLock<Mutex<Mail>> = LazyLock::new(Mutex::default);
/// The link has been opened or closed, there is something to be sent, or a message has come.
static CHANGED: Condvar = Condvar::new();
/// Locked by the thread that calls MPI for the link.
static ENDPOINT: Mutex<Option<Endpoint>> = Mutex::new(None);

/// The questions and answers of this host and the others.
pub fn mail() -> MutexGuard<'static, Mail> {
    lock(&MAIL)
}

/// Changes the questions and answers, and wakes the threads that wait for that.
fn post(change: impl FnOnce(&mut Mail)) {
    change(&mut mail());
    CHANGED.notify_all();
}

/// Whether messages reach the other hosts.
pub fn is_open() -> bool {
    mail().has_others()
}

/// Asks the other hosts, and waits for their answers, but not for long: the states of their ranks.
pub fn ask(kind: QuestionKind) -> World {
    let mut mail = mail();
    if kind == QuestionKind::Leave {
        mail.begin_question_to_answering();
    } else {
        mail.begin_question();
    }
    // The second rank of a host is asked where the first one does not answer, which may be gone.
    for place in 0..2 {
        mail.ask(kind, place);
        CHANGED.notify_all();
        let is_open = |mail: &mut Mail| !mail.is_answered();
        let waited = CHANGED.wait_timeout_while(mail, ANSWER_TIME / 2, is_open);
        mail = waited.unwrap_or_else(PoisonError::into_inner).0;
    }
    mail.answers()
}

/// A message has come from a rank of another host: answers it, or keeps the answer.
fn take((from, message): (i32, Message)) {
    match message {
        Message::Question(number, kind) => {
            mail().hear(from);
            let answer = Message::answer(number, &read::told(kind));
            post(|mail| mail.outbox.push((from, answer)));
        }
        Message::Answer(number, states) => post(|mail| mail.receive(from, number, states)),
    }
}

/// A message under way. MPI reads or writes the bytes until the request is done.
struct Transfer {
    request: MPI_Request,
    bytes: Vec<u8>,
    /// The sender of a message that is received; `None`: this rank sends the message.
    from: Option<i32>,
}

/// The communicator of the link, and its messages under way.
struct Endpoint {
    /// A communicator of ours, never freed: it is needed until `MPI_Finalize`.
    comm: usize,
    under_way: Vec<Transfer>,
}

// SAFETY: MPI's handles belong to the process, not to a thread, and the link is open only where any thread
// may use them.
unsafe impl Send for Endpoint {}

/// What this rank has in common with the ranks of its host, `host`, and with no others. Host 0, which has no ranks, stands for a rank
/// whose MPI forbids a link: then no rank has one.
pub fn own_host(host: u64) -> u64 {
    if any_thread_may_call() { host.max(1) } else { 0 }
}

/// Opens the link, unless the MPI of a rank forbids it, or all are on one host. Collective over `MPI_COMM_WORLD`. `hosts` has the
/// [`own_host`] of each rank.
pub fn open(hosts: &[u64], rank: i32) -> Result<(), Cause> {
    if hosts.contains(&0) || hosts.iter().all(|host| *host == hosts[0]) {
        return Ok(());
    }
    // SAFETY: MPI is running.
    let comm = unsafe {
        let comm = ffi::RSMPI_COMM_WORLD;
        let mut link = MaybeUninit::<MPI_Comm>::uninit();
        check("MPI_Comm_dup", ffi::MPI_Comm_dup(comm, link.as_mut_ptr()))?;
        let link = link.assume_init();
        check("MPI_Comm_set_errhandler", ffi::MPI_Comm_set_errhandler(link, ffi::RSMPI_ERRORS_RETURN))?;
        at_finalize(end)?;
        handle_value(link)
    };
    *lock(&ENDPOINT) = Some(Endpoint { comm, under_way: Vec::new() });
    *mail() = Mail::new(hosts, rank);
    // The endpoint stays without a thread too: MPI_Finalize is collective, and so is what `close` does.
    if std::thread::Builder::new().name("mpi4jax-link".into()).spawn(run).is_err() {
        *mail() = Mail::default();
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
        let Some(Ok((is_busy, messages))) = step() else { break };
        if is_busy {
            busy = Some(Instant::now());
        }
        messages.into_iter().for_each(take);
        let expects = busy.is_some_and(|at| at.elapsed() < EXPECTS);
        let is_idle = |mail: &mut Mail| {
            let has_messages = mail.answers_for_host || expects || !mail.outbox.is_empty();
            mail.has_others() && !has_messages
        };
        let mail = CHANGED.wait_while(mail(), is_idle).unwrap_or_else(PoisonError::into_inner);
        if mail.outbox.is_empty() {
            drop(CHANGED.wait_timeout(mail, PERIODS[usize::from(expects)]));
        }
    }
    post(|mail| *mail = Mail::default());
}

fn end() {
    // Locked, it keeps the thread from MPI. An error ends the link as well.
    let endpoint = lock(&ENDPOINT).take();
    let _ = endpoint.map(Endpoint::close);
    post(|mail| *mail = Mail::default());
}

fn is_done(request: &mut MPI_Request) -> Result<bool, Cause> {
    let (mut done, mut status) = (0, MaybeUninit::<MPI_Status>::uninit());
    // SAFETY: a request of ours.
    unsafe { check("MPI_Test", ffi::MPI_Test(request, &mut done, status.as_mut_ptr()))? };
    Ok(done != 0)
}

impl Endpoint {
    fn comm(&self) -> MPI_Comm {
        // SAFETY: from `handle_value`, in `open`.
        unsafe { handle(self.comm) }
    }

    /// Sends and receives what there is, without waiting. Returns whether there was something, and which messages have come.
    fn step(&mut self) -> Result<(bool, Vec<(i32, Message)>), Cause> {
        while self.receive()? {}
        let outgoing = std::mem::take(&mut mail().outbox);
        for (to, message) in outgoing {
            self.send(to, &message)?;
        }
        let (is_busy, mut messages) = (!self.under_way.is_empty(), Vec::new());
        let mut i = 0;
        while i < self.under_way.len() {
            if !is_done(&mut self.under_way[i].request)? {
                i += 1;
                continue;
            }
            let Transfer { bytes, from, .. } = self.under_way.remove(i);
            if let Some(from) = from
                && let Ok(message) = serde_json::from_slice(&bytes)
            {
                messages.push((from, message));
            }
        }
        Ok((is_busy, messages))
    }

    fn send(&mut self, to: i32, message: &Message) -> Result<(), Cause> {
        let bytes = serde_json::to_vec(message).unwrap_or_default();
        let mut request = MaybeUninit::<MPI_Request>::uninit();
        // SAFETY: the bytes stay where they are until the request is done.
        unsafe {
            let (from, n) = (bytes.as_ptr().cast(), bytes.len() as c_int);
            let (byte, comm) = (ffi::RSMPI_UINT8_T, self.comm());
            check("MPI_Isend", ffi::MPI_Isend(from, n, byte, to, TAG, comm, request.as_mut_ptr()))?;
            self.under_way.push(Transfer { request: request.assume_init(), bytes, from: None });
        }
        Ok(())
    }

    /// Begins to receive a message, if one has arrived.
    fn receive(&mut self) -> Result<bool, Cause> {
        let (mut found, mut status) = (0, MaybeUninit::<MPI_Status>::zeroed());
        // SAFETY: all-zero is a value of the status; the buffer has the size of the message that was found, and
        // stays where it is until the request is done.
        unsafe {
            let (byte, comm) = (ffi::RSMPI_UINT8_T, self.comm());
            let any = ffi::RSMPI_ANY_SOURCE;
            check("MPI_Iprobe", ffi::MPI_Iprobe(any, TAG, comm, &mut found, status.as_mut_ptr()))?;
            if found == 0 {
                return Ok(false);
            }
            let (status, mut n) = (status.assume_init(), 0);
            check("MPI_Get_count", ffi::MPI_Get_count(&status, byte, &mut n))?;
            let mut bytes = vec![0u8; usize::try_from(n).unwrap_or(0)];
            let (to, from) = (bytes.as_mut_ptr().cast(), status.MPI_SOURCE);
            let mut request = MaybeUninit::<MPI_Request>::uninit();
            check("MPI_Irecv", ffi::MPI_Irecv(to, n, byte, from, TAG, comm, request.as_mut_ptr()))?;
            self.under_way.push(Transfer { request: request.assume_init(), bytes, from: Some(from) });
        }
        Ok(true)
    }

    /// Answers until all ranks are in `MPI_Finalize`, where no rank asks any more.
    fn close(mut self) -> Result<(), Cause> {
        let mut all_here = MaybeUninit::<MPI_Request>::uninit();
        // SAFETY: a request of ours.
        let mut all_here = unsafe {
            check("MPI_Ibarrier", ffi::MPI_Ibarrier(self.comm(), all_here.as_mut_ptr()))?;
            all_here.assume_init()
        };
        let mut pause = PAUSES[0];
        while !is_done(&mut all_here)? {
            self.step()?.1.into_iter().for_each(take);
            std::thread::sleep(pause);
            pause = (2 * pause).min(PAUSES[1]);
        }
        // A message that is not received any more must stay where MPI may read it.
        std::mem::forget(self.under_way);
        Ok(())
    }
}
