//! What is known of a rank: what it says of itself, as text that others read, and whether its process lives.

use std::collections::BTreeMap;
use std::str::SplitAsciiWhitespace;

use super::ranks::Ranks;
use crate::comm::origin::{ONLY_ONE, UNKNOWN};

/// A communicator as its ranks know it without asking each other: its class (see `comm::register`), and where it comes from, by
/// which several with the same members are told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CommId {
    pub class: u64,
    pub origin: u64,
}

/// The other end of a message. None: any rank, any tag.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peer {
    pub rank: Option<i32>,
    pub tag: Option<i32>,
}

/// What has to happen for a wait to end.
#[derive(Clone, Debug, PartialEq)]
pub enum Need {
    /// All ranks come to the collective of this number on the communicator.
    Collective { comm: CommId, number: u64 },
    /// A message comes, or is taken, or both.
    Message { comm: CommId, from: Option<Peer>, to: Option<Peer> },
    /// All ranks come to a call that is no operation.
    Call,
    /// All ranks come to their end, as this one has.
    End,
    /// A GPU's stream comes to it.
    Stream,
}

/// Something that a thread of a rank waits for.
#[derive(Clone, Debug, PartialEq)]
pub struct Wait {
    /// Unique in its process.
    pub number: u64,
    pub need: Need,
    /// The ranks of its communicator.
    pub members: Ranks,
    /// For how long it has waited.
    pub seconds: f64,
    pub bytes: u64,
    /// Why it has waited too long, in words, if so.
    pub late: String,
    pub words: String,
    /// Where Python is, if the words have no line.
    pub at: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Life {
    Runs,
    /// Its program is at its end, and may still communicate.
    Exits,
    /// `MPI_Finalize` has begun: it takes part in nothing any more.
    Finished,
    Stopped,
    /// Its process has ended before.
    Gone,
    #[default]
    Unknown,
}

const LIVES: [(Life, &str); 6] = [
    (Life::Runs, "runs"),
    (Life::Exits, "exits"),
    (Life::Finished, "finished"),
    (Life::Stopped, "stopped"),
    (Life::Gone, "gone"),
    (Life::Unknown, "unknown"),
];

#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankStatus {
    pub life: Life,
    /// Its process, in words.
    pub process: String,
    /// The time of the last question that it has answered.
    pub answered: u64,
    /// It does not answer.
    pub is_silent: bool,
    /// What could go on with the program although the threads below wait, in words. None: nothing.
    pub other: Option<String>,
    pub waits: Vec<Wait>,
    /// What it has started and not waited for.
    pub started: Vec<Need>,
    /// How often `MPI_COMM_WORLD` has been duplicated; see `comm::origin`.
    pub copies: u64,
    /// How many collectives it has begun on communicators. Of a rank that has finished, the most on any of a class.
    pub counts: Vec<(CommId, u64)>,
    /// For how many seconds it has been in no operation, what it did before, and what it does: in Python or JAX.
    pub seconds: f64,
    pub before: String,
    pub python: String,
    pub activity: String,
    /// Its last operations, a line each.
    pub last: Vec<String>,
}

pub type World = BTreeMap<i32, RankStatus>;

/// Forgets where communicators come from, unless all ranks that wait have counted the same duplicates of `MPI_COMM_WORLD`: then
/// what is known of a communicator on one rank is known of it on all.
pub fn compare_origins(world: &mut World) {
    let mut copies = world.values().filter(|it| !it.waits.is_empty()).map(|it| it.copies);
    let first = copies.next();
    if copies.all(|copies| Some(copies) == first) {
        return;
    }
    for rank in world.values_mut() {
        let needs = rank.waits.iter_mut().map(|wait| &mut wait.need).chain(&mut rank.started);
        let ids = needs.filter_map(|need| match need {
            Need::Collective { comm, .. } | Need::Message { comm, .. } => Some(comm),
            Need::Call | Need::End | Need::Stream => None,
        });
        let unclear = |id: &&mut CommId| id.origin != ONLY_ONE;
        ids.chain(rank.counts.iter_mut().map(|(id, _)| id))
            .filter(unclear)
            .for_each(|id| id.origin = UNKNOWN);
    }
}

/// One word.
fn peer(peer: Option<Peer>) -> String {
    let number = |it: Option<i32>| it.map_or("*".into(), |it| it.to_string());
    peer.map_or("-".into(), |Peer { rank, tag }| format!("{}:{}", number(rank), number(tag)))
}

fn parse_peer(text: &str) -> Option<Option<Peer>> {
    if text == "-" {
        return Some(None);
    }
    let number = |text: &str| if text == "*" { Some(None) } else { text.parse().ok().map(Some) };
    let (rank, tag) = text.split_once(':')?;
    Some(Some(Peer { rank: number(rank)?, tag: number(tag)? }))
}

fn need(need: &Need) -> String {
    let comm = |comm: &CommId| format!("{:x} {:x}", comm.class, comm.origin);
    match need {
        Need::Collective { comm: id, number } => format!("collective {} {number}", comm(id)),
        Need::Message { comm: id, from, to } => format!("message {} {} {}", comm(id), peer(*from), peer(*to)),
        Need::Call => "call".into(),
        Need::End => "end".into(),
        Need::Stream => "stream".into(),
    }
}

fn parse_comm(words: &mut SplitAsciiWhitespace) -> Option<CommId> {
    let mut number = || u64::from_str_radix(words.next()?, 16).ok();
    Some(CommId { class: number()?, origin: number()? })
}

fn parse_need(text: &str) -> Option<Need> {
    let mut words = text.split_ascii_whitespace();
    let kind = words.next()?;
    Some(match kind {
        "collective" => {
            Need::Collective { comm: parse_comm(&mut words)?, number: words.next()?.parse().ok()? }
        }
        "message" => Need::Message {
            comm: parse_comm(&mut words)?,
            from: parse_peer(words.next()?)?,
            to: parse_peer(words.next()?)?,
        },
        "call" => Need::Call,
        "end" => Need::End,
        "stream" => Need::Stream,
        _ => return None,
    })
}

fn parse_wait(fields: &str) -> Option<Wait> {
    let mut fields = fields.split('\t');
    Some(Wait {
        number: fields.next()?.parse().ok()?,
        seconds: fields.next()?.parse().ok()?,
        bytes: fields.next()?.parse().ok()?,
        members: Ranks::parse(fields.next()?)?,
        need: parse_need(fields.next()?)?,
        late: fields.next()?.into(),
        words: fields.next()?.into(),
        at: fields.next()?.into(),
    })
}

impl RankStatus {
    /// Lines of fields between tabs.
    pub fn encode(&self) -> String {
        let life = LIVES.iter().find(|(life, _)| *life == self.life).map_or("", |(_, name)| name);
        let mut lines = vec![
            format!("life\t{life}"),
            format!("process\t{}", self.process),
            format!("answered\t{}", self.answered),
            format!("silent\t{}", self.is_silent),
            format!("copies\t{}", self.copies),
            format!("seconds\t{:.2}", self.seconds),
            format!("before\t{}", self.before),
            format!("python\t{}", self.python),
            format!("activity\t{}", self.activity),
        ];
        lines.extend(self.other.iter().map(|other| format!("other\t{other}")));
        lines.extend(
            self.counts.iter().map(|(id, count)| format!("count\t{:x} {:x} {count}", id.class, id.origin)),
        );
        lines.extend(self.started.iter().map(|started| format!("started\t{}", need(started))));
        for Wait { number, need: it, members, seconds, bytes, late, words, at } in &self.waits {
            let (needs, [late, words, at]) = (need(it), [late, words, at].map(|it| it.replace('\t', " ")));
            lines.push(format!(
                "wait\t{number}\t{seconds:.2}\t{bytes}\t{members}\t{needs}\t{late}\t{words}\t{at}"
            ));
        }
        lines.extend(self.last.iter().map(|line| format!("last\t{line}")));
        lines.into_iter().map(|line| line.replace(['\n', '\r'], " ") + "\n").collect()
    }

    /// None for what no [`encode`](Self::encode) has made.
    pub fn decode(text: &str) -> Option<Self> {
        let mut status = Self::default();
        for line in text.lines() {
            let (kind, rest) = line.split_once('\t')?;
            match kind {
                "life" => status.life = LIVES.iter().find(|(_, name)| *name == rest)?.0,
                "process" => status.process = rest.into(),
                "answered" => status.answered = rest.parse().ok()?,
                "silent" => status.is_silent = rest.parse().ok()?,
                "copies" => status.copies = rest.parse().ok()?,
                "seconds" => status.seconds = rest.parse().ok()?,
                "before" => status.before = rest.into(),
                "python" => status.python = rest.into(),
                "activity" => status.activity = rest.into(),
                "other" => status.other = Some(rest.into()),
                "count" => {
                    let mut words = rest.split_ascii_whitespace();
                    status.counts.push((parse_comm(&mut words)?, words.next()?.parse().ok()?));
                }
                "started" => status.started.push(parse_need(rest)?),
                "wait" => status.waits.push(parse_wait(rest)?),
                "last" => status.last.push(rest.into()),
                _ => return None,
            }
        }
        Some(status)
    }

    /// What other hosts are told: without what differs between ranks that do the same.
    pub fn briefly(&self) -> Self {
        let mut status =
            Self { answered: 0, seconds: self.seconds.floor(), last: Vec::new(), ..self.clone() };
        status.waits.iter_mut().for_each(|wait| wait.seconds = wait.seconds.floor());
        status
    }

    /// Whether the same is said as before, but for the time.
    pub fn is_news(&self, before: &Self) -> bool {
        let key = |status: &Self| -> Vec<(u64, bool)> {
            status.waits.iter().map(|wait| (wait.number, wait.late.is_empty())).collect()
        };
        (self.life, &self.other, self.answered) != (before.life, &before.other, before.answered)
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
        let comm = CommId { class: 0xabc, origin: 0xfeed };
        let end = |rank, tag| Some(Peer { rank, tag });
        let wait = |number, need| Wait {
            number,
            need,
            members: [0, 1, 5].into_iter().collect(),
            seconds: 4.25,
            bytes: 12,
            late: String::new(),
            words: "recv from 1, tag 7".into(),
            at: "a b.py:9 in f".into(),
        };
        let status = RankStatus {
            process: "process 7 on x".into(),
            answered: 3,
            copies: 2,
            other: Some("a thread at a.py:9 in f".into()),
            waits: vec![
                wait(3, Need::Collective { comm, number: 5 }),
                wait(4, Need::Message { comm, from: end(None, None), to: end(Some(2), Some(7)) }),
                wait(5, Need::Call),
            ],
            started: vec![Need::Message { comm, from: None, to: end(Some(1), Some(0)) }],
            counts: vec![(comm, 5), (CommId { class: 1, origin: UNKNOWN }, 2)],
            before: "the last one was barrier #1".into(),
            seconds: 1.5,
            last: vec!["barrier #1: took 1 s".into()],
            ..RankStatus::default()
        };
        for (life, _) in LIVES {
            let status = RankStatus { life, ..status.clone() };
            assert_eq!(RankStatus::decode(&status.encode()), Some(status));
        }
        assert_eq!(status.briefly().waits[0].seconds, 4.0);
        let later = status.briefly();
        assert!(!later.is_news(&RankStatus { answered: 0, ..status.clone() }) && later.is_news(&status));
        assert_eq!(RankStatus::decode(&RankStatus::default().encode()), Some(RankStatus::default()));
        for broken in ["x", "wait\t1\t2", "started\tmessage 1 0 x -", "count\tzz 1 1", "life\tx"] {
            assert_eq!(RankStatus::decode(broken), None, "{broken}");
        }
    }
}
