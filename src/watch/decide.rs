//! What the leader of a host does about ranks that wait: a pure function of observations, without clock, files, MPI or
//! processes, that returns actions.
//!
//! A job is ended for a proof that a wait cannot end, or for a time limit of the user's. Anything else is a warning. What is not
//! known proves nothing. Before the job is ended, before a warning, and to learn what other hosts wait for, the leader asks all
//! ranks what they do, and then decides by the answers. It asks when a wait has become twice as old as when ranks were asked
//! last, by whichever leader; as a result one leader, mostly that of the first host, asks and reports for the whole job.

use std::collections::{HashMap, HashSet};

use super::graph::{Graph, Trust, Why};
use crate::watch::job::mail::QuestionKind;
use crate::watch::job::status::{Life, Need, RankStatus, Wait, WaitId, World, wait_of};

/// For how long a proof has to hold, and a wait lasts before the other hosts are asked: messages may be under way.
const PATIENCE: f64 = 3.0;
/// For how long a wait lasts before anything is proved of it.
const PROVE_AFTER: f64 = 1.0;
/// How many bytes a second travel at least: what looks like a hang may be a large message.
const SLOWEST: f64 = 20e6;
/// For how long a rank that has finished waits for the others before there is a warning.
const END_PATIENCE: f64 = 10.0;
/// Waits of other ranks are younger than the one for which a leader asked, but by no more than this part of their age.
const SPREAD: f64 = 0.2;
/// The interval at which hosts ask where warnings are switched off.
const USUAL_REPORT_AFTER: f64 = 30.0;
/// For how long answers are waited for, and when hosts that have not answered are asked again.
const ANSWER_TIME: f64 = 5.0;
const ASK_AGAIN: f64 = 2.0;

#[derive(Clone, Debug)]
pub struct Settings {
    /// Seconds until a warning about an operation that waits; infinity: never.
    pub report_after: f64,
    /// The place of this host among the hosts, and how many there are.
    pub host: (usize, usize),
}

/// A wait of a rank.
pub type Key = (i32, WaitId);

/// When leaders of other hosts asked last: for anything, to end the job, and one that comes before this rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Heard {
    pub last: f64,
    pub end: f64,
    pub before_this: f64,
}

impl Default for Heard {
    fn default() -> Self {
        let never = f64::NEG_INFINITY;
        Self { last: never, end: never, before_this: never }
    }
}

impl Heard {
    /// A leader has asked.
    pub fn note(&mut self, is_before_this: bool, kind: QuestionKind, now: f64) {
        self.last = now;
        if kind == QuestionKind::End {
            self.end = now;
        }
        if is_before_this {
            self.before_this = now;
        }
    }
}

/// The input of a decision.
#[derive(Clone, Debug, Default)]
pub struct Observation {
    pub world: World,
    /// A debugger is attached to this process.
    pub is_debugged: bool,
    /// The user has asked this rank for a report.
    pub report_for: Option<i32>,
    /// When leaders of other hosts asked.
    pub heard: Heard,
    /// All ranks have answered the question of this leader.
    pub is_answered: bool,
}

/// A question of this leader to all ranks.
#[derive(Clone, Debug)]
pub struct Question {
    kind: QuestionKind,
    /// The rank that the user asked for a report.
    report_for: Option<i32>,
    at: f64,
    /// When ranks were asked before, by any leader.
    before: f64,
    was_repeated: bool,
}

/// The state that earlier decisions leave for later ones.
#[derive(Clone, Debug)]
pub struct Memory {
    pub question: Option<Question>,
    /// When ranks last answered this leader.
    asked: f64,
    /// Since when there has been a reason to end the job for a wait.
    suspects: HashMap<Key, f64>,
    /// What has been reported as hung.
    reported: HashSet<Key>,
}

impl Default for Memory {
    fn default() -> Self {
        Self { question: None, asked: f64::NEG_INFINITY, suspects: HashMap::new(), reported: HashSet::new() }
    }
}

impl Memory {
    /// Whether what other hosts have answered is still needed.
    pub fn is_idle(&self) -> bool {
        self.question.is_none() && self.suspects.is_empty()
    }

    /// Whether a question is under way that may still be answered.
    pub fn expects_answers(&self, now: f64) -> bool {
        self.question.as_ref().is_some_and(|question| now - question.at < ANSWER_TIME)
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Asks all ranks what they do.
    Ask(QuestionKind),
    /// Asks the hosts that have not answered once more.
    AskAgain,
    /// Prints what a wait waits for.
    PrintLine(Key),
    /// Prints what all ranks do, for a user who asked this rank.
    PrintReport(i32),
    /// Reports that a wait hangs, and ends the job.
    End(Key, Why),
}

/// The actions, and the state for the next decision.
pub fn decide(state: &Observation, memory: &Memory, settings: &Settings, now: f64) -> (Memory, Vec<Action>) {
    let mut next = memory.clone();
    if let Some(question) = &mut next.question
        && !state.is_answered
        && memory.expects_answers(now)
    {
        let repeats = now - question.at >= ASK_AGAIN && !question.was_repeated;
        question.was_repeated |= repeats;
        return (next, repeats.then_some(Action::AskAgain).into_iter().collect());
    }
    let hung = if state.is_debugged { None } else { hung(state, &mut next, settings, now) };
    if state.is_debugged {
        next.suspects.clear();
    }
    let action = match next.question.take() {
        Some(question) => conclude(state, &mut next, &question, hung, settings, now),
        None => ask(state, &mut next, hung.is_some(), settings, now),
    };
    (next, action.into_iter().collect())
}

/// Asks all ranks, if there is a reason to.
fn ask(
    state: &Observation,
    next: &mut Memory,
    is_hung: bool,
    settings: &Settings,
    now: f64,
) -> Option<Action> {
    let before = next.asked.max(state.heard.last);
    let another_reports = now - state.heard.end < 2.0 * ANSWER_TIME;
    let is_due = || {
        let first = if settings.host.1 > 1 { PATIENCE } else { f64::INFINITY };
        waits(&state.world).any(|(_, _, wait)| has_come_to(first, wait, settings, now, before))
    };
    let kind = if state.report_for.is_some() {
        QuestionKind::Report
    } else if is_hung && !another_reports {
        QuestionKind::End
    } else if !state.is_debugged && is_due() {
        QuestionKind::Status
    } else {
        return None;
    };
    let report_for = state.report_for;
    next.question = Some(Question { kind, report_for, at: now, before, was_repeated: false });
    Some(Action::Ask(kind))
}

/// What is done when the ranks have answered.
fn conclude(
    state: &Observation,
    next: &mut Memory,
    question: &Question,
    hung: Option<(Key, Why)>,
    settings: &Settings,
    now: f64,
) -> Option<Action> {
    next.asked = now;
    if let Some(rank) = question.report_for {
        return Some(Action::PrintReport(rank));
    }
    // Of leaders that ask at the same time, only the first one reports.
    if state.heard.before_this >= question.at - 1.0 {
        return None;
    }
    if question.kind == QuestionKind::End
        && let Some((key, why)) = hung
    {
        next.reported.insert(key);
        return Some(Action::End(key, why));
    }
    // A line about the oldest of the waits that are due; about an operation rather than a rank's end.
    let is_due = |key: &Key, wait: &Wait| {
        let is_old = has_come_to(settings.report_after, wait, settings, now, question.before);
        is_old && !state.is_debugged && !next.reported.contains(key)
    };
    let due = waits(&state.world).filter(|(key, _, wait)| is_due(key, wait));
    let age = |wait: &Wait| if wait.need == Need::End { 0.0 } else { wait.seconds };
    due.max_by(|a, b| age(a.2).total_cmp(&age(b.2))).map(|(key, ..)| Action::PrintLine(key))
}

fn waits(world: &World) -> impl Iterator<Item = (Key, &RankStatus, &Wait)> {
    world.iter().flat_map(|(&rank, it)| it.waits.iter().map(move |wait| ((rank, wait.id), it, wait)))
}

/// The wait for which the job should be ended: one is enough, of this host if there is one, whose last operations are known.
/// Since when there has been a reason to, is written down for all waits.
fn hung(state: &Observation, next: &mut Memory, settings: &Settings, now: f64) -> Option<(Key, Why)> {
    let graph = Graph::new(&state.world, Trust::Proved);
    let (moves, volume) = (graph.moves(), graph.volume());
    let mut suspects = HashMap::new();
    let mut found: Option<(bool, Key, Why)> = None;
    for (key, rank, wait) in waits(&state.world).filter(|(key, ..)| !next.reported.contains(key)) {
        let may_be_proved = wait.seconds >= PROVE_AFTER && rank.life != Life::Stopped && !rank.is_silent;
        let why = if !wait.late.is_empty() {
            Some(Why::Late)
        } else if may_be_proved {
            let is_still = !rank.moves && !moves;
            graph.why(key.0, wait).filter(|why| is_still || matches!(why, Why::Gone(_)))
        } else {
            None
        };
        let Some(why) = why else { continue };
        let since = next.suspects.get(&key).copied();
        suspects.insert(key, since.unwrap_or(now));
        let has_held = since
            .is_some_and(|since| now - since >= patience(wait.volume().max(volume), &why) + delay(settings));
        let has_details = !rank.last.is_empty();
        if has_held && found.as_ref().is_none_or(|(other_has_details, ..)| has_details && !other_has_details)
        {
            found = Some((has_details, key, why));
        }
    }
    next.suspects = suspects;
    next.reported.retain(|key| wait_of(&state.world, *key).is_some());
    found.map(|(_, key, why)| (key, why))
}

/// For how long a reason has to hold.
fn patience(volume: f64, why: &Why) -> f64 {
    match why {
        Why::Late => 0.0,
        Why::Gone(_) => PATIENCE,
        // The largest message decides, whichever wait it is of: the others end after it.
        Why::Finished(_) | Why::Stuck(_) => PATIENCE + volume / SLOWEST,
    }
}

/// How much later than the first host this one asks, so that few ask at the same time: the second one by
/// a second, the next two by two, the next four by three, and so on.
fn delay(settings: &Settings) -> f64 {
    f64::from(usize::BITS - settings.host.0.leading_zeros())
}

/// Whether a wait has become as old as one of the ages at which ranks are asked, since they were asked `before`. These ages are
/// `report_after`, twice as much, and so on, and half of it, and so on, down to `first` or `report_after`.
fn has_come_to(first: f64, wait: &Wait, settings: &Settings, now: f64, before: f64) -> bool {
    let reported = settings.report_after;
    let unit = if reported.is_finite() { reported } else { USUAL_REPORT_AFTER };
    let age = wait.seconds - delay(settings);
    if age < first.min(reported) || (wait.need == Need::End && wait.seconds < END_PATIENCE) {
        return false;
    }
    let asked_at = unit * (age / unit).log2().floor().exp2();
    let age_before = wait.seconds - (now - before);
    asked_at >= first.min(reported) && age_before < (1.0 - SPREAD) * asked_at
}

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
