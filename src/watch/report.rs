//! The texts of reports: a line about a wait that takes long, and a report of the states of all ranks.

use std::path::Path;

use super::groups;
use super::link::ANSWER_TIME;
use super::state::{Key, Need, Peer, RankStatus, State, Wait, World, wait_of};
use super::verdict::{Verdict, Why};
use crate::board::ranks::Ranks;
use crate::comm;
use crate::comm::origin::UNKNOWN;
use crate::mpilib::Tag;

/// What a report is made of.
pub struct Facts<'a> {
    pub world: &'a World,
    pub size: i32,
    /// The ranks of this host have a board.
    pub has_board: bool,
    /// Messages reach the other hosts.
    pub asks_hosts: bool,
}

fn operations(status: &RankStatus) -> Option<String> {
    let words: Vec<&str> = status.waits.iter().map(|wait| &*wait.words).collect();
    (!words.is_empty()).then(|| format!("in {}", words.join("; and in ")))
}

/// What a rank does.
pub fn doing(status: &RankStatus) -> String {
    let handles = if status.exception.is_empty() {
        String::new()
    } else {
        format!("; it is handling {}", status.exception)
    };
    what(status) + &handles
}

fn what(status: &RankStatus) -> String {
    let RankStatus { state, process, before, activity, python, .. } = status;
    match (state, operations(status)) {
        (State::Gone, _) => return format!("gone: {process} has died{before}"),
        (State::Stopped, _) => return format!("stopped: {process} gets no time (SIGSTOP, or a debugger)"),
        // A process without time, on a busy machine, has said before what it waits for.
        (_, Some(words)) if status.is_silent => return format!("{words}; {process} gets no time"),
        (_, Some(words)) if python.is_empty() || status.waits.iter().all(|wait| wait.has_line) => {
            return words;
        }
        (_, Some(words)) => return format!("{words}; Python is at {python}"),
        (State::Finished, _) => {}
        _ if status.is_silent => return format!("silent: {process} does not answer"),
        _ => {}
    }
    let mut text: String = if *state == State::Finished { "finished" } else { "in no operation" }.into();
    for (before, part) in [("; ", activity), ("", before), ("; Python is at ", python)] {
        let is_over = *state == State::Finished && !before.is_empty();
        if !part.is_empty() && !is_over {
            text += &format!("{before}{part}");
        }
    }
    text
}

impl Facts<'_> {
    fn unknown(&self) -> String {
        if self.asks_hosts {
            let time = ANSWER_TIME.as_secs();
            format!(
                "silent: no answer over MPI within {time} s; the process may be slow, stopped or gone, or the network interrupted"
            )
        } else {
            "unknown: it has not imported mpi4jax, or is on another host".into()
        }
    }

    fn can_ask(&self) -> bool {
        self.has_board || self.asks_hosts
    }

    fn state(&self, rank: i32) -> (String, i32) {
        (self.world.get(&rank).map_or_else(|| self.unknown(), doing), rank)
    }

    /// For how long a rank has done what it does.
    fn seconds(&self, rank: i32) -> f64 {
        let seconds = |it: &RankStatus| it.waits.first().map_or(it.seconds, |wait| wait.seconds);
        self.world.get(&rank).map_or(0.0, seconds)
    }

    /// What all ranks do, and what one of them, the subject, did last.
    pub fn report(&self, headline: &str, (subject, wait): (i32, Option<Key>), this_rank: i32) -> String {
        let mut text = format!("r{subject} | mpi4jax: {headline}\n");
        let ranks = if self.can_ask() { 0..self.size } else { this_rank..this_rank + 1 };
        text += &groups::lines(ranks.map(|rank| self.state(rank)), |rank| self.seconds(rank));
        if text.contains(" on comm#") {
            text += "  comm#0, comm#1, ... are numbers that each rank gives for itself to communicators without a name; \
                     of those with the same ranks, only duplicates (Dup) are compared: Set_name tells them apart\n";
        }
        if let Some(status) = self.world.get(&subject).filter(|status| !status.last.is_empty()) {
            text += &format!("  last operations of rank {subject}:\n");
            text.extend(status.last.iter().map(|line| format!("    {line}\n")));
        }
        let hint = wait.and_then(|wait| self.hint(wait));
        text + &hint.map_or_else(String::new, |hint| format!("  {hint}\n"))
    }

    /// Where the report and the board are left, or why they are not.
    pub fn left(&self, left: Result<&Path, String>) -> String {
        match left {
            Ok(path) => format!("  more: python -m mpi4jax.report {}\n", path.display()),
            Err(why) if self.size > 1 && !self.has_board => {
                format!("  the other ranks cannot be asked: {why}\n")
            }
            Err(why) if self.size > 1 => format!("  this report is not left in a file: {why}\n"),
            Err(_) => String::new(),
        }
    }

    /// The warning about a long wait: for which ranks it waits. `None`: there is no reason to warn.
    pub fn line(&self, key: Key) -> Option<String> {
        let wait = wait_of(self.world, key)?;
        let mut line = format!("r{} | mpi4jax: {} has waited for {:.0} s", key.0, wait.words, wait.seconds);
        if self.can_ask() {
            let late = wait.members.iter().filter(|&rank| self.is_late(key.0, wait, rank));
            let late: Vec<_> = late.map(|rank| self.state(rank)).collect();
            match (late.is_empty(), &wait.need) {
                (true, Need::Collective { comm, .. }) if comm.origin == UNKNOWN => {
                    line += ": all ranks have called it, and it is in progress, unless they are on different communicators of the \
                             same ranks, which is a deadlock";
                }
                (true, _) => line += ": all ranks have called it, and it is in progress",
                (false, _) => line += &format!(": {}", groups::in_words(late)),
            }
        } else {
            let others: Ranks = wait.members.iter().filter(|rank| *rank != key.0).collect();
            line += &format!(" for {}", groups::ranks_in_words(&others));
        }
        line += &self.hint(key).map_or_else(String::new, |hint| format!("; {hint}"));
        if let Some(why) = self.world.get(&key.0).and_then(|it| it.goes_on.as_ref()) {
            line += &format!("; rank {} has {why}", key.0);
        }
        Some(line + "; the job continues (MPI4JAX_TIMEOUT=seconds would abort it)\n")
    }

    /// The warning about a job that is stuck, which is aborted in `left` seconds.
    pub fn stuck_line(&self, key: Key, why: &Why, left: f64) -> String {
        let what = match why {
            Why::Stuck(_) => cycle_text(self.world, key.0),
            _ => {
                wait_of(self.world, key).map_or_else(String::new, |wait| headline(self.world, key, wait, why))
            }
        };
        let ends = if left.is_finite() {
            format!("aborting the job in {left:.0} s unless a rank goes on (MPI4JAX_DEADLOCK_AFTER)")
        } else {
            "the job is not aborted (MPI4JAX_DEADLOCK_AFTER=0)".into()
        };
        let hint = self.hint(key).map_or_else(String::new, |hint| format!("; {hint}"));
        format!("r{} | mpi4jax: this looks like a deadlock: {what}{hint}; {ends}\n", key.0)
    }

    /// A frequent mistake that explains why no rank is about to send the message that a rank waits for.
    fn hint(&self, (rank, id): Key) -> Option<String> {
        let wait = wait_of(self.world, (rank, id))?;
        if self.size == 1 && matches!(wait.need, Need::Message { .. }) {
            return Some(
                "MPI.COMM_WORLD has 1 rank: start the program with mpiexec -n 2 python program.py".into(),
            );
        }
        if let Some((sender, tag)) = Verdict::new(self.world).lost(rank, &wait.need) {
            return Some(format!(
                "rank {sender} has sent a message with {} to rank {rank}, which has not received it",
                Tag(tag)
            ));
        }
        let Need::Message { comm, from: Some(from), .. } = wait.need else { return None };
        let mut senders = self.world.iter().filter(|(other, _)| from.rank.is_none_or(|it| it == **other));
        if senders.any(|(_, status)| status.may_match(rank, false, comm, from.tag)) {
            None
        } else if wait.words.contains("irecv") && from.tag == Some(0) {
            Some("irecv takes tag 0 unless it is given another one, or tag=MPI.ANY_TAG, as recv takes".into())
        } else if comm::is_default(comm.class) && from.tag.is_none_or(|tag| !Tag(tag).is_of_derivative()) {
            Some(
                "if mpi4py sends the message: the default communicator is a clone of MPI.COMM_WORLD; \
                 comm=MPI.COMM_WORLD receives what is sent there"
                    .into(),
            )
        } else {
            None
        }
    }

    /// Whether a rank waits for this other one.
    fn is_late(&self, rank: i32, wait: &Wait, other: i32) -> bool {
        let status = self.world.get(&other);
        let has_come = |it: &Wait| it.need == wait.need && (it.need != Need::Call || it.words == wait.words);
        other != rank
            && match &wait.need {
                Need::Collective { .. } | Need::Call => {
                    status.is_none_or(|it| !it.waits.iter().any(has_come))
                }
                Need::Message { from, to, .. } => {
                    let is_it = |peer: &Peer| peer.rank.is_none_or(|rank| rank == other);
                    [from, to].into_iter().flatten().any(is_it)
                }
                Need::Stream => true,
            }
    }
}

/// The first line of a report of a wait that hangs.
pub fn headline(world: &World, key: Key, wait: &Wait, why: &Why) -> String {
    let name = &wait.words;
    match why {
        Why::Late => format!("{name} {}", wait.late),
        Why::Gone(rank) => {
            let process = world.get(rank).map_or("its process", |status| &status.process);
            format!("{name} can never complete: rank {rank} has died ({process})")
        }
        Why::Finished(Some(rank)) => format!("{name} can never complete: rank {rank} has finished"),
        Why::Finished(None) => format!("{name} can never complete: all other ranks have finished"),
        Why::Stuck(_) => format!("deadlock: {}", cycle_text(world, key.0)),
    }
}

/// The ranks of a cycle of waits, from this rank on if it is one of them, and what they wait for.
fn cycle_text(world: &World, rank: i32) -> String {
    let verdict = Verdict::new(world);
    let order = verdict.cycle(rank);
    let does = |rank: i32| {
        let RankStatus { waits, python, .. } = &world[&rank];
        waits.first().map_or_else(String::new, |wait| match &**python {
            place if !wait.has_line && !place.is_empty() => format!("{}, Python at {place}", wait.words),
            _ => wait.words.clone(),
        })
    };
    let comm = |rank: &i32| {
        world[rank].waits.first().and_then(|wait| match wait.need {
            Need::Collective { comm, .. } => Some(comm),
            _ => None,
        })
    };
    let mut text = format!("rank {} is in {}", order[0], does(order[0]));
    for (before, rank) in order.iter().zip(&order[1..]).take(3) {
        text += &format!(", and waits for rank {rank}, which is in {}", does(*rank));
        let wait = world[rank].waits.first();
        if let Some((sender, tag)) = wait.and_then(|wait| verdict.lost(*rank, &wait.need)) {
            text += &format!(" (rank {sender} has sent it a message with {})", Tag(tag));
        }
        // Names may be the same, or not say it.
        if let (Some(one), Some(other)) = (comm(before), comm(rank))
            && one != other
        {
            text += ", on another communicator";
        }
    }
    if order.len() > 4 {
        text += &format!(", and so on ({} ranks)", order.len());
    }
    let last = order[order.len() - 1];
    text += &if order.len() == 1 && waits_for(world, last, last) {
        ", and waits for itself".into()
    } else if order.len() > 1 && waits_for(world, last, order[0]) {
        format!(", and waits for rank {}", order[0])
    } else {
        ", and no rank is about to serve it".into()
    };
    format!("{text}; {}", remedy(world, &order))
}

/// Whether a rank waits for this other one by name, or in what takes all.
fn waits_for(world: &World, rank: i32, other: i32) -> bool {
    let names = |end: &Option<Peer>| end.is_some_and(|end| end.rank.is_none_or(|it| it == other));
    world[&rank].waits.iter().any(|wait| match &wait.need {
        Need::Message { from, to, .. } => names(from) || names(to),
        _ => rank != other && wait.members.contains(other),
    })
}

fn remedy(world: &World, cycle: &[i32]) -> &'static str {
    let needs = || cycle.iter().flat_map(|rank| world[rank].waits.iter().map(|wait| &wait.need));
    let differ = |one: &Need| needs().any(|other| one.is_other_operation(other));
    if needs().any(differ) {
        return "the operations of the ranks do not match: let all ranks call the same collective";
    }
    let is_message = |need: &Need| matches!(need, Need::Message { .. });
    if needs().all(is_message) {
        let receives = |need: &Need| matches!(need, Need::Message { from: Some(_), to: None, .. });
        return if cycle.len() == 1 {
            "use sendrecv, or start one of the two with irecv or isend"
        } else if needs().all(receives) {
            "let one of them send first, or use sendrecv"
        } else {
            "let one of them receive first, or use sendrecv"
        };
    }
    if needs().any(is_message) {
        "let all ranks call the collective before the message, or after it"
    } else {
        "let all ranks use the communicators in the same order"
    }
}

#[cfg(test)]
mod tests;
