//! What Linux says of processes.

use std::ffi::c_int;
use std::fs;
use std::os::fd::RawFd;
use std::time::{Duration, SystemTime};

use super::process::{Info, State};

/// What the system knows of a process, also of one that has ended and that nobody has waited for.
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
            if threads < 2 { State::Ended } else { State::Runs }
        }
        "T" | "t" => State::Stopped,
        _ => State::Runs,
    };
    let name = head.split_once('(')?.1.to_owned();
    let parent = fields.next()?.parse().ok()?;
    Some(Info { name, parent, state, start: fields.nth(17)?.parse().ok()? })
}

/// Within what numbers of processes are unique, and times of their starts are comparable; empty where that is not known.
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
    // SAFETY: all-zero is a value of it, and the calls write nothing else.
    let (now, per_second) = unsafe {
        let mut now = std::mem::zeroed::<libc::timespec>();
        (libc::clock_gettime(libc::CLOCK_BOOTTIME, &mut now) == 0).then_some(())?;
        (now, libc::sysconf(libc::_SC_CLK_TCK))
    };
    let now = Duration::new(now.tv_sec.try_into().ok()?, now.tv_nsec.try_into().ok()?);
    let age = now.checked_sub(Duration::from_secs_f64(start as f64 / per_second as f64))?;
    SystemTime::now().checked_sub(age)
}

/// Whether a debugger is attached to this process.
pub fn is_debugged() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    status.lines().any(|line| line.strip_prefix("TracerPid:").is_some_and(|pid| pid.trim() != "0"))
}

/// A file that can be read when a process has ended; -1: there is none.
pub fn until_end(pid: i32) -> RawFd {
    // SAFETY: a plain system call; older systems do not have it.
    unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) as RawFd }
}

/// Where this thread has its `errno`.
pub fn error_location() -> *mut c_int {
    // SAFETY: takes nothing.
    unsafe { libc::__errno_location() }
}
