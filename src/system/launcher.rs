//! The launcher of this process: `mpiexec`, or its daemon on this host.

use std::os::fd::RawFd;

/// Programs that start ranks, and have ended if they are not the parents of these any more.
const LAUNCHERS: [&str; 6] = ["prterun", "prted", "mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy"];

/// The launcher that this process is a child of, if it is.
pub struct Launcher {
    process: i32,
    name: String,
    /// Can be read when it has ended; -1: nobody says so.
    pub ended: RawFd,
}

impl Launcher {
    /// Who is the parent of this process now.
    pub fn parent() -> Option<Self> {
        // SAFETY: takes nothing.
        let process = unsafe { libc::getppid() };
        let name = std::fs::read_to_string(format!("/proc/{process}/comm")).ok()?.trim().to_owned();
        LAUNCHERS.contains(&&*name).then(|| Self { process, name, ended: watch(process) })
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

/// A file that can be read when a process has ended.
#[cfg(target_os = "linux")]
fn watch(process: i32) -> RawFd {
    // SAFETY: a plain system call; older systems do not know it.
    unsafe { libc::syscall(libc::SYS_pidfd_open, process, 0) as RawFd }
}

#[cfg(not(target_os = "linux"))]
fn watch(_: i32) -> RawFd {
    -1
}
