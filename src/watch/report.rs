//! Reports: what this rank does, and what all of them do.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::frames::{self, Frame};
use super::peers::{self, Answer, Peers, Status};
use super::waits::{blocked, is_finished};
use super::{dump, link, signal};
use crate::record::clock::Epoch;
use crate::record::recorder::{self, State};
use crate::transport;

/// "1.2 s", "3.4 ms", "5.6 us"
fn time(seconds: f64) -> String {
    match seconds {
        1e-1.. => format!("{seconds:.1} s"),
        1e-3.. => format!("{:.1} ms", 1e3 * seconds),
        _ => format!("{:.1} us", 1e6 * seconds),
    }
}

/// "ranks 0-2, 5"
fn ranks(ranks: &[i32]) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut rest = ranks;
    while let Some(&first) = rest.first() {
        let run = rest.iter().zip(first..).take_while(|&(&rank, expected)| rank == expected).count();
        let last = rest[run - 1];
        parts.push(if run == 1 { first.to_string() } else { format!("{first}-{last}") });
        rest = &rest[run..];
    }
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, parts.join(", "))
}

/// For how long a report waits for the answers of the other ranks.
pub const GRACE: Duration = Duration::from_secs(3);

/// Where the main thread is in Python.
pub fn python() -> Vec<Frame> {
    if is_finished() { Vec::new() } else { signal::python() }
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
        let mut state: String = if is_finished() { "finished" } else { "in no operation" }.into();
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
        let dump = dump::json(&dump::Header {
            rank: self.peers.rank,
            size: self.peers.size,
            host: &self.peers.host,
            reason,
            state: &answer.state,
            python: &python,
        });
        let written = self.peers.answer(word, &answer, &dump);
        word.clone_into(&mut answered);
        (answer, written)
    }

    /// What all ranks are doing, as far as one can find out; or which rank reports that, where two began
    /// to at the same time.
    pub fn report(&self, headline: &str, reason: &str, hung: bool) -> Result<String, i32> {
        let Peers { rank, size, .. } = self.peers;
        let mut text = format!("r{rank} | mpi4jax: {headline}\n");
        let word = peers::word(rank);
        link::ask(&word, hung, rank, size);
        let asked = self.peers.ask(&word);
        let (own, written) = self.answer(&word, reason);
        let asked = asked.and(written);
        if asked.is_ok() || link::is_open() {
            for (members, line) in self.gather(&word, own) {
                text += &format!("  {} {line}\n", ranks(&members));
            }
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

    /// The ranks, grouped by what they do, most first.
    fn gather(&self, word: &str, own: Answer) -> Vec<(Vec<i32>, String)> {
        let size = self.peers.size;
        let mut answers: Vec<Option<Answer>> = vec![None; size as usize];
        answers[self.peers.rank as usize] = Some(own);
        let start = Instant::now();
        loop {
            for rank in 0..size {
                let answer = &mut answers[rank as usize];
                if answer.is_none() {
                    *answer = self.peers.answer_of(rank, word).or_else(|| link::answer_of(rank, word));
                }
            }
            // Those that cannot answer are not waited for.
            let waiting = |rank: i32| {
                answers[rank as usize].is_none()
                    && !matches!(self.peers.status(rank), Status::Stopped(_) | Status::Gone(_))
            };
            if start.elapsed() > GRACE || !(0..size).any(waiting) {
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let mut groups: Vec<(Vec<i32>, String, f64)> = Vec::new();
        for rank in 0..size {
            let status = match answers[rank as usize].take() {
                Some(answer) => Status::Answered(answer),
                None => self.peers.status(rank),
            };
            let (line, seconds) = match status {
                Status::Answered(answer) => (answer.state, answer.seconds),
                Status::Finished => ("finished".into(), 0.0),
                Status::Stopped(name) => {
                    (format!("stopped: {name} gets no time (SIGSTOP, or a debugger)"), 0.0)
                }
                Status::Gone(name) => (format!("gone: {name} has ended{}", self.before(rank)), 0.0),
                Status::Silent(name) => (format!("silent: {name} does not answer{}", self.before(rank)), 0.0),
                Status::Unknown if link::is_open() => (
                    "silent: it does not answer over MPI; its process, or the network, may be gone".into(),
                    0.0,
                ),
                Status::Unknown => {
                    ("unknown: it has not imported mpi4jax, or does not share this directory".into(), 0.0)
                }
            };
            match groups.iter_mut().find(|(_, other, _)| *other == line) {
                Some((members, _, longest)) => {
                    members.push(rank);
                    *longest = longest.max(seconds);
                }
                None => groups.push((vec![rank], line, seconds)),
            }
        }
        groups.sort_by_key(|(members, ..)| std::cmp::Reverse(members.len()));
        let words = |(members, line, seconds): (Vec<i32>, String, f64)| {
            let verb = if members.len() == 1 { "is" } else { "are" };
            let since = if seconds > 0.0 { format!(" (for {seconds:.1} s)") } else { String::new() };
            (members, format!("{verb} {line}{since}"))
        };
        groups.into_iter().map(words).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_named_in_runs() {
        assert_eq!(ranks(&[3]), "rank 3");
        assert_eq!(ranks(&[0, 1, 2, 5, 7, 8]), "ranks 0-2, 5, 7-8");
    }
}
