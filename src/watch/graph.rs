//! The wait-for graph of the ranks, as far as it is known: which rank waits for which, and which waits can still end.
//!
//! A rank is *stuck* if each of its threads that could run the program waits, and none of these waits can end: what it
//! waits for would have to come from ranks that have finished, are gone, or are stuck too. A set of stuck ranks is a knot. It
//! is found by reduction: all ranks that wait are taken for stuck at first, and those of which a wait can end are released, and
//! then those that wait for them.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};

use crate::comm::origin::FREED;
use crate::watch::job::ranks::Ranks;
use crate::watch::job::status::{CommId, Life, Need, Peer, RankStatus, Wait, World};

/// How many stuck ranks are named for one wait: a few are enough to find a cycle.
const MOST: usize = 64;

/// Why a wait is reported as hung: it cannot end, or is late.
#[derive(Clone, Debug, PartialEq)]
pub enum Why {
    /// It has waited longer than the user allows, or a library has failed; see [`Wait::late`].
    Late,
    /// This rank is gone.
    Gone(i32),
    /// This rank has finished; all others that could help have too, if there is none.
    Finished(Option<i32>),
    /// These are stuck.
    Stuck(Vec<i32>),
}

/// A collective: its communicator, and its number there.
type Collective = (CommId, u64);
/// What these ranks wait for together: a collective, or a call that is none.
type Shared = (Option<Collective>, Ranks);

/// Which assumptions the graph makes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Trust {
    /// None: only what is known.
    Proved,
    /// Threads of which nothing is known do not communicate.
    Threads,
    /// The same, and all ranks give a communicator the same name.
    Names,
}

impl Trust {
    fn known(self, comm: CommId) -> CommId {
        if self == Self::Names { comm } else { comm.without_name() }
    }
}

pub struct Graph<'a> {
    world: &'a World,
    trust: Trust,
    stuck: HashSet<i32>,
    gone: Vec<i32>,
    /// The ranks that wait in each collective.
    arrived: HashMap<Collective, HashSet<i32>>,
    /// The ranks that have begun to send.
    senders: Vec<i32>,
    /// Why that cannot end: found out once.
    shared: RefCell<HashMap<Shared, Option<Why>>>,
}

impl RankStatus {
    fn needs(&self) -> impl Iterator<Item = &Need> {
        self.waits.iter().map(|wait| &wait.need).chain(&self.started)
    }

    /// How many collectives it has begun on a communicator, at most: one that has been freed may be that one.
    fn collectives(&self, comm: CommId, trust: Trust) -> u64 {
        let is_it = |id: CommId| {
            let known = trust.known(id);
            known == comm || (known.class == comm.class && known.origin == FREED)
        };
        self.counts.iter().filter(|(id, _)| is_it(*id)).map(|(_, count)| *count).max().unwrap_or(0)
    }

    fn waits_in_call(&self, members: &Ranks) -> bool {
        self.waits.iter().any(|wait| wait.need == Need::Call && wait.members == *members)
    }

    /// Whether it has begun what may match a message that `rank` receives (or sends, if `sends`).
    pub fn may_match(&self, rank: i32, sends: bool, comm: CommId, tag: Option<i32>) -> bool {
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
    pub fn new(world: &'a World, trust: Trust) -> Self {
        // A rank that does not answer may do anything.
        let waits = |rank: &RankStatus| {
            let runs = rank.life == Life::Runs && !rank.is_silent;
            runs && !rank.waits.is_empty() && (trust != Trust::Proved || rank.other.is_none())
        };
        let stuck = world.iter().filter(|(_, rank)| waits(rank)).map(|(&rank, _)| rank).collect();
        let gone = world.iter().filter(|(_, rank)| rank.life == Life::Gone);
        let mut arrived: HashMap<_, HashSet<i32>> = HashMap::new();
        for (&rank, RankStatus { waits, .. }) in world {
            for wait in waits {
                if let Need::Collective { comm, number } = wait.need {
                    arrived.entry((trust.known(comm), number)).or_default().insert(rank);
                }
            }
        }
        let sends =
            |rank: &RankStatus| rank.needs().any(|need| matches!(need, Need::Message { to: Some(_), .. }));
        let senders = world.iter().filter(|(_, rank)| sends(rank)).map(|(&rank, _)| rank).collect();
        let gone = gone.map(|(&rank, _)| rank).collect();
        let mut graph = Self { world, trust, stuck, gone, arrived, senders, shared: RefCell::default() };
        graph.reduce();
        graph
    }

    /// Releases the ranks that are not stuck: first those of which a wait can end, then those that wait for them.
    fn reduce(&mut self) {
        type Key<'k> = (Option<Collective>, &'k Ranks);
        let mut named: HashMap<i32, Vec<i32>> = HashMap::new();
        let mut groups: HashMap<Key, Vec<i32>> = HashMap::new();
        for &rank in &self.stuck {
            for wait in &self.world[&rank].waits {
                match &wait.need {
                    Need::Collective { comm, number } => {
                        let collective = Some((self.trust.known(*comm), *number));
                        groups.entry((collective, &wait.members)).or_default().push(rank);
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
        let is_released =
            |rank: &i32| self.world[rank].waits.iter().any(|wait| self.why(*rank, wait).is_none());
        let mut released: Vec<i32> = self.stuck.iter().copied().filter(is_released).collect();
        while let Some(rank) = released.pop() {
            if !self.stuck.remove(&rank) {
                continue;
            }
            let mut waiting = named.remove(&rank).unwrap_or_default();
            groups.retain(|(collective, members), waiters| {
                let has_arrived =
                    collective.is_some_and(|key| self.arrived.get(&key).is_some_and(|it| it.contains(&rank)));
                let can_end = members.contains(rank) && !has_arrived;
                if can_end {
                    waiting.append(waiters);
                }
                !can_end
            });
            released.append(&mut waiting);
        }
        // That was found out while all ranks that wait were taken for stuck.
        self.shared.take();
    }

    /// Why a rank begins nothing any more; None: it may.
    fn ended(&self, rank: i32) -> Option<Why> {
        match self.world.get(&rank)?.life {
            Life::Finished => Some(Why::Finished(Some(rank))),
            Life::Gone => Some(Why::Gone(rank)),
            _ => self.stuck.contains(&rank).then(|| Why::Stuck(vec![rank])),
        }
    }

    /// Why a wait of a rank cannot end; None: it can, as far as is known.
    pub fn why(&self, rank: i32, wait: &Wait) -> Option<Why> {
        let collective = match wait.need {
            Need::Collective { comm, number } => Some((self.trust.known(comm), number)),
            Need::Call => None,
            _ => return self.find(rank, wait),
        };
        let key = (collective, wait.members.clone());
        if let Some(why) = self.shared.borrow().get(&key) {
            return why.clone();
        }
        let why = self.find(rank, wait);
        self.shared.borrow_mut().insert(key, why.clone());
        why
    }

    fn find(&self, rank: i32, wait: &Wait) -> Option<Why> {
        if let Some(&gone) = self.gone.iter().find(|&&gone| wait.members.contains(gone)) {
            return Some(Why::Gone(gone));
        }
        match &wait.need {
            Need::Collective { comm, number } => {
                let comm = self.trust.known(*comm);
                let arrived = self.arrived.get(&(comm, *number));
                // A rank that has begun it, or a later one, may have done its part.
                let begun = |it: &RankStatus| it.collectives(comm, self.trust);
                let is_missing = |member: i32| self.world.get(&member).is_none_or(|it| begun(it) < *number);
                self.incomplete(wait, |member| arrived.is_some_and(|it| it.contains(&member)), is_missing)
            }
            Need::Call => {
                let in_call =
                    |member: i32| self.world.get(&member).is_some_and(|it| it.waits_in_call(&wait.members));
                self.incomplete(wait, in_call, |member| self.stuck.contains(&member))
            }
            Need::Message { comm, from, to } => {
                let sides = [(from, false), (to, true)];
                let mut ends = sides.into_iter().filter_map(|(end, sends)| Some((end.as_ref()?, sends)));
                // One side of an exchange may be done, so neither must be able to end.
                let (first, sends) = ends.next()?;
                let why = self.unmatched(rank, wait, *comm, first, sends)?;
                ends.try_fold(why, |why, (end, sends)| {
                    Some(join(why, self.unmatched(rank, wait, *comm, end, sends)?))
                })
            }
            Need::End | Need::Stream => None,
        }
    }

    /// Why what takes all members cannot end: some are missing, and no member is left that could arrive. If a rank that seems to
    /// be missing had done its part by other means, all would have arrived.
    fn incomplete(
        &self,
        wait: &Wait,
        has_arrived: impl Fn(i32) -> bool,
        is_missing: impl Fn(i32) -> bool,
    ) -> Option<Why> {
        let mut missing = None;
        for member in wait.members.iter() {
            if has_arrived(member) {
                continue;
            }
            let why = self.ended(member)?;
            if is_missing(member) {
                missing = Some(missing.map_or(why.clone(), |before| join(before, why)));
            }
        }
        missing
    }

    /// Why no rank will be at the other end of a message.
    fn unmatched(&self, rank: i32, wait: &Wait, comm: CommId, end: &Peer, sends: bool) -> Option<Why> {
        let may_match = |peer: i32| {
            self.world
                .get(&peer)
                .is_some_and(|it| it.life != Life::Finished && it.may_match(rank, sends, comm, end.tag))
        };
        if let Some(peer) = end.rank {
            let why = self.ended(peer)?;
            return (!may_match(peer)).then_some(why);
        }
        if self.senders.iter().any(|&peer| wait.members.contains(peer) && may_match(peer)) {
            return None;
        }
        // The rank itself sends to itself at most in another thread.
        let mut stuck = Vec::new();
        for member in wait.members.iter() {
            if let Why::Stuck(_) = self.ended(member)?
                && member != rank
                && stuck.len() < MOST
            {
                stuck.push(member);
            }
        }
        Some(if stuck.is_empty() { Why::Finished(None) } else { Why::Stuck(stuck) })
    }

    fn stuck_ranks(&self) -> impl Iterator<Item = &RankStatus> {
        self.stuck.iter().filter_map(|rank| self.world.get(rank))
    }

    /// Whether bytes still move between a stuck rank and others: what it waits for may be under way.
    pub fn moves(&self) -> bool {
        self.stuck_ranks().any(|rank| rank.moves)
    }

    /// The most bytes that a wait of a stuck rank is about.
    pub fn volume(&self) -> f64 {
        self.stuck_ranks().flat_map(|rank| &rank.waits).map(Wait::volume).fold(0.0, f64::max)
    }

    /// A cycle of stuck ranks: each waits for the next one, the last one for the first. It is that of `rank`, or the one for
    /// which that waits in the end.
    pub fn cycle(&self, rank: i32) -> Vec<i32> {
        let mut path = vec![rank];
        loop {
            let last = path[path.len() - 1];
            let next = self.world[&last].waits.iter().find_map(|wait| match self.why(last, wait)? {
                // The way back, if there is one: the shortest cycle.
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

/// Of two reasons that hold together, the one that is reported.
fn join(first: Why, second: Why) -> Why {
    match (first, second) {
        (Why::Stuck(mut ranks), Why::Stuck(others)) => {
            let new: Vec<i32> = others.into_iter().filter(|rank| !ranks.contains(rank)).collect();
            ranks.extend(new.into_iter().take(MOST.saturating_sub(ranks.len())));
            Why::Stuck(ranks)
        }
        (gone @ Why::Gone(..), _) | (_, gone @ Why::Gone(..)) => gone,
        (finished @ Why::Finished(_), _) | (_, finished @ Why::Finished(_)) => finished,
        (late, _) => late,
    }
}
