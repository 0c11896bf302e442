//! What the ranks tell each other without MPI: files in one folder.
//!
//! It works when MPI does not, needs no thread level, and costs nothing while nothing is wrong. Every
//! file is written under another name and renamed, so that it is whole when it is seen. The [`Folder`] is this
//! user's alone, and what is in it is known by its [`Listing`]: [`Peers::look`] brings that up to date.
//!
//! | file | written | says |
//! | --- | --- | --- |
//! | `rank3.pid` | at the start | which process it is |
//! | `rank3.finished` | at its end | it takes part in nothing any more; how many collectives it did |
//! | `rank3.gone` | by a rank of the same machine | its process has ended, though it has not finished |
//! | `rank3.waits` | when it has waited for a while | in which collectives |
//! | `rank3.did` | at growing intervals, when it waits, and at its end | samples of what it did |
//! | `ask` | when a rank wants a report | a word that answers repeat |
//! | `rank3.state` | as an answer | in a line, what the rank is doing |
//! | `rank3.json` | as an answer | all that its recorder has |
//! | `reporter` | for a report | which rank reports |
//! | `default` | when the first rank makes the default communicator, or nobody is left to | how it is made |
//! | `told`, `shown` | after a line about a long wait, or a report that was asked for | which rank said it |
//! | `ending` | before a rank ends the job | that it has said why |

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use super::folder::Folder;
use super::listing::Listing;
use super::process::{self, Process};
use super::questions::Answer;
use super::sweep::sweep;
use crate::comm::{self, Comm};
use crate::record::host;
use crate::record::recorder::Record;

/// The ranks of a job.
#[derive(Debug)]
pub struct Peers {
    pub directory: PathBuf,
    pub rank: i32,
    pub size: i32,
    pub host: String,
    pub(super) process: Process,
    /// Files of an earlier job of the same name are older than this.
    pub(super) since: SystemTime,
    /// Why there are no files, if so.
    pub(super) folder: Result<Folder, String>,
    listing: Listing,
    /// The ranks' processes, as far as they have been asked for.
    processes: Mutex<HashMap<i32, Process>>,
    /// Ranks that have finished, and how many collectives each did, by [`Comm::class`].
    finished: Mutex<HashMap<i32, Arc<HashMap<u64, u64>>>>,
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

pub(super) fn file(rank: i32, kind: &str) -> String {
    format!("rank{rank}.{kind}")
}

/// A collective as all of its ranks know it.
fn collective(record: &Record) -> String {
    let what = &record.what;
    format!(
        "{:016x} {:016x} {} {} {}",
        what.comm.class,
        what.comm.id,
        record.sequence,
        what.name(),
        what.root
    )
}

impl Peers {
    pub fn new(directory: PathBuf, rank: i32, size: i32) -> Self {
        let folder = Folder::make(&directory).map_err(|error| error.to_string());
        let (process, since) = (Process::own(), process::started());
        let (processes, finished) = (Mutex::default(), Mutex::default());
        let (host, listing) = (host(), Listing::default());
        let mut peers =
            Self { directory, rank, size, host, process, since, folder, listing, processes, finished };
        if let Err(error) = peers.introduce() {
            peers.folder = Err(error.to_string());
        } else if let (0, Ok(folder)) = (rank, &peers.folder) {
            sweep(folder, &peers.process);
        }
        peers
    }

    fn folder(&self) -> io::Result<&Folder> {
        self.folder.as_ref().map_err(|why| io::Error::other(why.clone()))
    }

    /// Why there are no files, if so.
    pub fn broken(&self) -> Option<&str> {
        self.folder.as_ref().err().map(AsRef::as_ref)
    }

    fn introduce(&self) -> io::Result<()> {
        let folder = self.folder()?;
        self.look();
        if let Some(other) = self.process(self.rank)
            && other != self.process
            && !self.process.knows_gone(&other)
        {
            let name = other.name();
            return Err(io::Error::other(format!("{name} is rank {} of this job already", self.rank)));
        }
        self.processes.lock().unwrap_or_else(PoisonError::into_inner).clear();
        let (own, pid) = (file(self.rank, ""), file(self.rank, "pid"));
        let is_old = |name: &String| name.starts_with(&own) && *name != pid;
        folder.names().into_iter().filter(is_old).for_each(|name| folder.remove(&name));
        self.write(&pid, &format!("{}\n{}\n", self.process, self.size))
    }

    /// Finds out what is in the folder. As long as it returns the same number, nothing has changed there.
    pub fn look(&self) -> u64 {
        self.folder.as_ref().map_or(0, |folder| self.listing.look(folder))
    }

    pub(super) fn write(&self, name: &str, text: &str) -> io::Result<()> {
        self.folder()?.write(name, &format!("{name}.{}.tmp", self.rank), text)
    }

    /// A file of this job that was there at the last look.
    pub(super) fn listed(&self, name: &str) -> Option<String> {
        if self.listing.has(name) { self.read(name) } else { None }
    }

    /// A file of this job.
    pub(super) fn read(&self, name: &str) -> Option<String> {
        let (text, written) = self.folder.as_ref().ok()?.read(name)?;
        (written >= self.since).then_some(text)
    }

    pub(super) fn remove(&self, name: &str) {
        if let Ok(folder) = &self.folder {
            folder.remove(name);
        }
    }

    /// Tells the others that this rank has done its last operation.
    pub fn finish(&self) {
        let counts = comm::collectives();
        let lines: String = counts.iter().map(|(class, count)| format!("{class:016x} {count}\n")).collect();
        if self.write(&file(self.rank, "finished"), &format!("{}\n{lines}", self.process)).is_err() {
            // A full disk: nobody waits for a rank that has not come.
            self.remove(&file(self.rank, "pid"));
        }
    }

    /// The collectives that a rank did before it finished; `None` if it has not.
    fn finished(&self, rank: i32) -> Option<Arc<HashMap<u64, u64>>> {
        let mut finished = self.finished.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = finished.get(&rank) {
            return Some(known.clone());
        }
        let text = self.listed(&file(rank, "finished"))?;
        let (process, lines) = text.split_once('\n')?;
        // Not that of another job, whatever the name of the folder is.
        if Process::parse(process)? != self.process(rank)? {
            return None;
        }
        let count = |line: &str| {
            let (class, count) = line.split_once(' ')?;
            Some((u64::from_str_radix(class, 16).ok()?, count.parse().ok()?))
        };
        let counts = Arc::new(lines.lines().filter_map(count).collect());
        finished.insert(rank, Arc::clone(&counts));
        Some(counts)
    }

    /// How many collectives a rank did at most on a communicator before it finished; `None` if it has not.
    pub fn finished_collectives(&self, rank: i32, comm: &Comm) -> Option<u64> {
        Some(self.finished(rank)?.get(&comm.class).copied().unwrap_or(0))
    }

    pub fn has_finished(&self, rank: i32) -> bool {
        self.finished(rank).is_some()
    }

    /// Tells the others in which collectives this rank waits.
    pub fn wait_in<'a>(&self, records: impl Iterator<Item = &'a Record>) {
        let lines: String = records.map(|record| collective(record) + "\n").collect();
        if lines.is_empty() {
            self.remove(&file(self.rank, "waits"));
        } else {
            let _ = self.write(&file(self.rank, "waits"), &lines);
        }
    }

    /// Whether a rank has said that it waits in this collective too.
    pub fn waits_in(&self, rank: i32, record: &Record) -> bool {
        let line = collective(record);
        self.listed(&file(rank, "waits")).is_some_and(|text| text.lines().any(|other| other == line))
    }

    /// The process of a rank.
    pub(super) fn process(&self, rank: i32) -> Option<Process> {
        let mut processes = self.processes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = processes.get(&rank) {
            return Some(known.clone());
        }
        let process = Process::parse(self.listed(&file(rank, "pid"))?.lines().next()?)?;
        processes.insert(rank, process.clone());
        Some(process)
    }

    /// Whether the files of this job are still there: the last rank removes them at its end.
    pub fn is_under_way(&self) -> bool {
        self.folder.as_ref().is_ok_and(|folder| folder.has(&file(self.rank, "pid")))
    }

    /// What is known of a rank, apart from its answers.
    pub fn status(&self, rank: i32) -> Status {
        if self.has_finished(rank) {
            return Status::Finished;
        }
        match self.process(rank) {
            None => Status::Unknown,
            Some(process) if self.gone(rank).is_some() || self.process.knows_gone(&process) => {
                Status::Gone(process.name())
            }
            Some(process) if self.process.knows_stopped(&process) => Status::Stopped(process.name()),
            Some(process) => Status::Silent(process.name()),
        }
    }

    /// How the default communicator is made: the ranks' first choice, which is this one's if it is the first. Without files,
    /// its own.
    pub fn choose_default(&self, choice: &str) -> String {
        let Ok(folder) = &self.folder else { return choice.into() };
        for _ in 0..1000 {
            if folder.create("default", choice).is_ok() {
                break;
            }
            match self.read("default") {
                Some(chosen) if !chosen.is_empty() => return chosen,
                Some(_) => std::thread::sleep(Duration::from_millis(1)), // it is being written
                None => folder.remove("default"),                        // an earlier job's
            }
        }
        choice.into()
    }

    /// How the default communicator is made, if a rank has chosen.
    pub fn chosen_default(&self) -> Option<String> {
        self.listed("default").filter(|chosen| !chosen.is_empty())
    }

    /// Whether all ranks have files here.
    pub fn all_have_come(&self) -> bool {
        (0..self.size).all(|rank| self.listing.has(&file(rank, "pid")))
    }

    /// Whether all other ranks that have come have finished or are gone, and whether all have come.
    pub fn others_have_finished(&self) -> (bool, bool) {
        let has_come = |&rank: &i32| self.listing.has(&file(rank, "pid"));
        let is_gone = |rank| self.process(rank).is_some_and(|process| self.process.knows_gone(&process));
        let others = (0..self.size).filter(|&rank| rank != self.rank);
        let finished = others.filter(has_come).all(|rank| self.has_finished(rank) || is_gone(rank));
        (finished, self.all_have_come())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::fs;

    use super::*;

    pub fn directory(name: &str) -> PathBuf {
        let base = std::env::temp_dir().join(format!("mpi4jax-peers-{name}-{}", std::process::id()));
        base.join("user").join("job")
    }

    /// Two ranks, each as if it had been started by itself: one process cannot be two ranks in files.
    pub fn two(name: &str) -> (Peers, Peers) {
        (Peers::new(directory(name), 0, 2), Peers::new(directory(name), 1, 2))
    }

    #[test]
    fn a_directory_that_cannot_be_made_is_no_failure() {
        let peers = Peers::new("/proc/mpi4jax/job".into(), 0, 2);
        assert!(peers.broken().is_some());
        assert_eq!(peers.status(1), Status::Unknown);
        assert_eq!(peers.become_reporter(), Ok(()));
    }

    #[test]
    fn the_first_choice_holds_for_all() {
        let (a, b) = two("choice");
        b.look();
        assert_eq!(b.chosen_default(), None);
        assert_eq!(a.choose_default("world"), "world");
        assert_eq!(b.choose_default("clone"), "world");
        b.look();
        assert_eq!(b.chosen_default().as_deref(), Some("world"));
        let alone = Peers::new("/proc/mpi4jax/job".into(), 0, 2);
        assert_eq!(alone.choose_default("clone"), "clone");
        fs::remove_dir_all(a.directory.parent().unwrap().parent().unwrap()).unwrap();
    }

    #[test]
    fn files_of_other_processes_are_not_this_jobs() {
        let (a, b) = two("others");
        let alien = |text: &str| text.replacen(&std::process::id().to_string(), "1", 1);
        b.finish();
        let path = b.directory.join("rank1.finished");
        fs::write(&path, alien(&fs::read_to_string(&path).unwrap())).unwrap();
        a.look();
        assert!(!a.has_finished(1));
        // A live process that is rank 1 is not replaced.
        let path = b.directory.join("rank1.pid");
        let pid = fs::read_to_string(&path).unwrap();
        let mut child = std::process::Command::new("/bin/sleep").arg("100").spawn().unwrap();
        let line = fs::read_to_string(format!("/proc/{}/stat", child.id()));
        let start = line.ok().and_then(|text| Some(text.rsplit_once(") ")?.1.split(' ').nth(19)?.to_owned()));
        let mut words: Vec<String> = pid.split(' ').map(Into::into).collect();
        (words[0], words[2]) = (child.id().to_string(), start.unwrap_or("0".into()));
        fs::write(&path, words.join(" ")).unwrap();
        let again = Peers::new(directory("others"), 1, 2);
        assert!(again.broken().is_some_and(|why| why.contains("is rank 1 of this job already")), "{again:?}");
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(Peers::new(directory("others"), 1, 2).broken(), None);
        fs::remove_dir_all(a.directory.parent().unwrap().parent().unwrap()).unwrap();
    }
}
