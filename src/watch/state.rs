//! What is known of a rank: what it waits for, what it has begun, and whether its process lives.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::board::ranks::Ranks;
use crate::comm::CommId;
use crate::comm::origin::{ONLY_ONE, UNKNOWN};

/// The other end of a message. None: any rank, any tag.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Peer {
    pub rank: Option<i32>,
    pub tag: Option<i32>,
}

/// What has to happen for a wait to complete.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Need {
    /// All ranks come to the collective of this number on the communicator, and do the same there.
    Collective { comm: CommId, number: u64, what: u64 },
    /// A message comes, or is taken, or both. Messages are counted under the key.
    Message { comm: CommId, key: u64, from: Option<Peer>, to: Option<Peer> },
    /// The ranks of a communicator come to a call that is no operation.
    Call,
    /// A GPU's stream comes to it.
    Stream,
}

impl Need {
    /// Whether the two are in the same collective, but in different operations.
    pub fn is_other_operation(&self, other: &Self) -> bool {
        let of = |need: &Self| match *need {
            Self::Collective { comm, number, what } => Some(((comm.without_name(), number), what)),
            _ => None,
        };
        match (of(self), of(other)) {
            (Some((one, what)), Some((other, its_what))) => one == other && what != its_what,
            _ => false,
        }
    }
}

/// Which of the waits of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum WaitId {
    /// An operation, by its ticket of the recorder.
    Operation(u64),
    /// A call from Python that is no operation.
    Call(u64),
    /// An operation on a stream of a GPU.
    Stream(u64),
}

/// Something that a thread of a rank waits for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Wait {
    /// Unique in its process.
    pub id: WaitId,
    pub need: Need,
    /// The ranks of its communicator; none if they are not known.
    pub members: Ranks,
    /// For how long it has waited.
    pub seconds: f64,
    /// Why it has failed, in words, if so.
    pub late: String,
    pub words: String,
    /// The words name the line of the program.
    pub has_line: bool,
}

impl Wait {
    /// One that begins, whose words name no line.
    pub fn new(id: WaitId, need: Need, members: Ranks, words: String) -> Self {
        Self { id, need, members, seconds: 0.0, late: String::new(), words, has_line: false }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum State {
    Runs,
    /// `MPI_Finalize` has begun: it begins nothing any more.
    Finished,
    /// A signal or a debugger has stopped it.
    Stopped,
    /// Its process has ended before.
    Gone,
    #[default]
    Unknown,
}

/// Messages between a rank and another one on a communicator: the key, the other rank, the weights of those sent and received.
pub type Messages = (u64, i32, u64, u64);

/// The last collectives of a rank on a communicator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Noted {
    /// The identity of the communicator.
    pub comm: u64,
    /// Whether the identity is certain. Otherwise two ranks mean the same communicator only if both have counted the same number
    /// of duplicates of `MPI_COMM_WORLD`.
    pub is_sure: bool,
    /// The number of each collective, and the hash of what must be equal on all ranks.
    pub prints: Vec<(u64, u64)>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankStatus {
    pub state: State,
    /// Its process, in words.
    pub process: String,
    /// A debugger is attached to it, or it is stopped.
    pub is_halted: bool,
    /// Its watchdog does not look: the process gets no time.
    pub is_silent: bool,
    /// Why it goes on though it waits, in words.
    pub goes_on: Option<String>,
    pub waits: Vec<Wait>,
    /// Messages that it has started and not waited for. Of one that has died: what it was in.
    pub started: Vec<Need>,
    /// How many operations it has begun.
    pub begun: u64,
    /// How often `MPI_COMM_WORLD` has been duplicated; see `comm::origin`.
    pub copies: u64,
    /// How many collectives it has begun on communicators; those that were freed have the origin `FREED`. And on one that has
    /// been forgotten, at most.
    pub counts: Vec<(CommId, u64)>,
    pub forgotten: u64,
    /// Its last collectives, which are compared with the collectives of other hosts.
    pub noted: Vec<Noted>,
    pub messages: Vec<Messages>,
    /// The tags with which it has sent lately.
    pub tags: Vec<i32>,
    /// The weights of messages sent and received that are not among these.
    pub others: [u64; 2],
    /// For how many seconds it has been in no operation, what it did before, and what it does: in Python or JAX.
    pub seconds: f64,
    pub before: String,
    pub python: String,
    pub activity: String,
    /// The exception that it is handling.
    pub exception: String,
    /// Its last operations, a line each.
    pub last: Vec<String>,
}

pub type World = BTreeMap<i32, RankStatus>;
/// A wait of a rank.
pub type Key = (i32, WaitId);

/// One wait of a rank.
pub fn wait_of(world: &World, (rank, id): Key) -> Option<&Wait> {
    world.get(&rank)?.waits.iter().find(|wait| wait.id == id)
}

/// Origins of communicators hold only if all ranks that wait have counted the same duplicates of `MPI_COMM_WORLD`. Otherwise drops
/// the origins.
pub fn compare_origins(world: &mut World) {
    let mut copies = world.values().filter(|it| !it.waits.is_empty()).map(|it| it.copies);
    let first = copies.next();
    let are_clear = copies.all(|copies| Some(copies) == first);
    for rank in world.values_mut() {
        let needs = rank.waits.iter_mut().map(|wait| &mut wait.need).chain(&mut rank.started);
        let ids = needs.filter_map(|need| match need {
            Need::Collective { comm, .. } | Need::Message { comm, .. } => Some(comm),
            Need::Call | Need::Stream => None,
        });
        for id in ids.chain(rank.counts.iter_mut().map(|(id, _)| id)) {
            if !are_clear && id.origin != ONLY_ONE {
                id.origin = UNKNOWN;
            }
        }
    }
}

impl RankStatus {
    /// The status for other hosts: without the parts that differ between ranks that do the same.
    pub fn briefly(&self) -> Self {
        let mut status = Self { seconds: self.seconds.floor(), last: Vec::new(), ..self.clone() };
        status.waits.iter_mut().for_each(|wait| wait.seconds = wait.seconds.floor());
        status
    }
}
