//! Whether all ranks of a communicator have the same number.

use std::ffi::c_int;
use std::mem::{MaybeUninit, forget, take};

use mpi::ffi::{self, MPI_Comm, MPI_Request, MPI_Status};

use super::Comm;
use crate::error::Cause;
use crate::mpilib::{check, have_ended};

/// A number and its complement, of this rank, and the greatest of both of all ranks.
type Numbers = [[u64; 2]; 2];

/// A question to all ranks. MPI reads and writes its memory until all have answered.
pub struct Agreement(Box<Numbers>);

impl Agreement {
    /// Asks, and goes on; the request is that of the answer.
    pub fn start(comm: &Comm, number: u64) -> Result<(Self, MPI_Request), Cause> {
        let mut agreement = Self(Box::new([[number, !number]; 2]));
        let [own, greatest] = &mut *agreement.0;
        let (from, to, n) = (own.as_ptr().cast(), greatest.as_mut_ptr().cast(), own.len() as c_int);
        let mut request = MaybeUninit::uninit();
        // SAFETY: a registered communicator, which is not freed, constants of the MPI shim, and memory that stays where it is.
        // The request is written where there is no error.
        unsafe {
            let (kind, op) = (ffi::RSMPI_UINT64_T, ffi::RSMPI_MAX);
            let code = ffi::MPI_Iallreduce(from, to, n, kind, op, comm.handle(), request.as_mut_ptr());
            check("MPI_Iallreduce of a fingerprint", code)?;
            Ok((agreement, request.assume_init()))
        }
    }

    /// Whether all ranks have the same number, once they have answered.
    pub fn is_reached(&self) -> bool {
        // SAFETY: MPI has written it since the compiler saw it last.
        let greatest = unsafe { (&raw const self.0[1]).read_volatile() };
        // The greatest number is also the least one if all are equal.
        greatest[0] == !greatest[1]
    }
}

/// Waits for the answer to a question of this file's, which is under way.
fn wait_for(mut request: MPI_Request) -> Result<(), Cause> {
    let mut status = MaybeUninit::<MPI_Status>::uninit();
    // SAFETY: a request that is under way.
    check("MPI_Wait", unsafe { ffi::MPI_Wait(&mut request, status.as_mut_ptr()) })
}

impl Comm {
    /// Whether all ranks have the same number. Collective.
    pub fn agrees(&self, number: u64) -> Result<bool, Cause> {
        let (agreement, request) = Agreement::start(self, number)?;
        wait_for(request)?;
        Ok(agreement.is_reached())
    }
}

/// Bytes of text that a rank contributes to a comparison.
const TEXT: usize = 240;

/// The texts of all ranks, which MPI writes until all have come.
pub struct Texts {
    own: Box<[u8]>,
    all: Box<[u8]>,
}

impl Texts {
    /// Tells all ranks a text of this one, and goes on; the request is that of theirs. Collective.
    fn start(comm: &Comm, text: &str) -> Result<(Self, MPI_Request), Cause> {
        let mut texts = Self { own: vec![0; TEXT].into(), all: vec![0; TEXT * comm.size as usize].into() };
        let length = text.len().min(TEXT);
        texts.own[..length].copy_from_slice(&text.as_bytes()[..length]);
        let mut request = MaybeUninit::uninit();
        // SAFETY: a registered communicator, which is not freed, and memory that stays where it is, of as many bytes from each
        // rank. The request is written where there is no error.
        unsafe {
            let (n, t, comm): (_, _, MPI_Comm) = (TEXT as c_int, ffi::RSMPI_UINT8_T, comm.handle());
            let (from, to) = (texts.own.as_ptr().cast(), texts.all.as_mut_ptr().cast());
            let code = ffi::MPI_Iallgather(from, n, t, to, n, t, comm, request.as_mut_ptr());
            check("MPI_Iallgather of operations", code)?;
            Ok((texts, request.assume_init()))
        }
    }

    /// By rank. MPI has written them.
    fn read(&self) -> Vec<String> {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned();
        self.all.chunks(TEXT).map(text).collect()
    }
}

/// Whether all ranks do the same, and what each of them does otherwise: asked where an operation is started, and judged in the wait
/// for it.
///
/// The texts are told at once, not only where the numbers differ: a rank that learns of a difference in a wait cannot
/// know which collectives the others have started meanwhile, and so could not gather anything.
pub struct Comparison {
    agreement: Agreement,
    texts: Texts,
    /// Of the numbers, and of the texts.
    requests: Vec<MPI_Request>,
}

// SAFETY: handles of MPI's, which was initialized for calls from any thread; one thread at a time uses them.
unsafe impl Send for Comparison {}

impl Comparison {
    /// Collective, and waits for no other rank.
    pub fn start(comm: &Comm, number: u64, text: &str) -> Result<Self, Cause> {
        let (agreement, first) = Agreement::start(comm, number)?;
        let (texts, second) = Texts::start(comm, text)?;
        Ok(Self { agreement, texts, requests: vec![first, second] })
    }

    /// Whether all ranks have answered; lets MPI go on.
    pub fn test(&self) -> Result<bool, Cause> {
        // SAFETY: requests that no other thread uses now.
        unsafe { have_ended(&self.requests) }
    }

    /// Waits for the answers: the texts of all ranks, if their numbers differ.
    pub fn wait(mut self) -> Result<Option<Vec<String>>, Cause> {
        take(&mut self.requests).into_iter().try_for_each(wait_for)?;
        Ok((!self.agreement.is_reached()).then(|| self.texts.read()))
    }
}

impl Drop for Comparison {
    /// Nobody has waited for it: MPI may still write.
    fn drop(&mut self) {
        if !self.requests.is_empty() {
            forget((take(&mut self.agreement.0), take(&mut self.texts.own), take(&mut self.texts.all)));
        }
    }
}

impl Comm {
    /// The texts of all ranks. Collective.
    pub fn all_texts(&self, text: &str) -> Result<Vec<String>, Cause> {
        let (texts, request) = Texts::start(self, text)?;
        wait_for(request)?;
        Ok(texts.read())
    }
}
