//! Messages that one operation sends and receives: ghost cells, and parts of arrays.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::sync::Arc;

use mpi::ffi::{self, MPI_Comm, MPI_Request, MPI_Status};
use smallvec::SmallVec;

use super::duplicate::Duplicate;
use super::span::Span;
use crate::comm::Comm;
use crate::error::Cause;
use crate::mpilib::check;
use crate::ops::{Dtype, Wire};

/// One message, in memory that is its own until it has ended.
struct P2p {
    is_receive: bool,
    peer: i32,
    tag: c_int,
    data: *mut u8,
    bytes: usize,
}

/// Messages that travel at once.
pub struct P2pBatch {
    comm: Arc<Duplicate>,
    /// Added to the tags of messages.
    tag: c_int,
    /// Kept back, until there is a communicator for them.
    kept_back: SmallVec<[P2p; 16]>,
    requests: SmallVec<[MPI_Request; 64]>,
    /// Of the requests, which begin with those of receives: the source and the bytes that are expected.
    receives: SmallVec<[(i32, usize); 32]>,
}

impl P2pBatch {
    /// Messages whose tags are directions, of an operation that waits for them.
    pub fn of_directions(comm: &Comm) -> Result<Self, Cause> {
        Duplicate::of(comm).map(|comm| Self::on(comm, 0))
    }

    /// Messages of an operation that all ranks of the communicator take part in.
    pub fn new(comm: &Comm) -> Result<Self, Cause> {
        let comm = Duplicate::of(comm)?;
        let tag = comm.next_tag();
        Ok(Self::on(comm, tag))
    }

    fn on(comm: Arc<Duplicate>, tag: c_int) -> Self {
        let (kept_back, requests, receives) = Default::default();
        Self { comm, tag, kept_back, requests, receives }
    }

    /// Sends and receives what was kept back, if there is a communicator by now; whether there is.
    pub fn post(&mut self) -> Result<bool, Cause> {
        let Some(comm) = self.comm.handle()? else { return Ok(false) };
        for message in std::mem::take(&mut self.kept_back) {
            self.start(comm, &message)?;
        }
        Ok(true)
    }

    fn add(&mut self, message: P2p) -> Result<(), Cause> {
        if message.is_receive {
            self.receives.push((message.peer, message.bytes));
        }
        match self.comm.handle()? {
            Some(comm) if self.kept_back.is_empty() => self.start(comm, &message),
            _ => {
                self.kept_back.push(message);
                Ok(())
            }
        }
    }

    fn start(&mut self, comm: MPI_Comm, message: &P2p) -> Result<(), Cause> {
        let &P2p { is_receive, peer, tag, data, bytes } = message;
        let span = Span::new(bytes, Dtype::Uint8)?;
        let (data, n, t, tag) = (data.cast(), span.count, span.datatype, self.tag + tag);
        let mut request = MaybeUninit::uninit();
        // SAFETY: whoever has added the message keeps its memory until it has ended; MPI writes the request where there is
        // no error.
        unsafe {
            let request = request.as_mut_ptr();
            if is_receive {
                check("MPI_Irecv", ffi::MPI_Irecv(data, n, t, peer, tag, comm, request))?;
            } else {
                check("MPI_Isend", ffi::MPI_Isend(data, n, t, peer, tag, comm, request))?;
            }
            self.requests.push(*request);
        }
        Ok(())
    }

    /// Whether all have ended, as far as MPI knows; this call lets MPI go on with them.
    pub fn test(&mut self) -> Result<bool, Cause> {
        Ok(self.post()? && have_ended(&self.requests)?)
    }
}

/// Whether all of these have ended. They stay requests, whatever the answer is.
pub fn have_ended(requests: &[MPI_Request]) -> Result<bool, Cause> {
    for &request in requests {
        let (mut flag, mut status) = (0, MaybeUninit::<MPI_Status>::zeroed());
        // SAFETY: a request that nobody else uses now.
        let code = unsafe { ffi::MPI_Request_get_status(request, &mut flag, status.as_mut_ptr()) };
        check("MPI_Request_get_status", code)?;
        if flag == 0 {
            return Ok(false);
        }
    }
    Ok(true)
}

impl Wire for P2pBatch {
    unsafe fn receive(&mut self, peer: i32, tag: i32, into: *mut u8, bytes: usize) -> Result<(), Cause> {
        self.add(P2p { is_receive: true, peer, tag, data: into, bytes })
    }

    unsafe fn send(&mut self, peer: i32, tag: i32, from: *mut u8, bytes: usize) -> Result<(), Cause> {
        self.add(P2p { is_receive: false, peer, tag, data: from, bytes })
    }

    fn wait(&mut self) -> Result<(), Cause> {
        while !self.post()? {
            std::thread::yield_now();
        }
        for (i, request) in self.requests.iter_mut().enumerate() {
            let mut status = MaybeUninit::<MPI_Status>::zeroed();
            // SAFETY: a request that is under way.
            unsafe { check("MPI_Wait", ffi::MPI_Wait(request, status.as_mut_ptr()))? };
            let Some(&(peer, bytes)) = self.receives.get(i) else { continue };
            let mut count: ffi::MPI_Count = 0;
            // SAFETY: the status of a receive of bytes.
            unsafe {
                let code = ffi::MPI_Get_elements_x(status.as_ptr(), Dtype::Uint8.mpi(), &mut count);
                check("MPI_Get_elements_x", code)?;
            }
            if count as usize != bytes {
                return Err(Cause::Ghosts { received: count as usize, source_rank: peer, expected: bytes });
            }
        }
        Ok(())
    }
}
