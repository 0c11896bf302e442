//! Processes and threads on Linux.

use std::fs;
use std::os::fd::OwnedFd;
use std::time::{Duration, SystemTime};

use rustix::param::clock_ticks_per_second;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::time::{ClockId, clock_gettime};

use super::process::{Info, State};

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
fn of_thread(thread: i32, what: &str) -> Option<String> {
    fs::read_to_string(format!("/proc/self/task/{thread}/{what}")).ok()
}

/// How often the main thread has been given a processor.
pub fn runs_of_main() -> Option<u64> {
    let status = of_thread(std::process::id() as i32, "status")?;
    let switches =
        status.lines().filter_map(|line| line.split_once("_ctxt_switches:")?.1.trim().parse::<u64>().ok());
    Some(switches.sum())
}

/// The system call that a thread is in, and its fourth argument.
fn call(thread: i32) -> Option<(i64, String)> {
    let text = of_thread(thread, "syscall")?;
    let mut words = text.split(' ');
    Some((words.next()?.parse().ok()?, words.nth(3)?.to_owned()))
}

/// Whether the main thread sleeps until another thread of this process wakes it, without a time-out.
pub fn main_sleeps() -> bool {
    call(std::process::id() as i32).is_some_and(|(call, timeout)| call == libc::SYS_futex && timeout == "0x0")
}

/// Whether all threads of this process sleep but these, as far as the system says.
pub fn others_sleep(these: &[i32]) -> bool {
    if of_thread(std::process::id() as i32, "syscall").is_none() {
        return true;
    }
    let mut threads = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    threads.all(|thread| {
        let number = thread.file_name().to_str().and_then(|name| name.parse().ok());
        number.is_none_or(|number| these.contains(&number) || is_idle(number))
    })
}

/// Whether a thread, which is none of Python's, sleeps for something that comes.
fn is_idle(thread: i32) -> bool {
    #[cfg(target_arch = "x86_64")]
    const OLD: [i64; 3] = [libc::SYS_epoll_wait, libc::SYS_poll, libc::SYS_select];
    #[cfg(not(target_arch = "x86_64"))]
    const OLD: [i64; 0] = [];
    const SLEEPS: [i64; 6] = [
        libc::SYS_futex,
        libc::SYS_epoll_pwait,
        libc::SYS_ppoll,
        libc::SYS_pselect6,
        libc::SYS_recvfrom,
        libc::SYS_recvmsg,
    ];
    // One that has ended meanwhile does nothing either. What runs once may have just been asked.
    (0..3).any(|_| {
        let sleeps = call(thread).is_some_and(|(call, _)| SLEEPS.contains(&call) || OLD.contains(&call));
        let is_ours = || of_thread(thread, "comm").is_none_or(|name| name.starts_with("mpi4jax-"));
        sleeps || is_ours() || {
            std::thread::sleep(Duration::from_millis(5));
            false
        }
    })
}
