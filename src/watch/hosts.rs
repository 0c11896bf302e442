//! Questions and answers between hosts. Nothing here waits, or depends on how messages are sent.
//!
//! A question takes one message to each host and one back, however many ranks a host has: ranks with equal states are one part
//! of the answer.

use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::state::{RankStatus, World};
use crate::board::ranks::{Ranks, grouped};

/// What a question is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum QuestionKind {
    /// To know what ranks wait for.
    Status,
    /// For a report, with Python's places.
    Report,
    /// For a report that ends the job.
    End,
}

/// A question to all ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Question {
    pub kind: QuestionKind,
    /// The rank that asks.
    pub rank: i32,
    /// When, in nanoseconds by the clock of its host.
    pub time: u64,
}

impl Question {
    pub fn new(kind: QuestionKind, rank: i32) -> Self {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self { kind, rank, time: now.as_nanos() as u64 }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Message {
    Question(Question),
    /// The status of each group of ranks with equal ones.
    Answer(Question, Vec<(Ranks, RankStatus)>),
}

impl Message {
    /// The answer of a host, whose ranks these are.
    pub fn answer(question: Question, world: &World) -> Self {
        let text = |status: &RankStatus| serde_json::to_string(&status.briefly()).unwrap_or_default();
        let groups = grouped(world.iter().map(|(rank, status)| (text(status), *rank)));
        let status = |ranks: &Ranks| ranks.first().map(|rank| world[&rank].briefly()).unwrap_or_default();
        Self::Answer(question, groups.into_iter().map(|(_, ranks)| (ranks.clone(), status(&ranks))).collect())
    }
}

/// The questions and answers of a host.
#[derive(Debug, Default)]
pub struct Mail {
    /// The ranks of each host, in the order of their lowest ones.
    hosts: Vec<Ranks>,
    /// The index of this host in `hosts`.
    own: usize,
    /// Messages to be sent, each with the rank that it is for.
    pub outbox: Vec<(i32, Message)>,
    /// The last question of this host's, and the answers to it, each with the rank that it is from.
    asked: Option<Question>,
    answers: Vec<(i32, Vec<(Ranks, RankStatus)>)>,
    /// Questions of others that are not answered yet, each with the rank that asks.
    pub questions: Vec<(i32, Question)>,
}

impl Mail {
    /// From the name of each rank's host.
    pub fn new(names: &[u64], rank: i32) -> Self {
        let hosts: Vec<Ranks> =
            grouped(names.iter().copied().zip(0..)).into_iter().map(|(_, ranks)| ranks).collect();
        let own = hosts.iter().position(|host| host.contains(rank)).unwrap_or(0);
        Self { hosts, own, ..Self::default() }
    }

    /// Whether there are other hosts.
    pub fn has_others(&self) -> bool {
        self.hosts.len() > 1
    }

    /// Whether this rank answers for its host: the first rank of a host does, and the second one if the first is gone.
    pub fn answers_for_host(&self, rank: i32) -> bool {
        self.hosts.get(self.own).is_some_and(|host| host.iter().take(2).any(|it| it == rank))
    }

    /// Whether a rank is of a host that comes before this one.
    pub fn is_before(&self, rank: i32) -> bool {
        self.hosts.iter().take(self.own).any(|host| host.contains(rank))
    }

    fn others(&self) -> impl Iterator<Item = &Ranks> {
        self.hosts.iter().enumerate().filter(|(host, _)| *host != self.own).map(|(_, ranks)| ranks)
    }

    /// Asks the other hosts. Answers to an earlier question are ignored from now on.
    pub fn ask(&mut self, question: &Question) {
        self.asked = Some(question.clone());
        self.answers.clear();
        self.ask_each(0);
    }

    /// Asks the hosts that have not answered once more: their second rank, since the first may be gone.
    pub fn ask_again(&mut self) {
        self.ask_each(1);
    }

    /// Asks this rank of each host that has not answered.
    fn ask_each(&mut self, place: usize) {
        let Some(question) = &self.asked else { return };
        let has_answered = |ranks: &&Ranks| self.answers.iter().any(|(from, _)| ranks.contains(*from));
        let silent = self.others().filter(|ranks| !has_answered(ranks));
        let ranks: Vec<i32> = silent.filter_map(|ranks| ranks.iter().nth(place)).collect();
        self.outbox.extend(ranks.into_iter().map(|rank| (rank, Message::Question(question.clone()))));
    }

    /// A message has arrived.
    pub fn receive(&mut self, from: i32, message: Message) {
        match message {
            Message::Question(question) => self.questions.push((from, question)),
            Message::Answer(question, groups) => {
                let is_new = !self.answers.iter().any(|(other, _)| *other == from);
                if is_new && self.asked.as_ref() == Some(&question) {
                    self.answers.push((from, groups));
                }
            }
        }
    }

    /// Whether all hosts have answered the last question.
    pub fn is_answered(&self) -> bool {
        self.answers.len() >= self.others().count()
    }

    /// What the ranks of other hosts have answered to it.
    pub fn answers(&self) -> World {
        let groups = self.answers.iter().flat_map(|(_, groups)| groups);
        groups.flat_map(|(ranks, status)| ranks.iter().map(|rank| (rank, status.clone()))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_as_they_were_sent() {
        let status = |before: &str| RankStatus { before: before.into(), ..RankStatus::default() };
        let question = Question { kind: QuestionKind::End, rank: 3, time: 17 };
        let world = World::from([(0, status("a")), (1, status("b")), (2, status("a"))]);
        let answer = |world: &World| Message::answer(question.clone(), world);
        let Message::Answer(_, groups) = answer(&world) else { panic!("no answer") };
        let ranks = |list: &[i32]| list.iter().copied().collect::<Ranks>();
        assert_eq!(
            groups.iter().map(|group| group.0.clone()).collect::<Vec<_>>(),
            [ranks(&[0, 2]), ranks(&[1])]
        );
        for message in [Message::Question(question.clone()), answer(&world), answer(&World::new())] {
            let bytes = serde_json::to_vec(&message).unwrap();
            assert_eq!(serde_json::from_slice::<Message>(&bytes).unwrap(), message);
        }
    }

    #[test]
    fn hosts_are_known_by_their_lowest_ranks() {
        let mut mail = Mail::new(&[7, 7, 9, 7, 9], 3);
        assert!((mail.own, mail.hosts.len()) == (0, 2) && mail.hosts[0].iter().eq([0, 1, 3]));
        mail.ask(&Question::new(QuestionKind::Status, 3));
        mail.ask_again();
        let to: Vec<i32> = mail.outbox.iter().map(|(to, _)| *to).collect();
        assert_eq!(to, [2, 4]);
    }
}
