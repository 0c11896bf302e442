//! Why waits can never complete: a pure function of the states of the ranks.
//!
//! A wait is *certain* not to complete if a rank that it needs has died or finished, and no message of that rank can be under
//! way that the wait may match. The job is *stuck* if no rank goes on, and no wait is matched. Ranks that have come to a collective, but
//! are in different operations, do not match.

use std::collections::HashMap;

use super::state::{Key, Need, Peer, RankStatus, State, Wait, World};
use crate::board::ranks::Ranks;
use crate::comm::CommId;
use crate::comm::origin::FREED;
use crate::record::messages::Unreceived;

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

/// What is known of such a wait.
struct Missing {
    /// The members that have not come, and why what waits for them can certainly never complete.
    ranks: Vec<i32>,
    why: Option<Why>,
    /// Members that wait in it are in different operations.
    differ: bool,
}

pub struct Verdict<'a> {
    world: &'a World,
    /// Ranks that have not exited, and the sending ones among them.
    alive: Vec<i32>,
    senders: Vec<i32>,
    /// For each collective and call. Computed once for all that wait in it.
    missing: HashMap<Shared<'a>, Missing>,
    /// The weights of the messages of a pair of ranks on a communicator that were received.
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
        for (own, wait) in world.values().flat_map(|it| it.waits.iter().map(move |wait| (it, wait))) {
            if let Some(key) = shared(wait)
                && !verdict.missing.contains_key(&key)
            {
                let ranks = verdict.missing_of(own, wait);
                let why = verdict.certain_without(&ranks);
                let differ = verdict.others_in(wait).next().is_some();
                verdict.missing.insert(key, Missing { ranks, why, differ });
            }
        }
        verdict
    }

    /// The members that have not come to what the rank `own` waits in. A member that has begun this collective or a later one has come,
    /// maybe on another communicator that is not told apart from this one; but not if the member is over, and has begun fewer collectives
    /// on all of these than `own`.
    fn missing_of(&self, own: &RankStatus, wait: &Wait) -> Vec<i32> {
        let has_come = |member: i32| {
            let is_same = |need: &Need| *need == wait.need || need.is_other_operation(&wait.need);
            let died_in = |it: &RankStatus| it.state == State::Gone && it.started.iter().any(is_same);
            self.world.get(&member).is_some_and(|it| match wait.need {
                Need::Collective { .. } if died_in(it) => false,
                Need::Collective { comm, number, .. } => {
                    let comm = comm.without_name();
                    let is_it = |id: CommId| {
                        let is_freed = id.class == comm.class && id.origin == FREED;
                        id.without_name() == comm || is_freed
                    };
                    let begun = || it.counts.iter().filter(|(id, _)| is_it(*id)).map(|(_, begun)| *begun);
                    let alike = own.counts.iter().filter(|(id, _)| id.without_name() == comm);
                    let is_behind =
                        || it.is_over() && begun().sum::<u64>() < alike.map(|(_, begun)| begun).sum();
                    it.waits.iter().any(|other| is_same(&other.need))
                        || it.forgotten >= number
                        || begun().any(|begun| begun >= number) && !(it.forgotten == 0 && is_behind())
                }
                _ => it.waits.iter().any(|other| other.need == Need::Call && other.members == wait.members),
            })
        };
        wait.members.iter().filter(|&member| !has_come(member)).collect()
    }

    /// The members that wait in the collective of this number, but in another operation.
    fn others_in(&self, wait: &'a Wait) -> impl Iterator<Item = i32> {
        let is_there =
            |it: &RankStatus| it.waits.iter().any(|other| other.need.is_other_operation(&wait.need));
        wait.members.iter().filter(move |member| self.world.get(member).is_some_and(is_there))
    }

    /// The ends of a message, and whether this rank sends there.
    fn ends(wait: &Wait) -> impl Iterator<Item = (&Peer, bool)> {
        let (from, to) = match &wait.need {
            Need::Message { from, to, .. } => (from.as_ref(), to.as_ref()),
            _ => (None, None),
        };
        from.map(|end| (end, false)).into_iter().chain(to.map(|end| (end, true)))
    }

    /// The messages of a rank to another one that were not received.
    fn unreceived(&self, key: u64, from: i32, to: i32) -> Unreceived {
        let mut messages = self.world.get(&from).into_iter().flat_map(|it| &it.messages);
        let sent = messages.find(|it| (it.0, it.1) == (key, to)).map_or(0, |it| it.2);
        Unreceived(sent.wrapping_sub(self.received.get(&(key, from, to)).copied().unwrap_or(0)))
    }

    /// Whether a message of a rank to another one, which waits for this, may be under way.
    fn is_under_way(&self, from: i32, to: i32, need: &Need) -> bool {
        let Need::Message { key, from: Some(end), .. } = need else { return false };
        let used = self.world.get(&from).map_or(&[][..], |it| &it.tags);
        end.rank.is_none_or(|rank| rank == from) && self.unreceived(*key, from, to).may_match(end.tag, used)
    }

    /// A message to a rank that cannot match what the rank waits for, and was not received: its sender and its tag.
    pub fn lost(&self, rank: i32, need: &Need) -> Option<(i32, i32)> {
        let Need::Message { key, from: Some(from), .. } = need else { return None };
        let mut senders = self.world.iter().filter(|(it, _)| from.rank.is_none_or(|rank| rank == **it));
        senders.find_map(|(&sender, it)| {
            let unreceived = self.unreceived(*key, sender, rank);
            let tag = it.tags.iter().find(|tag| unreceived.all_have(**tag))?;
            (Some(*tag) != from.tag && from.tag.is_some()).then_some((sender, *tag))
        })
    }

    /// Whether messages are under way that their receivers now wait for. If not all messages are counted by rank, compares the sums.
    pub fn moves(&self) -> bool {
        let receives = |need: &Need| matches!(need, Need::Message { from: Some(_), .. });
        if self.world.values().any(|it| it.others != [0; 2]) {
            let sum = |of: fn(&RankStatus) -> [u64; 2]| {
                self.world
                    .values()
                    .map(of)
                    .fold(0u64, |sum, [sent, received]| sum.wrapping_add(sent).wrapping_sub(received))
            };
            let counted = |it: &RankStatus| {
                it.messages
                    .iter()
                    .fold([0u64; 2], |sum, it| [sum[0].wrapping_add(it.2), sum[1].wrapping_add(it.3)])
            };
            let left = Unreceived(sum(|it| it.others).wrapping_add(sum(counted)));
            return left.count() > 0
                && self.world.values().any(|it| !it.is_over() && it.needs().any(receives));
        }
        self.world.iter().any(|(&from, it)| {
            it.messages.iter().any(|&(_, to, ..)| {
                self.world.get(&to).is_some_and(|receiver| {
                    !receiver.is_over() && receiver.needs().any(|need| self.is_under_way(from, to, need))
                })
            })
        })
    }

    /// Whether a wait may complete, as far as is known, even if no rank begins another operation.
    fn is_matched(&self, rank: i32, wait: &'a Wait) -> bool {
        if let Some(key) = shared(wait) {
            return self.missing[&key].ranks.is_empty() && !self.missing[&key].differ;
        }
        let Need::Message { comm, .. } = wait.need else { return true };
        Self::ends(wait).any(|(end, sends)| {
            let may = |peer: i32| {
                let it = self.world.get(&peer);
                it.is_none_or(|it| !it.is_over() && it.may_match(rank, sends, comm, end.tag))
            };
            match end.rank {
                Some(peer) => may(peer),
                // What other ranks send is on communicators of other classes.
                None => self.senders.iter().any(|&peer| may(peer)),
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
            return self.missing[&key].why.clone();
        }
        let Need::Message { .. } = wait.need else {
            return wait.members.iter().find(|&it| self.state(it) == State::Gone).map(Why::Gone);
        };
        if self.is_matched(rank, wait) {
            return None;
        }
        let mut peers = Vec::new();
        let is_none_left = |peer: i32| self.is_over(peer) && !self.is_under_way(peer, rank, &wait.need);
        for (end, _) in Self::ends(wait) {
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
            Some(key) if self.missing[&key].ranks.is_empty() => self.others_in(wait).take(MOST).collect(),
            Some(key) => self.missing[&key].ranks.iter().copied().take(MOST).collect(),
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

    /// A cycle of ranks in which each waits for the next one, and the last for the first; or a
    /// chain that is not closed.
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
        Need::Collective { comm, number, .. } => Some((Some((comm.without_name(), number)), &wait.members)),
        Need::Call => Some((None, &wait.members)),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
