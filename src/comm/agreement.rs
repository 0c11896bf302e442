//! What all ranks of a communicator tell each other, to be compared: numbers, and texts where the numbers differ.

use std::ffi::c_int;
use std::mem::{MaybeUninit, forget};
use std::time::{Duration, Instant};

use mpi::ffi::{self, MPI_Request, MPI_Status};

use super::Comm;
use crate::error::Cause;
use crate::mpilib::{check, have_ended, wildcards};

/// The largest length of a text in bytes.
const TEXT: usize = 240;
/// For how long rank 0 waits for the texts of the others. A rank sends its own where it learns of the difference, and may never come
/// there.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often rank 0 looks for them.
const PAUSE: Duration = Duration::from_millis(1);

/// Of a number that should be equal on all ranks: the smallest one, and the complement of the largest one. MPI reads and writes this
/// memory until all ranks have come.
pub struct Agreement {
    own: Box<[u64; 2]>,
    least: Box<[u64; 2]>,
}

impl Agreement {
    fn new(number: u64) -> Self {
        // The largest number has the smallest complement.
        Self { own: Box::new([number, !number]), least: Box::new([0; 2]) }
    }

    /// Sends this rank's number to all ranks without waiting; the request receives their numbers.
    /// Collective.
    pub fn start(comm: &Comm, number: u64) -> Result<(Self, MPI_Request), Cause> {
        let mut told = Self::new(number);
        let mut request = MaybeUninit::uninit();
        // SAFETY: a registered communicator, which is not freed, and memory that stays where it is. The request is written where
        // there is no error.
        unsafe {
            let (from, to) = (told.own.as_ptr().cast(), told.least.as_mut_ptr().cast());
            let (t, min, comm) = (ffi::RSMPI_UINT64_T, ffi::RSMPI_MIN, comm.handle());
            let code = ffi::MPI_Iallreduce(from, to, 2, t, min, comm, request.as_mut_ptr());
            check("MPI_Iallreduce of what is compared", code)?;
            Ok((told, request.assume_init()))
        }
    }

    /// Whether all ranks have the same number, once they have come.
    pub fn is_reached(&self) -> bool {
        self.own == self.least
    }
}

/// Waits for what was started here.
fn wait_for(mut request: MPI_Request) -> Result<(), Cause> {
    let mut status = MaybeUninit::<MPI_Status>::uninit();
    // SAFETY: a request that is under way.
    check("MPI_Wait", unsafe { ffi::MPI_Wait(&mut request, status.as_mut_ptr()) })
}

impl Comm {
    /// Whether all ranks have the same number. Collective.
    pub fn agrees(&self, number: u64) -> Result<bool, Cause> {
        let mut told = Agreement::new(number);
        // SAFETY: a registered communicator, which is not freed; two numbers each way.
        let code = unsafe {
            let (from, to) = (told.own.as_ptr().cast(), told.least.as_mut_ptr().cast());
            let (t, min) = (ffi::RSMPI_UINT64_T, ffi::RSMPI_MIN);
            ffi::MPI_Allreduce(from, to, 2, t, min, self.handle())
        };
        check("MPI_Allreduce of what is compared", code)?;
        Ok(told.is_reached())
    }

    /// The texts of this rank and, on rank 0, of the others that have sent one within some time, by rank.
    ///
    /// A rank that learns of a difference in a wait cannot know which collectives the others have started meanwhile. So the texts
    /// are messages, in no order with collectives. The job ends afterwards: nobody else receives what has this tag.
    #[cold]
    fn gather_texts(&self, text: &str) -> Result<Vec<(i32, String)>, Cause> {
        let mut texts = vec![(self.rank, text.to_owned())];
        // SAFETY: constants of the MPI shim; a registered communicator, which is not freed; memory of the lengths that are given,
        // which is leaked where MPI may still read it.
        unsafe {
            let (byte, tag, comm) = (ffi::RSMPI_UINT8_T, wildcards().tag_limit, self.handle());
            if self.rank != 0 {
                let bytes = text.as_bytes().to_vec().leak();
                let mut request = MaybeUninit::uninit();
                let (from, n) = (bytes.as_ptr().cast(), bytes.len().min(TEXT) as c_int);
                let code = ffi::MPI_Isend(from, n, byte, 0, tag, comm, request.as_mut_ptr());
                check("MPI_Isend of what differs", code)?;
                return Ok(texts);
            }
            let began = Instant::now();
            while texts.len() < self.size as usize && began.elapsed() < PATIENCE {
                let (mut found, mut status) = (0, MaybeUninit::<MPI_Status>::zeroed());
                let any = ffi::RSMPI_ANY_SOURCE;
                check("MPI_Iprobe", ffi::MPI_Iprobe(any, tag, comm, &mut found, status.as_mut_ptr()))?;
                if found == 0 {
                    std::thread::sleep(PAUSE);
                    continue;
                }
                let (status, mut n, mut bytes) = (status.assume_init(), 0, [0u8; TEXT]);
                check("MPI_Get_count", ffi::MPI_Get_count(&status, byte, &mut n))?;
                let (to, from, mut ignored) = (bytes.as_mut_ptr().cast(), status.MPI_SOURCE, status);
                check("MPI_Recv", ffi::MPI_Recv(to, TEXT as c_int, byte, from, tag, comm, &mut ignored))?;
                let text = String::from_utf8_lossy(&bytes[..(n.max(0) as usize).min(TEXT)]);
                texts.push((from, text.into_owned()));
            }
        }
        texts.sort_unstable();
        Ok(texts)
    }
}

/// Whether all ranks do the same, and what each of them does otherwise: asked where an operation is started, and judged in the wait
/// for it.
pub struct Comparison {
    asked: Option<(Agreement, MPI_Request)>,
    text: String,
}

// SAFETY: a handle of MPI's, which was initialized for calls from any thread; one thread at a time uses it.
unsafe impl Send for Comparison {}

impl Comparison {
    /// Collective, and waits for no other rank.
    pub fn start(comm: &Comm, number: u64, text: String) -> Result<Self, Cause> {
        Ok(Self { asked: Some(Agreement::start(comm, number)?), text })
    }

    /// Whether all ranks have answered; lets MPI go on.
    pub fn test(&self) -> Result<bool, Cause> {
        // SAFETY: a request that no other thread uses now.
        self.asked.as_ref().map_or(Ok(true), |(_, request)| unsafe { have_ended(&[*request]) })
    }

    /// Waits for the answers: if the numbers differ, the texts that are known, by rank.
    pub fn wait(mut self, comm: &Comm) -> Result<Option<Vec<(i32, String)>>, Cause> {
        let Some((agreement, request)) = self.asked.take() else { return Ok(None) };
        wait_for(request)?;
        if agreement.is_reached() { Ok(None) } else { comm.gather_texts(&self.text).map(Some) }
    }
}

impl Drop for Comparison {
    /// Nobody has waited for it: MPI may still write.
    fn drop(&mut self) {
        forget(self.asked.take());
    }
}
