//! The status of a rank: its own account, as JSON that others read, and whether its process lives.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::ranks::Ranks;
use crate::comm::origin::{ONLY_ONE, UNKNOWN};

/// What all ranks of a communicator can compute alike without messages: its class (see `comm::register`), and its origin, which
/// distinguishes communicators with the same members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CommId {
    pub class: u64,
    pub origin: u64,
    /// Of the name that the program has given it, where it is not known where it comes from; 0: none. Ranks may name one communicator
    /// differently, so it proves nothing.
    pub name: u64,
}

impl CommId {
    /// What is certain.
    pub fn without_name(self) -> Self {
        Self { name: 0, ..self }
    }
}

/// The other end of a message. None: any rank, any tag.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Peer {
    pub rank: Option<i32>,
    pub tag: Option<i32>,
}

/// What has to happen for a wait to end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Need {
    /// All ranks come to the collective of this number on the communicator.
    Collective { comm: CommId, number: u64 },
    /// A message comes, or is taken, or both.
    Message { comm: CommId, from: Option<Peer>, to: Option<Peer> },
    /// The ranks of a communicator come to a call that is no operation.
    Call,
    /// All ranks come to their end, as this one has.
    End,
    /// A GPU's stream comes to it.
    Stream,
}

/// Which of the waits of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WaitId {
    /// For an operation, by its ticket of the recorder.
    Operation(u64),
    /// For a call of Python's that is no operation.
    Call(u64),
    /// For an operation on a stream of a GPU.
    Stream(u64),
    /// For the other ranks, at the end of this one.
    End,
}

/// Something that a thread of a rank waits for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Wait {
    /// Unique in its process.
    pub id: WaitId,
    pub need: Need,
    /// The ranks of its communicator.
    pub members: Ranks,
    /// For how long it has waited.
    pub seconds: f64,
    pub bytes: u64,
    /// Why it has waited too long, in words, if so.
    pub late: String,
    pub words: String,
    /// The words name the line of the program.
    pub has_line: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Life {
    Runs,
    /// `MPI_Finalize` has begun, and calls what the program has attached to `MPI_COMM_SELF`, which may communicate.
    Ends,
    /// `MPI_Finalize` has come to what is its own: the rank takes part in nothing any more.
    Finished,
    Stopped,
    /// Its process has ended before.
    Gone,
    #[default]
    Unknown,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankStatus {
    pub life: Life,
    /// Its process, in words.
    pub process: String,
    /// The time of the last question that it has answered.
    pub answered: u64,
    /// It does not answer.
    pub is_silent: bool,
    /// A thread that could continue the program while those below wait, in words. None: there is none.
    pub other: Option<String>,
    pub waits: Vec<Wait>,
    /// Bytes still move between it and others.
    pub moves: bool,
    /// What it has started and not waited for.
    pub started: Vec<Need>,
    /// How often `MPI_COMM_WORLD` has been duplicated; see `comm::origin`.
    pub copies: u64,
    /// How many collectives it has begun on communicators; of those that have been freed, the most on one of a class.
    pub counts: Vec<(CommId, u64)>,
    /// For how many seconds it has been in no operation, what it did before, and what it does: in Python or JAX.
    pub seconds: f64,
    pub before: String,
    pub python: String,
    pub activity: String,
    /// Its last operations, a line each.
    pub last: Vec<String>,
}

impl Wait {
    /// How many bytes may have to move before it ends.
    pub fn volume(&self) -> f64 {
        let copies = if matches!(self.need, Need::Collective { .. }) { self.members.count() } else { 1 };
        self.bytes as f64 * copies as f64
    }
}

pub type World = BTreeMap<i32, RankStatus>;

/// One wait of a rank.
pub fn wait_of(world: &World, (rank, id): (i32, WaitId)) -> Option<&Wait> {
    world.get(&rank)?.waits.iter().find(|wait| wait.id == id)
}

/// Origins of communicators hold only if all ranks that wait have counted the same duplicates of `MPI_COMM_WORLD`. If they have,
/// drops the names of communicators with a known origin; otherwise drops the origins.
pub fn compare_origins(world: &mut World) {
    let mut copies = world.values().filter(|it| !it.waits.is_empty()).map(|it| it.copies);
    let first = copies.next();
    let are_clear = copies.all(|copies| Some(copies) == first);
    for rank in world.values_mut() {
        let needs = rank.waits.iter_mut().map(|wait| &mut wait.need).chain(&mut rank.started);
        let ids = needs.filter_map(|need| match need {
            Need::Collective { comm, .. } | Need::Message { comm, .. } => Some(comm),
            Need::Call | Need::End | Need::Stream => None,
        });
        for id in ids.chain(rank.counts.iter_mut().map(|(id, _)| id)) {
            if !are_clear && id.origin != ONLY_ONE {
                id.origin = UNKNOWN;
            }
            if id.origin != UNKNOWN {
                id.name = 0;
            }
        }
    }
}

impl RankStatus {
    pub fn encode(&self) -> String {
        serde_json::to_string(self).expect("plain fields")
    }

    /// The status for other hosts: without the parts that differ between ranks that do the same.
    pub fn briefly(&self) -> Self {
        let mut status =
            Self { answered: 0, seconds: self.seconds.floor(), last: Vec::new(), ..self.clone() };
        status.waits.iter_mut().for_each(|wait| wait.seconds = wait.seconds.floor());
        status
    }

    /// Whether it differs from an earlier one in more than times.
    pub fn is_news(&self, before: &Self) -> bool {
        let key = |status: &Self| -> Vec<(WaitId, bool)> {
            status.waits.iter().map(|wait| (wait.id, wait.late.is_empty())).collect()
        };
        // Where another thread is, is asked for before it is reported.
        let state = |status: &Self| (status.life, status.other.is_some(), status.moves, status.answered);
        state(self) != state(before)
            || key(self) != key(before)
            || self.started != before.started
            || self.counts != before.counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_what_is_read() {
        let comm = CommId { class: 0xabc, origin: 0xfeed, name: 7 };
        let end = |rank, tag| Some(Peer { rank, tag });
        let wait = |id, need| Wait {
            id,
            need,
            members: [0, 1, 5].into_iter().collect(),
            seconds: 4.25,
            bytes: 12,
            late: String::new(),
            words: "recv from 1, tag 7".into(),
            has_line: true,
        };
        let status = RankStatus {
            process: "process 7 on x".into(),
            answered: 3,
            copies: 2,
            other: Some("a thread at a.py:9 in f".into()),
            waits: vec![
                wait(WaitId::Operation(3), Need::Collective { comm, number: 5 }),
                wait(
                    WaitId::Operation(4),
                    Need::Message { comm, from: end(None, None), to: end(Some(2), Some(7)) },
                ),
                wait(WaitId::Call(5), Need::Call),
            ],
            started: vec![Need::Message { comm, from: None, to: end(Some(1), Some(0)) }],
            counts: vec![(comm, 5), (CommId { class: 1, origin: UNKNOWN, name: 0 }, 2)],
            before: "the last one was barrier #1".into(),
            seconds: 1.5,
            last: vec!["barrier #1: took 1 s".into()],
            ..RankStatus::default()
        };
        assert_eq!(serde_json::from_str::<RankStatus>(&status.encode()).unwrap(), status);
        assert_eq!(status.briefly().waits[0].seconds, 4.0);
        let later = status.briefly();
        assert!(!later.is_news(&RankStatus { answered: 0, ..status.clone() }) && later.is_news(&status));
    }
}
