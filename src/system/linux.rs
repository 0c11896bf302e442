//! Processes and threads on Linux.

use std::fs;
use std::os::fd::OwnedFd;
use std::time::{Duration, SystemTime};

use rustix::param::clock_ticks_per_second;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::time::{ClockId, clock_gettime};

pub use super::network::moved;
use super::process::{Info, ProcessState};
pub use super::threads::{calling_file, number_of, threads};

/// What the system knows of a process, also of a zombie.
pub fn info(pid: i32) -> Option<Info> {
    // Of its first thread: emulators give a process another `stat` of its own than others see.
    let stat = fs::read_to_string(format!("/proc/{pid}/task/{pid}/stat")).ok()?;
    // Its name, in parentheses, may hold anything.
    let (head, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    let state = match fields.next()? {
        // Its first thread has ended: the others may go on.
        "Z" | "X" => {
            let threads = fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
            if threads < 2 { ProcessState::Ended } else { ProcessState::Runs }
        }
        "T" | "t" => ProcessState::Stopped,
        _ => ProcessState::Runs,
    };
    let name = head.split_once('(')?.1.to_owned();
    let parent = fields.next()?.parse().ok()?;
    Some(Info { name, parent, state, start: fields.nth(17)?.parse().ok()? })
}

/// Within what numbers of processes are unique, and times of their starts are comparable; empty where that is not known.
#[cfg_attr(feature = "python", pyo3::pyfunction(name = "process_space"))]
pub fn space() -> String {
    let parts = || {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        // Where /proc shows another namespace than this process's, it says nothing of numbers here.
        let number = fs::read_link("/proc/self").ok()?;
        (number.to_str()? == std::process::id().to_string()).then_some(())?;
        let namespace = |kind| {
            fs::read_link(format!("/proc/self/ns/{kind}"))
                .map(|link| link.to_string_lossy().replace(' ', "_"))
                .unwrap_or_default()
        };
        Some(format!("{}/{}/{}", boot.trim(), namespace("pid"), namespace("time")))
    };
    parts().unwrap_or_default()
}

/// The time of a start, which the system gives in ticks since it was started itself.
pub fn time_of(start: u64) -> Option<SystemTime> {
    let now = Duration::try_from(clock_gettime(ClockId::Boottime)).ok()?;
    let age = now.checked_sub(Duration::from_secs_f64(start as f64 / clock_ticks_per_second() as f64))?;
    SystemTime::now().checked_sub(age)
}

/// Whether a debugger is attached to this process.
pub fn is_debugged() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    status.lines().any(|line| line.strip_prefix("TracerPid:").is_some_and(|pid| pid.trim() != "0"))
}

/// A file that can be read when a process has ended; older systems do not have it.
pub fn until_end(process: Pid) -> Option<OwnedFd> {
    pidfd_open(process, PidfdFlags::empty()).ok()
}

/// What the system says of a thread of this process.
pub fn of_thread(thread: i32, what: &str) -> Option<String> {
    fs::read_to_string(format!("/proc/self/task/{thread}/{what}")).ok()
}

/// How often a thread of this process has been given a processor.
pub fn runs(thread: i32) -> Option<u64> {
    of_thread(thread, "status").map(|status| switches(&status))
}

/// How often a process has been given a processor.
pub fn runs_of_process(pid: i32) -> Option<u64> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten();
    let statuses = threads.filter_map(|thread| fs::read_to_string(thread.path().join("status")).ok());
    Some(statuses.map(|status| switches(&status)).sum())
}

fn switches(status: &str) -> u64 {
    let count = |line: &str| line.split_once("_ctxt_switches:")?.1.trim().parse::<u64>().ok();
    status.lines().filter_map(count).sum()
}

/// Whether a thread sleeps until another thread of this process wakes it, without a time-out.
pub fn waits_for_another(thread: i32) -> bool {
    let text = of_thread(thread, "syscall").unwrap_or_default();
    let mut words = text.split(' ');
    words.next().and_then(|call| call.parse().ok()) == Some(libc::SYS_futex) && words.nth(3) == Some("0x0")
}
