//! The ranks of a host exchange their states without MPI, by files in one folder.
//!
//! It works when MPI does not, needs no thread level, and costs nothing while nothing is wrong. Every file is written
//! under another name and renamed, so that it is whole when it is seen. The [`Folder`] is this user's alone. Of the ranks whose
//! files are here, the lowest one that runs is the [leader](HostFolder::leader).
//!
//! | file | written | holds |
//! | --- | --- | --- |
//! | `rank3.pid` | at the start | which process it is |
//! | `rank3.pipe` | at the start | a named pipe: others wake the rank's watchdog by it, or have the leader report |
//! | `rank3.settings` | at the start | those of its settings that must be equal on all ranks |
//! | `rank3.status` | when it has waited for a while, as an answer, and at its end | its [`RankStatus`] |
//! | `rank3.json` | as an answer | all that its recorder has |
//! | `rank3.samples` | at growing intervals, when it waits, and at its end | samples of what it did |
//! | `rank3.announced` | before the first run of a line | samples of these runs, a line each, which others compare before theirs |
//! | `default` | when the first rank makes the default communicator, or no rank is left to | how it is made |
//! | `ask` | when the leader asks what the ranks do | a [`Question`] |
//! | `ending` | before a rank ends the job | nothing: this rank has reported why |
//! | `report.txt` | before a report ends the job | the report |
//!
//! Cleaners of temporary folders may remove these files: each rank [restores](HostFolder::mend) its own.

mod announced;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::mail::Question;
use super::ranks::Ranks;
use super::status::{Life, Need, RankStatus, World};
use crate::comm;
use crate::record::host;
use crate::sync::lock;
use crate::system::folder::Folder;
use crate::system::process::{self, Process};

/// The folder of a job on this host, as one of its ranks uses it.
#[derive(Debug)]
pub struct HostFolder {
    pub directory: PathBuf,
    pub rank: i32,
    pub size: i32,
    pub name: String,
    pub process: Process,
    /// Files of an earlier job of the same name are older than this.
    since: SystemTime,
    opened: Mutex<Opened>,
}

#[derive(Debug)]
struct Opened {
    /// Why there are no files, if so.
    folder: Result<Arc<Folder>, String>,
    /// Where others wake this rank.
    pipe: Option<Arc<File>>,
    /// What this rank has written, and others need as long as it runs.
    files: BTreeMap<String, String>,
    /// When files were first found to be missing.
    gone: Option<Instant>,
}

/// For how long files are missing before they are made again: at its end, a job removes them.
const GONE: Duration = Duration::from_millis(3500);

/// Part of the error of a rank whose files belong to another live process.
pub const ALREADY: &str = "of this job already";
/// The kinds of files that others need of a rank as long as it runs.
const KEPT: [&str; 4] = ["pid", "settings", "status", "samples"];
/// What the pipe of a rank is written, besides the rank that the leader is to report for.
const WAKE: i32 = -1;
const COMPARE: i32 = -2;
const REPORT: &str = "report.txt";
/// How the default communicator is made.
const CHOICE: &str = "default";

fn file(rank: i32, kind: &str) -> String {
    format!("rank{rank}.{kind}")
}

impl HostFolder {
    pub fn new(directory: PathBuf, rank: i32, size: i32) -> Self {
        let folder = Folder::make(&directory).map(Arc::new).map_err(|error| error.to_string());
        let (process, since) = (Process::own(), process::started());
        let opened = Opened { folder, pipe: None, files: BTreeMap::new(), gone: None };
        let host = Self { directory, rank, size, name: host(), process, since, opened: Mutex::new(opened) };
        if let Err(error) = host.register() {
            host.opened().folder = Err(error.to_string());
        } else if rank == 0
            && let Ok(folder) = host.folder()
        {
            sweep(&folder.path, &host.process);
        }
        host
    }

    fn opened(&self) -> MutexGuard<'_, Opened> {
        lock(&self.opened)
    }

    fn folder(&self) -> io::Result<Arc<Folder>> {
        self.opened().folder.clone().map_err(io::Error::other)
    }

    /// Why there are no files, if so.
    pub fn broken(&self) -> Option<String> {
        self.opened().folder.as_ref().err().cloned()
    }

    /// Where others wake this rank.
    pub fn pipe(&self) -> Option<Arc<File>> {
        self.opened().pipe.clone()
    }

    /// Whether the files of this rank have been removed, or the folder.
    pub fn is_gone(&self) -> bool {
        let is_there = |folder: Arc<Folder>| folder.is_in_place() && folder.has(&file(self.rank, "pid"));
        let is_gone = self.folder().is_ok_and(|folder| !is_there(folder));
        let mut opened = self.opened();
        opened.gone = if is_gone { opened.gone.or_else(|| Some(Instant::now())) } else { None };
        is_gone
    }

    /// Waits until [`mend`](Self::mend) makes files again that are missing.
    pub fn wait_if_gone(&self) {
        if self.is_gone() {
            std::thread::sleep(GONE);
        }
    }

    /// Makes the folder and the files of this rank again, if they have been missing for a while. A rank that `has_finished` does
    /// it only where another has: the last rank removes the folder. Returns a warning, once in a job.
    pub fn mend(&self, has_finished: bool) -> Option<String> {
        if !self.is_gone() || self.opened().gone?.elapsed() < GONE {
            return None;
        }
        if has_finished && !self.directory.exists() {
            return None;
        }
        let directory = self.directory.display();
        let removed =
            format!("{directory} was removed while the job runs (by a cleaner of temporary folders?)");
        let again = Folder::make(&self.directory).and_then(|folder| {
            self.opened().folder = Ok(Arc::new(folder));
            let files = self.opened().files.clone();
            let folder = self.folder()?;
            for (name, text) in files {
                if name == CHOICE {
                    let _ = folder.create(&name, &text);
                } else {
                    folder.write(&name, &self.temporary(&name), &text)?;
                }
            }
            self.make_pipe();
            Ok(())
        });
        self.opened().gone = None;
        if let Err(error) = again {
            let why = format!("{removed}, and cannot be made again: {error}");
            self.opened().folder = Err(why.clone());
            return Some(format!("{why}; this rank exchanges no states with others any more"));
        }
        let words = format!(
            "{removed}; it is made again, and what ranks tell each other there goes on; MPI4JAX_DUMP_DIR names \
             another directory"
        );
        self.is_first_to("removed").then_some(words)
    }

    fn make_pipe(&self) {
        // Without one, others learn later what this rank does.
        let pipe = self.folder().and_then(|folder| folder.make_pipe(&file(self.rank, "pipe")));
        self.opened().pipe = pipe.ok().map(Arc::new);
    }

    fn register(&self) -> io::Result<()> {
        let folder = self.folder()?;
        if let Some(other) = self.process(self.rank)
            && other != self.process
            && !self.process.sees_ended(&other)
        {
            let name = other.name();
            return Err(io::Error::other(format!("{name} is rank {} {ALREADY}", self.rank)));
        }
        let (own, pid) = (file(self.rank, ""), file(self.rank, "pid"));
        let is_old = |name: &String| name.starts_with(&own) && *name != pid;
        folder.names().into_iter().filter(is_old).for_each(|name| folder.remove(&name));
        self.write(&pid, &(&self.process, self.size))?;
        self.make_pipe();
        Ok(())
    }

    /// A number shared by exactly those ranks that see this folder; without a folder, a number of this rank alone.
    pub fn place(&self) -> u64 {
        let folder = self.folder().ok().and_then(|folder| folder.identity());
        comm::hash((folder, folder.is_none().then_some(self.rank), self.process.space()))
    }

    fn write(&self, name: &str, value: &impl Serialize) -> io::Result<()> {
        let text = serde_json::to_string(value)?;
        let result = self.folder()?.write(name, &self.temporary(name), &text);
        if KEPT.iter().any(|kind| *name == file(self.rank, kind)) {
            self.opened().files.insert(name.into(), text);
        }
        result
    }

    fn temporary(&self, name: &str) -> String {
        format!("{name}.{}.tmp", self.rank)
    }

    /// The content of a file of this job.
    fn parsed<T: DeserializeOwned>(&self, name: &str) -> Option<T> {
        serde_json::from_str(&self.read(name)?).ok()
    }

    /// A file of this job.
    fn read(&self, name: &str) -> Option<String> {
        let (text, written) = self.folder().ok()?.read(name)?;
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

    /// Settings of a rank that ranks must have alike.
    pub fn settings<T: DeserializeOwned>(&self, rank: i32) -> Option<T> {
        self.parsed(&file(rank, "settings"))
    }

    pub fn publish_settings(&self, settings: &impl Serialize) {
        let _ = self.write(&file(self.rank, "settings"), settings);
    }

    /// Samples of what a rank did.
    pub fn samples<T: DeserializeOwned>(&self, rank: i32) -> Option<T> {
        self.parsed(&file(rank, "samples"))
    }

    pub fn publish_samples(&self, samples: &impl Serialize) {
        let _ = self.write(&file(self.rank, "samples"), samples);
    }

    /// Leaves a report, and returns its file.
    pub fn leave_report(&self, text: &str) -> Option<PathBuf> {
        let folder = self.folder().ok()?;
        folder.write(REPORT, &self.temporary(REPORT), text).ok()?;
        Some(folder.path.join(REPORT))
    }

    fn remove(&self, name: &str) {
        self.opened().files.remove(name);
        if let Ok(folder) = self.folder() {
            folder.remove(name);
        }
    }

    /// Whether no rank of this job has done this before.
    pub fn is_first_to(&self, name: &str) -> bool {
        let Ok(folder) = self.folder() else { return false };
        if self.read(name).is_none() {
            folder.remove(name); // an earlier job's
        }
        folder.create(name, "").is_ok()
    }

    /// Passes the user's request for a report, made to this rank, on to the leader.
    pub fn request_report(&self, leader: i32) {
        self.notify(leader, self.rank);
    }

    /// The rank to which the user's request for a report was made, as another rank has written into this one's pipe.
    pub fn requested(messages: &[u8]) -> Option<i32> {
        let ranks =
            messages.chunks_exact(4).filter_map(|bytes| bytes.try_into().ok()).map(i32::from_ne_bytes);
        ranks.max().filter(|rank| *rank >= 0)
    }

    /// Wakes the watchdog of a rank.
    pub fn wake(&self, rank: i32) {
        self.notify(rank, WAKE);
    }

    fn notify(&self, rank: i32, number: i32) {
        if let Ok(folder) = self.folder() {
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
        self.folder().is_ok_and(|folder| folder.has(&file(self.rank, "pid")))
    }

    /// The ranks that have files here.
    pub fn here(&self) -> Ranks {
        let rank = |name: &str| name.strip_prefix("rank")?.strip_suffix(".pid")?.parse().ok();
        let names = self.folder().map(|folder| folder.names()).unwrap_or_default();
        names.iter().filter_map(|name| rank(name)).chain([self.rank]).collect()
    }

    /// How often a rank's process has been given a processor, if this process can read that.
    pub fn runs(&self, rank: i32) -> Option<u64> {
        self.process(rank).and_then(|process| self.process.sees_runs(&process))
    }

    /// Of the ranks whose processes are visible here, the lowest that runs and is not passed over; without files, this one.
    pub fn leader(&self, mut is_passed_over: impl FnMut(i32) -> bool) -> i32 {
        let mut runs = |rank: &i32| {
            *rank == self.rank
                || self.process(*rank).is_some_and(|process| {
                    self.process.can_see(&process)
                        && !self.process.sees_ended(&process)
                        && !self.process.sees_stopped(&process)
                        && !is_passed_over(*rank)
                })
        };
        self.here().iter().find(|rank| runs(rank)).unwrap_or(self.rank)
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
            Life::Ends => Life::Ends,
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
        let Ok(folder) = self.folder() else { return choice.into() };
        let choose = || {
            for _ in 0..1000 {
                if folder.create(CHOICE, choice).is_ok() {
                    break;
                }
                match self.read(CHOICE) {
                    Some(chosen) if !chosen.is_empty() => return chosen,
                    Some(_) => std::thread::sleep(Duration::from_millis(1)), // it is being written
                    None => folder.remove(CHOICE),                           // an earlier job's
                }
            }
            choice.into()
        };
        let chosen = choose();
        self.opened().files.insert(CHOICE.into(), chosen.clone());
        chosen
    }

    /// How the default communicator is made, if a rank has chosen.
    pub fn chosen_default(&self) -> Option<String> {
        self.read(CHOICE).filter(|chosen| !chosen.is_empty())
    }

    /// Whether a rank begins no operation any more, or has no files here.
    fn has_ended(&self, rank: i32) -> bool {
        self.has_finished(rank) || self.status(rank).is_some_and(|status| status.life == Life::Ends)
    }

    /// Whether a rank begins nothing any more, or has no files here.
    fn has_finished(&self, rank: i32) -> bool {
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
        let has_dump = self.folder().is_ok_and(|folder| folder.has(&file(self.rank, "json")));
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
        let Ok(folder) = self.folder() else { return };
        let is_left = |name: &str| name.ends_with(".json") || name == REPORT;
        folder.names().iter().filter(|name| !is_left(name)).for_each(|name| folder.remove(name));
        folder.remove_self(); // fails where dumps are left
    }

    /// At the very end, when all ranks have been in `MPI_Finalize`: the last rank that has come cleans up.
    pub fn leave(&self) {
        if self.published(self.rank).is_some_and(|status| status.life == Life::Finished)
            && self.here().iter().all(|rank| self.has_finished(rank))
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
