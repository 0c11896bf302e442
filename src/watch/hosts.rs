//! Questions and answers between hosts. Nothing here waits, or depends on how messages are sent.
//!
//! A question takes one message to each host and one back, however many ranks a host has: ranks with equal states are one part
//! of the answer.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::state::{RankStatus, World};
use crate::board::ranks::{Ranks, grouped};

/// What a question is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum QuestionKind {
    /// To know what ranks wait for.
    Status,
    /// For a report, with Python's places.
    Report,
    /// For a report that aborts the job.
    End,
    /// To leave a copy of the board, after the report has been printed.
    Leave,
}

/// The states of the ranks of a host: each group of ranks with equal ones.
type States = Vec<(Ranks, RankStatus)>;

/// A question, or the answer to one. The rank that asks numbers its questions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Message {
    Question(u64, QuestionKind),
    Answer(u64, States),
}

impl Message {
    /// The answer of a host, whose ranks these are.
    pub fn answer(number: u64, world: &World) -> Self {
        let text = |status: &RankStatus| serde_json::to_string(&status.briefly()).unwrap_or_default();
        let groups = grouped(world.iter().map(|(rank, status)| (text(status), *rank)));
        let status = |ranks: &Ranks| ranks.first().map(|rank| world[&rank].briefly()).unwrap_or_default();
        Self::Answer(number, groups.into_iter().map(|(_, ranks)| (ranks.clone(), status(&ranks))).collect())
    }
}

/// What this host asks, and has been answered.
#[derive(Debug, Default)]
pub struct Mail {
    /// The ranks of each host, in the order of their lowest ones.
    hosts: Vec<Ranks>,
    /// The index of this host in `hosts`, and whether this rank answers for it: the first rank of a host does, and the second one if
    /// the first is gone.
    own: usize,
    pub answers_for_host: bool,
    /// Messages to be sent, each with the rank that it is for.
    pub outbox: Vec<(i32, Message)>,
    /// The last question of this rank, and the answers to it, by the index of the host.
    asked: u64,
    answers: BTreeMap<usize, States>,
    /// When a host before this one has asked.
    heard: Option<Instant>,
}

impl Mail {
    /// From the name of each rank's host.
    pub fn new(names: &[u64], rank: i32) -> Self {
        let hosts: Vec<Ranks> =
            grouped(names.iter().copied().zip(0..)).into_iter().map(|(_, ranks)| ranks).collect();
        let own = hosts.iter().position(|host| host.contains(rank)).unwrap_or(0);
        let answers_for_host = hosts.get(own).is_some_and(|host| host.iter().take(2).any(|it| it == rank));
        Self { hosts, own, answers_for_host, ..Self::default() }
    }

    /// Whether there are other hosts.
    pub fn has_others(&self) -> bool {
        self.hosts.len() > 1
    }

    /// Whether a host before this one has asked within this time. One host that asks is enough.
    pub fn leaves_asking_to_others(&self, time: Duration) -> bool {
        self.heard.is_some_and(|at| at.elapsed() < time)
    }

    /// A new question. Answers to an earlier one are ignored from now on.
    pub fn begin_question(&mut self) {
        self.asked += 1;
        self.answers.clear();
    }

    /// A question to the hosts that have answered the last one: no other is asked, or waited for.
    pub fn begin_question_to_answering(&mut self) {
        self.asked += 1;
        let hosts = 0..self.hosts.len();
        let silent = hosts.filter(|host| *host != self.own && !self.answers.contains_key(host));
        self.answers = silent.map(|host| (host, States::new())).collect();
    }

    /// Puts the question to the rank at this place of each host that has not answered.
    pub fn ask(&mut self, kind: QuestionKind, place: usize) {
        let silent =
            (0..self.hosts.len()).filter(|host| *host != self.own && !self.answers.contains_key(host));
        let ranks: Vec<i32> = silent.filter_map(|host| self.hosts[host].nth(place)).collect();
        self.outbox.extend(ranks.into_iter().map(|rank| (rank, Message::Question(self.asked, kind))));
    }

    fn host_of(&self, rank: i32) -> Option<usize> {
        self.hosts.iter().position(|host| host.contains(rank))
    }

    /// A rank of another host has asked.
    pub fn hear(&mut self, from: i32) {
        if self.host_of(from).is_some_and(|host| host < self.own) {
            self.heard = Some(Instant::now());
        }
    }

    /// A rank of another host has answered a question.
    pub fn receive(&mut self, from: i32, number: u64, states: States) {
        if let Some(host) = self.host_of(from).filter(|_| number == self.asked) {
            self.answers.entry(host).or_insert(states);
        }
    }

    /// Whether all hosts have answered the last question.
    pub fn is_answered(&self) -> bool {
        self.answers.len() + 1 >= self.hosts.len()
    }

    /// What the ranks of other hosts have answered to it.
    pub fn answers(&self) -> World {
        let groups = self.answers.values().flatten();
        groups.flat_map(|(ranks, status)| ranks.iter().map(|rank| (rank, status.clone()))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_as_they_were_sent() {
        let status = |before: &str| RankStatus { before: before.into(), ..RankStatus::default() };
        let world = World::from([(0, status("a")), (1, status("b")), (2, status("a"))]);
        let Message::Answer(_, groups) = Message::answer(17, &world) else { panic!("no answer") };
        let ranks = |list: &[i32]| list.iter().copied().collect::<Ranks>();
        assert_eq!(
            groups.iter().map(|group| group.0.clone()).collect::<Vec<_>>(),
            [ranks(&[0, 2]), ranks(&[1])]
        );
        let question = Message::Question(17, QuestionKind::End);
        for message in [question, Message::answer(17, &world), Message::answer(17, &World::new())] {
            let bytes = serde_json::to_vec(&message).unwrap();
            assert_eq!(serde_json::from_slice::<Message>(&bytes).unwrap(), message);
        }
    }

    #[test]
    fn hosts_are_known_by_their_lowest_ranks_and_each_answers_once() {
        let mut mail = Mail::new(&[7, 7, 9, 7, 9], 3);
        assert!((mail.own, mail.hosts.len()) == (0, 2) && mail.hosts[0].iter().eq([0, 1, 3]));
        mail.begin_question();
        (0..2).for_each(|place| mail.ask(QuestionKind::Status, place));
        let to: Vec<i32> = mail.outbox.iter().map(|(to, _)| *to).collect();
        assert_eq!(to, [2, 4]);
        let states = |before: &str| {
            let status = RankStatus { before: before.into(), ..RankStatus::default() };
            vec![([2, 4].into_iter().collect(), status)]
        };
        mail.receive(2, 0, states("of an earlier question"));
        assert!(!mail.is_answered());
        mail.receive(4, 1, states("of the second rank"));
        mail.receive(2, 1, states("of the first rank, later"));
        assert!(mail.is_answered());
        let answers = mail.answers();
        assert_eq!((answers.len(), &*answers[&4].before), (2, "of the second rank"));
    }

    #[test]
    fn hosts_that_have_not_answered_are_not_asked_to_leave_a_board() {
        let mut mail = Mail::new(&[7, 9, 11], 0);
        mail.begin_question();
        mail.receive(2, 1, States::new());
        mail.begin_question_to_answering();
        mail.ask(QuestionKind::Leave, 0);
        assert_eq!(mail.outbox, [(2, Message::Question(2, QuestionKind::Leave))]);
        assert!(!mail.is_answered());
        mail.receive(2, 2, States::new());
        assert!(mail.is_answered());
    }
}
