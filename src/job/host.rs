//! The ranks of a host exchange their states without MPI, by files in one folder.
//!
//! It works when MPI does not, needs no thread level, and costs nothing while nothing is wrong. Every file is written
//! under another name and renamed, so that it is whole when it is seen. The [`Folder`] is this user's alone. Of the ranks whose
//! files are here, the lowest one that runs is the [leader](Host::leader).
//!
//! | file | written | holds |
//! | --- | --- | --- |
//! | `rank3.pid` | at the start | which process it is |
//! | `rank3.pipe` | at the start | a named pipe: others wake the rank's watchdog by it, or have the leader report |
//! | `rank3.status` | when it has waited for a while, is asked, and at its end | its [`RankStatus`] |
//! | `rank3.json` | as an answer | all that its recorder has |
//! | `rank3.samples` | at growing intervals, when it waits, and at its end | samples of what it did |
//! | `default` | when the first rank makes the default communicator, or no rank is left to | how it is made |
//! | `ask` | when the leader asks what the ranks do | a [`Question`] |
//! | `ending` | before a rank ends the job | nothing: this rank has reported why |

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::mail::Question;
use super::ranks::Ranks;
use super::status::{Life, Need, RankStatus, World};
use crate::comm;
use crate::record::host;
use crate::system::folder::Folder;
use crate::system::process::{self, Process};

/// The ranks of a host.
#[derive(Debug)]
pub struct Host {
    pub directory: PathBuf,
    pub rank: i32,
    pub size: i32,
    pub name: String,
    pub process: Process,
    /// Files of an earlier job of the same name are older than this.
    since: SystemTime,
    /// Why there are no files, if so.
    folder: Result<Folder, String>,
    /// Where others wake this rank.
    pub pipe: Option<File>,
}

fn file(rank: i32, kind: &str) -> String {
    format!("rank{rank}.{kind}")
}

impl Host {
    pub fn new(directory: PathBuf, rank: i32, size: i32) -> Self {
        let folder = Folder::make(&directory).map_err(|error| error.to_string());
        let (process, since) = (Process::own(), process::started());
        let mut host = Self { directory, rank, size, name: host(), process, since, folder, pipe: None };
        if let Err(error) = host.register() {
            host.folder = Err(error.to_string());
        } else if let Ok(folder) = &host.folder {
            // Without one, others learn later what this rank does.
            host.pipe = folder.make_pipe(&file(rank, "pipe")).ok();
            if rank == 0 {
                sweep(&folder.path, &host.process);
            }
        }
        host
    }

    fn folder(&self) -> io::Result<&Folder> {
        self.folder.as_ref().map_err(|why| io::Error::other(why.clone()))
    }

    /// Why there are no files, if so.
    pub fn broken(&self) -> Option<&str> {
        self.folder.as_ref().err().map(AsRef::as_ref)
    }

    fn register(&self) -> io::Result<()> {
        let folder = self.folder()?;
        if let Some(other) = self.process(self.rank)
            && other != self.process
            && !self.process.sees_ended(&other)
        {
            let name = other.name();
            return Err(io::Error::other(format!("{name} is rank {} of this job already", self.rank)));
        }
        let (own, pid) = (file(self.rank, ""), file(self.rank, "pid"));
        let is_old = |name: &String| name.starts_with(&own) && *name != pid;
        folder.names().into_iter().filter(is_old).for_each(|name| folder.remove(&name));
        self.write(&pid, &(&self.process, self.size))
    }

    /// What the ranks have in common that see this folder, and no others; without one, this rank alone.
    pub fn place(&self) -> u64 {
        let folder = self.folder.as_ref().ok().and_then(Folder::identity);
        comm::hash((folder, folder.is_none().then_some(self.rank), self.process.space()))
    }

    fn write(&self, name: &str, value: &impl Serialize) -> io::Result<()> {
        self.folder()?.write(name, &format!("{name}.{}.tmp", self.rank), &serde_json::to_string(value)?)
    }

    /// What a file of this job says.
    fn parsed<T: DeserializeOwned>(&self, name: &str) -> Option<T> {
        serde_json::from_str(&self.read(name)?).ok()
    }

    /// A file of this job.
    fn read(&self, name: &str) -> Option<String> {
        let (text, written) = self.folder.as_ref().ok()?.read(name)?;
        (written >= self.since).then_some(text)
    }

    /// Writes the status of this rank.
    pub fn publish(&self, status: &RankStatus) -> io::Result<()> {
        let result = self.write(&file(self.rank, "status"), &(&self.process, status));
        if result.is_err() && status.life == Life::Finished {
            // A full disk: no rank waits for one that has not come.
            self.remove(&file(self.rank, "pid"));
        }
        result
    }

    /// The last status of a rank, unless another process wrote it, of an earlier job.
    fn published(&self, rank: i32) -> Option<RankStatus> {
        let (process, status): (Process, RankStatus) = self.parsed(&file(rank, "status"))?;
        (process == self.process(rank)?).then_some(status)
    }

    /// Writes the dump of this rank for `python -m mpi4jax.report`.
    pub fn dump(&self, dump: &Value) -> io::Result<()> {
        self.write(&file(self.rank, "json"), dump)
    }

    /// Samples of what a rank did.
    pub fn samples<T: DeserializeOwned>(&self, rank: i32) -> Option<T> {
        self.parsed(&file(rank, "samples"))
    }

    pub fn publish_samples(&self, samples: &impl Serialize) {
        let _ = self.write(&file(self.rank, "samples"), samples);
    }

    fn remove(&self, name: &str) {
        if let Ok(folder) = &self.folder {
            folder.remove(name);
        }
    }

    /// Whether no rank of this job has done this before.
    pub fn is_first_to(&self, name: &str) -> bool {
        let Ok(folder) = &self.folder else { return false };
        if self.read(name).is_none() {
            folder.remove(name); // an earlier job's
        }
        folder.create(name, "").is_ok()
    }

    /// The user asks this rank for a report, which the leader makes.
    pub fn request_report(&self) {
        self.notify(self.leader(), self.rank);
    }

    /// The rank that the user has asked for a report, as another rank has told this one through its pipe.
    pub fn requested(messages: &[u8]) -> Option<i32> {
        let ranks =
            messages.chunks_exact(4).filter_map(|bytes| bytes.try_into().ok()).map(i32::from_ne_bytes);
        ranks.max().filter(|rank| *rank >= 0)
    }

    /// Wakes the watchdog of a rank.
    pub fn wake(&self, rank: i32) {
        self.notify(rank, -1);
    }

    fn notify(&self, rank: i32, number: i32) {
        if let Ok(folder) = &self.folder {
            folder.notify(&file(rank, "pipe"), &number.to_ne_bytes());
        }
    }

    /// Asks the ranks of this folder what they do.
    pub fn ask(&self, question: &Question) -> io::Result<()> {
        self.write("ask", question)?;
        self.here().iter().filter(|&rank| rank != self.rank).for_each(|rank| self.wake(rank));
        Ok(())
    }

    /// The last question.
    pub fn question(&self) -> Option<Question> {
        self.parsed("ask")
    }

    /// The process of a rank.
    fn process(&self, rank: i32) -> Option<Process> {
        let (process, _): (Process, i32) = self.parsed(&file(rank, "pid"))?;
        Some(process)
    }

    /// Whether the files of this job are still there: the last rank removes them at its end.
    pub fn is_under_way(&self) -> bool {
        self.folder.as_ref().is_ok_and(|folder| folder.has(&file(self.rank, "pid")))
    }

    /// The ranks that have files here.
    pub fn here(&self) -> Ranks {
        let rank = |name: &str| name.strip_prefix("rank")?.strip_suffix(".pid")?.parse().ok();
        let names = self.folder.as_ref().map(Folder::names).unwrap_or_default();
        names.iter().filter_map(|name| rank(name)).chain([self.rank]).collect()
    }

    /// Of the ranks whose processes this one sees, the lowest that runs; without files, this one.
    pub fn leader(&self) -> i32 {
        let runs = |rank: &i32| {
            *rank == self.rank
                || self.process(*rank).is_some_and(|process| {
                    self.process.can_see(&process)
                        && !self.process.sees_ended(&process)
                        && !self.process.sees_stopped(&process)
                })
        };
        self.here().iter().find(runs).unwrap_or(self.rank)
    }

    /// What a rank does; None: it has no files here.
    fn status(&self, rank: i32) -> Option<RankStatus> {
        let process = self.process(rank)?;
        // First: a process that has ended publishes nothing more.
        let is_gone = self.process.sees_ended(&process);
        let mut status = self.published(rank).unwrap_or_default();
        status.life = match status.life {
            Life::Finished => Life::Finished,
            _ if is_gone => Life::Gone,
            _ if self.process.sees_stopped(&process) => Life::Stopped,
            _ => Life::Runs,
        };
        match status.life {
            Life::Gone => status.waits.clear(),
            // It waits for nothing but the end of the others.
            Life::Finished => status.waits.retain(|wait| wait.need == Need::End),
            _ => {}
        }
        Some(RankStatus { process: process.name(), ..status })
    }

    /// The states of the ranks, by their files.
    pub fn world(&self) -> World {
        if !self.is_under_way() {
            return World::new();
        }
        self.here().iter().filter_map(|rank| Some((rank, self.status(rank)?))).collect()
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
        self.read("default").filter(|chosen| !chosen.is_empty())
    }

    /// Whether a rank begins nothing any more, or has no files here.
    fn has_ended(&self, rank: i32) -> bool {
        matches!(self.status(rank).map(|status| status.life), None | Some(Life::Finished | Life::Gone))
    }

    /// Whether all other ranks that have come have ended, and whether all have come.
    pub fn others_have_ended(&self) -> (bool, bool) {
        let here = self.here();
        let ended = here.iter().all(|rank| rank == self.rank || self.has_ended(rank));
        (ended, here.count() == self.size as usize)
    }

    /// The job is about to be ended, by this rank, which has said why. Files that are not needed to find that out go.
    pub fn end(&self) {
        let has_dump = self.folder.as_ref().is_ok_and(|folder| folder.has(&file(self.rank, "json")));
        if has_dump {
            let _ = self.write("ending", &());
        } else {
            self.clean();
        }
    }

    /// Whether a rank has ended the job.
    pub fn is_ending(&self) -> bool {
        self.broken().is_none() && (!self.is_under_way() || self.read("ending").is_some())
    }

    /// Removes what this job has left, but dumps.
    fn clean(&self) {
        let Ok(folder) = &self.folder else { return };
        folder.names().iter().filter(|name| !name.ends_with(".json")).for_each(|name| folder.remove(name));
        folder.remove_self(); // fails where dumps are left
    }

    /// At the very end, when all ranks have been in `MPI_Finalize`: the last rank that has come cleans up.
    pub fn leave(&self) {
        if self.published(self.rank).is_some_and(|status| status.life == Life::Finished)
            && self.here().iter().all(|rank| self.has_ended(rank))
        {
            self.clean();
        }
    }
}

/// Removes what killed jobs have left beside this folder, except for dumps: where all of a job's processes were of this
/// machine, and are gone.
fn sweep(folder: &Path, own: &Process) {
    let entries = |folder: &Path| {
        fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect::<Vec<_>>()
    };
    for job in folder.parent().map(entries).unwrap_or_default() {
        let files = entries(&job);
        let with = |kind: &'static str| files.iter().filter(move |it| it.extension() == Some(kind.as_ref()));
        let read = |path| serde_json::from_str(&fs::read_to_string(path).ok()?).ok();
        let ranks: Vec<(Process, usize)> = with("pid").filter_map(read).collect();
        let is_gone = |(process, size): &(Process, usize)| *size == ranks.len() && own.sees_ended(process);
        // Without ranks, it is a job that begins now.
        if !ranks.is_empty() && ranks.iter().all(is_gone) && with("json").next().is_none() {
            let _ = fs::remove_dir_all(job);
        }
    }
}

#[cfg(test)]
mod tests;
