//! Processes, identified by more than their numbers.
//!
//! Numbers are used again, and containers with the same host name count their processes separately.

use std::time::{Duration, SystemTime};

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use serde::{Deserialize, Serialize};

use super::os;
use crate::record::host;

/// A process, as it identifies itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    pid: i32,
    host: String,
    /// Within what numbers are unique, and times are comparable: this start of the machine, and namespaces. Empty:
    /// not known.
    space: String,
    /// When it was started, in units of the system's.
    start: u64,
}

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

impl Process {
    pub fn own() -> Self {
        let pid = std::process::id() as i32;
        Self { pid, host: host(), space: os::space(), start: os::info(pid).map_or(0, |info| info.start) }
    }

    /// Where it is: the machine and its namespaces, or the machine's name.
    pub fn space(&self) -> &str {
        // Which containers see each other's files, the files say.
        if self.space.is_empty() { &self.host } else { self.space.split('/').next().unwrap_or_default() }
    }

    /// Whether `self`, which runs, can see whether `other` runs.
    pub fn can_see(&self, other: &Self) -> bool {
        !self.space.is_empty() && self.space == other.space
    }

    /// Whether another process has certainly ended.
    pub fn sees_ended(&self, other: &Self) -> bool {
        if !self.can_see(other) {
            return false;
        }
        match os::info(other.pid) {
            None => !exists(other.pid),
            Some(info) => info.start != other.start || info.state == ProcessState::Ended,
        }
    }

    /// Whether another process is stopped, by a signal or a debugger.
    pub fn sees_stopped(&self, other: &Self) -> bool {
        self.can_see(other) && os::info(other.pid).is_some_and(|info| info.state == ProcessState::Stopped)
    }

    /// How often another process has been given a processor, if the system says it.
    pub fn sees_runs(&self, other: &Self) -> Option<u64> {
        self.can_see(other).then(|| os::runs_of_process(other.pid))?
    }

    /// As reports name it.
    pub fn name(&self) -> String {
        format!("process {} on {}", self.pid, self.host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_told_from_another_of_its_number() {
        let own = Process::own();
        assert!(!own.sees_ended(&own));
        let age = SystemTime::now().duration_since(started()).unwrap();
        assert!(age < Duration::from_secs(1000), "{age:?}");
        let earlier = Process { start: own.start + 1, ..own.clone() };
        assert!(own.sees_ended(&earlier));
        let mut child = std::process::Command::new("/bin/sleep").arg("100").spawn().unwrap();
        let pid = child.id() as i32;
        let other = Process { pid, start: os::info(pid).unwrap().start, ..own.clone() };
        assert!(!own.sees_ended(&other) && !own.sees_stopped(&other));
        let info = os::info(pid).unwrap();
        assert_eq!((&*info.name, info.parent), ("sleep", own.pid));
        // SAFETY: a plain system call.
        unsafe { libc::kill(pid, libc::SIGSTOP) };
        while !own.sees_stopped(&other) {
            std::thread::sleep(Duration::from_millis(1));
        }
        child.kill().unwrap();
        while !own.sees_ended(&other) {
            std::thread::sleep(Duration::from_millis(1)); // a zombie
        }
        child.wait().unwrap();
        assert!(own.sees_ended(&other));
        // In another container there may be a process of this number, or none: that is not known.
        let elsewhere = Process { space: "another".into(), ..other.clone() };
        assert!(!own.sees_ended(&elsewhere));
        let nowhere = Process { space: String::new(), ..own.clone() };
        assert!(!nowhere.sees_ended(&Process { space: String::new(), ..other }));
    }
}
