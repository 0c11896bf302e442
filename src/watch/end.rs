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

/// Ends the job with this status unless the process has ended by itself after so many seconds.
pub fn abort_after(seconds: f64, code: i32, clean: fn()) {
    timeline::flush();
    clean();
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs_f64(seconds));
        end_job(code, clean);
    });
}

/// Ends the job, after `clean` has removed what it would leave.
pub fn end_job(code: i32, clean: fn()) -> ! {
    // Whatever state MPI is in: launchers end a job of which a process dies.
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(5));
        // SAFETY: ends the process.
        unsafe { libc::_exit(code) };
    });
    // Launchers lose lines that are written just before the end.
    std::thread::sleep(Duration::from_millis(200));
    timeline::flush();
    clean();
    end_launcher();
    mpilib::abort(code);
    // SAFETY: ends the process.
    unsafe { libc::_exit(code) }
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
