//! What is done about ranks that wait: a pure function, which uses no clock, file, MPI or process, and returns an action.
//!
//! A job is aborted for what is [certain](super::verdict), after it has been stuck for a time, and for time limits of the user. While
//! a debugger is attached to a rank, or a rank is stopped, no job is aborted, and lines about long waits are printed.

use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use super::settings::Settings;
use super::state::{Key, Wait, World};
use super::verdict::{Verdict, Why};

/// For how long a wait lasts before it is judged, and for how long a certain reason has to hold.
const JUDGE_AFTER: f64 = 1.0;
const PATIENCE: f64 = 4.0;
/// For how long a job is stuck before a line says so.
const WARN_AFTER: f64 = 10.0;
/// A line about one wait stands for waits of other ranks too that are younger by less than this part of their age.
const SPREAD: f64 = 0.2;

/// What is remembered from earlier decisions.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    /// Since when there has been a certain reason.
    certain: HashMap<Key, f64>,
    /// The signature of the ranks while they are stuck, since when they have been, and whether a line has said so.
    stuck: Option<(u64, f64, bool)>,
    /// When a line about a long wait was printed. The clock begins with the job.
    line_at: f64,
    /// What has been reported.
    reported: HashSet<Key>,
}

impl Memory {
    /// A line about a long wait was printed then, by whichever rank.
    pub fn note_line(&mut self, at: f64) {
        self.line_at = self.line_at.max(at);
    }

    /// Whether there is a reason to look again soon.
    pub fn is_suspicious(&self) -> bool {
        !self.certain.is_empty() || self.stuck.is_some()
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Prints what a wait waits for.
    Line(Key),
    /// Prints that the job looks stuck, and in how many seconds it is aborted (infinity: never).
    Stuck(Key, Why, f64),
    /// Reports a wait that can never complete, and aborts the job.
    End(Key, Why),
}

/// A hash of what the ranks do, which changes when a rank makes progress.
fn signature(world: &World) -> u64 {
    let mut hasher = DefaultHasher::new();
    for (rank, it) in world {
        (rank, it.begun, it.state as u8, it.waits.len()).hash(&mut hasher);
        it.waits.iter().for_each(|wait| wait.id.hash(&mut hasher));
        it.messages.iter().for_each(|messages| messages.hash(&mut hasher));
    }
    hasher.finish()
}

fn waits(world: &World) -> impl Iterator<Item = (Key, &Wait)> {
    world.iter().flat_map(|(&rank, it)| it.waits.iter().map(move |wait| ((rank, wait.id), wait)))
}

/// The action, if there is one. `now` and the ages of the waits are of one clock.
pub fn decide(world: &World, memory: &mut Memory, settings: &Settings, now: f64) -> Option<Action> {
    let is_halted = world.values().any(|it| it.is_halted);
    let oldest = waits(world).map(|(_, wait)| wait.seconds).fold(0.0, f64::max);
    memory.reported.retain(|key| super::state::wait_of(world, *key).is_some());
    if is_halted || oldest < JUDGE_AFTER {
        memory.certain.clear();
        memory.stuck = None;
        // A process may have been stopped by mistake, which only the line about a long wait shows.
        return line(world, memory, settings, now);
    }
    let verdict = Verdict::new(world);
    certain(world, &verdict, memory, now)
        .or_else(|| stuck(world, &verdict, memory, settings, now))
        .or_else(|| line(world, memory, settings, now))
}

/// Aborts the job for a wait that has had a certain reason for `PATIENCE` seconds. Remembers since when each wait has had one.
fn certain(world: &World, verdict: &Verdict, memory: &mut Memory, now: f64) -> Option<Action> {
    let mut found = HashMap::new();
    let mut action = None;
    for (key, wait) in waits(world) {
        if memory.reported.contains(&key) {
            continue;
        }
        let Some(why) = verdict.certain(key.0, wait) else { continue };
        let since = memory.certain.get(&key).copied().unwrap_or(now);
        found.insert(key, since);
        if now - since >= PATIENCE && action.is_none() {
            action = Some((key, why));
        }
    }
    memory.certain = found;
    let (key, why) = action?;
    memory.reported.insert(key);
    Some(Action::End(key, why))
}

fn stuck(
    world: &World,
    verdict: &Verdict,
    memory: &mut Memory,
    settings: &Settings,
    now: f64,
) -> Option<Action> {
    if !verdict.is_stuck(settings.size) {
        memory.stuck = None;
        return None;
    }
    let now_do = signature(world);
    let (_, since, is_said) =
        memory.stuck.filter(|(before, ..)| *before == now_do).unwrap_or((now_do, now, false));
    memory.stuck = Some((now_do, since, is_said));
    let waited = now - since;
    let (key, why) = verdict.stuck().filter(|(key, _)| !memory.reported.contains(key))?;
    if waited >= settings.deadlock_after {
        memory.reported.insert(key);
        return Some(Action::End(key, why));
    }
    if waited >= WARN_AFTER && !is_said {
        memory.stuck = Some((now_do, since, true));
        return Some(Action::Stuck(key, why, settings.deadlock_after - waited));
    }
    None
}

/// Prints a line about the oldest wait for which a line is due.
fn line(world: &World, memory: &mut Memory, settings: &Settings, now: f64) -> Option<Action> {
    // Ages at which a line is printed: `report_after`, twice as much, and so on.
    let unit = settings.report_after;
    let is_due = |wait: &Wait| {
        let due_at = unit * (wait.seconds / unit).log2().floor().exp2();
        let age_before = wait.seconds - (now - memory.line_at);
        wait.seconds >= unit && age_before < (1.0 - SPREAD) * due_at
    };
    let due = waits(world).filter(|(key, wait)| is_due(wait) && !memory.reported.contains(key));
    let (key, _) = due.max_by(|a, b| a.1.seconds.total_cmp(&b.1.seconds))?;
    memory.line_at = now;
    Some(Action::Line(key))
}

#[cfg(test)]
mod tests;
