//! How a rank waits in MPI: in the library, which polls and keeps a core busy, or with `MPI4JAX_WAIT=sleep` in looks at the
//! request with sleep in between.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use mpi::ffi::{self, MPI_Request, MPI_Status};

use crate::error::Cause;
use crate::system::variable;

const WAIT: &str = "MPI4JAX_WAIT";

/// Whether ranks that wait sleep. All ranks of a communicator choose alike: MPI does not match blocking collectives with
/// nonblocking ones.
static SLEEPS: AtomicBool = AtomicBool::new(false);

/// How long a rank polls before it sleeps for the first time: most waits are shorter.
const POLLS: Duration = Duration::from_micros(100);
/// Which part of the time that it has waited a rank sleeps until the next look: what comes is noticed late by that.
const PART: u32 = 64;
const LONGEST: Duration = Duration::from_millis(2);

#[inline]
pub fn sleeps() -> bool {
    SLEEPS.load(Ordering::Relaxed)
}

/// Chooses how ranks wait.
pub fn set_sleeps(sleeps: bool) {
    SLEEPS.store(sleeps, Ordering::Relaxed);
}

/// Whether a rank sleeps, by the environment's setting.
fn by(setting: &str) -> Result<bool, Cause> {
    match setting.to_ascii_lowercase().as_str() {
        "" | "poll" => Ok(false),
        "sleep" => Ok(true),
        _ => Err(Cause::Setting {
            message: format!("{WAIT}={setting} is not understood: expected poll or sleep"),
        }),
    }
}

/// Reads the environment.
pub fn read_setting() -> Result<(), Cause> {
    by(&variable(WAIT).unwrap_or_default()).map(set_sleeps)
}

/// What a rank does between two looks, if it has waited since `began`.
pub fn pause(began: Instant) {
    let waited = began.elapsed();
    if sleeps() && waited > POLLS {
        std::thread::sleep((waited / PART).min(LONGEST));
    } else {
        std::thread::yield_now();
    }
}

/// `MPI_Wait`.
///
/// # Safety
/// The request is pending, no other thread uses it, and `status` points to an `MPI_Status`.
pub unsafe fn wait(request: &mut MPI_Request, status: *mut MPI_Status) -> c_int {
    if !sleeps() {
        // SAFETY: promised by the caller.
        return unsafe { ffi::MPI_Wait(request, status) };
    }
    let (began, mut has_ended) = (Instant::now(), 0);
    loop {
        // SAFETY: promised by the caller.
        let code = unsafe { ffi::MPI_Test(request, &mut has_ended, status) };
        if code != 0 || has_ended != 0 {
            return code;
        }
        pause(began);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_setting_is_one_of_two_words() {
        assert_eq!(["", "poll", "sleep"].map(|it| by(it).unwrap()), [false, false, true]);
        assert!(by("nap").unwrap_err().to_string().contains("nap"));
    }
}
