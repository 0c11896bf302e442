//! How a job is ended.

use std::os::fd::RawFd;
use std::time::Duration;

use crate::mpilib;
use crate::record::timeline;

/// Programs that start ranks, and have ended if they are not the parents of these any more.
const LAUNCHERS: [&str; 6] = ["prterun", "prted", "mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy"];

/// Ends the job with this status unless the process has ended by itself after so many seconds. `ending` tells the others.
pub fn abort_after(seconds: f64, code: i32, ending: fn()) {
    timeline::flush();
    ending();
    std::thread::spawn(move || {
        std::thread::sleep(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX));
        end_job(code, ending);
    });
}

/// Ends the job. `ending` tells the others, and removes what the job would leave.
pub fn end_job(code: i32, ending: fn()) -> ! {
    // Whatever state MPI is in: launchers end a job of which a process dies.
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(5));
        // SAFETY: ends the process.
        unsafe { libc::_exit(code) };
    });
    let_launcher_read();
    timeline::flush();
    ending();
    mpilib::abort(code);
    // SAFETY: ends the process.
    unsafe { libc::_exit(code) }
}

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

    /// Ends this process, of which nobody knows any more.
    pub fn follow(&self, code: i32, words: impl FnOnce(&str), ending: fn()) -> ! {
        timeline::flush();
        words(&format!(
            "the launcher ({}, process {}) has ended, and so does this rank",
            self.name, self.process
        ));
        ending();
        // SAFETY: ends the process.
        unsafe { libc::_exit(code) }
    }
}

/// Launchers lose lines that are written just before the end.
pub fn let_launcher_read() {
    std::thread::sleep(Duration::from_millis(200));
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
