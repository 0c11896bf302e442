//! Receives: which messages of derivatives they leave alone.
//!
//! A rank that waits for a message from any rank with any tag could take one from a rank that is in its
//! backward pass already. Messages of derivatives have tags of their own, and are received from a named
//! rank; what such a wait comes upon is set aside for the receive that it is meant for. Between two ranks
//! nothing overtakes, so that is done on three and more.

use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use mpi::ffi::{self, MPI_Message, MPI_Request, MPI_Status};

use super::span::Span;
use super::waiting;
use crate::call::Envelope;
use crate::comm::Comm;
use crate::error::Cause;
use crate::mpilib::{check, wildcards};
use crate::ops::Buffer;
use crate::sync::lock;

/// A message that was matched, and not received yet.
struct Matched {
    message: MPI_Message,
    source: i32,
    tag: i32,
}

// SAFETY: a handle of MPI's, which was initialized for calls from any thread.
unsafe impl Send for Matched {}

/// Messages of derivatives that a receive with both wildcards has come upon, in the order of their arrival.
///
/// Its lock is held where a receive of such a message looks here first and then asks MPI, and where a message is taken from
/// MPI and put here. Nothing waits for another rank there. If the two steps were apart, another thread could put the
/// message here that the first one is about to wait for in MPI.
#[derive(Default)]
struct SetAside(Mutex<Vec<Matched>>);

impl SetAside {
    fn of(comm: &Comm) -> Result<Arc<Self>, Cause> {
        comm.attach(|| Ok(Self::default()))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Matched>> {
        lock(&self.0)
    }
}

/// Whether the first message that fits is the one to receive.
#[inline]
fn takes_the_first(comm: &Comm, source: i32, tag: i32) -> bool {
    let any = wildcards();
    comm.size <= 2 || (tag < any.derivative && (source, tag) != (any.source, any.tag))
}

/// The first message that no derivative has sent.
///
/// # Safety
/// The communicator is registered and not freed.
unsafe fn first_of_no_derivative(comm: &Comm) -> Result<MPI_Message, Cause> {
    let (any, aside) = (wildcards(), SetAside::of(comm)?);
    let began = Instant::now();
    loop {
        let mut message = MaybeUninit::<MPI_Message>::uninit();
        let (mut flag, mut status) = (0, MaybeUninit::<MPI_Status>::zeroed());
        let mut messages = aside.lock();
        // SAFETY: promised by the caller; both are written where there is a message.
        unsafe {
            let (raw, found) = (comm.handle(), (message.as_mut_ptr(), status.as_mut_ptr()));
            let code = ffi::MPI_Improbe(any.source, any.tag, raw, &mut flag, found.0, found.1);
            check("MPI_Improbe", code)?;
            if flag != 0 {
                let (message, status) = (message.assume_init(), status.assume_init());
                if status.MPI_TAG < any.derivative {
                    return Ok(message);
                }
                messages.push(Matched { message, source: status.MPI_SOURCE, tag: status.MPI_TAG });
                continue;
            }
        }
        drop(messages);
        waiting::pause(began);
    }
}

/// `MPI_Recv`.
///
/// # Safety
/// The communicator is registered and not freed, and `into` may be written to.
#[inline]
pub unsafe fn receive(
    name: &'static str,
    comm: &Comm,
    envelope: &Envelope,
    into: &Buffer,
) -> Result<MPI_Status, Cause> {
    let &Envelope { source, recvtag, .. } = envelope;
    let span = Span::of(into)?;
    let ((n, t), to) = (span.arguments(), into.data().cast());
    let takes_first = takes_the_first(comm, source, recvtag);
    let mut status = MaybeUninit::<MPI_Status>::zeroed();
    // SAFETY: the caller's; the status is filled where there is no error.
    unsafe {
        let code = if takes_first && !waiting::sleeps() {
            ffi::MPI_Recv(to, n, t, source, recvtag, comm.handle(), status.as_mut_ptr())
        } else if takes_first || recvtag >= wildcards().derivative {
            waiting::wait(&mut start(name, comm, envelope, into)?, status.as_mut_ptr())
        } else {
            ffi::MPI_Mrecv(to, n, t, &mut first_of_no_derivative(comm)?, status.as_mut_ptr())
        };
        check(name, code)?;
        Ok(status.assume_init())
    }
}

/// `MPI_Irecv`, from any source or with any tag, not both: what derivatives send is not to be taken.
///
/// # Safety
/// As [`receive`], until the request has ended.
pub unsafe fn start(
    name: &'static str,
    comm: &Comm,
    envelope: &Envelope,
    into: &Buffer,
) -> Result<MPI_Request, Cause> {
    let &Envelope { source, recvtag, .. } = envelope;
    let span = Span::of(into)?;
    let ((n, t), to) = (span.arguments(), into.data().cast());
    let mut request = MaybeUninit::<MPI_Request>::uninit();
    let from_mpi = |request: &mut MaybeUninit<MPI_Request>| {
        // SAFETY: the caller's. MPI_Irecv waits for no rank.
        unsafe { ffi::MPI_Irecv(to, n, t, source, recvtag, comm.handle(), request.as_mut_ptr()) }
    };
    let code = if takes_the_first(comm, source, recvtag) {
        from_mpi(&mut request)
    } else {
        let aside = SetAside::of(comm)?;
        let mut messages = aside.lock();
        let found = messages.iter().position(|it| (it.source, it.tag) == (source, recvtag));
        match found.map(|found| messages.remove(found)) {
            // SAFETY: the caller's.
            Some(Matched { mut message, .. }) => unsafe {
                ffi::MPI_Imrecv(to, n, t, &mut message, request.as_mut_ptr())
            },
            None => from_mpi(&mut request),
        }
    };
    check(name, code)?;
    // SAFETY: written where there is no error.
    Ok(unsafe { request.assume_init() })
}

/// `MPI_Sendrecv`.
///
/// # Safety
/// As [`receive`]; `from` may be read, and does not overlap `into`.
#[inline]
pub unsafe fn exchange(
    name: &'static str,
    comm: &Comm,
    envelope: &Envelope,
    from: &Buffer,
    into: &Buffer,
) -> Result<MPI_Status, Cause> {
    let &Envelope { source, recvtag, dest, sendtag } = envelope;
    let (sent, received) = (Span::of(from)?, Span::of(into)?);
    let ((n, t), (m, u)) = (sent.arguments(), received.arguments());
    let (data, to, raw) = (from.data().cast(), into.data().cast(), comm.handle());
    let mut status = MaybeUninit::<MPI_Status>::zeroed();
    // MPI libraries copy small messages at once, and only large ones would show it.
    debug_assert!(from.data() != into.data() || n == 0, "MPI_Sendrecv from its own result");
    // SAFETY: the caller's; the status is filled where there is no error.
    unsafe {
        let found = status.as_mut_ptr();
        if takes_the_first(comm, source, recvtag) && !waiting::sleeps() {
            let code = ffi::MPI_Sendrecv(data, n, t, dest, sendtag, to, m, u, source, recvtag, raw, found);
            check(name, code)?;
            return Ok(status.assume_init());
        }
        let mut request = MaybeUninit::<MPI_Request>::uninit();
        let code = ffi::MPI_Isend(data, n, t, dest, sendtag, raw, request.as_mut_ptr());
        check("MPI_Isend", code)?;
        let received = receive(name, comm, envelope, into);
        // Not before the send is over may its memory be another's, also where the receive has failed.
        check("MPI_Wait", waiting::wait(request.assume_init_mut(), found))?;
        received
    }
}
