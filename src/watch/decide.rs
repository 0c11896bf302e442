//! What is to be done about what the ranks wait for. No clock, file, MPI or process in it: what is known goes in, and actions
//! come out.
//!
//! A job is ended for what is proved, or for a time that the user has set. All else is a line. What is not known is not held
//! against anybody. Before a line is printed or the job is ended, all ranks are asked what they do: a [`Question`] is asked
//! first, and the rest is done when it is answered, if what it is about still holds then.

use std::collections::{HashMap, HashSet};

use super::graph::{Assume, Graph, Why};
use crate::job::mail::Kind;
use crate::job::ranks::Ranks;
use crate::job::status::{Life, Need, RankStatus, Wait, World};

/// For how long an operation waits before anything is proved of it, and for how long a proof has to hold: messages may be
/// under way.
const PATIENCE: f64 = 3.0;
const LOOK_AFTER: f64 = 1.0;
/// How many bytes a second travel at least, where what looks like a hang may be a large message.
const SLOWEST: f64 = 20e6;
/// For how long at least a rank that has finished waits for the others before a line says so.
const END_PATIENCE: f64 = 10.0;
/// For how long answers are waited for, and when hosts that have not answered are asked again.
pub const ANSWER_TIME: f64 = 5.0;
const ASK_AGAIN: f64 = 2.0;

/// How a rank decides that leads its host.
#[derive(Clone, Debug)]
pub struct Settings {
    /// After how many seconds a line says what an operation waits for.
    pub report_after: f64,
    /// Its place among the hosts, and how many there are.
    pub host: (usize, usize),
}

/// A wait, by its rank and number.
pub type Key = (i32, u64);

/// Why a wait is reported as hung.
#[derive(Clone, Debug, PartialEq)]
pub enum Reason {
    /// In words: the user's limit, or an error of a library.
    Late(String),
    Proof(Why),
}

/// What ranks are asked for.
#[derive(Clone, Debug, PartialEq)]
pub enum Purpose {
    /// To find out what ranks of other hosts wait for.
    Look,
    /// To say what a wait waits for.
    Line(Key),
    /// Because somebody wants to know.
    Show,
    /// To report that a wait hangs, and end the job.
    End(Key, Reason),
}

impl Purpose {
    pub fn kind(&self) -> Kind {
        match self {
            Self::Look => Kind::Look,
            Self::Line(_) => Kind::Line,
            Self::Show => Kind::Show,
            Self::End(..) => Kind::End,
        }
    }
}

#[derive(Clone, Debug)]
pub struct Question {
    pub purpose: Purpose,
    pub at: f64,
    pub was_repeated: bool,
    /// All that can be expected have answered.
    pub is_answered: bool,
}

/// What is known, and what has been done about it.
#[derive(Clone, Debug, Default)]
pub struct State {
    pub world: World,
    /// The ranks of this host, which this one leads.
    pub own: Ranks,
    /// A debugger looks at this process.
    pub is_debugged: bool,
    /// When a leader of another host has asked for this last, and whether it comes before this one where both ask at once.
    pub heard: HashMap<Kind, (f64, bool)>,
    /// What this rank has asked.
    pub question: Option<Question>,
    /// Since when it has been certain of a wait that it cannot end.
    pub suspects: HashMap<Key, f64>,
    /// How long a wait has to take before something is said of it again, and when something was said.
    pub told: HashMap<Key, f64>,
    pub spoke: Option<f64>,
    /// What has been reported as hung.
    pub reported: HashSet<Key>,
    /// When the other hosts were asked, and how long a wait has to take until they are again.
    pub asked: Option<f64>,
    pub ask_after: f64,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// From now on it is certain of this wait that it cannot end, or not any more.
    Suspect(Key),
    Acquit(Key),
    Ask(Purpose),
    /// Asks the hosts that have not answered once more.
    AskAgain,
    /// The question is done with.
    Close,
    /// Does not look at other hosts, or says nothing of a wait, because another rank just has: the next time is as much later.
    SkipLook,
    SkipLine(Key),
    /// Says what a wait waits for.
    Tell(Key),
    /// Reports what all ranks do.
    Show,
    /// Reports that a wait hangs, and ends the job.
    End(Key, Reason),
}

/// What is to be done. What the next decision has to know of it is written down by [`State::apply`].
pub fn decide(state: &State, settings: &Settings, now: f64) -> Vec<Action> {
    let mut actions = Vec::new();
    if state.is_debugged {
        actions.extend(state.suspects.keys().map(|&key| Action::Acquit(key)));
        return actions;
    }
    if let Some(question) = &state.question {
        let age = now - question.at;
        if question.is_answered || age >= ANSWER_TIME {
            actions.push(Action::Close);
            actions.extend(conclude(state, question));
        } else if age >= ASK_AGAIN && !question.was_repeated {
            actions.push(Action::AskAgain);
        }
        if question.purpose != Purpose::Look {
            return actions;
        }
    }
    if let Some(end) = hung(state, settings, now, &mut actions) {
        actions.push(end);
    } else if let Some(line) = line(state, settings, now, &mut actions) {
        actions.push(line);
    } else if state.question.is_none() {
        actions.extend(look(state, settings, now));
    }
    actions
}

/// What is done when the ranks have answered.
fn conclude(state: &State, question: &Question) -> Option<Action> {
    let heard = state.heard.get(&question.purpose.kind());
    let is_ahead = heard.is_some_and(|&(at, is_before)| is_before && at >= question.at - 1.0);
    match &question.purpose {
        Purpose::Look => None,
        Purpose::Show => Some(Action::Show),
        Purpose::Line(key) => (state.wait(*key).is_some() && !is_ahead).then_some(Action::Tell(*key)),
        Purpose::End(key, reason) => {
            let holds = match reason {
                Reason::Late(_) => state.wait(*key).is_some_and(|wait| !wait.late.is_empty()),
                Reason::Proof(_) => {
                    // Who has not answered may do anything.
                    let silent = |(rank, it): (&i32, &RankStatus)| {
                        let unknown = RankStatus { life: Life::Unknown, ..RankStatus::default() };
                        (*rank, if it.is_silent && it.life != Life::Gone { unknown } else { it.clone() })
                    };
                    why(&state.world.iter().map(silent).collect(), *key).is_some()
                }
            };
            Some(if holds && !is_ahead { Action::End(*key, reason.clone()) } else { Action::Acquit(*key) })
        }
    }
}

fn waits(world: &World) -> impl Iterator<Item = (Key, &RankStatus, &Wait)> {
    world.iter().flat_map(|(&rank, it)| it.waits.iter().map(move |wait| ((rank, wait.number), it, wait)))
}

/// A wait for which the job is to be ended: one is enough, of this host if there is one, whose last operations are known.
fn hung(state: &State, settings: &Settings, now: f64, actions: &mut Vec<Action>) -> Option<Action> {
    let graph = Graph::new(&state.world, Assume::default());
    let mut found: Option<(bool, Key, Reason)> = None;
    for (key, rank, wait) in waits(&state.world).filter(|(key, ..)| !state.reported.contains(key)) {
        let own = state.own.contains(key.0);
        let may_be_proved = wait.seconds >= LOOK_AFTER && rank.life != Life::Stopped;
        let proof = if may_be_proved { graph.why(key.0, wait) } else { None };
        let late = (own && !wait.late.is_empty()).then(|| Reason::Late(wait.late.clone()));
        let since = state.suspects.get(&key);
        match (proof.is_some() || late.is_some(), since) {
            (true, None) => actions.push(Action::Suspect(key)),
            (false, Some(_)) => actions.push(Action::Acquit(key)),
            _ => {}
        }
        let (held, turn) = (since.map_or(0.0, |since| now - since), turn(settings));
        let proof = proof.filter(|why| since.is_some() && held >= patience(wait, why) + turn);
        let reason = proof.map(Reason::Proof).or(late.filter(|_| held >= turn));
        if let Some(reason) = reason
            && found.as_ref().is_none_or(|(has_own, ..)| own && !has_own)
        {
            found = Some((own, key, reason));
        }
    }
    let (_, key, reason) = found?;
    let another_does = state.heard_at(Kind::End).is_some_and(|at| now - at < 2.0 * ANSWER_TIME);
    (!another_does).then_some(Action::Ask(Purpose::End(key, reason)))
}

/// For how long it has to be certain that a wait cannot end.
fn patience(wait: &Wait, why: &Why) -> f64 {
    let copies = if matches!(wait.need, Need::Collective { .. }) { wait.members.count() } else { 1 };
    let travels = wait.bytes as f64 * copies as f64 / SLOWEST;
    PATIENCE + if matches!(why, Why::Gone(_)) { 0.0 } else { travels }
}

/// How much later than the first host this one speaks or asks, so that few do before they have heard of each other: the second
/// one by a second, the next two by two, the next four by three, and so on.
fn turn(settings: &Settings) -> f64 {
    f64::from(usize::BITS - settings.host.0.leading_zeros())
}

/// When something is done again that was done after so many seconds of a wait: after twice as many.
fn again(after: f64, seconds: f64) -> f64 {
    let mut next = after.max(f64::MIN_POSITIVE);
    while next <= seconds {
        next *= 2.0;
    }
    next
}

/// How long a wait takes before something is said of it.
fn told_after(state: &State, settings: &Settings, key: Key, wait: &Wait) -> f64 {
    let patience = if wait.need == Need::End { END_PATIENCE } else { 0.0 };
    state.told.get(&key).copied().unwrap_or(settings.report_after.max(patience))
}

/// A wait of which something is to be said: an operation rather than a rank's end; of several, what waits longest.
fn line(state: &State, settings: &Settings, now: f64, actions: &mut Vec<Action>) -> Option<Action> {
    let mut due: Vec<(Key, f64)> = Vec::new();
    for (key, _, wait) in waits(&state.world).filter(|(key, ..)| state.own.contains(key.0)) {
        let after = told_after(state, settings, key, wait);
        if wait.seconds <= after + turn(settings).min(after / 4.0) || state.reported.contains(&key) {
            continue;
        }
        // Who has spoken took a little longer to come to the line.
        let spoke = [state.spoke, state.heard_at(Kind::Line), state.heard_at(Kind::End)];
        if spoke.into_iter().flatten().any(|at| now - at < after / 3.0) {
            actions.push(Action::SkipLine(key));
        } else {
            due.push((key, if wait.need == Need::End { 0.0 } else { wait.seconds }));
        }
    }
    let longest = due.iter().rev().max_by(|a, b| a.1.total_cmp(&b.1))?.0;
    actions.extend(due.iter().filter(|(key, _)| *key != longest).map(|(key, _)| Action::SkipLine(*key)));
    Some(Action::Ask(Purpose::Line(longest)))
}

/// The other hosts are asked where, as far as is known on this one, a wait may be part of a knot.
fn look(state: &State, settings: &Settings, now: f64) -> Option<Action> {
    let own = |rank: i32| state.own.contains(rank);
    let seconds = waits(&state.world).filter(|(key, ..)| own(key.0)).map(|(_, _, wait)| wait.seconds);
    let (after, longest) = (state.ask_after.max(PATIENCE), seconds.fold(0.0, f64::max));
    if settings.host.1 < 2 || longest < after + turn(settings) {
        return None;
    }
    // Since the wait has taken so long, or just before.
    let mut asked = [state.asked, state.heard_at(Kind::Look)].into_iter().flatten();
    if asked.any(|at| at > now - (longest - after) - 1.0) {
        return Some(Action::SkipLook);
    }
    let here: World =
        state.world.iter().filter(|(rank, _)| own(**rank)).map(|(rank, it)| (*rank, it.clone())).collect();
    let graph = Graph::new(&here, Assume { unknown_stuck: true, threads_idle: false });
    let may_be_stuck = waits(&here).any(|(key, _, wait)| graph.why(key.0, wait).is_some());
    may_be_stuck.then_some(Action::Ask(Purpose::Look))
}

impl State {
    fn heard_at(&self, kind: Kind) -> Option<f64> {
        self.heard.get(&kind).map(|(at, _)| *at)
    }

    pub fn wait(&self, (rank, number): Key) -> Option<&Wait> {
        self.world.get(&rank)?.waits.iter().find(|wait| wait.number == number)
    }

    /// What the next decision has to know of what is done now.
    pub fn apply(&mut self, action: &Action, settings: &Settings, now: f64) {
        let next_line = |state: &Self, key: Key| {
            state.wait(key).map(|wait| again(told_after(state, settings, key, wait), wait.seconds))
        };
        match action {
            Action::Suspect(key) => drop(self.suspects.insert(*key, now)),
            Action::Acquit(key) => drop(self.suspects.remove(key)),
            Action::Ask(purpose) => {
                let (at, purpose) = (now, purpose.clone());
                match &purpose {
                    Purpose::Look => {
                        self.asked = Some(now);
                        self.skip_look();
                    }
                    Purpose::Line(key) => {
                        self.spoke = Some(now);
                        self.told.extend(next_line(self, *key).map(|next| (*key, next)));
                    }
                    Purpose::Show | Purpose::End(..) => {}
                }
                self.question = Some(Question { purpose, at, was_repeated: false, is_answered: false });
            }
            Action::AskAgain => {
                self.question.iter_mut().for_each(|question| question.was_repeated = true);
            }
            Action::Close => self.question = None,
            Action::SkipLook => self.skip_look(),
            Action::SkipLine(key) => self.told.extend(next_line(self, *key).map(|next| (*key, next))),
            Action::Tell(_) => self.spoke = Some(now),
            Action::Show => {}
            Action::End(key, _) => drop(self.reported.insert(*key)),
        }
    }

    fn skip_look(&mut self) {
        let longest = waits(&self.world).map(|(_, _, wait)| wait.seconds).fold(0.0, f64::max);
        self.ask_after = again(self.ask_after.max(PATIENCE), longest);
    }

    /// Forgets what has been done about waits that have ended.
    pub fn forget(&mut self) {
        let live: HashSet<Key> = waits(&self.world).map(|(key, ..)| key).collect();
        self.suspects.retain(|key, _| live.contains(key));
        self.told.retain(|key, _| live.contains(key));
        self.reported.retain(|key| live.contains(key));
        if live.is_empty() {
            self.ask_after = 0.0;
        }
    }
}

/// Why a wait cannot end, as far as is known now.
pub fn why(world: &World, key: Key) -> Option<Why> {
    let wait = world.get(&key.0)?.waits.iter().find(|wait| wait.number == key.1)?;
    Graph::new(world, Assume::default()).why(key.0, wait)
}

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
