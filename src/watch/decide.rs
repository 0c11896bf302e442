//! What is to be done about what the ranks wait for. No clock, file, MPI or process in it: what is known goes in, and actions
//! come out.
//!
//! A job is ended for what is proved, or for a time that the user has set. All else is a line. What is not known is not held
//! against anybody.

use std::collections::{HashMap, HashSet};

use super::graph::{Assume, Graph, Life, Need, Rank, Wait, Why, World};
use super::ranks::Ranks;

/// For how long an operation waits before anything is proved of it, and for how long a proof has to hold: messages may be
/// under way.
pub const PATIENCE: f64 = 3.0;
const LOOK_AFTER: f64 = 1.0;
/// How many bytes a second travel at least, where what looks like a hang may be a large message.
const SLOWEST: f64 = 20e6;
/// For how long at least a rank that has finished waits for the others before a line says so.
const END_PATIENCE: f64 = 10.0;

/// How a rank decides that speaks for its host.
#[derive(Clone, Debug)]
pub struct Settings {
    /// After how many seconds a line says what an operation waits for.
    pub report_after: f64,
    /// Its place among the hosts, and how many there are.
    pub host: (usize, usize),
}

/// A wait, by its rank and number.
pub type Key = (i32, u64);

/// What is known, and what has been done about it.
#[derive(Clone, Debug, Default)]
pub struct State {
    pub world: World,
    /// The ranks of this host, which this one speaks for.
    pub own: Ranks,
    /// A debugger looks at this process.
    pub is_debugged: bool,
    /// Since when it has been certain of a wait that it cannot end.
    pub suspects: HashMap<Key, f64>,
    /// How long a wait has to take before something is said of it again.
    pub told: HashMap<Key, f64>,
    /// What has been reported as hung.
    pub reported: HashSet<Key>,
    /// When a rank spoke, of this host or another.
    pub spoke: Option<f64>,
    /// When the other hosts were asked, by this one or another, and how long a wait has to take until they are again.
    pub asked: Option<f64>,
    pub ask_after: f64,
}

/// Why a wait is reported as hung.
#[derive(Clone, Debug, PartialEq)]
pub enum Reason {
    /// In words: the user's limit, or an error of a library.
    Late(String),
    Proof(Why),
}

#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// From now on it is certain of this wait that it cannot end, or not any more.
    Suspect(Key),
    Acquit(Key),
    /// Asks the other hosts what their ranks wait for.
    Ask,
    /// Does not, because another one has: the next time is as much later.
    LetAsk,
    /// Says what a wait waits for; says nothing, because another one has.
    Tell(Key),
    LetTell(Key),
    /// Reports that a wait hangs, and ends the job.
    End(Key, Reason),
}

/// What is to be done. Applying it to the state is [`State::apply`].
pub fn decide(state: &State, settings: &Settings, now: f64) -> Vec<Action> {
    let mut actions = Vec::new();
    let graph = Graph::new(&state.world, Assume::default());
    let mut end = None;
    for (key, rank, wait) in waits(&state.world) {
        let own = state.own.contains(key.0);
        if state.is_debugged || state.reported.contains(&key) {
            if state.suspects.contains_key(&key) {
                actions.push(Action::Acquit(key));
            }
            continue;
        }
        let why = if wait.seconds < LOOK_AFTER || rank.life == Life::Stopped {
            None
        } else {
            graph.why(key.0, wait)
        };
        let reason = match (why, state.suspects.get(&key)) {
            (Some(why), Some(since)) => (now - since >= patience(wait, &why)).then_some(Reason::Proof(why)),
            (Some(_), None) => {
                actions.push(Action::Suspect(key));
                None
            }
            (None, suspected) => {
                actions.extend(suspected.map(|_| Action::Acquit(key)));
                None
            }
        };
        let late = || (own && !wait.late.is_empty()).then(|| Reason::Late(wait.late.clone()));
        // One is enough: of this host, if there is one, whose last operations are known.
        if let Some(reason) = reason.or_else(late)
            && end.as_ref().is_none_or(|(has_own, _)| own && !has_own)
        {
            end = Some((own, Action::End(key, reason)));
        }
    }
    if let Some((_, end)) = end {
        actions.push(end);
        return actions;
    }
    if !state.is_debugged {
        tell(state, settings, now, &mut actions);
        actions.extend(ask(state, settings, now));
    }
    actions
}

fn waits(world: &World) -> impl Iterator<Item = (Key, &Rank, &Wait)> {
    world.iter().flat_map(|(&rank, it)| it.waits.iter().map(move |wait| ((rank, wait.number), it, wait)))
}

/// For how long it has to be certain that a wait cannot end.
fn patience(wait: &Wait, why: &Why) -> f64 {
    let copies = if matches!(wait.need, Need::Collective { .. }) { wait.members.len() } else { 1 };
    let travels =
        if matches!(why, Why::Gone(..)) { 0.0 } else { wait.bytes as f64 * copies as f64 / SLOWEST };
    PATIENCE + travels
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

fn tell(state: &State, settings: &Settings, now: f64, actions: &mut Vec<Action>) {
    let mut due: Vec<(Key, &Wait)> = Vec::new();
    for (key, _, wait) in waits(&state.world).filter(|(key, ..)| state.own.contains(key.0)) {
        let after = told_after(state, settings, key, wait);
        if wait.seconds <= after + turn(settings).min(after / 4.0) || state.reported.contains(&key) {
            continue;
        }
        // Who has spoken took a little longer to come to the line.
        if state.spoke.is_some_and(|at| now - at < after / 3.0) {
            actions.push(Action::LetTell(key));
        } else {
            due.push((key, wait));
        }
    }
    // An operation rather than a rank's end; of several, what waits longest.
    let seconds = |wait: &Wait| if wait.need == Need::End { 0.0 } else { wait.seconds };
    due.sort_by(|(_, a), (_, b)| seconds(b).total_cmp(&seconds(a)));
    let speak = |(i, (key, _)): (usize, &(Key, &Wait))| {
        if i == 0 { Action::Tell(*key) } else { Action::LetTell(*key) }
    };
    actions.extend(due.iter().enumerate().map(speak));
}

/// The other hosts are asked where, as far as is known on this one, a wait may be part of a knot.
fn ask(state: &State, settings: &Settings, now: f64) -> Option<Action> {
    let own = |rank: i32| state.own.contains(rank);
    let longest = |world: &World| {
        waits(world).filter(|(key, ..)| own(key.0)).map(|(_, _, wait)| wait.seconds).fold(0.0, f64::max)
    };
    let (after, seconds) = (state.ask_after.max(PATIENCE), longest(&state.world));
    if settings.host.1 < 2 || seconds < after + turn(settings) {
        return None;
    }
    // Since the wait has taken so long, or just before.
    if state.asked.is_some_and(|at| at > now - (seconds - after) - 1.0) {
        return Some(Action::LetAsk);
    }
    let here: World =
        state.world.iter().filter(|(rank, _)| own(**rank)).map(|(rank, it)| (*rank, it.clone())).collect();
    let graph = Graph::new(&here, Assume { unknown_stuck: true, threads_idle: false });
    waits(&here).any(|(key, _, wait)| graph.why(key.0, wait).is_some()).then_some(Action::Ask)
}

impl State {
    pub fn wait(&self, (rank, number): Key) -> Option<&Wait> {
        self.world.get(&rank)?.waits.iter().find(|wait| wait.number == number)
    }

    /// What the next decision has to know of what is done now.
    pub fn apply(&mut self, action: &Action, settings: &Settings, now: f64) {
        match *action {
            Action::Suspect(key) => drop(self.suspects.insert(key, now)),
            Action::Acquit(key) => drop(self.suspects.remove(&key)),
            Action::Tell(key) | Action::LetTell(key) => {
                let next =
                    self.wait(key).map(|wait| again(told_after(self, settings, key, wait), wait.seconds));
                self.told.extend(next.map(|next| (key, next)));
            }
            Action::Ask | Action::LetAsk => {
                let longest = waits(&self.world).map(|(_, _, wait)| wait.seconds).fold(0.0, f64::max);
                self.ask_after = again(self.ask_after.max(PATIENCE), longest);
            }
            Action::End(key, _) => drop(self.reported.insert(key)),
        }
        if matches!(action, Action::Tell(_)) {
            self.spoke = Some(now);
        }
        if *action == Action::Ask {
            self.asked = Some(now);
        }
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

/// The ranks of a circle of waits, and who of them could still go on with its program, where that is all that is missing for
/// a proof.
pub fn looks_stuck(world: &World, key: Key) -> Option<(Vec<i32>, i32)> {
    let wait = world.get(&key.0)?.waits.iter().find(|wait| wait.number == key.1)?;
    let graph = Graph::new(world, Assume { threads_idle: true, unknown_stuck: false });
    let Some(Why::Stuck(_)) = graph.why(key.0, wait) else { return None };
    let cycle = graph.cycle(key.0);
    let goes_on = cycle.iter().chain([&key.0]).find(|rank| world[rank].other.is_some())?;
    Some((cycle.clone(), *goes_on))
}

/// What is said of a knot that a rank is in, or waits for, and how to undo it.
pub fn deadlock(world: &World, key: Key) -> String {
    let cycle = Graph::new(world, Assume::default()).cycle(key.0);
    circle(world, &cycle, key.0)
}

/// Who waits for whom in a circle, begun at this rank if it is in it.
pub fn circle(world: &World, cycle: &[i32], rank: i32) -> String {
    let start = cycle.iter().position(|&it| it == rank).unwrap_or(0);
    let order: Vec<i32> = cycle[start..].iter().chain(&cycle[..start]).copied().collect();
    let does = |rank: i32| {
        world[&rank].waits.first().map_or_else(String::new, |wait| match &*wait.at {
            "" => wait.words.clone(),
            at => format!("{}, {at}", wait.words),
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
    text += &if order.len() > 1 {
        format!(", and waits for rank {}", order[0])
    } else {
        ", and waits for itself".into()
    };
    format!("{text}; {}", cure(world, &order))
}

fn cure(world: &World, cycle: &[i32]) -> &'static str {
    let needs = || cycle.iter().flat_map(|rank| world[rank].waits.iter().map(|wait| &wait.need));
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
        "let all ranks come to the collective before the message, or after it"
    } else {
        "let all ranks use the communicators in the same order"
    }
}

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
