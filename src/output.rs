//! Lines for the user, on standard error.
//!
//! Test runners, notebooks and loggers redirect it to files that nobody reads once the job is ended. Messages therefore also go to
//! what it was when the package was imported.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::sync::OnceLock;

use rustix::fs::fstat;

static KEPT: OnceLock<File> = OnceLock::new();

/// Keeps a descriptor of standard error as the user sees it.
pub fn keep(descriptor: RawFd) {
    // SAFETY: the caller's descriptor, which is used here alone; a number that is none is an error.
    let found = unsafe { BorrowedFd::borrow_raw(descriptor.max(0)) };
    if let Ok(own) = found.try_clone_to_owned() {
        let _ = KEPT.set(own.into());
    }
}

/// Prints in one write to each, so that ranks do not mix their lines.
pub fn print(text: &str) {
    let mut stderr = std::io::stderr().lock();
    let kept = KEPT.get().filter(|kept| !is_one_file(kept.as_fd(), stderr.as_fd()));
    let _ = stderr.write_all(text.as_bytes());
    let _ = stderr.flush();
    if let Some(mut kept) = kept {
        let _ = kept.write_all(text.as_bytes());
    }
}

fn is_one_file(one: BorrowedFd, other: BorrowedFd) -> bool {
    let file = |it| fstat(it).ok().map(|found| (found.st_dev, found.st_ino));
    file(one).is_some_and(|one| Some(one) == file(other))
}
