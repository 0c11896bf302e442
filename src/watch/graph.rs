//! Who waits for whom, and what of that can still end: the wait-for graph of the ranks, as far as it is known.
//!
//! A rank is *stuck* if each of its threads that could run the program waits, and none of these waits can end: what it
//! waits for would have to come from ranks that have ended, or that are stuck too. A set of such ranks is a knot.

use std::collections::{HashMap, HashSet};

use crate::job::ranks::Ranks;
use crate::job::status::{CommId, Life, Need, Peer, RankStatus, Wait, World};

/// How many stuck ranks are named for one wait: a few are enough to find a circle.
const MOST: usize = 64;

/// Why a wait cannot end.
#[derive(Clone, Debug, PartialEq)]
pub enum Why {
    /// This rank is gone.
    Gone(i32),
    /// This rank has finished; all others that could help have too, if there is none.
    Finished(Option<i32>),
    /// These are stuck.
    Stuck(Vec<i32>),
}

/// What is assumed where nothing is known, to find out whether it is worth asking.
#[derive(Clone, Copy, Debug, Default)]
pub struct Assume {
    /// That ranks of which nothing is known are stuck.
    pub unknown_stuck: bool,
    /// That threads of which nothing is known never communicate.
    pub threads_idle: bool,
}

pub struct Graph<'a> {
    world: &'a World,
    assume: Assume,
    stuck: HashSet<i32>,
    gone: Vec<i32>,
    /// Who waits in each collective.
    come: HashMap<(CommId, u64), HashSet<i32>>,
    /// Who has begun to send.
    senders: Vec<i32>,
}

impl RankStatus {
    fn needs(&self) -> impl Iterator<Item = &Need> {
        self.waits.iter().map(|wait| &wait.need).chain(&self.started)
    }

    fn has_begun(&self, comm: CommId) -> u64 {
        let all = self.life == Life::Finished;
        let is_it = |id: CommId| id.class == comm.class && (id.origin == comm.origin || all);
        self.counts.iter().filter(|(id, _)| is_it(*id)).map(|(_, count)| *count).max().unwrap_or(0)
    }

    fn waits_in_call(&self) -> bool {
        self.waits.iter().any(|wait| wait.need == Need::Call)
    }

    /// Whether it has begun what may be the other side of a message that `rank` receives (or sends, if `sends`).
    pub fn offers(&self, rank: i32, sends: bool, comm: CommId, tag: Option<i32>) -> bool {
        self.needs().any(|need| {
            let Need::Message { comm: other, from, to } = need else { return false };
            let end = if sends { from } else { to };
            end.is_some_and(|end| {
                let tags = end.tag.is_none() || tag.is_none() || end.tag == tag;
                other.class == comm.class && tags && end.rank.is_none_or(|end| end == rank)
            })
        })
    }
}

impl<'a> Graph<'a> {
    pub fn new(world: &'a World, assume: Assume) -> Self {
        let waits = |rank: &RankStatus| {
            let runs = matches!(rank.life, Life::Runs | Life::Exits) && !rank.waits.is_empty();
            runs && (assume.threads_idle || rank.other.is_none())
        };
        let stuck = world.iter().filter(|(_, rank)| waits(rank)).map(|(&rank, _)| rank).collect();
        let gone = world.iter().filter(|(_, rank)| rank.life == Life::Gone);
        let mut come: HashMap<_, HashSet<i32>> = HashMap::new();
        for (&rank, RankStatus { waits, .. }) in world {
            for wait in waits {
                if let Need::Collective { comm, number } = wait.need {
                    come.entry((comm, number)).or_default().insert(rank);
                }
            }
        }
        let sends =
            |rank: &RankStatus| rank.needs().any(|need| matches!(need, Need::Message { to: Some(_), .. }));
        let senders = world.iter().filter(|(_, rank)| sends(rank)).map(|(&rank, _)| rank).collect();
        let gone = gone.map(|(&rank, _)| rank).collect();
        let mut graph = Self { world, assume, stuck, gone, come, senders };
        graph.settle();
        graph
    }

    /// Takes away who is not stuck: first those of which a wait may end, then those who wait for them.
    fn settle(&mut self) {
        type Key<'k> = (Option<(CommId, u64)>, &'k Ranks);
        let mut named: HashMap<i32, Vec<i32>> = HashMap::new();
        let mut groups: HashMap<Key, Vec<i32>> = HashMap::new();
        for &rank in &self.stuck {
            for wait in &self.world[&rank].waits {
                match &wait.need {
                    Need::Collective { comm, number } => {
                        groups.entry((Some((*comm, *number)), &wait.members)).or_default().push(rank);
                    }
                    Need::Message { from, to, .. } => {
                        for end in [from, to].into_iter().flatten() {
                            match end.rank {
                                Some(peer) => named.entry(peer).or_default().push(rank),
                                None => groups.entry((None, &wait.members)).or_default().push(rank),
                            }
                        }
                    }
                    Need::Call => groups.entry((None, &wait.members)).or_default().push(rank),
                    Need::End | Need::Stream => {}
                }
            }
        }
        // What all members of a group decide together is found out once, for all of its waits.
        let mut known: HashMap<(CommId, u64), bool> = HashMap::new();
        let mut free: Vec<i32> = Vec::new();
        for &rank in &self.stuck {
            let is_blocked = |wait: &Wait| match wait.need {
                Need::Collective { comm, number } => {
                    *known.entry((comm, number)).or_insert_with(|| self.why(rank, wait).is_some())
                }
                _ => self.why(rank, wait).is_some(),
            };
            if !self.world[&rank].waits.iter().all(is_blocked) {
                free.push(rank);
            }
        }
        while let Some(rank) = free.pop() {
            if !self.stuck.remove(&rank) {
                continue;
            }
            let mut again = named.remove(&rank).unwrap_or_default();
            groups.retain(|(collective, members), waiters| {
                let has_come =
                    collective.is_some_and(|key| self.come.get(&key).is_some_and(|it| it.contains(&rank)));
                let is_freed = members.contains(rank) && !has_come;
                if is_freed {
                    again.append(waiters);
                }
                !is_freed
            });
            // The wait of each of these may end.
            free.append(&mut again);
        }
    }

    /// Whether nothing will come from a rank any more, and why. None: something may.
    fn is_out(&self, rank: i32) -> Option<Option<Why>> {
        match self.world.get(&rank).map(|rank| rank.life) {
            Some(Life::Finished) => Some(Some(Why::Finished(Some(rank)))),
            Some(Life::Gone) => Some(Some(Why::Gone(rank))),
            _ if self.stuck.contains(&rank) => Some(Some(Why::Stuck(vec![rank]))),
            None | Some(Life::Unknown) if self.assume.unknown_stuck => Some(None),
            _ => None,
        }
    }

    /// Why a wait of a rank cannot end; None: it may.
    pub fn why(&self, rank: i32, wait: &Wait) -> Option<Why> {
        if let Some(&gone) = self.gone.iter().find(|&&gone| wait.members.contains(gone)) {
            return Some(Why::Gone(gone));
        }
        match &wait.need {
            Need::Collective { comm, number } => {
                let come = self.come.get(&(*comm, *number));
                // Who has begun it, or a later one, may have done its part.
                let is_missing =
                    |member: i32| self.world.get(&member).is_none_or(|it| it.has_begun(*comm) < *number);
                self.all_out(wait, |member| come.is_some_and(|come| come.contains(&member)), is_missing)
            }
            Need::Call => {
                let in_call = |member: i32| self.world.get(&member).is_some_and(RankStatus::waits_in_call);
                self.all_out(wait, in_call, |member| {
                    self.stuck.contains(&member) || self.assume.unknown_stuck
                })
            }
            Need::Message { comm, from, to } => {
                let sides = [(from, false), (to, true)];
                let mut ends = sides.into_iter().filter_map(|(end, sends)| Some((end.as_ref()?, sends)));
                // One side of an exchange may be done, so neither must be able to end.
                let (first, sends) = ends.next()?;
                let why = self.side(rank, wait, *comm, first, sends)?;
                ends.try_fold(why, |why, (end, sends)| {
                    Some(join(why, self.side(rank, wait, *comm, end, sends)?))
                })
            }
            Need::End | Need::Stream => None,
        }
    }

    /// Why what takes all members cannot end: some are missing, and nobody is left who could come. If a rank that seems to be
    /// missing had done its part by other means, all would have come.
    fn all_out(
        &self,
        wait: &Wait,
        has_come: impl Fn(i32) -> bool,
        is_missing: impl Fn(i32) -> bool,
    ) -> Option<Why> {
        let mut missing = None;
        for member in wait.members.iter() {
            if has_come(member) {
                continue;
            }
            let out = self.is_out(member)?;
            if is_missing(member) {
                let why = out.unwrap_or(Why::Stuck(Vec::new()));
                missing = Some(missing.map_or(why.clone(), |before| join(before, why)));
            }
        }
        missing
    }

    /// Why nobody is at the other end of a message.
    fn side(&self, rank: i32, wait: &Wait, comm: CommId, end: &Peer, sends: bool) -> Option<Why> {
        let offers = |peer: i32| {
            self.world
                .get(&peer)
                .is_some_and(|it| it.life != Life::Finished && it.offers(rank, sends, comm, end.tag))
        };
        if let Some(peer) = end.rank {
            let why = self.is_out(peer)?.unwrap_or(Why::Stuck(Vec::new()));
            return (!offers(peer)).then_some(why);
        }
        if self.senders.iter().any(|&peer| wait.members.contains(peer) && offers(peer)) {
            return None;
        }
        // The rank itself sends to itself at most in another thread.
        let mut stuck = Vec::new();
        for member in wait.members.iter() {
            if let Some(Why::Stuck(_)) = self.is_out(member)?
                && member != rank
                && stuck.len() < MOST
            {
                stuck.push(member);
            }
        }
        Some(if stuck.is_empty() { Why::Finished(None) } else { Why::Stuck(stuck) })
    }

    /// Ranks each of which waits for the next one, the last one for the first; `rank`, which is stuck, or those that it
    /// waits for in the end.
    pub fn cycle(&self, rank: i32) -> Vec<i32> {
        let mut path = vec![rank];
        loop {
            let last = path[path.len() - 1];
            let next = self.world[&last].waits.iter().find_map(|wait| match self.why(last, wait)? {
                // The way back, if there is one: the shortest circle.
                Why::Stuck(ranks) => ranks.iter().find(|rank| path.contains(rank)).or(ranks.first()).copied(),
                _ => None,
            });
            let Some(next) = next else { return path };
            if let Some(at) = path.iter().position(|&rank| rank == next) {
                return path.split_off(at);
            }
            path.push(next);
        }
    }
}

/// Of two reasons that hold together, the one that is told.
fn join(first: Why, second: Why) -> Why {
    match (first, second) {
        (Why::Stuck(mut ranks), Why::Stuck(others)) => {
            let new: Vec<i32> = others.into_iter().filter(|rank| !ranks.contains(rank)).collect();
            ranks.extend(new.into_iter().take(MOST.saturating_sub(ranks.len())));
            Why::Stuck(ranks)
        }
        (gone @ Why::Gone(..), _) | (_, gone @ Why::Gone(..)) => gone,
        (finished @ Why::Finished(_), _) | (_, finished @ Why::Finished(_)) => finished,
    }
}
