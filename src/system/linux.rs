//! Processes and threads on Linux.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU32;
use std::time::{Duration, SystemTime};

use rustix::param::clock_ticks_per_second;
use rustix::thread::futex::{self, Flags, Timespec};
use rustix::time::{ClockId, clock_gettime};

use super::process::{Info, ProcessState};

/// What the system knows of a process, also of a zombie.
pub fn info(pid: i32) -> Option<Info> {
    // The file of the first thread: under an emulator, a process's own `stat` differs from what other processes read.
    let stat = fs::read_to_string(format!("/proc/{pid}/task/{pid}/stat")).ok()?;
    // The name, in parentheses, may contain any character.
    let (head, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    let state = match fields.next()? {
        // The first thread has ended; others may still run.
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

/// A path by which a file that was removed can be opened, if a process of this user has it open.
pub fn removed(path: &Path) -> Option<PathBuf> {
    let entries =
        |path: PathBuf| fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
    let link = PathBuf::from(format!("{} (deleted)", path.display()));
    let mut open = entries("/proc".into()).flat_map(|process| entries(process.join("fd")));
    open.find(|file| fs::read_link(file).is_ok_and(|found| found == link))
}

/// Whether a debugger is attached to a process.
pub fn is_traced(pid: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.lines().any(|line| line.strip_prefix("TracerPid:").is_some_and(|pid| pid.trim() != "0"))
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

/// The threads of this process: number, name, and seconds of processor time.
pub fn threads() -> Vec<(i32, String, f64)> {
    let of = |task: fs::DirEntry| {
        let stat = fs::read_to_string(task.path().join("stat")).ok()?;
        let (head, rest) = stat.rsplit_once(") ")?;
        let (number, name) = head.split_once(" (")?;
        let mut fields = rest.split(' ').skip(11).map_while(|field| field.parse::<u64>().ok());
        let ticks = fields.next()? + fields.next()?;
        Some((number.parse().ok()?, name.to_owned(), ticks as f64 / clock_ticks_per_second() as f64))
    };
    fs::read_dir("/proc/self/task").into_iter().flatten().flatten().filter_map(of).collect()
}

/// Waits at most `seconds` until another thread or process changes the number from this value and
/// wakes the waiting ones.
pub fn wait(number: &AtomicU32, seen: u32, seconds: f64) {
    let time = Timespec { tv_sec: seconds as i64, tv_nsec: (1e9 * seconds.fract()) as i64 };
    let _ = futex::wait(number, Flags::empty(), seen, Some(&time));
}

/// Wakes who waits for a change of a number. Async-signal-safe.
pub fn wake(number: &AtomicU32) {
    let _ = futex::wake(number, Flags::empty(), i32::MAX as u32);
}
