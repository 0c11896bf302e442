//! Messages that one blocking operation sends and receives: ghost cells, and parts of arrays.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::sync::Arc;

use mpi::ffi::{self, MPI_Comm, MPI_Datatype, MPI_Request, MPI_Status};
use smallvec::SmallVec;

use super::span::Span;
use super::{allow, elements, waiting};
use crate::call::Site;
use crate::comm::OwnedComm;
use crate::error::Cause;
use crate::mpilib::check;
use crate::ops::{Dtype, Private, Wire};

/// See [`Private::Messages`].
struct Messages(OwnedComm);

/// The tag of all messages: there is one at a time from a rank to another.
const TAG: c_int = 0;

/// Messages that are under way at the same time.
pub struct P2pBatch {
    comm: Arc<Messages>,
    /// Source and number of bytes of each receive; its request is at the same index of `requests`;
    /// the requests of the sends follow.
    receives: SmallVec<[(i32, usize); 32]>,
    requests: SmallVec<[MPI_Request; 64]>,
}

impl P2pBatch {
    pub fn new(site: &Site) -> Result<Self, Cause> {
        allow(site, Private::Messages)?;
        let comm = site.comm.attach(|| site.comm.split(site.comm.rank).map(Messages))?;
        Ok(Self { comm, receives: SmallVec::new(), requests: SmallVec::new() })
    }

    /// Starts a message of this many bytes.
    fn start(
        &mut self,
        name: &'static str,
        bytes: usize,
        start: impl FnOnce(MPI_Comm, c_int, MPI_Datatype, *mut MPI_Request) -> c_int,
    ) -> Result<(), Cause> {
        let span = Span::new(bytes, Dtype::Uint8)?;
        let (n, t) = span.arguments();
        let mut request = MaybeUninit::uninit();
        check(name, start(self.comm.0.handle(), n, t, request.as_mut_ptr()))?;
        // SAFETY: written by a call that succeeded.
        self.requests.push(unsafe { request.assume_init() });
        Ok(())
    }
}

impl Wire for P2pBatch {
    unsafe fn receive(&mut self, peer: i32, into: *mut u8, bytes: usize) -> Result<(), Cause> {
        self.receives.push((peer, bytes));
        // SAFETY: promised by the caller.
        self.start("MPI_Irecv", bytes, |comm, n, t, request| unsafe {
            ffi::MPI_Irecv(into.cast(), n, t, peer, TAG, comm, request)
        })
    }

    unsafe fn send(&mut self, peer: i32, from: *mut u8, bytes: usize) -> Result<(), Cause> {
        // SAFETY: promised by the caller.
        self.start("MPI_Isend", bytes, |comm, n, t, request| unsafe {
            ffi::MPI_Isend(from.cast(), n, t, peer, TAG, comm, request)
        })
    }

    fn wait(&mut self) -> Result<(), Cause> {
        for (i, request) in self.requests.iter_mut().enumerate() {
            let mut status = MaybeUninit::<MPI_Status>::zeroed();
            // SAFETY: a request that is under way.
            unsafe { check("MPI_Wait", waiting::wait(request, status.as_mut_ptr()))? };
            let Some(&(peer, bytes)) = self.receives.get(i) else { continue };
            // SAFETY: zeros, or what the wait has written.
            let received = elements(&unsafe { status.assume_init() }, Dtype::Uint8)?;
            if received != bytes {
                return Err(Cause::MessageLength { received, source_rank: peer, expected: bytes });
            }
        }
        Ok(())
    }
}
