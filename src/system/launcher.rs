//! The launcher of this process: `mpiexec`, or its daemon on this host.

use std::os::fd::RawFd;

use super::os;

/// Programs that start ranks, and have ended if they are not the parents of these any more.
const LAUNCHERS: [&str; 6] = ["prterun", "prted", "mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy"];

/// The launcher that this process is a child of, if it is.
pub struct Launcher {
    process: i32,
    name: String,
    /// Can be read when it has ended; -1: there is none.
    pub ended: RawFd,
}

impl Launcher {
    /// Who is the parent of this process now.
    pub fn parent() -> Option<Self> {
        // SAFETY: takes nothing.
        let process = unsafe { libc::getppid() };
        let name = os::info(process)?.name;
        LAUNCHERS.contains(&&*name).then(|| Self { process, name, ended: os::until_end(process) })
    }

    /// Whether it has ended. Then nobody ends this process where the job ends: it is left over, and MPI cannot be asked.
    pub fn is_gone(&self) -> bool {
        // SAFETY: takes nothing.
        (unsafe { libc::getppid() }) != self.process
    }

    /// As reports name it.
    pub fn name(&self) -> String {
        format!("the launcher ({}, process {})", self.name, self.process)
    }
}
