//! What all ranks of a communicator tell each other, to be compared: numbers, and texts.

use std::ffi::c_int;
use std::mem::{MaybeUninit, forget};

use mpi::ffi::{self, MPI_Request, MPI_Status};

use super::Comm;
use crate::error::Cause;
use crate::mpilib::{check, have_ended};

/// The lengths of the number and of the text in bytes.
const NUMBER: usize = size_of::<u64>();
const TEXT: usize = 240;

/// A number of each rank, which should be equal, and perhaps a text. MPI reads and writes this memory until all have come.
pub struct Agreement {
    own: Box<[u8]>,
    all: Box<[u8]>,
}

impl Agreement {
    /// Tells all ranks those of this one, and goes on; the request is that of theirs. Collective.
    pub fn start(comm: &Comm, number: u64, text: Option<&str>) -> Result<(Self, MPI_Request), Cause> {
        let mut own = number.to_ne_bytes().to_vec();
        if let Some(text) = text {
            own.extend(&text.as_bytes()[..text.len().min(TEXT)]);
            own.resize(NUMBER + TEXT, 0);
        }
        let mut told = Self { all: vec![0; own.len() * comm.size as usize].into(), own: own.into() };
        let mut request = MaybeUninit::uninit();
        // SAFETY: a registered communicator, which is not freed, and memory that stays where it is, of as many bytes from each
        // rank. The request is written where there is no error.
        unsafe {
            let (n, t, comm) = (told.own.len() as c_int, ffi::RSMPI_UINT8_T, comm.handle());
            let (from, to) = (told.own.as_ptr().cast(), told.all.as_mut_ptr().cast());
            let code = ffi::MPI_Iallgather(from, n, t, to, n, t, comm, request.as_mut_ptr());
            check("MPI_Iallgather of what is compared", code)?;
            Ok((told, request.assume_init()))
        }
    }

    /// What each rank has told, after MPI has written it.
    fn parts(&self) -> impl Iterator<Item = &[u8]> {
        self.all.chunks(self.own.len())
    }

    /// Whether all ranks have the same number, once they have come.
    pub fn is_reached(&self) -> bool {
        self.parts().all(|part| part[..NUMBER] == self.own[..NUMBER])
    }

    fn texts(&self) -> Vec<String> {
        let text = |part: &[u8]| String::from_utf8_lossy(&part[NUMBER..]).trim_end_matches('\0').to_owned();
        self.parts().map(text).collect()
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
        let (agreement, request) = Agreement::start(self, number, None)?;
        wait_for(request)?;
        Ok(agreement.is_reached())
    }
}

/// Whether all ranks do the same, and what each of them does otherwise: asked where an operation is started, and judged in the wait
/// for it.
///
/// The texts are told at once, not only where the numbers differ: a rank that learns of a difference in a wait cannot
/// know which collectives the others have started meanwhile, and so could not gather anything.
pub struct Comparison(Option<(Agreement, MPI_Request)>);

// SAFETY: a handle of MPI's, which was initialized for calls from any thread; one thread at a time uses it.
unsafe impl Send for Comparison {}

impl Comparison {
    /// Collective, and waits for no other rank.
    pub fn start(comm: &Comm, number: u64, text: &str) -> Result<Self, Cause> {
        Agreement::start(comm, number, Some(text)).map(Some).map(Self)
    }

    /// Whether all ranks have answered; lets MPI go on.
    pub fn test(&self) -> Result<bool, Cause> {
        // SAFETY: a request that no other thread uses now.
        self.0.as_ref().map_or(Ok(true), |(_, request)| unsafe { have_ended(&[*request]) })
    }

    /// Waits for the answers: the texts of all ranks, if their numbers differ.
    pub fn wait(mut self) -> Result<Option<Vec<String>>, Cause> {
        let Some((agreement, request)) = self.0.take() else { return Ok(None) };
        wait_for(request)?;
        Ok((!agreement.is_reached()).then(|| agreement.texts()))
    }
}

impl Drop for Comparison {
    /// Nobody has waited for it: MPI may still write.
    fn drop(&mut self) {
        forget(self.0.take());
    }
}
