//! Why waits can never complete: a pure function of the states of the ranks.
//!
//! A wait is *certain* not to complete if a rank that it needs has died or finished, and no message of that rank can be under
//! way. The job is *stuck* if no rank goes on, and no wait is matched.

use std::collections::HashMap;

use super::state::{Key, Need, Peer, RankStatus, State, Wait, World};
use crate::board::ranks::Ranks;
use crate::comm::CommId;
use crate::comm::origin::FREED;

/// How many ranks are named for one wait.
const MOST: usize = 64;

/// Why a wait is reported.
#[derive(Clone, Debug, PartialEq)]
pub enum Why {
    /// The wait exceeds the time limit, or a library has failed; see [`Wait::late`].
    Late,
    /// This rank has died.
    Gone(i32),
    /// This rank has finished; `None`: all ranks that could complete the wait have.
    Finished(Option<i32>),
    /// These ranks are missing, and no rank makes progress.
    Stuck(Vec<i32>),
}

impl RankStatus {
    fn needs(&self) -> impl Iterator<Item = &Need> {
        self.waits.iter().map(|wait| &wait.need).chain(&self.started)
    }

    /// Whether it has begun what may match a message that `rank` receives (or sends, if `sends`).
    pub fn may_match(&self, rank: i32, sends: bool, comm: CommId, tag: Option<i32>) -> bool {
        self.needs().any(|need| {
            let Need::Message { comm: other, from, to, .. } = need else { return false };
            let end = if sends { from } else { to };
            end.is_some_and(|end| {
                let tags = end.tag.is_none() || tag.is_none() || end.tag == tag;
                other.class == comm.class && tags && end.rank.is_none_or(|end| end == rank)
            })
        })
    }

    fn is_over(&self) -> bool {
        matches!(self.state, State::Finished | State::Gone)
    }
}

/// What waits for all of its members: the collective if it is one, and the members.
type Shared<'a> = (Option<(CommId, u64)>, &'a Ranks);

pub struct Verdict<'a> {
    world: &'a World,
    /// Ranks that have not ended, and those of them that send.
    alive: Vec<i32>,
    senders: Vec<i32>,
    /// For each collective and call, the ranks that are missing, and why it can certainly never complete. Computed once for all that
    /// wait in it.
    missing: HashMap<Shared<'a>, (Vec<i32>, Option<Why>)>,
    /// How many messages of a pair of ranks on a communicator were received.
    received: HashMap<(u64, i32, i32), u64>,
}

impl<'a> Verdict<'a> {
    pub fn new(world: &'a World) -> Self {
        let sends =
            |it: &RankStatus| it.needs().any(|need| matches!(need, Need::Message { to: Some(_), .. }));
        let alive: Vec<i32> = world.iter().filter(|(_, it)| !it.is_over()).map(|(&rank, _)| rank).collect();
        let senders = alive.iter().copied().filter(|rank| sends(&world[rank])).collect();
        let received = |(&rank, it): (&i32, &'a RankStatus)| {
            it.messages.iter().map(move |&(key, from, _, received)| ((key, from, rank), received))
        };
        let received = world.iter().flat_map(received).collect();
        let mut verdict = Self { world, alive, senders, missing: HashMap::new(), received };
        for wait in world.values().flat_map(|it| &it.waits) {
            if let Some(key) = shared(wait)
                && !verdict.missing.contains_key(&key)
            {
                let missing = verdict.missing_of(wait);
                let why = verdict.certain_without(&missing);
                verdict.missing.insert(key, (missing, why));
            }
        }
        verdict
    }

    /// The members that have not come. A member that has begun this collective or a later one has come.
    fn missing_of(&self, wait: &Wait) -> Vec<i32> {
        let has_come = |member: i32| {
            let died_in = |it: &RankStatus| it.state == State::Gone && it.started.contains(&wait.need);
            self.world.get(&member).is_some_and(|it| match wait.need {
                Need::Collective { .. } if died_in(it) => false,
                Need::Collective { comm, number } => {
                    let comm = comm.without_name();
                    let is_it = |id: CommId| {
                        let is_freed = id.class == comm.class && id.origin == FREED;
                        id.without_name() == comm || is_freed
                    };
                    it.waits.iter().any(|other| other.need == wait.need)
                        || it.forgotten >= number
                        || it.counts.iter().any(|(id, begun)| is_it(*id) && *begun >= number)
                }
                _ => it.waits.iter().any(|other| other.need == Need::Call && other.members == wait.members),
            })
        };
        wait.members.iter().filter(|&member| !has_come(member)).collect()
    }

    /// The ends of a message, and whether this rank sends there.
    fn ends(wait: &Wait) -> impl Iterator<Item = (&Peer, bool)> {
        let (from, to) = match &wait.need {
            Need::Message { from, to, .. } => (from.as_ref(), to.as_ref()),
            _ => (None, None),
        };
        from.map(|end| (end, false)).into_iter().chain(to.map(|end| (end, true)))
    }

    /// The messages of a rank that were not received: the key of the communicator, and the receiver.
    fn under_way(&self, from: i32) -> impl Iterator<Item = (u64, i32)> {
        let messages = self.world.get(&from).into_iter().flat_map(|it| &it.messages);
        messages.filter_map(move |&(key, to, sent, _)| {
            let received = self.received.get(&(key, from, to)).copied().unwrap_or(0);
            (sent > received).then_some((key, to))
        })
    }

    /// Whether messages are under way between any two ranks. If not all messages are counted by rank, compares the sums.
    pub fn moves(&self) -> bool {
        if self.world.values().any(|it| it.others != [0; 2]) {
            let sum = |of: fn(&RankStatus) -> u64| self.world.values().map(of).sum::<u64>();
            let sent = sum(|it| it.messages.iter().map(|it| it.2).sum::<u64>() + it.others[0]);
            return sent > sum(|it| it.messages.iter().map(|it| it.3).sum::<u64>() + it.others[1]);
        }
        let is_awaited = |(_, to): (u64, i32)| !self.world.get(&to).is_none_or(RankStatus::is_over);
        self.world.keys().any(|&from| self.under_way(from).any(is_awaited))
    }

    /// Whether a wait may complete, as far as is known, even if no rank begins another operation.
    fn is_matched(&self, rank: i32, wait: &'a Wait) -> bool {
        if let Some(key) = shared(wait) {
            return self.missing[&key].0.is_empty();
        }
        let Need::Message { comm, .. } = wait.need else { return true };
        Self::ends(wait).any(|(end, sends)| {
            let may = |peer: i32| {
                let it = self.world.get(&peer);
                it.is_none_or(|it| !it.is_over() && it.may_match(rank, sends, comm, end.tag))
            };
            match end.rank {
                Some(peer) => may(peer),
                None => self.senders.iter().any(|&peer| wait.members.contains(peer) && may(peer)),
            }
        })
    }

    fn state(&self, rank: i32) -> State {
        self.world.get(&rank).map_or(State::Unknown, |it| it.state)
    }

    fn is_over(&self, rank: i32) -> bool {
        self.world.get(&rank).is_some_and(RankStatus::is_over)
    }

    /// Why a wait of a rank can certainly never complete. `None`: it may complete, as far as is known.
    pub fn certain(&self, rank: i32, wait: &'a Wait) -> Option<Why> {
        if let Some(key) = shared(wait) {
            return self.missing[&key].1.clone();
        }
        let Need::Message { key, .. } = wait.need else {
            return wait.members.iter().find(|&it| self.state(it) == State::Gone).map(Why::Gone);
        };
        if self.is_matched(rank, wait) {
            return None;
        }
        let mut peers = Vec::new();
        for (end, sends) in Self::ends(wait) {
            let is_none_left = |peer: i32| {
                self.is_over(peer) && (sends || !self.under_way(peer).any(|it| it == (key, rank)))
            };
            match end.rank {
                Some(peer) if is_none_left(peer) => peers.push(peer),
                None if self.alive.iter().any(|&it| it != rank && wait.members.contains(it)) => return None,
                None if !wait.members.iter().all(|it| it == rank || is_none_left(it)) => return None,
                None => peers.extend(wait.members.iter().filter(|&it| self.state(it) == State::Gone)),
                _ => return None,
            }
        }
        Some(self.named(&peers))
    }

    /// Why what waits for these ranks can never complete.
    fn certain_without(&self, missing: &[i32]) -> Option<Why> {
        // A rank that has died is named first.
        let gone = missing.iter().find(|&&it| self.state(it) == State::Gone);
        let are_over = !missing.is_empty() && missing.iter().all(|&it| self.is_over(it));
        gone.map(|&gone| Why::Gone(gone)).or_else(|| are_over.then(|| self.named(missing)))
    }

    fn named(&self, ranks: &[i32]) -> Why {
        let gone = ranks.iter().find(|&&it| self.state(it) == State::Gone);
        gone.map_or(Why::Finished(ranks.first().copied()), |&gone| Why::Gone(gone))
    }

    /// Whether no rank of a job of `size` ranks makes progress, and no wait is matched.
    pub fn is_stuck(&self, size: i32) -> bool {
        let is_still = |(&rank, it): (&i32, &'a RankStatus)| match it.state {
            State::Finished | State::Gone => true,
            State::Runs if it.waits.is_empty() || it.is_silent || it.goes_on.is_some() => false,
            State::Runs => it.waits.iter().all(|wait| wait.late.is_empty() && !self.is_matched(rank, wait)),
            _ => false,
        };
        self.world.len() == size as usize
            && self.world.values().any(|it| !it.waits.is_empty())
            && self.world.iter().all(is_still)
            && !self.moves()
    }

    /// The ranks that are missing in a wait.
    fn missing_in(&self, wait: &'a Wait) -> Vec<i32> {
        match shared(wait) {
            Some(key) => self.missing[&key].0.iter().copied().take(MOST).collect(),
            None if Self::ends(wait).any(|(end, _)| end.rank.is_none()) => {
                wait.members.iter().take(MOST).collect()
            }
            None => Self::ends(wait).filter_map(|(end, _)| end.rank).collect(),
        }
    }

    /// The wait for which a job that is stuck is reported, and why: a rank of a cycle, if there is one.
    pub fn stuck(&self) -> Option<(Key, Why)> {
        let (&rank, it) = self.world.iter().find(|(_, it)| !it.waits.is_empty())?;
        let cycle = self.cycle(rank);
        let (rank, it) = cycle.iter().min().map_or((rank, it), |&rank| (rank, &self.world[&rank]));
        let wait = it.waits.first()?;
        let missing = self.missing_in(wait);
        let over = missing.iter().copied().find(|&it| self.is_over(it) && missing.len() == 1);
        Some(((rank, wait.id), over.map_or(Why::Stuck(missing), |rank| Why::Finished(Some(rank)))))
    }

    /// A cycle of ranks, each of which waits for the next one, the last one for the first; or a way that ends.
    pub fn cycle(&self, rank: i32) -> Vec<i32> {
        let mut path = vec![rank];
        loop {
            let last = path[path.len() - 1];
            let of = self.world.get(&last).and_then(|it| it.waits.first());
            let missing = of.map(|wait| self.missing_in(wait)).unwrap_or_default();
            // The way back, if there is one: the shortest cycle.
            let waits = |rank: &&i32| self.world.get(rank).is_some_and(|it| !it.waits.is_empty());
            let back = missing.iter().find(|rank| path.contains(rank));
            let Some(&next) = back.or(missing.iter().find(waits)) else { return path };
            if let Some(at) = path.iter().position(|&rank| rank == next) {
                return path.split_off(at);
            }
            path.push(next);
        }
    }
}

/// What a wait needs all members for, if it does.
fn shared(wait: &Wait) -> Option<Shared<'_>> {
    match wait.need {
        Need::Collective { comm, number } => Some((Some((comm.without_name(), number)), &wait.members)),
        Need::Call => Some((None, &wait.members)),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
