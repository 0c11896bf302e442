//! The default communicator at a rank's end. Its making takes all ranks, also those that had no use for it: in
//! `MPI_Finalize`, they wait until no rank is left that might make it, or take part. One whose delete functions may still
//! communicate does not wait, but votes against it.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use mpi::ffi::{self, MPI_Request};

use super::host::HostFolder;
use crate::comm::{Agreement, wait_for};
use crate::error::Cause;
use crate::finalize::{after_others, are_others_deleted_last};
use crate::mpilib::{check, handle_value, have_ended, is_running};

/// Ranks that import the package when they start, as most do, have come so long after each other at most.
const COMING: Duration = Duration::from_secs(5);
/// How often it is looked at, at most and at least.
const PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(20)];
/// Ranks that end together come so long after each other at most.
const TOGETHER: Duration = Duration::from_millis(100);

/// This rank has taken part in the choice.
static CHOSEN: AtomicBool = AtomicBool::new(false);

/// How it is made. The ranks' first choice holds for all of them.
pub fn choose(host: &HostFolder, choice: &str) -> String {
    CHOSEN.store(true, Ordering::Relaxed);
    host.choose_default(choice)
}

/// What a rank says of it, once: where it needs it, or in `MPI_Finalize`. MPI writes the answers until all ranks have said it.
struct Vote {
    takes_part: bool,
    agreement: Agreement,
    request: MPI_Request,
}

// SAFETY: a handle of MPI's belongs to the process, not to a thread, and one thread at a time uses it.
unsafe impl Send for Vote {}

impl Vote {
    /// Waits for no other rank.
    fn cast(takes_part: bool) -> Result<Self, Cause> {
        let (agreement, request) = Agreement::of_world(takes_part.into())?;
        Ok(Self { takes_part, agreement, request })
    }

    /// Whether all ranks take part, once all have said whether they do.
    fn wait(self) -> Result<bool, Cause> {
        wait_for(self.request)?;
        Ok(self.takes_part && self.agreement.is_reached())
    }

    /// Goes on without the answer, which other ranks wait for: until later, or until `MPI_Finalize` has nothing else to do.
    fn leave(self) {
        let begin = Instant::now();
        // SAFETY: a request that no other thread uses.
        let is_open = || !unsafe { have_ended(&[self.request]) }.unwrap_or(true);
        while is_open() && begin.elapsed() < TOGETHER {
            std::thread::sleep(PAUSES[0]);
        }
        let is_open = is_open();
        let end = || {
            let _ = self.wait();
        };
        if is_open {
            // Where nothing can wait for it, MPI may still write.
            std::mem::forget(after_others(Box::new(end)));
        } else {
            end();
        }
    }
}

/// Whether all ranks make it together. Collective over `MPI_COMM_WORLD`.
pub fn agree() -> Result<bool, Cause> {
    Vote::cast(true)?.wait()
}

/// Waits until it is known whether it is made.
fn will_be_made(host: &HostFolder, started: Instant) -> bool {
    if are_others_deleted_last() {
        // Another rank may wait for what those do: it is not waited for. Without it, `MPI_COMM_WORLD` is used.
        return host.choose_default("world") == "clone";
    }
    let mut pause = PAUSES[0];
    loop {
        if let Some(chosen) = host.chosen_default() {
            return chosen == "clone";
        }
        if host.broken().is_some() {
            return true;
        }
        let (ended, have_come) = host.others_have_ended();
        if ended && (have_come || started.elapsed() > COMING) {
            return host.choose_default("world") == "clone";
        }
        let (mut found, mut status) = (0, MaybeUninit::zeroed());
        // SAFETY: between MPI_Init and MPI_Finalize. Others may wait for MPI to go on in this process.
        unsafe {
            let (source, tag) = (ffi::RSMPI_ANY_SOURCE, ffi::RSMPI_ANY_TAG);
            ffi::MPI_Iprobe(source, tag, ffi::RSMPI_COMM_SELF, &mut found, status.as_mut_ptr());
        }
        std::thread::sleep(pause);
        pause = (2 * pause).min(PAUSES[1]);
    }
}

/// `MPI_Finalize` begins: takes part in its making, if it is made and this rank has not. Then the handle of what was made is
/// given to `made`. `one_directory`: all ranks certainly see the same files.
pub fn join(
    host: &HostFolder,
    started: Instant,
    one_directory: bool,
    made: impl FnOnce(usize),
) -> Result<(), Cause> {
    let is_needless = host.size == 1 || !is_running() || CHOSEN.load(Ordering::Relaxed);
    // Else the others would wait in the making. But ranks that have not imported the package never join.
    if is_needless || (one_directory && !will_be_made(host, started)) {
        return Ok(());
    }
    // What is called later may serve a rank that does not answer before, or wait for one that waits for this answer.
    let waits = !are_others_deleted_last();
    let vote = Vote::cast(waits)?;
    if !waits {
        vote.leave();
        return Ok(());
    }
    if !vote.wait()? {
        return Ok(());
    }
    let mut clone = MaybeUninit::uninit();
    // SAFETY: MPI is running, and all ranks do this or have done it.
    let clone = unsafe {
        check("MPI_Comm_dup", ffi::MPI_Comm_dup(ffi::RSMPI_COMM_WORLD, clone.as_mut_ptr()))?;
        clone.assume_init()
    };
    made(handle_value(clone));
    Ok(())
}
