//! What the ranks of a host tell each other without MPI: files in one folder.
//!
//! It works when MPI does not, needs no thread level, and costs nothing while nothing is wrong. Every file is written
//! under another name and renamed, so that it is whole when it is seen. The [`Folder`] is this user's alone, and what is in
//! it is known by its [`Listing`]: [`Host::look`] brings that up to date. Of the ranks whose files are here, the lowest one
//! that runs speaks for all: the [leader](Host::leader).
//!
//! | file | written | says |
//! | --- | --- | --- |
//! | `rank3.pid` | at the start | which process it is |
//! | `rank3.bell` | at the start | by it others wake the rank's watchdog |
//! | `rank3.status` | when it has waited for a while, is asked, and at its end | its [`RankStatus`] |
//! | `rank3.json` | as an answer | all that its recorder has |
//! | `rank3.did` | at growing intervals, when it waits, and at its end | samples of what it did |
//! | `default` | when the first rank makes the default communicator, or nobody is left to | how it is made |
//! | `ask` | when the leader, or a rank with a signal, wants to know | a [`Word`] |
//! | `shown` | when somebody has asked all ranks for a report | which rank makes it |
//! | `ending` | before a rank ends the job | that it has said why |

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::mail::Word;
use super::ranks::Ranks;
use super::status::{Life, Need, RankStatus, World};
use crate::comm;
use crate::record::host;
use crate::system::folder::{Folder, Listing};
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
    pub bell: RawFd,
    listing: Listing,
    /// The ranks' processes, as far as they have been asked for.
    processes: Mutex<HashMap<i32, Process>>,
}

/// For how long a report that a rank makes is that of all others, too: launchers ask all of them at once.
const SHOWN: Duration = Duration::from_secs(3);

fn file(rank: i32, kind: &str) -> String {
    format!("rank{rank}.{kind}")
}

impl Host {
    pub fn new(directory: PathBuf, rank: i32, size: i32) -> Self {
        let folder = Folder::make(&directory).map_err(|error| error.to_string());
        let (process, since) = (Process::own(), process::started());
        let (name, listing, processes) = (host(), Listing::default(), Mutex::default());
        let mut host =
            Self { directory, rank, size, name, process, since, folder, bell: -1, listing, processes };
        if let Err(error) = host.introduce() {
            host.folder = Err(error.to_string());
        } else if let Ok(folder) = &host.folder {
            // Without one, others learn later what this rank does.
            host.bell = folder.make_bell(&file(rank, "bell")).unwrap_or(-1);
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
        self.write(&pid, &(&self.process, self.size))
    }

    /// What the ranks have in common that see this folder, and no others; without one, this rank alone.
    pub fn place(&self) -> u64 {
        let folder = self.folder.as_ref().ok().and_then(Folder::identity);
        comm::hash((folder, folder.is_none().then_some(self.rank), self.process.space()))
    }

    /// Finds out what is in the folder. As long as it returns the same number, nothing has changed there.
    pub fn look(&self) -> u64 {
        self.folder.as_ref().map_or(0, |folder| self.listing.look(folder))
    }

    fn write(&self, name: &str, value: &impl Serialize) -> io::Result<()> {
        self.folder()?.write(name, &format!("{name}.{}.tmp", self.rank), &serde_json::to_string(value)?)
    }

    /// What a file of this job says that was there at the last look.
    fn listed<T: DeserializeOwned>(&self, name: &str) -> Option<T> {
        if self.listing.has(name) { serde_json::from_str(&self.read(name)?).ok() } else { None }
    }

    /// A file of this job.
    fn read(&self, name: &str) -> Option<String> {
        let (text, written) = self.folder.as_ref().ok()?.read(name)?;
        (written >= self.since).then_some(text)
    }

    /// Tells the others how this rank fares.
    pub fn say(&self, status: &RankStatus) -> io::Result<()> {
        let said = self.write(&file(self.rank, "status"), &(&self.process, status));
        if said.is_err() && status.life == Life::Finished {
            // A full disk: nobody waits for a rank that has not come.
            self.remove(&file(self.rank, "pid"));
        }
        said
    }

    /// This rank has nothing to say any more.
    pub fn say_nothing(&self) {
        self.remove(&file(self.rank, "status"));
    }

    /// What this process of a rank has said last: not what that of another job has, whatever the name of the folder is.
    fn said(&self, rank: i32) -> Option<RankStatus> {
        let (process, status): (Process, RankStatus) = self.listed(&file(rank, "status"))?;
        (process == self.process(rank)?).then_some(status)
    }

    /// What this rank leaves for `python -m mpi4jax.report`.
    pub fn dump(&self, dump: &Value) -> io::Result<()> {
        self.write(&file(self.rank, "json"), dump)
    }

    /// Samples of what a rank did.
    pub fn did<T: DeserializeOwned>(&self, rank: i32) -> Option<T> {
        serde_json::from_str(&self.read(&file(rank, "did"))?).ok()
    }

    pub fn say_did(&self, samples: &impl Serialize) {
        let _ = self.write(&file(self.rank, "did"), samples);
    }

    fn remove(&self, name: &str) {
        if let Ok(folder) = &self.folder {
            folder.remove(name);
        }
    }

    /// Leaves a file that says which rank has done something, unless another one has: what `is_old` says no more.
    fn claim(&self, name: &str, is_old: impl Fn(&str, SystemTime) -> bool) -> bool {
        let (Ok(folder), own) = (&self.folder, self.rank.to_string()) else { return false };
        folder.create(name, &own).is_ok()
            || folder.read(name).is_none_or(|(rank, at)| is_old(&rank, at)) && {
                folder.remove(name);
                folder.create(name, &own).is_ok()
            }
    }

    /// Whether no rank of this job has done this before.
    pub fn is_first_to(&self, name: &str) -> bool {
        self.claim(name, |_, at| at < self.since)
    }

    /// Whether this rank makes the report that all have been asked for: no other one just has. Without files, it does.
    pub fn may_show(&self) -> bool {
        let is_old = |rank: &str, at: SystemTime| {
            rank == self.rank.to_string() || at.elapsed().is_ok_and(|ago| ago > SHOWN)
        };
        self.broken().is_some() || self.claim("shown", is_old)
    }

    /// Wakes the watchdog of a rank.
    pub fn ring(&self, rank: i32) {
        if let Ok(folder) = &self.folder {
            folder.ring(&file(rank, "bell"));
        }
    }

    /// Asks the ranks of this folder what they do.
    pub fn ask(&self, word: &Word) -> io::Result<()> {
        self.write("ask", word)?;
        self.look();
        self.here().iter().filter(|&rank| rank != self.rank).for_each(|rank| self.ring(rank));
        Ok(())
    }

    /// The last question.
    pub fn asked(&self) -> Option<Word> {
        self.listed("ask")
    }

    /// The process of a rank.
    fn process(&self, rank: i32) -> Option<Process> {
        let mut processes = self.processes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = processes.get(&rank) {
            return Some(known.clone());
        }
        let (process, _): (Process, i32) = self.listed(&file(rank, "pid"))?;
        processes.insert(rank, process.clone());
        Some(process)
    }

    /// Whether the files of this job are still there: the last rank removes them at its end.
    pub fn is_under_way(&self) -> bool {
        self.folder.as_ref().is_ok_and(|folder| folder.has(&file(self.rank, "pid")))
    }

    /// The ranks that have files here.
    pub fn here(&self) -> Ranks {
        let rank = |name: &str| name.strip_prefix("rank")?.strip_suffix(".pid")?.parse().ok();
        self.listing.names().iter().filter_map(|name| rank(name)).chain([self.rank]).collect()
    }

    /// Who speaks for the ranks whose processes this one sees: the lowest that runs.
    pub fn leader(&self) -> i32 {
        let runs = |rank: &i32| {
            *rank == self.rank
                || self.process(*rank).is_some_and(|process| {
                    self.process.sees(&process)
                        && !self.process.knows_gone(&process)
                        && !self.process.knows_stopped(&process)
                })
        };
        self.here().iter().find(runs).unwrap_or(self.rank)
    }

    /// How a rank fares; None: it has no files here. `before` is what it had said when the folder was like this.
    fn status(&self, rank: i32, before: Option<&RankStatus>) -> Option<RankStatus> {
        let process = self.process(rank)?;
        let has_ended = |said: &RankStatus| matches!(said.life, Life::Exits | Life::Finished);
        let is_gone = self.process.knows_gone(&process);
        if is_gone && before.is_none_or(|said| !has_ended(said)) {
            // It may have come to its end just before.
            self.look();
        }
        let said = if is_gone { self.said(rank) } else { before.cloned().or_else(|| self.said(rank)) };
        let mut status = said.unwrap_or_default();
        status.life = match status.life {
            // One whose program has ended is no loss.
            Life::Exits | Life::Finished if is_gone => Life::Finished,
            _ if is_gone => Life::Gone,
            Life::Finished => Life::Finished,
            _ if self.process.knows_stopped(&process) => Life::Stopped,
            Life::Exits => Life::Exits,
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

    /// What is known of the ranks by their files. `before` is what was known when the folder was like this.
    pub fn world(&self, before: Option<&World>) -> World {
        if !self.is_under_way() {
            return World::new();
        }
        let status = |rank| Some((rank, self.status(rank, before.and_then(|before| before.get(&rank)))?));
        self.here().iter().filter_map(status).collect()
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
        self.listing.has("default").then(|| self.read("default"))?.filter(|chosen| !chosen.is_empty())
    }

    /// Whether the programs of all other ranks that have come are at their end, and whether all have come.
    pub fn others_have_ended(&self) -> (bool, bool) {
        let here = self.here();
        let has_ended = |rank: i32| {
            let life = self.status(rank, None).map(|status| status.life);
            matches!(life, Some(Life::Exits | Life::Finished | Life::Gone))
        };
        let ended = here.iter().filter(|&rank| rank != self.rank).all(has_ended);
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
        self.look();
        let has_ended = |rank: i32| {
            let life = self.status(rank, None).map(|status| status.life);
            matches!(life, None | Some(Life::Finished | Life::Gone))
        };
        if self.said(self.rank).is_some_and(|said| said.life == Life::Finished)
            && self.here().iter().all(has_ended)
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
        let is_gone = |(process, size): &(Process, usize)| *size == ranks.len() && own.knows_gone(process);
        // Without ranks, it is a job that begins now.
        if !ranks.is_empty() && ranks.iter().all(is_gone) && with("json").next().is_none() {
            let _ = fs::remove_dir_all(job);
        }
    }
}

#[cfg(test)]
mod tests;
