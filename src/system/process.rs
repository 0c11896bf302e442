//! Processes, identified by their number and the time of their start, because numbers are used again.

use std::time::{Duration, SystemTime};

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

use super::{host, os};

/// What the system knows of a process.
#[derive(Clone, Debug)]
pub struct Info {
    pub name: String,
    pub parent: i32,
    pub state: ProcessState,
    /// When it was started, in units of the system's.
    pub start: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessState {
    Runs,
    /// Stopped, by a signal or a debugger.
    Stopped,
    /// Ended and not waited for by its parent: a zombie.
    Ended,
}

/// When this process was started, or a little earlier: file systems and clocks round. Where the system does not say, now.
pub fn started() -> SystemTime {
    let start = os::info(std::process::id() as i32).and_then(|info| os::time_of(info.start));
    start.unwrap_or_else(SystemTime::now) - Duration::from_secs(2)
}

/// Whether there is a process of this number.
fn exists(pid: i32) -> bool {
    Pid::from_raw(pid).is_some_and(|pid| test_kill_process(pid) != Err(Errno::SRCH))
}

/// What the system says of the process of a number that was started at this time: None: there is none any more.
pub fn state(pid: i32, start: u64) -> Option<ProcessState> {
    match os::info(pid) {
        None => exists(pid).then_some(ProcessState::Runs),
        Some(info) if info.start != start || info.state == ProcessState::Ended => None,
        Some(info) => Some(info.state),
    }
}

/// As reports name a process of this machine.
pub fn name(pid: i32) -> String {
    format!("process {pid} on {}", host())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_told_from_another_of_its_number() {
        let age = SystemTime::now().duration_since(started()).unwrap();
        assert!(age < Duration::from_secs(1000), "{age:?}");
        let mut child = std::process::Command::new("/bin/sleep").arg("100").spawn().unwrap();
        let pid = child.id() as i32;
        let info = os::info(pid).unwrap();
        assert_eq!((&*info.name, info.parent), ("sleep", std::process::id() as i32));
        assert_eq!(state(pid, info.start), Some(ProcessState::Runs));
        assert_eq!(state(pid, info.start + 1), None, "an earlier one of this number");
        assert!(!os::is_traced(pid));
        // SAFETY: a plain system call.
        unsafe { libc::kill(pid, libc::SIGSTOP) };
        while state(pid, info.start) != Some(ProcessState::Stopped) {
            std::thread::sleep(Duration::from_millis(1));
        }
        child.kill().unwrap();
        while state(pid, info.start).is_some() {
            std::thread::sleep(Duration::from_millis(1)); // a zombie
        }
        child.wait().unwrap();
        assert_eq!(state(pid, info.start), None);
    }
}
