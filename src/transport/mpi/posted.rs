//! Nonblocking operations under way: MPI's requests, and what MPI reads until they end.

use std::ffi::c_int;
use std::mem::MaybeUninit;

use mpi::ffi::{self, MPI_Comm, MPI_Request, MPI_Status};
use smallvec::SmallVec;

use super::finish_receive;
use super::lengths::Lengths;
use super::reducer::Reducer;
use super::vectors::Vectors;
use super::waiting;
use crate::call::Call;
use crate::comm::Agreement;
use crate::error::Cause;
use crate::mpilib::{check, have_ended, neighbours, wildcards};
use crate::ops::{Buffer, Op, Parts};

/// The requests of a nonblocking operation, and what MPI uses until they end. A large reduction has several.
#[derive(Default)]
pub struct Posted {
    pub(super) requests: SmallVec<[MPI_Request; 1]>,
    /// Counts, displacements and types of an operation that has parts or counts: MPI reads them until it has ended.
    vectors: Option<Box<[Vectors; 2]>>,
    /// The lengths of the blocks of a `gatherv` or `scatterv`, which MPI writes.
    pub(super) lengths: Option<Lengths>,
    /// The operands of all ranks, for a scan that begins at the last one.
    pub(super) operands: Option<Vec<u8>>,
    /// Number of items of each rank, for a reduce_scatterv.
    pub(super) items: Option<Box<[c_int]>>,
    /// Whether all ranks have given the same counts: the answer is the first request.
    agreement: Option<Agreement>,
}

// SAFETY: handles of MPI's, which was initialized for calls from any thread; one thread at a time uses them.
unsafe impl Send for Posted {}

impl Drop for Posted {
    /// Dropped before its end, after an error: its memory is leaked, because MPI may still use it.
    fn drop(&mut self) {
        if !self.requests.is_empty() {
            std::mem::forget((self.vectors.take(), self.operands.take(), self.items.take()));
            std::mem::forget((self.agreement.take(), self.lengths.take()));
        }
    }
}

/// Calls the blocking function, or the nonblocking one with a request of its own if there is a list to add it to.
macro_rules! either {
    ($posted:ident, $blocking:ident | $starting:ident($($argument:expr),+)) => {
        match $posted.as_deref_mut() {
            None => check(stringify!($blocking), ffi::$blocking($($argument),+)),
            Some(posted) => posted.add(stringify!($starting), |request| ffi::$starting($($argument),+, request)),
        }
    };
}
pub(super) use either;

impl Posted {
    /// Calls a nonblocking function of MPI and keeps its request.
    pub(super) fn add(
        &mut self,
        name: &'static str,
        start: impl FnOnce(*mut MPI_Request) -> c_int,
    ) -> Result<(), Cause> {
        let mut request = MaybeUninit::uninit();
        check(name, start(request.as_mut_ptr()))?;
        // SAFETY: written by what starts it, where there is no error.
        self.requests.push(unsafe { request.assume_init() });
        Ok(())
    }

    /// Starts an operation that has parts.
    ///
    /// # Safety
    /// The call's buffers are the request's own, and have passed `Parts::check`.
    pub(super) unsafe fn start_parts(&mut self, call: &Call, parts: &Parts) -> Result<(), Cause> {
        let comm: MPI_Comm = call.site.comm.handle();
        // SAFETY: a registered communicator's handle, which is not freed.
        let neighbours = unsafe { neighbours(comm) };
        let [send, recv] = parts.both();
        let ranks = (call.site.comm.rank as usize, parts.size());
        let vectors = [
            Vectors::new(ranks, send, call.send, neighbours)?,
            Vectors::new(ranks, recv, call.recv, neighbours)?,
        ];
        let vectors = self.vectors.insert(Box::new(vectors));
        let pointers = |v: &Vectors| (v.counts.as_ptr(), v.starts.as_ptr(), v.types.as_ptr());
        let [(n, at, t), (to_n, to_at, to_t)] = [pointers(&vectors[0]), pointers(&vectors[1])];
        let data =
            |buffer: Option<Buffer>| buffer.map_or(std::ptr::null_mut(), |buffer| buffer.data().cast());
        let (from, to) = (data(call.send), data(call.recv));
        if let Some(recv) = call.recv {
            // SAFETY: promised by the caller.
            unsafe {
                parts.clear(&recv);
                parts.copy_own(call.send, call.recv);
            }
        }
        // SAFETY: promised by the caller; what MPI reads is kept until the operation has ended.
        self.add("MPI_Ialltoallw", |request| unsafe {
            ffi::MPI_Ialltoallw(from, n, at, t, to, to_n, to_at, to_t, comm, request)
        })
    }

    /// Asks the other ranks whether they have the same number, without waiting for the answer.
    pub(super) fn agree(&mut self, call: &Call, number: u64) -> Result<(), Cause> {
        let (agreement, request) = Agreement::start(&call.site.comm, number)?;
        self.agreement = Some(agreement);
        self.requests.push(request);
        Ok(())
    }

    /// Whether MPI says that all of it has ended; this call lets MPI go on with it. Where it has, [`Self::wait`] takes no time.
    pub fn test(&mut self) -> Result<bool, Cause> {
        // SAFETY: requests that no other thread uses now.
        unsafe { have_ended(&self.requests) }
    }

    /// Waits for the end; `call` is the one that was started.
    pub fn wait(&mut self, call: &Call) -> Result<(), Cause> {
        let mut status = MaybeUninit::<MPI_Status>::zeroed();
        for request in &mut self.requests {
            // SAFETY: a request that no other thread uses now. MPI makes it null.
            check(call.site.mpi_name(), unsafe { waiting::wait(request, status.as_mut_ptr()) })?;
            // The other initiated operations may never complete if the ranks do not agree, so the
            // error aborts the job.
            if self.agreement.take_if(|agreement| !agreement.is_reached()).is_some() {
                return Err(Cause::Counts { counts: call.parts()?.sent() });
            }
        }
        self.requests.clear();
        if let Some(vectors) = self.vectors.take() {
            return vectors[1].check();
        }
        if let Some(lengths) = self.lengths.take() {
            return lengths.check(call);
        }
        // SAFETY: zeros, or what the wait has written.
        let status = unsafe { status.assume_init() };
        match (call.site.op, &call.recv) {
            // What was there before stays.
            (Op::Recv, _) if call.envelope.source == wildcards().proc_null => Ok(()),
            (Op::Recv, _) => finish_receive(call, &status),
            (Op::Exscan, Some(recv)) if call.site.is_first() => {
                // SAFETY: the memory of the result, which MPI leaves undefined.
                unsafe { recv.data().write_bytes(0, recv.bytes()) };
                Ok(())
            }
            (Op::Exscan | Op::Scan, Some(recv)) => match self.operands.take() {
                // SAFETY: an operand of each rank, of the result's size; and the request's own memory.
                Some(operands) => unsafe { scan_from_the_last(call, operands, recv) },
                None => Ok(()),
            },
            _ => Ok(()),
        }
    }
}

/// Reduces the operands of the ranks from the last one to this one, or to the one after it.
///
/// # Safety
/// `operands` are as large as `recv` for each rank, and `recv` is used by nothing else.
unsafe fn scan_from_the_last(call: &Call, mut operands: Vec<u8>, recv: &Buffer) -> Result<(), Cause> {
    let site = call.site;
    let by = Reducer::of(site, recv.dtype())?;
    let first = site.comm.rank as usize + usize::from(site.op == Op::Exscan);
    for rank in first..site.comm.size as usize {
        // SAFETY: promised by the caller.
        unsafe {
            let from = operands.as_mut_ptr().add(rank * recv.bytes());
            if rank == first {
                recv.data().copy_from_nonoverlapping(from, recv.bytes());
                continue;
            }
            by.in_pieces(recv, (from.cast(), recv.data()), |from, to, n| {
                check("MPI_Reduce_local", ffi::MPI_Reduce_local(from, to, n, by.datatype, by.op))
            })?;
        }
    }
    Ok(())
}
