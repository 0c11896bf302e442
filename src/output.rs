//! Lines for the user, on standard error.
//!
//! Test runners, notebooks and loggers redirect it to files that nobody reads once the job was
//! aborted. Messages are therefore also written to the standard error that the process had when the
//! package was imported.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::sync::{OnceLock, mpsc};
use std::thread;
use std::time::Duration;

use rustix::fs::fstat;

static KEPT: OnceLock<File> = OnceLock::new();

/// Keeps a descriptor of standard error as the user sees it.
pub fn keep(descriptor: RawFd) {
    // SAFETY: only this function uses the caller's descriptor; for an invalid number, the call
    // returns an error.
    let found = unsafe { BorrowedFd::borrow_raw(descriptor.max(0)) };
    if let Ok(own) = found.try_clone_to_owned() {
        let _ = KEPT.set(own.into());
    }
}

/// For how long a line may take: standard error may be a pipe that is full, and that nobody reads. A launcher on a busy machine may
/// need more than a second to read it, and the job should not end before its report is out.
const PATIENCE: Duration = Duration::from_millis(2500);

/// Prints in one write to each, so that ranks do not mix their lines. Returns when that is done, or takes too long.
pub fn print(text: &str) {
    let (done, wait) = mpsc::channel();
    let owned = text.to_owned();
    let thread = thread::Builder::new().name("mpi4jax-print".into());
    match thread.spawn(move || {
        write(&owned);
        let _ = done.send(());
    }) {
        Ok(_) => drop(wait.recv_timeout(PATIENCE)),
        Err(_) => write(text),
    }
}

fn write(text: &str) {
    let kept = KEPT.get().filter(|kept| !is_one_file(kept.as_fd(), std::io::stderr().as_fd()));
    // First where the user looks.
    if let Some(mut kept) = kept {
        let _ = kept.write_all(text.as_bytes());
    }
    let mut stderr = std::io::stderr().lock();
    let _ = stderr.write_all(text.as_bytes());
    let _ = stderr.flush();
}

fn is_one_file(one: BorrowedFd, other: BorrowedFd) -> bool {
    let file = |it| fstat(it).ok().map(|found| (found.st_dev, found.st_ino));
    file(one).is_some_and(|one| Some(one) == file(other))
}
