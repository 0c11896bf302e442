//! What a rank asks the others through MPI, and what it has heard of them. Nothing here waits, or knows how messages travel.
//!
//! A question holds a word, an answer the same word and a line. Who asks has a question and an answer for each other
//! rank; all others have one of each.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::questions::{Answer, wants_dumps};

/// Bytes of a message at most: less than every MPI's eager limit.
const LARGEST: usize = 1024;

#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    /// Asks for the receiver's state; `hung` if the sender is going to report that an operation hangs.
    Question {
        word: String,
        hung: bool,
    },
    Answer {
        word: String,
        answer: Answer,
    },
}

impl Message {
    pub fn encode(&self) -> Vec<u8> {
        let (kind, seconds, word, state) = match self {
            Self::Question { word, hung } => (u8::from(*hung), 0.0, word, ""),
            Self::Answer { word, answer } => (2, answer.seconds, word, &*answer.state),
        };
        let mut bytes = vec![kind, word.len().min(255) as u8];
        bytes.extend(f64::to_le_bytes(seconds));
        bytes.extend(&word.as_bytes()[..word.len().min(255)]);
        let room = LARGEST - bytes.len();
        let end = (0..=room.min(state.len())).rev().find(|&end| state.is_char_boundary(end));
        bytes.extend(&state.as_bytes()[..end.unwrap_or(0)]);
        bytes
    }

    /// `None` for what no [`encode`](Self::encode) has made.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (&[kind, length], rest) = bytes.split_first_chunk()?;
        let (seconds, rest) = rest.split_first_chunk()?;
        let (word, state) = rest.split_at_checked(length.into())?;
        let word = String::from_utf8(word.into()).ok()?;
        match kind {
            0 | 1 => Some(Self::Question { word, hung: kind == 1 }),
            2 => {
                let seconds = f64::from_le_bytes(*seconds);
                let state = String::from_utf8(state.into()).ok()?;
                Some(Self::Answer { word, answer: Answer { seconds, state } })
            }
            _ => None,
        }
    }
}

/// For how long a rank lets lower ones speak first, the last one for `longest`: else, of ten thousand that begin to wait
/// together, hundreds would ask all others.
pub fn turn(rank: i32, size: i32, longest: Duration) -> Duration {
    longest * rank as u32 / size as u32
}

#[derive(Default)]
pub struct Desk {
    outbox: Vec<(i32, Message)>,
    /// The word of our last question, and the answers to it by rank.
    word: String,
    answers: HashMap<i32, Answer>,
    /// Who else is going to report that an operation hangs, and when it asked.
    reporter: Option<(i32, Instant)>,
    /// Who else has asked for a line about a long wait, and when.
    teller: Option<(i32, Instant)>,
}

fn recent(who: Option<(i32, Instant)>, within: Duration, now: Instant) -> Option<i32> {
    who.filter(|(_, at)| now.duration_since(*at) < within).map(|(rank, _)| rank)
}

impl Desk {
    /// Asks all ranks for their state. A later question makes an earlier one void.
    pub fn ask(&mut self, word: &str, hung: bool, rank: i32, size: i32) {
        word.clone_into(&mut self.word);
        self.answers.clear();
        let others = (0..size).filter(|&other| other != rank);
        self.outbox.extend(others.map(|other| (other, Message::Question { word: word.into(), hung })));
    }

    /// What there is to be sent, and to whom.
    pub fn sent(&mut self) -> Vec<(i32, Message)> {
        std::mem::take(&mut self.outbox)
    }

    /// A message has arrived; the word to be answered, if it is a question.
    pub fn take_in(&mut self, from: i32, message: Message, now: Instant) -> Option<String> {
        match message {
            Message::Question { word, hung } => {
                if hung {
                    self.reporter = Some((from, now));
                } else if !wants_dumps(&word) {
                    self.teller = Some((from, now));
                }
                Some(word)
            }
            Message::Answer { word, answer } => {
                if self.word == word {
                    self.answers.insert(from, answer);
                }
                None
            }
        }
    }

    pub fn answer_of(&self, rank: i32, word: &str) -> Option<Answer> {
        if self.word == word { self.answers.get(&rank).cloned() } else { None }
    }

    /// Another rank that has begun to report, in this time, that an operation hangs.
    pub fn reporter(&self, within: Duration, now: Instant) -> Option<i32> {
        recent(self.reporter, within, now)
    }

    /// Another rank that has begun to say, in this time, what it waits for.
    pub fn teller(&self, within: Duration, now: Instant) -> Option<i32> {
        recent(self.teller, within, now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(state: &str) -> Message {
        Message::Answer { word: "3-17".into(), answer: Answer { seconds: 1.5, state: state.into() } }
    }

    #[test]
    fn messages_arrive_as_they_were_sent() {
        let question = |hung| Message::Question { word: "3-17".into(), hung };
        for message in [question(false), question(true), answer("in barrier #1"), answer("")] {
            assert_eq!(Message::decode(&message.encode()), Some(message));
        }
    }

    #[test]
    fn long_states_are_cut_between_characters() {
        for filler in ["", "x", "xx"] {
            let message = answer(&format!("{filler}{}", "é".repeat(LARGEST)));
            let bytes = message.encode();
            assert!(bytes.len() <= LARGEST);
            let Some(Message::Answer { answer, .. }) = Message::decode(&bytes) else { panic!("no answer") };
            assert!(answer.state.len() > LARGEST - 20);
        }
    }

    #[test]
    fn bytes_of_another_making_are_no_message() {
        let whole = answer("in barrier #1").encode();
        assert_eq!(Message::decode(&[]), None);
        assert_eq!(Message::decode(&whole[..12]), None);
        assert_eq!(Message::decode(&[3; 40]), None);
        assert_eq!(Message::decode(&[[2, 0].as_slice(), &[0; 8], &[0xff]].concat()), None);
    }

    // ---- Ten thousand ranks on a hundred hosts, as states

    const PERIOD: Duration = Duration::from_millis(50);

    /// Ranks that all begin to wait at once: what becomes of their questions, with a message's way taking a period.
    struct Job {
        desks: Vec<Desk>,
        per_host: i32,
        start: Instant,
        now: Instant,
        under_way: Vec<(i32, i32, Message)>,
        /// Messages that each rank has sent.
        sent: Vec<usize>,
        gone: Vec<bool>,
        /// A host that nothing reaches, and how many of so many messages get lost elsewhere.
        cut_off: Option<i32>,
        lost: u64,
        random: u64,
    }

    impl Job {
        fn new(hosts: i32, per_host: i32) -> Self {
            let (size, now) = ((hosts * per_host) as usize, Instant::now());
            Self {
                desks: (0..size).map(|_| Desk::default()).collect(),
                per_host,
                start: now,
                now,
                under_way: Vec::new(),
                sent: vec![0; size],
                gone: vec![false; size],
                cut_off: None,
                lost: 0,
                random: 1,
            }
        }

        fn size(&self) -> i32 {
            self.desks.len() as i32
        }

        fn arrives(&mut self, from: i32, to: i32) -> bool {
            let hosts = [from, to].map(|rank| rank / self.per_host);
            let is_cut = hosts[0] != hosts[1] && hosts.iter().any(|host| Some(*host) == self.cut_off);
            self.random = self.random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            !is_cut && !self.gone[to as usize] && (self.random >> 33) % 100 >= self.lost
        }

        /// A period passes: messages arrive, are answered, and leave.
        fn step(&mut self) {
            self.now += PERIOD;
            for (from, to, message) in std::mem::take(&mut self.under_way) {
                if self.arrives(from, to)
                    && let Some(word) = self.desks[to as usize].take_in(from, message, self.now)
                {
                    let answer = Answer { seconds: 1.0, state: format!("in allreduce #{}", 7 + to % 2) };
                    self.sent[to as usize] += 1;
                    self.under_way.push((to, from, Message::Answer { word, answer }));
                }
            }
            for from in 0..self.size() {
                for (to, message) in self.desks[from as usize].sent() {
                    self.sent[from as usize] += 1;
                    self.under_way.push((from, to, message));
                }
            }
        }

        /// All ranks come to the end of their patience. Of a host, the first whose turn it is speaks, if it has not
        /// heard of another one. Returns who asked, and how many answers each of them has after the grace of a report.
        fn report(&mut self, hung: bool, longest: Duration, grace: Duration) -> Vec<(i32, usize)> {
            let word = |rank| format!("{}{rank}-1", if hung { "" } else { "brief-" });
            let (size, mut asked) = (self.size(), Vec::new());
            let mut spoken = vec![false; (size / self.per_host) as usize];
            let mut next = 0;
            while self.now < self.start + longest + grace {
                while next < size && self.start + turn(next, size, longest) <= self.now {
                    let (rank, host) = (next, &mut spoken[(next / self.per_host) as usize]);
                    next += 1;
                    let desk = &mut self.desks[rank as usize];
                    let others =
                        if hung { desk.reporter(grace, self.now) } else { desk.teller(grace, self.now) };
                    if !self.gone[rank as usize] && !*host && others.is_none() {
                        *host = true;
                        desk.ask(&word(rank), hung, rank, size);
                        asked.push(rank);
                    }
                }
                self.step();
            }
            let answers = |&rank: &i32| {
                let desk = &self.desks[rank as usize];
                (rank, (0..size).filter(|&other| desk.answer_of(other, &word(rank)).is_some()).count())
            };
            asked.iter().map(answers).collect()
        }
    }

    const GRACE: Duration = Duration::from_secs(6);

    #[test]
    fn few_of_ten_thousand_ask_all_others() {
        for (hosts, hung) in [(10, true), (100, false), (100, true)] {
            let mut job = Job::new(hosts, 100);
            let asked = job.report(hung, Duration::from_secs(if hung { 1 } else { 5 }), GRACE);
            // Those whose turn comes before the first question has arrived.
            assert!(asked.len() <= if hung { 12 } else { 3 }, "{asked:?}");
            assert!(asked.iter().all(|(_, answers)| *answers == job.desks.len() - 1), "{asked:?}");
            let others = (0..job.size()).filter(|rank| !asked.iter().any(|(asker, _)| asker == rank));
            // An answer to each of them: as many for a thousand ranks as for ten thousand.
            assert!(others.map(|rank| job.sent[rank as usize]).all(|sent| sent == asked.len()));
        }
    }

    #[test]
    fn a_rank_that_is_gone_is_silent_and_another_speaks() {
        let mut job = Job::new(100, 100);
        job.gone[0] = true;
        let asked = job.report(true, Duration::from_secs(1), GRACE);
        assert_eq!(asked[0], (1, job.desks.len() - 2));
    }

    #[test]
    fn on_both_sides_of_a_cut_somebody_speaks() {
        let mut job = Job::new(100, 100);
        job.cut_off = Some(99);
        let asked = job.report(true, Duration::from_secs(1), GRACE);
        let (alone, others): (Vec<_>, Vec<_>) = asked.into_iter().partition(|(rank, _)| *rank >= 9900);
        assert_eq!(alone, [(9900, 99)]);
        assert!(others.iter().all(|(_, answers)| *answers == 9899), "{others:?}");
    }

    /// A question or an answer that is lost makes a silent rank; that nobody has heard of another one makes one speaker
    /// for each host, and no more.
    #[test]
    fn a_network_that_loses_messages_does_not_end_reports() {
        let mut job = Job::new(100, 100);
        job.lost = 20;
        let asked = job.report(true, Duration::from_secs(1), GRACE);
        assert!((1..=100).contains(&asked.len()), "{}", asked.len());
        assert!(asked.iter().all(|(_, answers)| (5000..7500).contains(answers)), "{asked:?}");
        let total: usize = job.sent.iter().sum();
        assert!(total <= 2 * asked.len() * job.desks.len(), "{total}");
    }
}
