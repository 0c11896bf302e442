//! What the ranks of a host tell each other without MPI: files in one folder.
//!
//! It works when MPI does not, needs no thread level, and costs nothing while nothing is wrong. Every file is written
//! under another name and renamed, so that it is whole when it is seen. The [`Folder`] is this user's alone, and what is in
//! it is known by its [`Listing`]: [`Peers::look`] brings that up to date. Of the ranks whose files are here, the lowest one
//! that runs speaks for all: the [leader](Peers::leader).
//!
//! | file | written | says |
//! | --- | --- | --- |
//! | `rank3.pid` | at the start | which process it is |
//! | `rank3.bell` | at the start | by it others wake the rank's watchdog |
//! | `rank3.exit` | when Python ends | it does not make the default communicator any more, unless others do |
//! | `rank3.finished` | when `MPI_Finalize` begins | how many collectives it did: it takes part in nothing any more |
//! | `rank3.waits` | when it has waited for a while | for what (see [`known`]) |
//! | `rank3.did` | at growing intervals, when it waits, and at its end | samples of what it did |
//! | `default` | when the first rank makes the default communicator, or nobody is left to | how it is made |
//!
//! Those by which ranks ask each other are in [`questions`](super::questions).

use std::collections::HashMap;
use std::io;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use super::graph::{CommId, Life, Need, Rank, World};
use super::known;

use super::ranks::Ranks;
use crate::comm;
use crate::record::host;
use crate::system::folder::{Folder, Listing};
use crate::system::process::{self, Process};

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
    /// Where others wake this rank.
    pub bell: RawFd,
    listing: Listing,
    /// The ranks' processes, as far as they have been asked for.
    processes: Mutex<HashMap<i32, Process>>,
}

pub(super) fn file(rank: i32, kind: &str) -> String {
    format!("rank{rank}.{kind}")
}

impl Peers {
    pub fn new(directory: PathBuf, rank: i32, size: i32) -> Self {
        let folder = Folder::make(&directory).map_err(|error| error.to_string());
        let (process, since) = (Process::own(), process::started());
        let (host, listing, processes) = (host(), Listing::default(), Mutex::default());
        let mut peers =
            Self { directory, rank, size, host, process, since, folder, bell: -1, listing, processes };
        if let Err(error) = peers.introduce() {
            peers.folder = Err(error.to_string());
        } else if let Ok(folder) = &peers.folder {
            // Without one, others learn later what this rank does.
            peers.bell = folder.make_bell(&file(rank, "bell")).unwrap_or(-1);
            if rank == 0 {
                sweep(folder, &peers.process);
            }
        }
        peers
    }

    pub(super) fn folder(&self) -> io::Result<&Folder> {
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

    /// What the ranks have in common that see this folder, and no others; without one, this rank alone.
    pub fn place(&self) -> u64 {
        let folder = self.folder.as_ref().ok().and_then(Folder::identity);
        comm::hash((folder, folder.is_none().then_some(self.rank), self.process.space()))
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

    /// What a file says that this process of a rank has written: not that of another job, whatever the name of the folder is.
    fn said(&self, rank: i32, kind: &str) -> Option<String> {
        let text = self.listed(&file(rank, kind))?;
        let (process, rest) = text.split_once('\n')?;
        (Process::parse(process)? == self.process(rank)?).then(|| rest.to_owned())
    }

    fn say(&self, kind: &str, text: &str) -> io::Result<()> {
        self.write(&file(self.rank, kind), &format!("{}\n{text}", self.process))
    }

    pub(super) fn remove(&self, name: &str) {
        if let Ok(folder) = &self.folder {
            folder.remove(name);
        }
    }

    /// Wakes the watchdog of a rank.
    pub fn ring(&self, rank: i32) {
        if let Ok(folder) = &self.folder {
            folder.ring(&file(rank, "bell"));
        }
    }

    /// Tells the others that the program of this rank is at its end.
    pub fn exit(&self) {
        let _ = self.say("exit", "");
    }

    /// Tells the others that this rank takes part in nothing any more.
    pub fn finish(&self) {
        let counts = comm::collectives();
        let lines: String = counts.iter().map(|(class, count)| format!("{class:016x} {count}\n")).collect();
        if self.say("finished", &lines).is_err() {
            // A full disk: nobody waits for a rank that has not come.
            self.remove(&file(self.rank, "pid"));
        }
    }

    /// The collectives that a rank did before it finished; `None` if it has not.
    fn finished(&self, rank: i32) -> Option<Vec<(CommId, u64)>> {
        let count = |line: &str| {
            let (class, count) = line.split_once(' ')?;
            let class = u64::from_str_radix(class, 16).ok()?;
            Some((CommId { class, index: -1 }, count.parse().ok()?))
        };
        Some(self.said(rank, "finished")?.lines().filter_map(count).collect())
    }

    /// Tells the others what this rank waits for; `None`: for nothing.
    pub fn wait(&self, rank: Option<&Rank>) {
        match rank {
            Some(rank) => drop(self.say("waits", &known::encode(rank, false))),
            None => self.remove(&file(self.rank, "waits")),
        }
    }

    /// What a rank waits for, as it has said last.
    pub fn told_waits(&self, rank: i32) -> Option<Rank> {
        known::decode(&self.said(rank, "waits")?)
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

    /// Whether a rank lives; `None`: it has no files here.
    pub fn life(&self, rank: i32) -> Option<Life> {
        let process = self.process(rank)?;
        if self.listing.has(&file(rank, "finished")) && self.finished(rank).is_some() {
            return Some(Life::Finished);
        }
        if self.process.knows_gone(&process) {
            // It may have come to its end just before; one whose program has ended is no loss.
            self.look();
            let has_ended = ["finished", "exit"].iter().any(|kind| self.said(rank, kind).is_some());
            return Some(if has_ended { Life::Finished } else { Life::Gone(process.name()) });
        }
        Some(if self.process.knows_stopped(&process) { Life::Stopped } else { Life::Runs })
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

    /// Whether a rank of this folder has said that it waits.
    pub fn somebody_waits(&self) -> bool {
        self.listing.names().iter().any(|name| name.ends_with(".waits"))
    }

    /// What is known of these ranks by their files. `before` is what was known when the folder was like this.
    pub fn world(&self, ranks: &Ranks, before: Option<World>) -> World {
        let known = |rank: i32| {
            let life = self.life(rank)?;
            let mut told = match (&before, &life) {
                (_, Life::Gone(_)) => Rank::default(),
                (Some(before), _) => before.get(&rank)?.clone(),
                (None, _) => self.told_waits(rank).unwrap_or_default(),
            };
            if life == Life::Finished {
                // It waits for nothing but the end of the others.
                told.waits.retain(|wait| wait.need == Need::End);
                told.counts = self.finished(rank).unwrap_or_default();
            }
            Some((rank, Rank { life, ..told }))
        };
        ranks.iter().filter_map(known).collect()
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

    /// Whether the programs of all other ranks that have come are at their end, and whether all have come.
    pub fn others_have_ended(&self) -> (bool, bool) {
        let here = self.here();
        let has_ended = |rank: i32| {
            ["exit", "finished"].iter().any(|kind| self.said(rank, kind).is_some())
                || self.process(rank).is_some_and(|process| self.process.knows_gone(&process))
        };
        let ended = here.iter().filter(|&rank| rank != self.rank).all(has_ended);
        (ended, here.len() == self.size as usize)
    }

    /// Removes what this job has left, but dumps.
    pub fn clean(&self) {
        let Ok(folder) = &self.folder else { return };
        folder.names().iter().filter(|name| !name.ends_with(".json")).for_each(|name| folder.remove(name));
        folder.remove_self(); // fails where dumps are left
    }

    /// At the very end, when all ranks have been in `MPI_Finalize`: the last rank that has come cleans up.
    pub fn leave(&self) {
        self.look();
        let others = || self.here().iter().filter(|&rank| rank != self.rank).collect::<Vec<_>>();
        let has_ended =
            |rank: &i32| !matches!(self.life(*rank), Some(Life::Runs | Life::Stopped | Life::Unknown));
        if self.said(self.rank, "finished").is_some() && others().iter().all(has_ended) {
            self.clean();
        }
    }
}

/// Removes what killed jobs have left beside this folder, except for dumps: where all of a job's processes were of this
/// machine, and are gone.
fn sweep(folder: &Folder, own: &Process) {
    for other in folder.siblings() {
        let names = other.names();
        if names.is_empty() || names.iter().any(|name| name.ends_with(".json")) {
            continue; // a job that begins now, or dumps
        }
        let pids = names.iter().filter(|name| name.ends_with(".pid"));
        let texts: Vec<String> = pids.filter_map(|name| Some(other.read(name)?.0)).collect();
        let is_gone = |text: &String| {
            let (process, size) = text.split_once('\n')?;
            let complete = size.trim().parse() == Ok(texts.len());
            Some(complete && own.knows_gone(&Process::parse(process)?))
        };
        if !texts.is_empty() && texts.iter().all(|text| is_gone(text) == Some(true)) {
            names.iter().for_each(|name| other.remove(name));
            other.remove_self();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::questions::{Answer, Kind};
    use super::*;
    use crate::system::folder::operations;

    fn directory(name: &str) -> PathBuf {
        let base = std::env::temp_dir().join(format!("mpi4jax-peers-{name}-{}", std::process::id()));
        base.join("user").join("job")
    }

    fn remove(peers: &Peers) {
        fs::remove_dir_all(peers.directory.parent().unwrap().parent().unwrap()).unwrap();
    }

    /// Two ranks, each as if it had been started by itself: one process cannot be two ranks in files.
    fn two(name: &str) -> (Peers, Peers) {
        (Peers::new(directory(name), 0, 2), Peers::new(directory(name), 1, 2))
    }

    #[test]
    fn a_directory_that_cannot_be_made_is_no_failure() {
        let peers = Peers::new("/proc/mpi4jax/job".into(), 0, 2);
        assert!(peers.broken().is_some());
        assert_eq!((peers.life(1), peers.here().to_string()), (None, "0".into()));
        assert_eq!(peers.become_reporter(), Ok(()));
        assert_eq!(peers.choose_default("clone"), "clone");
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
        remove(&a);
    }

    #[test]
    fn ranks_ask_and_answer_and_end() {
        let (a, b) = two("ask");
        let word = Kind::Hung.word(0);
        a.ask(&word).unwrap();
        b.look();
        assert_eq!(b.asked().as_ref(), Some(&word));
        assert_eq!(Kind::of(&word), Some(Kind::Hung));
        assert_eq!(a.answer_of(1, &word), None);
        let state = "in barrier #1".to_owned();
        let answer = Answer { seconds: 1.5, state, marks: "3/a/0/1".into(), last: "    a\n    b\n".into() };
        b.answer(&word, &answer, Some("{}")).unwrap();
        a.look();
        assert_eq!(a.answer_of(1, &word), Some(answer));
        assert_eq!(a.answer_of(1, "another"), None);
        assert_eq!(a.last_answer(1).unwrap().0, word);
        assert_eq!((a.become_reporter(), b.become_reporter()), (Ok(()), Err(0)));
        // Its program is at its end, and may still communicate.
        b.exit();
        a.look();
        assert_eq!((a.life(1), a.others_have_ended()), (Some(Life::Runs), (true, true)));
        b.finish();
        a.look();
        assert_eq!((a.life(1), a.others_have_ended()), (Some(Life::Finished), (true, true)));
        b.leave();
        assert!(a.directory.exists());
        let _ = fs::remove_file(a.directory.join("rank1.json"));
        a.finish();
        a.leave();
        assert!(!a.directory.exists());
        remove(&a);
    }

    #[test]
    fn what_a_rank_waits_for_others_know() {
        let (a, b) = two("waits");
        let ranks = Ranks::all(2);
        let waits = Rank { life: Life::Runs, other: Some("a thread".into()), ..Rank::default() };
        b.wait(Some(&waits));
        a.look();
        assert!(a.somebody_waits());
        let world = a.world(&ranks, None);
        assert_eq!((&world[&1], a.leader(), b.leader()), (&waits, 0, 0));
        b.wait(None);
        b.finish();
        a.look();
        let world = a.world(&ranks, Some(world));
        assert!(!a.somebody_waits() && world[&1].life == Life::Finished);
        remove(&a);
    }

    /// The line by which a process of this machine introduces itself, as that of another number or start.
    fn introduced(pid: Option<u32>, start: Option<&str>) -> String {
        let own = Process::own().to_string();
        let mut words: Vec<String> = own.split(' ').map(Into::into).collect();
        words[0] = pid.map_or(words[0].clone(), |pid| pid.to_string());
        words[2] = start.map_or(words[2].clone(), Into::into);
        words.join(" ")
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn files_of_other_processes_are_not_this_jobs() {
        let (a, b) = two("others");
        b.finish();
        let path = b.directory.join("rank1.finished");
        fs::write(&path, format!("{}\n", introduced(Some(1), None))).unwrap();
        a.look();
        assert_eq!(a.life(1), Some(Life::Runs));
        // A live process that is rank 1 is not replaced.
        let mut child = std::process::Command::new("/bin/sleep").arg("100").spawn().unwrap();
        let stat = fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        let start = stat.rsplit_once(") ").unwrap().1.split(' ').nth(19).unwrap();
        let line = format!("{}\n2\n", introduced(Some(child.id()), Some(start)));
        fs::write(b.directory.join("rank1.pid"), line).unwrap();
        let again = Peers::new(directory("others"), 1, 2);
        assert!(again.broken().is_some_and(|why| why.contains("is rank 1 of this job already")), "{again:?}");
        let other = Peers::new(directory("others"), 0, 2);
        other.look();
        assert_eq!(other.life(1), Some(Life::Runs));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(matches!(other.life(1), Some(Life::Gone(name)) if name.starts_with("process ")));
        // One whose program had come to its end is no loss.
        fs::write(b.directory.join("rank1.exit"), line_of(&b)).unwrap();
        other.look();
        assert_eq!(other.life(1), Some(Life::Finished));
        assert_eq!(Peers::new(directory("others"), 1, 2).broken(), None);
        remove(&a);
    }

    fn line_of(peers: &Peers) -> String {
        let text = fs::read_to_string(peers.directory.join("rank1.pid")).unwrap();
        format!("{}\n", text.lines().next().unwrap())
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn only_what_killed_jobs_have_left_is_swept() {
        let (a, _b) = two("sweep");
        let (own, gone) = (introduced(None, None), introduced(None, Some("1")));
        let words: Vec<&str> = own.split(' ').collect();
        let elsewhere = format!("{} {} 1 another", words[0], words[1]);
        let make = |job: &str, files: &[(&str, &str)]| {
            let folder = Folder::make(&a.directory.with_file_name(job)).unwrap();
            files.iter().for_each(|(name, text)| folder.create(name, text).unwrap());
        };
        make("killed", &[("rank0.pid", &format!("{gone}\n1\n")), ("ask", "")]);
        make("incomplete", &[("rank0.pid", &format!("{gone}\n2\n"))]);
        make("elsewhere", &[("rank0.pid", &format!("{elsewhere}\n1\n"))]);
        make("alive", &[("rank0.pid", &format!("{own}\n1\n"))]);
        make("dumps", &[("rank0.pid", &format!("{gone}\n1\n")), ("rank0.json", "{}")]);
        make("new", &[]);
        let _ = Peers::new(directory("sweep"), 0, 2);
        for (job, stays) in [
            ("killed", false),
            ("incomplete", true),
            ("elsewhere", true),
            ("alive", true),
            ("dumps", true),
            ("new", true),
        ] {
            assert_eq!(a.directory.with_file_name(job).exists(), stays, "{job}");
        }
        remove(&a);
    }

    /// What a rank does while it waits is the same for a hundred ranks and a thousand.
    #[test]
    #[cfg(target_os = "linux")]
    fn ranks_of_one_folder_do_no_more_when_they_are_many() {
        let figures = [100, 1000].map(|size| {
            let path = directory(&format!("many-{size}"));
            let ranks: Vec<Peers> = (0..size).map(|rank| Peers::new(path.clone(), rank, size)).collect();
            let look = || {
                let one = |peers: &Peers| {
                    let before = operations();
                    peers.look();
                    peers.leader();
                    operations() - before
                };
                ranks.iter().map(one).max()
            };
            look();
            // Until the folder counts as settled.
            std::thread::sleep(Duration::from_millis(2100));
            look();
            let quiet = look();
            remove(&ranks[0]);
            quiet
        });
        assert_eq!(figures, [Some(1), Some(1)], "one look at the folder");
    }
}
