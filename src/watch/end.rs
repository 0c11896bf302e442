//! How a job is ended.

use std::os::fd::RawFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::mpilib;
use crate::record::timeline;

/// How many seconds a launcher has to end after the job.
const LAUNCHER_GRACE: u32 = 10;
/// Programs that start the ranks of one job, and that are ended if they outlive them.
const LAUNCHERS: [&str; 5] = ["prterun", "mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy"];
/// A daemon that serves one job where `prterun` has started it, and many where it was there before.
const DAEMON: &str = "prted";

/// Ends the job with this status unless the process has ended by itself after so many seconds. `ending` tells the others.
pub fn abort_after(seconds: f64, code: i32, ending: fn()) {
    timeline::flush();
    ending();
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs_f64(seconds));
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
    end_launcher();
    mpilib::abort(code);
    // SAFETY: ends the process.
    unsafe { libc::_exit(code) }
}

/// The launcher that this process is a child of, if it is.
pub struct Launcher {
    process: i32,
    name: String,
}

impl Launcher {
    /// Who is the parent of this process now.
    pub fn parent() -> Option<Self> {
        // SAFETY: takes nothing.
        let process = unsafe { libc::getppid() };
        let name = std::fs::read_to_string(format!("/proc/{process}/comm")).ok()?.trim().to_owned();
        (name == DAEMON || LAUNCHERS.contains(&&*name)).then_some(Self { process, name })
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

/// Whether a parent of this name ends with its job.
fn serves_this_job_alone(parent: &str, namespace: &str) -> bool {
    LAUNCHERS.contains(&parent) || (parent == DAEMON && namespace.starts_with("prterun-"))
}

/// Makes sure that the launcher ends too: Open MPI's waits for ever for a host that it cannot reach. A
/// process outside of the job gives it [`LAUNCHER_GRACE`] seconds to end by itself.
fn end_launcher() {
    // SAFETY: takes nothing.
    let parent = unsafe { libc::getppid() };
    let name = std::fs::read_to_string(format!("/proc/{parent}/comm")).unwrap_or_default();
    if !serves_this_job_alone(name.trim(), &std::env::var("PMIX_NAMESPACE").unwrap_or_default()) {
        return;
    }
    // Twice: Open MPI takes the first signal for a request, and the second for an order.
    let script = format!(
        "trap '' TERM HUP; for i in $(seq {LAUNCHER_GRACE}); do sleep 1; kill -0 {parent} || exit; done; \
         kill -TERM {parent}; sleep 2; kill -TERM {parent}; sleep 2; kill -KILL {parent}"
    );
    let mut command = Command::new("/bin/sh");
    command.args(["-c", &script]).process_group(0);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // Nor does it keep this process's connections: MPICH's launcher waits until they are closed.
    let close = || {
        // SAFETY: async-signal-safe calls, as must be between fork and exec.
        for file in 3..unsafe { libc::sysconf(libc::_SC_OPEN_MAX) }.clamp(256, 1 << 16) {
            unsafe { libc::fcntl(file as RawFd, libc::F_SETFD, libc::FD_CLOEXEC) };
        }
        Ok(())
    };
    // SAFETY: as above. Without a shell the launcher is left to itself.
    let _ = unsafe { command.pre_exec(close) }.spawn();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn daemons_that_serve_other_jobs_are_left_alone() {
        for (parent, namespace, expected) in [
            ("prterun", "prterun-node1-12@1", true),
            ("prted", "prterun-node1-12@1", true),
            ("prted", "prte-node1-12@3", false),
            ("prte", "prte-node1-12@3", false),
            ("orted", "", false),
            ("hydra_pmi_proxy", "", true),
            ("slurmstepd", "slurm.pmix.4.0", false),
            ("bash", "prterun-node1-12@1", false),
        ] {
            assert_eq!(serves_this_job_alone(parent, namespace), expected, "{parent} {namespace}");
        }
    }
}
