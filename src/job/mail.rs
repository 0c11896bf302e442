//! What the leaders of the hosts ask each other, and have heard. Nothing here waits, or knows how messages travel.
//!
//! A question holds a [`Word`], an answer the same word and what the ranks of a host say, once for those that say the same. A
//! report takes a question and an answer for each host, however many ranks a host has.

use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::ranks::{Ranks, grouped};
use super::status::{RankStatus, World};

/// What somebody wants to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// What ranks wait for, as far as they have said so by themselves.
    Look,
    /// What they do, for a line.
    Line,
    /// The same, for a report, with dumps.
    Show,
    /// For a report that ends the job.
    End,
}

/// A question: what for, who asks, and when, in nanoseconds by the clock of the asker's host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Word {
    pub kind: Kind,
    pub rank: i32,
    pub time: u64,
}

impl Word {
    pub fn new(kind: Kind, rank: i32) -> Self {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self { kind, rank, time: now.as_nanos() as u64 }
    }
}

/// Ranks that say the same, and what.
pub type Said = (Ranks, RankStatus);

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Message {
    Question(Word),
    Answer(Word, Vec<Said>),
}

impl Message {
    /// The answer of a host to a question.
    pub fn answer(word: Word, world: &World) -> Self {
        let said = grouped(world.iter().map(|(rank, status)| (status.briefly().encode(), *rank)));
        let said = said.into_iter().map(|(_, ranks)| {
            let status = ranks.first().map(|rank| world[&rank].briefly()).unwrap_or_default();
            (ranks, status)
        });
        Self::Answer(word, said.collect())
    }

    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("plain fields")
    }
}

/// The hosts of a job: the ranks of each, by its lowest.
#[derive(Clone, Debug, Default)]
pub struct Hosts {
    hosts: Vec<Ranks>,
    own: usize,
}

impl Hosts {
    /// From what each rank calls its host.
    pub fn new(names: &[u64], rank: i32) -> Self {
        let hosts: Vec<Ranks> =
            grouped(names.iter().copied().zip(0..)).into_iter().map(|(_, ranks)| ranks).collect();
        let own = hosts.iter().position(|host| host.contains(rank)).unwrap_or(0);
        Self { hosts, own }
    }

    /// The place of this host, and how many there are.
    pub fn place(&self) -> (usize, usize) {
        (self.own, self.hosts.len().max(1))
    }

    pub fn own(&self) -> Option<&Ranks> {
        self.hosts.get(self.own)
    }

    /// The other hosts.
    fn others(&self) -> impl Iterator<Item = &Ranks> {
        self.hosts.iter().enumerate().filter(|(host, _)| *host != self.own).map(|(_, ranks)| ranks)
    }
}

#[derive(Debug, Default)]
pub struct Mail {
    pub hosts: Hosts,
    /// This rank speaks for its host.
    pub leads: bool,
    outbox: Vec<(i32, Message)>,
    /// Our last question, and the answers to it by who has sent them.
    word: Option<Word>,
    answers: Vec<(i32, Vec<Said>)>,
    /// Questions of others that are not answered yet.
    questions: Vec<(i32, Word)>,
    /// Who else has asked what, and when.
    heard: Vec<(Kind, i32, f64)>,
}

impl Mail {
    /// Asks the other hosts. A later question makes an earlier one void.
    pub fn ask(&mut self, word: &Word) {
        self.word = Some(word.clone());
        self.answers.clear();
        let question = |ranks: &Ranks| Some((ranks.first()?, Message::Question(word.clone())));
        self.outbox.extend(self.hosts.others().filter_map(question));
    }

    /// Asks those hosts again that have not answered: their second rank, since the first may be gone.
    pub fn ask_again(&mut self) {
        let Some(word) = &self.word else { return };
        let answered = |ranks: &Ranks| self.answers.iter().any(|(from, _)| ranks.contains(*from));
        let second =
            self.hosts.others().filter(|ranks| !answered(ranks)).filter_map(|ranks| ranks.iter().nth(1));
        self.outbox.extend(second.map(|rank| (rank, Message::Question(word.clone()))));
    }

    /// What there is to be sent, and to whom.
    pub fn sent(&mut self) -> Vec<(i32, Message)> {
        std::mem::take(&mut self.outbox)
    }

    /// Whether there is something to be sent.
    pub fn has_more(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// A message has arrived.
    pub fn take_in(&mut self, from: i32, message: Message, now: f64) {
        match message {
            Message::Question(word) => {
                self.heard.retain(|(kind, ..)| *kind != word.kind);
                self.heard.push((word.kind, from, now));
                self.questions.push((from, word));
            }
            Message::Answer(word, said) => {
                if self.word.as_ref() == Some(&word) && !self.answers.iter().any(|(other, _)| *other == from)
                {
                    self.answers.push((from, said));
                }
            }
        }
    }

    /// The questions that have come.
    pub fn questions(&mut self) -> Vec<(i32, Word)> {
        std::mem::take(&mut self.questions)
    }

    pub fn answer(&mut self, to: i32, answer: Message) {
        self.outbox.push((to, answer));
    }

    /// The answers to the last question so far, and whether all hosts have answered.
    pub fn answers(&self) -> (impl Iterator<Item = &Said>, bool) {
        let is_complete = self.answers.len() >= self.hosts.others().count();
        (self.answers.iter().flat_map(|(_, said)| said), is_complete)
    }

    /// Who has asked for this last, of other hosts, and when.
    pub fn heard(&self, kind: Kind) -> Option<(i32, f64)> {
        self.heard.iter().find(|(other, ..)| *other == kind).map(|(_, from, at)| (*from, *at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_as_they_were_sent() {
        let status = |before: &str| RankStatus { before: before.into(), ..RankStatus::default() };
        let word = Word { kind: Kind::End, rank: 3, time: 17 };
        let world = World::from([(0, status("a")), (1, status("b")), (2, status("a"))]);
        let answer = |world: &World| Message::answer(word.clone(), world);
        let Message::Answer(_, said) = answer(&world) else { panic!("no answer") };
        assert_eq!(said.iter().map(|(ranks, _)| ranks.to_string()).collect::<Vec<_>>(), ["0,2", "1"]);
        for message in [Message::Question(word.clone()), answer(&world), answer(&World::new())] {
            assert_eq!(serde_json::from_slice::<Message>(&message.encode()).unwrap(), message);
        }
    }

    #[test]
    fn hosts_are_known_by_their_lowest_ranks() {
        let hosts = Hosts::new(&[7, 7, 9, 7, 9], 3);
        assert_eq!((hosts.place(), hosts.own().unwrap().to_string()), ((0, 2), "0-1,3".into()));
        let mut mail = Mail { hosts, ..Mail::default() };
        mail.ask(&Word::new(Kind::Look, 3));
        mail.ask_again();
        let to: Vec<i32> = mail.sent().into_iter().map(|(to, _)| to).collect();
        assert_eq!(to, [2, 4]);
    }
}
