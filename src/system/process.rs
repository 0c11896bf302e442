//! Which process is meant, whatever number others have.
//!
//! A number alone does not say: it is used again, and containers with one host name each count for themselves.

use std::fs;
use std::io;
use std::time::{Duration, SystemTime};

use crate::record::host;

/// A process, as it introduces itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    pid: i32,
    host: String,
    /// Within what numbers are unique, and times are comparable: this start of the machine, and namespaces. Empty:
    /// nobody knows.
    space: String,
    /// When it was started, in units of the system's.
    start: u64,
}

#[cfg(target_os = "linux")]
fn space() -> String {
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

#[cfg(not(target_os = "linux"))]
fn space() -> String {
    host()
}

/// The letter that Linux gives the state of a process, and when it was started.
fn stat(pid: i32) -> Option<(char, u64)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Its name, in parentheses, may hold anything.
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    Some((fields.next()?.chars().next()?, fields.nth(18)?.parse().ok()?))
}

/// When this process was started, or a little earlier: file systems and clocks round. Where the system does not say, now.
pub fn started() -> SystemTime {
    let age = || {
        let (_, start) = stat(std::process::id() as i32)?;
        // SAFETY: all-zero is a value of it, and the calls write nothing else.
        let (now, per_second) = unsafe {
            let mut now = std::mem::zeroed::<libc::timespec>();
            (libc::clock_gettime(BOOT, &mut now) == 0).then_some(())?;
            (now, libc::sysconf(libc::_SC_CLK_TCK))
        };
        let now = Duration::new(now.tv_sec.try_into().ok()?, now.tv_nsec.try_into().ok()?);
        now.checked_sub(Duration::from_secs_f64(start as f64 / per_second as f64))
    };
    SystemTime::now() - age().unwrap_or_default() - Duration::from_secs(2)
}

/// The clock by which Linux tells when a process was started.
#[cfg(target_os = "linux")]
const BOOT: libc::clockid_t = libc::CLOCK_BOOTTIME;
#[cfg(not(target_os = "linux"))]
const BOOT: libc::clockid_t = libc::CLOCK_MONOTONIC;

/// Whether there is a process of this number.
fn exists(pid: i32) -> bool {
    // SAFETY: signal 0 only asks whether the process exists.
    unsafe { libc::kill(pid, 0) == 0 || io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH) }
}

impl Process {
    pub fn own() -> Self {
        let pid = std::process::id() as i32;
        Self { pid, host: host(), space: space(), start: stat(pid).map_or(0, |(_, start)| start) }
    }

    pub fn parse(text: &str) -> Option<Self> {
        let mut words = text.trim_end().split(' ');
        let mut word = || words.next();
        let (pid, host) = (word()?.parse().ok()?, word()?.into());
        let start = word()?.parse().ok()?;
        let space = word()?.trim_start_matches('-').into();
        Some(Self { pid, host, space, start })
    }

    /// Where it is: the machine and its namespaces, or the machine's name.
    pub fn space(&self) -> &str {
        // Which containers see each other's files, the files say.
        if self.space.is_empty() { &self.host } else { self.space.split('/').next().unwrap_or_default() }
    }

    /// Whether `self`, which runs, can tell how `other` fares.
    pub fn sees(&self, other: &Self) -> bool {
        !self.space.is_empty() && self.space == other.space
    }

    /// Whether another process has certainly ended.
    pub fn knows_gone(&self, other: &Self) -> bool {
        if !self.sees(other) {
            return false;
        }
        match stat(other.pid) {
            None => !exists(other.pid),
            Some((_, start)) if start != other.start => true,
            // Its first thread has ended: the others may go on.
            Some(('Z' | 'X', _)) => {
                fs::read_dir(format!("/proc/{}/task", other.pid)).map_or(true, |threads| threads.count() < 2)
            }
            Some(_) => false,
        }
    }

    /// Whether another process is stopped, by a signal or a debugger.
    pub fn knows_stopped(&self, other: &Self) -> bool {
        self.sees(other) && matches!(stat(other.pid), Some(('T' | 't', _)))
    }
}

/// A line without a line break.
impl std::fmt::Display for Process {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let space = if self.space.is_empty() { "-" } else { &self.space };
        write!(f, "{} {} {} {space}", self.pid, self.host, self.start)
    }
}

impl Process {
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
        assert_eq!(Process::parse(&own.to_string()).as_ref(), Some(&own));
        assert!(!own.knows_gone(&own));
        let age = SystemTime::now().duration_since(started()).unwrap();
        assert!(age < Duration::from_secs(1000), "{age:?}");
        let earlier = Process { start: own.start + 1, ..own.clone() };
        assert_eq!(own.knows_gone(&earlier), cfg!(target_os = "linux"));
        let mut child = std::process::Command::new("/bin/sleep").arg("100").spawn().unwrap();
        let pid = child.id() as i32;
        let other = Process { pid, start: stat(pid).map_or(0, |(_, start)| start), ..own.clone() };
        assert!(!own.knows_gone(&other));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(own.knows_gone(&other));
        // In another container there may be a process of this number, or none: nobody knows.
        let elsewhere = Process { space: "another".into(), ..other.clone() };
        assert!(!own.knows_gone(&elsewhere));
        let nowhere = Process { space: String::new(), ..own.clone() };
        assert_eq!(Process::parse(&nowhere.to_string()).as_ref(), Some(&nowhere));
        assert!(!nowhere.knows_gone(&Process { space: String::new(), ..other }));
    }
}
