//! Receives: which messages of derivatives they leave alone.
//!
//! A rank that waits for a message from any rank with any tag could take one from a rank that is in its
//! backward pass already. Messages of derivatives have tags of their own, and are received from a named
//! rank; what such a wait comes upon is set aside for the receive that it is meant for. Between two ranks
//! nothing overtakes, so that is done on three and more.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex, PoisonError};

use mpi::ffi::{self, MPI_Comm, MPI_Datatype, MPI_Message, MPI_Request, MPI_Status};

use crate::call::Envelope;
use crate::comm::Comm;
use crate::error::Cause;
use crate::mpilib::{check, handle, wildcards};

/// A buffer as MPI's functions take it.
#[derive(Clone, Copy)]
pub struct Memory {
    pub data: *mut c_void,
    pub count: c_int,
    pub datatype: MPI_Datatype,
}

struct Message {
    message: MPI_Message,
    source: i32,
    tag: i32,
}

// SAFETY: a handle of MPI's, which was initialised for calls from any thread.
unsafe impl Send for Message {}

/// Messages of derivatives that somebody else has come upon, in the order of their arrival.
#[derive(Default)]
struct SetAside(Mutex<Vec<Message>>);

impl SetAside {
    fn of(comm: &Comm) -> Result<Arc<Self>, Cause> {
        comm.attach(|| Ok(Self::default()))
    }

    fn take(&self, source: i32, tag: i32) -> Option<MPI_Message> {
        let mut messages = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let found = messages.iter().position(|it| (it.source, it.tag) == (source, tag))?;
        Some(messages.remove(found).message)
    }

    fn add(&self, message: Message) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(message);
    }
}

/// Whether the first message that fits is the one to receive.
#[inline]
fn takes_the_first(comm: &Comm, source: i32, tag: i32) -> bool {
    let any = wildcards();
    comm.size <= 2 || (tag < any.derivative && (source, tag) != (any.source, any.tag))
}

/// The message to receive, if it is not just the first one to come.
#[inline]
unsafe fn chosen(comm: &Comm, source: i32, tag: i32) -> Result<Option<MPI_Message>, Cause> {
    if takes_the_first(comm, source, tag) {
        return Ok(None);
    }
    if tag >= wildcards().derivative {
        return Ok(comm.attached::<SetAside>().and_then(|aside| aside.take(source, tag)));
    }
    // SAFETY: the caller's.
    unsafe { first_of_no_derivative(comm).map(Some) }
}

unsafe fn first_of_no_derivative(comm: &Comm) -> Result<MPI_Message, Cause> {
    let any = wildcards();
    loop {
        let mut message = MaybeUninit::<MPI_Message>::uninit();
        let mut status = MaybeUninit::<MPI_Status>::zeroed();
        // SAFETY: the caller's.
        let (message, status) = unsafe {
            let comm: MPI_Comm = handle(comm.handle);
            let found = (message.as_mut_ptr(), status.as_mut_ptr());
            check("MPI_Mprobe", ffi::MPI_Mprobe(any.source, any.tag, comm, found.0, found.1))?;
            (message.assume_init(), status.assume_init())
        };
        let (source, tag) = (status.MPI_SOURCE, status.MPI_TAG);
        if tag < any.derivative {
            return Ok(message);
        }
        SetAside::of(comm)?.add(Message { message, source, tag });
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
    into: Memory,
) -> Result<MPI_Status, Cause> {
    let &Envelope { source, recvtag, .. } = envelope;
    let Memory { data, count, datatype } = into;
    let mut status = MaybeUninit::<MPI_Status>::zeroed();
    // SAFETY: the caller's; the status is filled where there is no error.
    unsafe {
        let code = match chosen(comm, source, recvtag)? {
            Some(mut message) => ffi::MPI_Mrecv(data, count, datatype, &mut message, status.as_mut_ptr()),
            None => {
                let comm: MPI_Comm = handle(comm.handle);
                ffi::MPI_Recv(data, count, datatype, source, recvtag, comm, status.as_mut_ptr())
            }
        };
        check(name, code)?;
        Ok(status.assume_init())
    }
}

/// `MPI_Irecv`, of anybody's message or with any tag, not both: what derivatives send is not to be taken.
///
/// # Safety
/// As [`receive`], until the request has ended.
pub unsafe fn start(comm: &Comm, envelope: &Envelope, into: Memory, request: *mut MPI_Request) -> c_int {
    let &Envelope { source, recvtag, .. } = envelope;
    let Memory { data, count, datatype } = into;
    let aside = || comm.attached::<SetAside>()?.take(source, recvtag);
    // SAFETY: the caller's.
    unsafe {
        match if takes_the_first(comm, source, recvtag) { None } else { aside() } {
            Some(mut message) => ffi::MPI_Imrecv(data, count, datatype, &mut message, request),
            None => ffi::MPI_Irecv(data, count, datatype, source, recvtag, handle(comm.handle), request),
        }
    }
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
    from: Memory,
    into: Memory,
) -> Result<MPI_Status, Cause> {
    let &Envelope { source, recvtag, dest, sendtag } = envelope;
    let mut status = MaybeUninit::<MPI_Status>::zeroed();
    // SAFETY: the caller's; the status is filled where there is no error.
    unsafe {
        let raw: MPI_Comm = handle(comm.handle);
        let found = status.as_mut_ptr();
        if takes_the_first(comm, source, recvtag) {
            let (out, to) = (from, into);
            let code = ffi::MPI_Sendrecv(
                out.data,
                out.count,
                out.datatype,
                dest,
                sendtag,
                to.data,
                to.count,
                to.datatype,
                source,
                recvtag,
                raw,
                found,
            );
            check(name, code)?;
            return Ok(status.assume_init());
        }
        let mut request = MaybeUninit::<MPI_Request>::uninit();
        let Memory { data, count, datatype } = from;
        let code = ffi::MPI_Isend(data, count, datatype, dest, sendtag, raw, request.as_mut_ptr());
        check("MPI_Isend", code)?;
        let received = receive(name, comm, envelope, into);
        // Not before the send is over may its memory be another's, also where the receive has failed.
        check("MPI_Wait", ffi::MPI_Wait(request.as_mut_ptr(), found))?;
        received
    }
}
