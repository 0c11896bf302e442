//! The launcher of this process: `mpiexec`, or its daemon on this host.

use std::os::fd::RawFd;

use super::os;

/// The launcher that this process is a child of, if it is.
pub struct Launcher {
    process: i32,
    name: String,
    /// Can be read when it has ended; -1: there is none.
    pub ended: RawFd,
}

impl Launcher {
    /// The parent of this process, if it has one of these names.
    pub fn parent(names: &[String]) -> Option<Self> {
        // SAFETY: takes nothing.
        let process = unsafe { libc::getppid() };
        let name = os::info(process)?.name;
        names.contains(&name).then(|| Self { process, name, ended: os::until_end(process) })
    }

    /// Whether it has ended. Then nothing ends this process where the job ends, and MPI cannot be asked.
    pub fn is_gone(&self) -> bool {
        // SAFETY: takes nothing.
        (unsafe { libc::getppid() }) != self.process
    }

    /// As reports name it.
    pub fn name(&self) -> String {
        format!("the launcher ({}, process {})", self.name, self.process)
    }
}
