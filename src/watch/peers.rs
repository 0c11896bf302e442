//! What the ranks tell each other without MPI: files in one directory.
//!
//! It works when MPI does not, needs no thread level, and costs nothing while nothing is wrong. Every
//! file is written under another name and renamed, so that it is whole when it is seen.
//!
//! | file | written | says |
//! | --- | --- | --- |
//! | `rank3.pid` | at the start | where the process is |
//! | `rank3.finished` | at its end | it takes part in nothing any more; how many collectives it did |
//! | `ask` | when a rank wants a report | a word that answers repeat |
//! | `rank3.state` | as an answer | in a line, what the rank is doing |
//! | `rank3.json` | as an answer | all that its recorder has |
//! | `reporter` | at a time-out | which rank reports |

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use crate::comm::{self, Comm};
use crate::record::host;

/// The directory of a job.
#[derive(Debug)]
pub struct Peers {
    pub directory: PathBuf,
    pub rank: i32,
    pub size: i32,
    pub host: String,
    /// Files of an earlier job of the same name are older than this.
    since: SystemTime,
    /// Why the directory cannot be written to, if so.
    pub broken: Option<String>,
}

/// What a rank answers.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// Seconds for which it has been doing that.
    pub seconds: f64,
    pub state: String,
}

/// What is known of a rank.
#[derive(Clone, Debug, PartialEq)]
pub enum Status {
    Answered(Answer),
    Finished,
    /// Its process is stopped, by a signal or a debugger.
    Stopped(String),
    /// Its process does not exist any more.
    Gone(String),
    /// It has a process, as far as one can see from here.
    Silent(String),
    /// It never wrote to the directory.
    Unknown,
}

/// When this process was started; without /proc, now.
fn process_start() -> SystemTime {
    let start = fs::metadata("/proc/self").and_then(|found| found.modified());
    // File systems and clocks round.
    start.unwrap_or_else(|_| SystemTime::now()) - Duration::from_secs(2)
}

/// A word for a question of this rank.
pub fn word(rank: i32) -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    format!("{rank}-{}", now.as_nanos())
}

impl Peers {
    pub fn new(directory: PathBuf, rank: i32, size: i32) -> Self {
        if rank == 0 {
            sweep(&directory);
        }
        let mut peers = Self { directory, rank, size, host: host(), since: process_start(), broken: None };
        if let Err(error) = peers.introduce() {
            peers.broken = Some(error.to_string());
        }
        peers
    }

    fn introduce(&self) -> io::Result<()> {
        fs::create_dir_all(&self.directory)?;
        for kind in ["finished", "state", "json"] {
            let _ = fs::remove_file(self.file(self.rank, kind));
        }
        self.write(&self.file(self.rank, "pid"), &format!("{} {}", std::process::id(), self.host))
    }

    fn file(&self, rank: i32, kind: &str) -> PathBuf {
        self.directory.join(format!("rank{rank}.{kind}"))
    }

    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        let mut temporary = path.as_os_str().to_owned();
        temporary.push(format!(".{}.tmp", self.rank));
        fs::write(&temporary, text)?;
        fs::rename(&temporary, path)
    }

    /// A file of this job.
    fn read(&self, path: &Path) -> Option<String> {
        let recent = fs::metadata(path).and_then(|found| found.modified()).is_ok_and(|at| at >= self.since);
        if recent { fs::read_to_string(path).ok() } else { None }
    }

    /// Tells the others that this rank has done its last operation.
    pub fn finish(&self) {
        let count =
            |comm: &Arc<Comm>| format!("{:016x} {}\n", comm.id, comm.collectives.load(Ordering::Relaxed));
        let lines: String = comm::live().iter().chain(&comm::past()).map(count).collect();
        let _ = self.write(&self.file(self.rank, "finished"), &lines);
    }

    /// How many collectives of a communicator a rank did before it finished; `None` if it has not.
    pub fn finished_collectives(&self, rank: i32, comm: &Comm) -> Option<u64> {
        let text = self.read(&self.file(rank, "finished"))?;
        let start = format!("{:016x} ", comm.id);
        // One that is made when another has been freed may have its id.
        Some(text.lines().filter_map(|line| line.strip_prefix(&start)?.parse().ok()).max().unwrap_or(0))
    }

    pub fn has_finished(&self, rank: i32) -> bool {
        self.read(&self.file(rank, "finished")).is_some()
    }

    /// The process of a rank on this host, with words that name it.
    fn process(&self, rank: i32) -> Option<(Option<i32>, String)> {
        let text = self.read(&self.file(rank, "pid"))?;
        let (pid, host) = text.split_once(' ')?;
        let name = format!("process {pid} on {host}");
        Some(((host == self.host).then(|| pid.parse().ok()).flatten(), name))
    }

    /// Whether the process of a rank has ended, and how it is named. Known only on the same host.
    pub fn gone(&self, rank: i32) -> Option<String> {
        let (pid, name) = self.process(rank)?;
        (!exists(pid?) || process_state(pid?) == Some('Z')).then_some(name)
    }

    /// What is known of a rank, apart from its answers.
    pub fn status(&self, rank: i32) -> Status {
        if self.has_finished(rank) {
            return Status::Finished;
        }
        let Some((pid, name)) = self.process(rank) else { return Status::Unknown };
        if self.gone(rank).is_some() {
            return Status::Gone(name);
        }
        match pid.and_then(process_state) {
            Some('T' | 't') => Status::Stopped(name),
            _ => Status::Silent(name),
        }
    }

    /// Asks all ranks for their state; answers repeat the word.
    pub fn ask(&self, word: &str) -> io::Result<()> {
        self.write(&self.directory.join("ask"), word)
    }

    /// The word of the last question.
    pub fn asked(&self) -> Option<String> {
        self.read(&self.directory.join("ask"))
    }

    pub fn answer(&self, word: &str, answer: &Answer, dump: &str) -> io::Result<()> {
        self.write(&self.file(self.rank, "json"), dump)?;
        let line = format!("{word}\n{:.3}\n{}\n", answer.seconds, answer.state);
        self.write(&self.file(self.rank, "state"), &line)
    }

    /// Whether this rank has left a dump.
    pub fn has_dump(&self) -> bool {
        self.file(self.rank, "json").exists()
    }

    pub fn answer_of(&self, rank: i32, word: &str) -> Option<Answer> {
        let (answered, answer) = self.last_answer(rank)?;
        (answered == word).then_some(answer)
    }

    /// The last answer of a rank, and the word of the question.
    pub fn last_answer(&self, rank: i32) -> Option<(String, Answer)> {
        let text = self.read(&self.file(rank, "state"))?;
        let mut lines = text.lines();
        let word = lines.next()?.to_owned();
        Some((word, Answer { seconds: lines.next()?.parse().ok()?, state: lines.next()?.to_owned() }))
    }

    /// Makes this rank the one that reports; another one's rank if that was faster.
    pub fn become_reporter(&self) -> Result<(), i32> {
        let path = self.directory.join("reporter");
        for _ in 0..2 {
            match fs::OpenOptions::new().write(true).create_new(true).open(&path) {
                Ok(mut file) => {
                    let _ = write!(file, "{}", self.rank);
                    return Ok(());
                }
                Err(_) if self.read(&path).is_none() => drop(fs::remove_file(&path)), // an earlier job's
                Err(_) => break,
            }
        }
        // The winner may have created the file without having written to it.
        std::thread::sleep(Duration::from_millis(20));
        match self.read(&path).and_then(|text| text.parse().ok()) {
            Some(rank) if rank != self.rank => Err(rank),
            _ => Ok(()),
        }
    }

    pub fn resign_as_reporter(&self) {
        let _ = fs::remove_file(self.directory.join("reporter"));
    }

    /// Removes what this job has left, but dumps.
    pub fn clean(&self) {
        for rank in 0..self.size {
            for kind in ["pid", "finished", "state"] {
                let _ = fs::remove_file(self.file(rank, kind));
            }
        }
        for name in ["ask", "reporter"] {
            let _ = fs::remove_file(self.directory.join(name));
        }
        let _ = fs::remove_dir(&self.directory); // fails where dumps are left
    }

    /// At the very end: the last rank cleans up.
    pub fn leave(&self) {
        if (0..self.size).all(|rank| self.has_finished(rank)) {
            self.clean();
        }
    }
}

/// Removes what killed jobs of this host have left beside this directory, except for dumps.
fn sweep(directory: &Path) {
    let (Some(parent), Some(name)) = (directory.parent(), directory.file_name().and_then(|n| n.to_str()))
    else {
        return;
    };
    // `mpi4jax-<user>-`
    let prefix: String = name.splitn(3, '-').take(2).flat_map(|part| [part, "-"]).collect();
    let host = host();
    let is_left = |path: &Path| {
        path.extension().is_some_and(|kind| kind == "pid")
            && fs::read_to_string(path).is_ok_and(|text| {
                let (pid, on) = text.split_once(' ').unwrap_or_default();
                on == host && pid.parse().is_ok_and(|pid| !exists(pid))
            })
    };
    let entries = |path: &Path| fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
    for sibling in entries(parent) {
        let ours = sibling.file_name().and_then(|n| n.to_str()).is_some_and(|n| n.starts_with(&prefix));
        if ours && sibling != directory && entries(&sibling).all(|file| is_left(&file)) {
            for file in entries(&sibling) {
                let _ = fs::remove_file(file);
            }
            let _ = fs::remove_dir(&sibling);
        }
    }
}

/// Whether there is a process of this number.
fn exists(pid: i32) -> bool {
    // SAFETY: signal 0 only asks whether the process exists.
    unsafe { libc::kill(pid, 0) == 0 || io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH) }
}

/// The letter that Linux gives the state of a process.
fn process_state(pid: i32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("mpi4jax-peers-{name}-{}", std::process::id()))
    }

    #[test]
    fn ranks_ask_and_answer() {
        let (a, b) = (Peers::new(directory("ask"), 0, 2), Peers::new(directory("ask"), 1, 2));
        assert_eq!(a.broken, None);
        let word = word(0);
        a.ask(&word).unwrap();
        assert_eq!(b.asked().as_ref(), Some(&word));
        assert_eq!(a.answer_of(1, &word), None);
        let answer = Answer { seconds: 1.5, state: "in barrier #1".into() };
        b.answer(&word, &answer, "{}").unwrap();
        assert_eq!(a.answer_of(1, &word), Some(answer));
        assert_eq!(a.answer_of(1, "another"), None);
        assert_eq!(a.last_answer(1).unwrap().0, word);
        assert_eq!(a.become_reporter(), Ok(()));
        assert_eq!(b.become_reporter(), Err(0));
        assert!(matches!(a.status(1), Status::Silent(_)));
        b.finish();
        assert_eq!(a.status(1), Status::Finished);
        b.leave();
        assert!(a.directory.exists());
        let _ = fs::remove_file(a.file(1, "json"));
        a.finish();
        a.leave();
        assert!(!a.directory.exists());
    }

    #[test]
    fn a_directory_that_cannot_be_made_is_no_failure() {
        let peers = Peers::new("/proc/mpi4jax".into(), 0, 2);
        assert!(peers.broken.is_some());
        assert_eq!(peers.status(1), Status::Unknown);
    }
}
