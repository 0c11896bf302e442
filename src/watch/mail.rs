//! What the leaders of the hosts ask each other, and have heard. Nothing here waits, or knows how messages travel.
//!
//! A question holds a word, an answer the same word and what the ranks of a host do, in groups: those that do the same are one
//! line. So a report takes a question and an answer for each host, however many ranks a host has.

use super::groups::Group;
use super::questions::Kind;
use super::ranks::Ranks;

/// Bytes of an answer at most.
const LARGEST: usize = 1 << 18;
/// Between groups, and between what is said of one.
const GROUP: char = '\x1e';
const FIELD: char = '\x1f';

#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    Question { word: String },
    Answer { word: String, groups: Vec<Group> },
}

impl Message {
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Question { word } => format!("?{word}").into_bytes(),
            Self::Answer { word, groups } => {
                let mut text = format!("={word}");
                for Group { members, state, seconds } in groups {
                    let group = format!("{GROUP}{members}{FIELD}{seconds:.3}{FIELD}{state}");
                    // Of the ranks that are left out, nothing is known.
                    if text.len() + group.len() <= LARGEST {
                        text += &group;
                    }
                }
                text.into_bytes()
            }
        }
    }

    /// `None` for what no [`encode`](Self::encode) has made.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(bytes).ok()?;
        if let Some(word) = text.strip_prefix('?') {
            return Some(Self::Question { word: word.into() });
        }
        let mut parts = text.strip_prefix('=')?.split(GROUP);
        let word = parts.next()?.into();
        let group = |text: &str| {
            let mut fields = text.splitn(3, FIELD);
            let members = Ranks::parse(fields.next()?)?;
            Some(Group { members, seconds: fields.next()?.parse().ok()?, state: fields.next()?.into() })
        };
        Some(Self::Answer { word, groups: parts.map(group).collect::<Option<_>>()? })
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
        let mut by_name: Vec<(u64, Vec<i32>)> = Vec::new();
        let mut places = std::collections::HashMap::new();
        for (&name, rank) in names.iter().zip(0..) {
            let place = *places.entry(name).or_insert_with(|| {
                by_name.push((name, Vec::new()));
                by_name.len() - 1
            });
            by_name[place].1.push(rank);
        }
        let hosts: Vec<Ranks> = by_name.into_iter().map(|(_, ranks)| ranks.into_iter().collect()).collect();
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
    outbox: Vec<(i32, Message)>,
    /// The word of our last question, and the answers to it by who has sent them.
    word: String,
    answers: Vec<(i32, Vec<Group>)>,
    /// Who else has asked what, and when.
    heard: Vec<(Kind, i32, f64)>,
}

impl Mail {
    /// Asks the other hosts. A later question makes an earlier one void.
    pub fn ask(&mut self, word: &str) {
        word.clone_into(&mut self.word);
        self.answers.clear();
        let question = |ranks: &Ranks| Some((ranks.first()?, Message::Question { word: word.into() }));
        self.outbox.extend(self.hosts.others().filter_map(question));
    }

    /// Asks those hosts again that have not answered: their second rank, since the first may be gone.
    pub fn ask_again(&mut self) {
        let answered = |ranks: &Ranks| self.answers.iter().any(|(from, _)| ranks.contains(*from));
        let second =
            self.hosts.others().filter(|ranks| !answered(ranks)).filter_map(|ranks| ranks.iter().nth(1));
        let question = |rank: i32| (rank, Message::Question { word: self.word.clone() });
        let questions: Vec<_> = second.map(question).collect();
        self.outbox.extend(questions);
    }

    /// What there is to be sent, and to whom.
    pub fn sent(&mut self) -> Vec<(i32, Message)> {
        std::mem::take(&mut self.outbox)
    }

    /// A message has arrived; the word to be answered, if it is a question.
    pub fn take_in(&mut self, from: i32, message: Message, now: f64) -> Option<String> {
        match message {
            Message::Question { word } => {
                let kind = Kind::of(&word)?;
                self.heard.retain(|(other, ..)| *other != kind);
                self.heard.push((kind, from, now));
                Some(word)
            }
            Message::Answer { word, groups } => {
                if self.word == word && !self.answers.iter().any(|(other, _)| *other == from) {
                    self.answers.push((from, groups));
                }
                None
            }
        }
    }

    pub fn answer(&mut self, to: i32, word: String, groups: Vec<Group>) {
        self.outbox.push((to, Message::Answer { word, groups }));
    }

    /// The answers so far, and whether all hosts have answered.
    pub fn answers(&self, word: &str) -> (Vec<Group>, bool) {
        if self.word != word {
            return (Vec::new(), false);
        }
        let groups = self.answers.iter().flat_map(|(_, groups)| groups.iter().cloned()).collect();
        (groups, self.answers.len() >= self.hosts.others().count())
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
        let group = |members: &str, state: &str| Group {
            members: Ranks::parse(members).unwrap(),
            state: state.into(),
            seconds: 1.5,
        };
        let groups = vec![group("0-127", "in barrier #1"), group("128", "other\t-\nwait\t3")];
        for message in [
            Message::Question { word: "hung-3-17".into() },
            Message::Answer { word: "waits-3-17".into(), groups: groups.clone() },
            Message::Answer { word: "waits-3-17".into(), groups: Vec::new() },
        ] {
            assert_eq!(Message::decode(&message.encode()), Some(message));
        }
        let long = vec![group("0", &"x".repeat(LARGEST)), groups[0].clone()];
        let Some(Message::Answer { groups, .. }) =
            Message::decode(&Message::Answer { word: "w".into(), groups: long }.encode())
        else {
            panic!("no answer")
        };
        assert_eq!(groups.len(), 1, "what has no room is left out");
        for broken in [[].as_slice(), b"x", b"=w\x1e1-2", &[b'?', 0xff]] {
            assert_eq!(Message::decode(broken), None);
        }
    }

    #[test]
    fn hosts_are_known_by_their_lowest_ranks() {
        let hosts = Hosts::new(&[7, 7, 9, 7, 9], 3);
        assert_eq!((hosts.place(), hosts.own().unwrap().to_string()), ((0, 2), "0-1,3".into()));
        let mut mail = Mail { hosts, ..Mail::default() };
        mail.ask("waits-3-1");
        mail.ask_again();
        let to: Vec<i32> = mail.sent().into_iter().map(|(to, _)| to).collect();
        assert_eq!(to, [2, 4]);
    }
}
