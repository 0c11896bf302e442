//! Reports: what this rank does, and what all of them do.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::frames::{self, Frame};
use super::groups::{self, NO_OPERATION};
use super::peers::{Peers, Status};
use super::questions::{self, Answer};
use super::waits::{blocked, is_finished};
use super::{dump, link, stacks};
use crate::mpilib::wildcards;
use crate::record::clock::Epoch;
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

/// For how long a report waits for the answers of the other ranks.
pub const GRACE: Duration = Duration::from_secs(3);

/// Where the main thread is in Python.
pub fn python() -> Vec<Frame> {
    if is_finished() { Vec::new() } else { stacks::python() }
}

/// What answers for this rank, and reports for all.
pub struct Reporter {
    pub peers: Peers,
    /// The word of the last question that this rank has answered.
    answered: Mutex<String>,
}

impl Reporter {
    pub fn new(peers: Peers) -> Self {
        Self { peers, answered: Mutex::default() }
    }

    /// What this rank is doing.
    fn state(&self, python: &[Frame]) -> Answer {
        let epoch = Epoch::now();
        let running = recorder::running();
        if let Some(first) = running.first() {
            let mut state = format!("in {first}");
            for other in &running[1..] {
                state += &format!("; and in {other}");
            }
            // An operation outside of compiled functions has no line of its own.
            if first.what.location.is_empty()
                && let Some(frame) = frames::user_frame(python)
            {
                state += &format!("; Python is at {frame}");
            }
            return Answer { seconds: first.seconds(&epoch), state };
        }
        if let Some(call) = &*blocked() {
            let mut state = format!("in {}", call.what);
            if let Some(frame) = frames::user_frame(python) {
                state += &format!("; Python is at {frame}");
            }
            return Answer { seconds: epoch.seconds_since(call.started), state };
        }
        if let [first, ..] = transport::unfinished().as_slice() {
            let mut state = format!("in {first}");
            if let Some(frame) = frames::user_frame(python) {
                state += &format!(" Python is at {frame}");
            }
            return Answer { seconds: first.seconds, state: state.trim_end_matches(',').into() };
        }
        let last = recorder::records().pop();
        let mut state: String = if is_finished() { "finished" } else { NO_OPERATION }.into();
        if let Some(activity) = frames::activity(python) {
            state += &format!("; {activity}");
        }
        match &last {
            Some(record) if record.state == State::Failed => {
                state += &format!("; the last one, {record}, failed");
            }
            Some(record) => state += &format!("; the last one was {record}"),
            None => state += ", and was in none before",
        }
        if let Some(frame) = frames::user_frame(python) {
            state += &format!("; Python is at {frame}");
        }
        Answer { seconds: last.map_or(0.0, |record| epoch.seconds_since(record.ended)), state }
    }

    /// What this rank is doing, in few words. Python is asked only if there is nothing else to say.
    pub fn briefly(&self) -> String {
        let state = self.state(&[]).state;
        if state.starts_with(NO_OPERATION) {
            return groups::brief(&self.state(&python()).state);
        }
        state
    }

    pub fn answered(&self) -> MutexGuard<'_, String> {
        self.answered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What this rank is doing; also written to its files, once for each question.
    pub fn answer(&self, word: &str, reason: &str) -> (Answer, std::io::Result<()>) {
        // Held for as long as it takes: the link and the watchdog may be asked at the same time.
        let mut answered = self.answered();
        let python = python();
        let answer = self.state(&python);
        if *answered == word {
            return (answer, Ok(()));
        }
        let dump = questions::wants_dumps(word).then(|| {
            dump::json(&dump::Header {
                rank: self.peers.rank,
                size: self.peers.size,
                host: &self.peers.host,
                reason,
                state: &answer.state,
                python: &python,
            })
        });
        let written = self.peers.answer(word, &answer, dump.as_deref());
        word.clone_into(&mut answered);
        (answer, written)
    }

    /// What all ranks are doing, as far as one can find out; or which rank reports that, where two began
    /// to at the same time.
    pub fn report(&self, headline: &str, reason: &str, hung: bool) -> Result<String, i32> {
        let Peers { rank, size, .. } = self.peers;
        let mut text = format!("r{rank} | mpi4jax: {headline}\n");
        let word = questions::word(rank, true);
        link::ask(&word, hung, rank, size);
        let asked = self.peers.ask(&word);
        let (own, written) = self.answer(&word, reason);
        let asked = asked.and(written);
        if asked.is_ok() || link::is_open() {
            text += &self.overview(&word, own);
            if hung
                && let Some(other) = link::reporter(2 * GRACE)
                && other < rank
            {
                return Err(other);
            }
        } else {
            text += &format!("  rank {rank} is {} (for {:.1} s)\n", own.state, own.seconds);
            if let Err(error) = &asked
                && size > 1
            {
                text += &format!(
                    "  the other ranks cannot be asked: writing to {} failed: {error}; MPI4JAX_DUMP_DIR \
                     names another directory\n",
                    self.peers.directory.display()
                );
            }
        }
        let epoch = Epoch::now();
        let records = recorder::records();
        text += &format!("  last operations of rank {rank}:\n");
        for record in &records[records.len().saturating_sub(8)..] {
            let seconds = record.seconds(&epoch);
            text += &match record.state {
                State::Started => format!("    {record}: for {}\n", time(seconds)),
                State::Failed => format!("    {record}: failed after {}\n", time(seconds)),
                State::Done => format!(
                    "    {record}: took {}, ended {} ago\n",
                    time(seconds),
                    time(epoch.seconds_since(record.ended))
                ),
            };
        }
        if records.is_empty() {
            text += "    none\n";
        }
        let directory = self.peers.directory.display();
        match asked {
            Ok(()) => text += &format!("  more: python -m mpi4jax.report {directory}\n"),
            Err(error) if link::is_open() => {
                text += &format!("  no dumps are left: writing to {directory} failed: {error}\n");
            }
            Err(_) => {}
        }
        Ok(text)
    }

    /// What a rank was doing when it last told, if it ever did.
    fn before(&self, rank: i32) -> String {
        let told = self.peers.last_answer(rank);
        told.map_or_else(String::new, |(_, Answer { state, .. })| format!("; before, it was {state}"))
    }

    /// What is known of each rank, after a question with this word.
    fn gather(&self, word: &str, own: Answer) -> Vec<Status> {
        let size = self.peers.size;
        let mut answers: Vec<Option<Answer>> = vec![None; size as usize];
        answers[self.peers.rank as usize] = Some(own);
        let start = Instant::now();
        let mut seen = None;
        for round in 0.. {
            let now = Some(self.peers.look());
            let in_file = |rank| if now == seen { None } else { self.peers.answer_of(rank, word) };
            for (answer, rank) in answers.iter_mut().zip(0..) {
                if answer.is_none() {
                    *answer = in_file(rank).or_else(|| link::answer_of(rank, word));
                }
            }
            seen = now;
            let mut missing = (0..size).filter(|&rank| answers[rank as usize].is_none());
            // Those that cannot answer are not waited for.
            let cannot = |rank| matches!(self.peers.status(rank), Status::Stopped(_) | Status::Gone(_));
            let is_complete = if round % 10 == 0 { missing.all(cannot) } else { missing.next().is_none() };
            if start.elapsed() > GRACE || is_complete {
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let status = |(answer, rank): (Option<Answer>, i32)| {
            answer.map_or_else(|| self.peers.status(rank), Status::Answered)
        };
        answers.into_iter().zip(0..).map(status).collect()
    }

    /// What a rank does, in words.
    fn words(&self, rank: i32, status: Status) -> (String, f64) {
        let words = match status {
            Status::Answered(answer) => return (answer.state, answer.seconds),
            Status::Finished => "finished".into(),
            Status::Stopped(name) => format!("stopped: {name} gets no time (SIGSTOP, or a debugger)"),
            Status::Gone(name) => format!("gone: {name} has ended{}", self.before(rank)),
            Status::Silent(name) => format!("silent: {name} does not answer{}", self.before(rank)),
            Status::Unknown if link::is_open() => {
                "silent: it does not answer over MPI; its process, or the network, may be gone".into()
            }
            Status::Unknown => {
                "unknown: it has not imported mpi4jax, or does not share this directory".into()
            }
        };
        (words, 0.0)
    }

    /// What all ranks do, most first, in a bounded number of lines.
    fn overview(&self, word: &str, own: Answer) -> String {
        let statuses = self.gather(word, own).into_iter().zip(0..);
        let states = statuses.map(|(status, rank)| {
            let (state, seconds) = self.words(rank, status);
            (rank, state, seconds)
        });
        let mut text = groups::lines(states);
        if text.contains(" on comm#") {
            text += "  comm#0, comm#1, ... are numbers that each rank gives for itself to communicators without a name: \
                     Set_name tells them apart\n";
        }
        text
    }

    /// A line about something that takes long: whom this rank waits for. `None` if another rank says so.
    pub fn waits_for(&self, name: &str, waited: Duration, record: Option<&Record>) -> Option<String> {
        let Peers { rank, size, .. } = self.peers;
        let word = questions::word(rank, false);
        link::ask(&word, false, rank, size);
        let asked = self.peers.ask(&word);
        let (own, written) = self.answer(&word, "a line");
        let mut comes = comes_from(record, rank, size);
        comes.sort_unstable();
        let mut line = format!("r{rank} | mpi4jax: {name} has waited for {:.0} s", waited.as_secs_f64());
        if asked.and(written).is_ok() || link::is_open() {
            let statuses = self.gather(&word, own).into_iter().zip(0..);
            if link::teller(2 * GRACE).is_some_and(|other| other < rank) {
                return None;
            }
            let same = record.filter(|record| record.what.op.row().is_collective());
            let same = same.map(|record| format!("in {} #{} ", record.what.name(), record.sequence));
            let is_late = |state: &str| same.as_ref().is_none_or(|same| !state.starts_with(same));
            let late: Vec<_> = statuses
                .filter(|(_, rank)| comes.binary_search(rank).is_ok())
                .map(|(status, rank)| (rank, self.words(rank, status)))
                .filter(|(_, (state, _))| is_late(state))
                .map(|(rank, (state, _))| (rank, groups::brief(&state), 0.0))
                .collect();
            line += &match late.is_empty() {
                true => ": all ranks have come, and it is under way".into(),
                false => groups::waited_for(late.into_iter()),
            };
        } else {
            line += &format!(" for {}", groups::ranks(&comes));
        }
        Some(line + "; the job goes on (MPI4JAX_TIMEOUT=seconds would end it)\n")
    }
}

/// The ranks that what is waited for may come from.
fn comes_from(record: Option<&Record>, rank: i32, size: i32) -> Vec<i32> {
    let Some(record) = record else { return (0..size).filter(|&other| other != rank).collect() };
    let (comm, row) = (&record.what.comm, record.what.op.row());
    let sides = [(record.source, row.receives()), (record.dest, row.sends())];
    let named: Vec<i32> =
        sides.iter().filter(|side| side.1).filter_map(|side| comm.world_rank(side.0)).collect();
    let is_from_any = row.receives() && record.source == wildcards().source;
    let may = |other: &i32| *other != rank && (row.is_collective() || is_from_any || named.contains(other));
    comm.world.iter().copied().filter(may).collect()
}
