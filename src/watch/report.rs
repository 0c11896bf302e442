//! Reports: what this rank does, and what all of them do.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::decide::{self, Key};
use super::frames;
use super::graph::{Life, Need, Peer, Wait, World};
use super::groups::{self, Group, NO_OPERATION};
use super::known;
use super::link;
use super::peers::Peers;
use super::questions::{Answer, Kind};
use super::ranks::Ranks;
use super::threads::{self, Python};
use super::waits::{self, blocked, is_finished};
use crate::record::clock::Epoch;
use crate::record::dump;
use crate::record::recorder::{self, Record, State};
use crate::transport;

/// "1.2 s", "3.4 ms", "5.6 us"
fn time(seconds: f64) -> String {
    match seconds {
        1e-1.. => format!("{seconds:.1} s"),
        1e-3.. => format!("{:.1} ms", 1e3 * seconds),
        _ => format!("{:.1} us", 1e6 * seconds),
    }
}

/// For how long a report waits for the answers of the other ranks, and for those of other hosts.
pub const GRACE: Duration = Duration::from_secs(3);
const GRACE_OF_HOSTS: Duration = Duration::from_secs(5);
/// When hosts that have not answered are asked again.
const AGAIN: Duration = Duration::from_secs(2);
/// How many operations a report has of a rank.
const LAST: usize = 8;
/// In a message, between what a rank does and its marks.
const MARKS: char = '\x1d';

/// What answers for this rank, and reports for all.
pub struct Reporter {
    pub peers: Peers,
    /// The word of the last question that this rank has answered.
    answered: Mutex<String>,
}

/// What all ranks do, as far as one can find out.
pub struct Overview {
    pub groups: Vec<Group>,
    /// The marks of the ranks that have answered (see [`waits::mark`]).
    pub marks: Vec<(Ranks, String)>,
}

impl Overview {
    /// The marks of a rank; None if it has not answered.
    pub fn marks_of(&self, rank: i32) -> Option<&str> {
        self.marks.iter().find(|(ranks, _)| ranks.contains(rank)).map(|(_, marks)| &**marks)
    }

    /// Whether a wait was still under way when its rank answered; None if it has not.
    pub fn is_under_way(&self, (rank, number): Key) -> Option<bool> {
        let number = number.to_string();
        Some(self.marks_of(rank)?.split(' ').any(|mark| mark.split('/').next() == Some(&*number)))
    }
}

/// The last operations of this rank, a line each.
fn last_operations() -> String {
    let (epoch, records) = (Epoch::now(), recorder::records());
    let line = |record: &Record| {
        let seconds = record.seconds(&epoch);
        match record.state {
            State::Started => format!("    {record}: for {}\n", time(seconds)),
            State::Failed => format!("    {record}: failed after {}\n", time(seconds)),
            State::Done => {
                let ago = time(epoch.seconds_since(record.ended));
                format!("    {record}: took {}, ended {ago} ago\n", time(seconds))
            }
        }
    };
    if records.is_empty() {
        return "    none\n".into();
    }
    records[records.len().saturating_sub(LAST)..].iter().map(line).collect()
}

/// What this rank is doing.
fn state(python: &Python) -> Answer {
    let (epoch, running, calls) = (Epoch::now(), recorder::running(), blocked());
    let main = python.main();
    let at = |text: String| match frames::user_frame(main) {
        Some(frame) => format!("{text}; Python is at {frame}"),
        None => text,
    };
    let mut marks: Vec<String> = running.iter().map(waits::mark).collect();
    marks.extend(calls.iter().map(|call| call.number.to_string()));
    marks.extend(is_finished().then(|| waits::AT_END.to_string()));
    let answer = |seconds, state| Answer { seconds, state, marks: marks.join(" "), last: String::new() };
    if let Some(first) = running.first() {
        let others: String = running[1..].iter().map(|other| format!("; and in {other}")).collect();
        let state = format!("in {first}{others}");
        // An operation outside of compiled functions may have no line of its own.
        let state = if first.what.location.is_empty() { at(state) } else { state };
        return answer(first.seconds(&epoch), state);
    }
    if let Some(first) = calls.first() {
        let others: String = calls[1..].iter().map(|other| format!("; and in {}", other.what)).collect();
        return answer(epoch.seconds_since(first.started), at(format!("in {}{others}", first.what)));
    }
    if let Some(first) = transport::unfinished().first() {
        return answer(first.seconds, at(format!("in {first}").trim_end_matches(',').into()));
    }
    let last = recorder::records().pop();
    let mut text: String = if is_finished() { "finished" } else { NO_OPERATION }.into();
    text += &match python {
        Python::Silent => format!("; {}", groups::IN_C),
        _ => frames::activity(main).map_or_else(String::new, |activity| format!("; {activity}")),
    };
    text += &match &last {
        Some(record) if record.state == State::Failed => format!("; the last one, {record}, failed"),
        Some(record) => format!("; the last one was {record}"),
        None => ", and was in none before".into(),
    };
    answer(last.map_or(0.0, |record| epoch.seconds_since(record.ended)), at(text))
}

impl Reporter {
    pub fn new(peers: Peers) -> Self {
        Self { peers, answered: Mutex::default() }
    }

    /// What this rank is doing, in few words. Python is asked only if there is nothing else to say.
    pub fn briefly(&self) -> String {
        let words = state(&Python::Nothing).state;
        if words.starts_with(NO_OPERATION) { groups::brief(&state(&threads::python()).state) } else { words }
    }

    pub fn answered(&self) -> MutexGuard<'_, String> {
        self.answered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What this rank is doing; also written to its files, once for each question.
    pub fn answer(&self, word: &str, reason: &str) -> (Answer, std::io::Result<()>) {
        // Held for as long as it takes: the link and the watchdog may be asked at the same time.
        let mut answered = self.answered();
        let python = threads::python();
        let mut answer = state(&python);
        answer.last = last_operations();
        if *answered == word {
            return (answer, Ok(()));
        }
        let frame = |frame: &frames::Frame| (frame.file.clone(), frame.line, frame.function.clone());
        let dump = Kind::of(word).is_some_and(Kind::leaves_dumps).then(|| {
            dump::json(&dump::Header {
                rank: self.peers.rank,
                size: self.peers.size,
                host: &self.peers.host,
                reason,
                state: &answer.state,
                python: python.main().iter().map(frame).collect(),
            })
        });
        let written = self.peers.answer(word, &answer, dump.as_deref());
        word.clone_into(&mut answered);
        (answer, written)
    }

    /// What the ranks of this host do, for another host.
    pub fn respond(&self, word: &str) -> Vec<Group> {
        let peers = &self.peers;
        peers.look();
        let here = peers.here();
        if Kind::of(word) == Some(Kind::Waits) {
            let world = peers.world(&here, None);
            let group = |(rank, it): (&i32, _)| Group {
                members: [*rank].into_iter().collect(),
                seconds: 0.0,
                state: known::encode(it, true),
            };
            return groups::grouped(world.iter().map(group));
        }
        let _ = peers.ask(word);
        let (own, _) = self.answer(word, "another host asked");
        let answers = self.gather_here(word, own, &here);
        let group = |(rank, answer): (i32, Result<Answer, String>)| {
            let (seconds, state) = match answer {
                Ok(Answer { seconds, state, marks, .. }) => (seconds, format!("{state}{MARKS}{marks}")),
                Err(words) => (0.0, words),
            };
            Group { members: [rank].into_iter().collect(), state, seconds }
        };
        groups::grouped(answers.into_iter().map(group))
    }

    /// The answers of the ranks of this folder, or what is known of them.
    fn gather_here(&self, word: &str, own: Answer, here: &Ranks) -> Vec<(i32, Result<Answer, String>)> {
        let peers = &self.peers;
        let mut answers: Vec<(i32, Option<Answer>)> = here.iter().map(|rank| (rank, None)).collect();
        let start = Instant::now();
        let mut seen = None;
        for round in 0.. {
            let now = Some(peers.look());
            for (rank, answer) in answers.iter_mut().filter(|(_, answer)| answer.is_none()) {
                if *rank == peers.rank {
                    *answer = Some(own.clone());
                } else if now != seen {
                    *answer = peers.answer_of(*rank, word);
                }
            }
            seen = now;
            let mut missing = answers.iter().filter(|(_, answer)| answer.is_none());
            // Those that cannot answer are not waited for.
            let cannot = |rank| matches!(peers.life(rank), Some(Life::Stopped | Life::Gone(_)) | None);
            let is_complete = if round % 10 == 0 {
                missing.all(|(rank, _)| cannot(*rank))
            } else {
                missing.next().is_none()
            };
            if start.elapsed() > GRACE || is_complete {
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        answers.into_iter().map(|(rank, answer)| (rank, answer.ok_or_else(|| self.words(rank)))).collect()
    }

    /// What is known of a rank that does not answer.
    fn words(&self, rank: i32) -> String {
        let peers = &self.peers;
        let name = || peers.process(rank).map_or_else(String::new, |process| process.name());
        let before = || {
            let told = peers.last_answer(rank);
            told.map_or_else(String::new, |(_, Answer { state, .. })| format!("; before, it was {state}"))
        };
        match peers.life(rank) {
            Some(Life::Finished) => "finished".into(),
            Some(Life::Stopped) => format!("stopped: {} gets no time (SIGSTOP, or a debugger)", name()),
            Some(Life::Gone(name)) => format!("gone: {name} has ended{}", before()),
            Some(_) => match peers.told_waits(rank).map(|told| told.waits) {
                // A process without time, on a busy machine, has said before what it waits for.
                Some(waits) if !waits.is_empty() => {
                    let words: Vec<&str> = waits.iter().map(|wait| &*wait.words).collect();
                    format!("in {}; {} has not answered yet", words.join("; and in "), name())
                }
                _ => format!("silent: {} does not answer{}", name(), before()),
            },
            None if link::is_open() => {
                "silent: it does not answer over MPI; its process, or the network, may be gone".into()
            }
            None => "unknown: it has not imported mpi4jax, or does not share this directory".into(),
        }
    }

    /// What all ranks do, after a question with this word.
    fn gather(&self, word: &str, own: Answer) -> Overview {
        let start = Instant::now();
        let mut overview = Overview { groups: Vec::new(), marks: Vec::new() };
        let mut has_answered = vec![false; self.peers.size as usize];
        let here = self.peers.here();
        for (rank, answer) in self.gather_here(word, own, &here) {
            has_answered[rank as usize] = true;
            let members: Ranks = [rank].into_iter().collect();
            let (state, seconds) = match answer {
                Ok(Answer { seconds, state, marks, .. }) => {
                    overview.marks.push((members.clone(), marks));
                    (state, seconds)
                }
                Err(words) => (words, 0.0),
            };
            overview.groups.push(Group { members, state, seconds });
        }
        let mut again = false;
        let answers = loop {
            let (answers, complete) = link::answers(word);
            if complete || start.elapsed() > GRACE_OF_HOSTS {
                break answers;
            }
            if !again && start.elapsed() > AGAIN {
                link::ask_again();
                again = true;
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        for Group { members, state, seconds } in answers {
            members.iter().for_each(|rank| has_answered[rank as usize] = true);
            let (words, marks) =
                state.split_once(MARKS).map_or((&*state, None), |(words, it)| (words, Some(it)));
            overview.marks.extend(marks.map(|marks| (members.clone(), marks.to_owned())));
            overview.groups.push(Group { members, state: words.into(), seconds });
        }
        for rank in (0..self.peers.size).filter(|rank| !has_answered[*rank as usize]) {
            let members = [rank].into_iter().collect();
            overview.groups.push(Group { members, state: self.words(rank), seconds: 0.0 });
        }
        overview
    }

    /// Asks all ranks. An error: those of this host could not be asked.
    pub fn ask(&self, kind: Kind, reason: &str) -> (Overview, std::io::Result<()>, Answer) {
        let word = kind.word(self.peers.rank);
        link::ask(&word);
        let asked = self.peers.ask(&word);
        let (own, written) = self.answer(&word, reason);
        let overview = self.gather(&word, own.clone());
        (overview, asked.and(written), own)
    }

    /// What all ranks are doing, and what one of them did last.
    pub fn report(&self, headline: &str, reason: &str, kind: Kind, subject: i32) -> (String, Overview) {
        let Peers { rank, size, .. } = self.peers;
        let (overview, asked, own) = self.ask(kind, reason);
        let mut text = format!("r{subject} | mpi4jax: {headline}\n");
        if asked.is_ok() || link::is_open() {
            text += &groups::lines(overview.groups.iter().cloned());
            if text.contains(" on comm#") {
                text += "  comm#0, comm#1, ... are numbers that each rank gives for itself to communicators without a \
                         name: Set_name tells them apart\n";
            }
        } else {
            text += &format!("  rank {rank} is {} (for {:.1} s)\n", own.state, own.seconds);
        }
        let directory = self.peers.directory.display();
        let theirs = || self.peers.last_answer(subject).map(|(_, answer)| answer.last);
        if let Some(last) = if subject == rank { Some(own.last) } else { theirs() } {
            text += &format!("  last operations of rank {subject}:\n{last}");
        }
        text += &match asked {
            Ok(()) => format!("  more: python -m mpi4jax.report {directory}\n"),
            Err(error) if link::is_open() => {
                format!("  no dumps are left: writing to {directory} failed: {error}\n")
            }
            Err(_) if size == 1 => String::new(),
            Err(error) => format!(
                "  the other ranks cannot be asked: writing to {directory} failed: {error}; MPI4JAX_DUMP_DIR names \
                 another directory\n"
            ),
        };
        (text, overview)
    }

    /// A line about something that takes long: whom a rank waits for. `None`: there is nothing to say.
    pub fn line(&self, world: &World, key: Key, wait: &Wait) -> Option<String> {
        let (overview, asked, _) = self.ask(Kind::Line, "a line");
        let mut line = format!("r{} | mpi4jax: {} has waited for {:.0} s", key.0, wait.words, wait.seconds);
        if asked.is_err() && !link::is_open() {
            let others: Ranks = wait.members.iter().filter(|rank| *rank != key.0).collect();
            line += &format!(" for {}", groups::ranks(&others));
        } else {
            let late = late(&overview, key.0, wait);
            match (late.is_empty(), &wait.need) {
                (true, Need::End) => return None,
                (true, _) => line += ": all ranks have come, and it is under way",
                (false, _) => line += &groups::waited_for(late),
            }
        }
        if let Some((cycle, rank)) = decide::looks_stuck(world, key)
            && let Some(other) = &world[&rank].other
        {
            line += &format!(
                "; this looks like a deadlock: {}; it is not ended, because rank {rank} has {other} and could still \
                 communicate",
                decide::circle(world, &cycle, key.0)
            );
        }
        Some(line + "; the job goes on (MPI4JAX_TIMEOUT=seconds would end it)\n")
    }
}

/// The ranks that a wait waits for.
fn late(overview: &Overview, rank: i32, wait: &Wait) -> Vec<Group> {
    let is_late = |other: i32, state: &str| match &wait.need {
        Need::Collective { comm, number } => {
            let mark = waits::collective_mark(*comm, *number);
            let is_it = |it: &str| it.find('/').is_some_and(|at| it[at..] == mark);
            !overview.marks_of(other).is_some_and(|marks| marks.split(' ').any(is_it))
        }
        Need::Message { from, to, .. } => {
            [from, to].into_iter().flatten().any(|Peer { rank, .. }| rank.is_none_or(|rank| rank == other))
        }
        Need::End => !state.starts_with("finished"),
        Need::Call | Need::Stream => true,
    };
    let own = |group: &Group| {
        let is_asked =
            |other: &i32| *other != rank && wait.members.contains(*other) && is_late(*other, &group.state);
        let members: Ranks = group.members.iter().filter(is_asked).collect();
        Group { members, state: groups::brief(&group.state), seconds: 0.0 }
    };
    overview.groups.iter().map(own).filter(|group| group.members.len() > 0).collect()
}
