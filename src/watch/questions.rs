//! How a rank asks those of its host what they do, and says what it has found out, by files.
//!
//! | file | written | says |
//! | --- | --- | --- |
//! | `ask` | when a rank wants a report | a word that answers repeat |
//! | `rank3.state` | as an answer | what the rank is doing |
//! | `rank3.json` | as an answer | all that its recorder has |
//! | `reporter` | for a report | which rank reports |
//! | `told`, `shown` | after a line about a long wait, or a report that was asked for | which rank said it |
//! | `ending` | before a rank ends the job | that it has said why |

use std::io;
use std::time::{Duration, SystemTime};

use super::peers::{Peers, file};

/// What a rank answers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    /// Seconds for which it has been doing that.
    pub seconds: f64,
    pub state: String,
    /// Marks of what is under way there (see `waits::mark`).
    pub marks: String,
    /// Its last operations, a line each.
    pub last: String,
}

/// What somebody wants to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// What ranks wait for, as far as they have said so by themselves.
    Waits,
    /// What they do, for a line.
    Line,
    /// The same, for a report, with dumps.
    Report,
    /// For a report that ends the job.
    Hung,
}

impl Kind {
    pub const ALL: [(Self, &'static str); 4] =
        [(Self::Waits, "waits"), (Self::Line, "line"), (Self::Report, "report"), (Self::Hung, "hung")];

    /// What is asked for with a word.
    pub fn of(word: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, name)| word.split('-').next() == Some(name)).map(|(kind, _)| *kind)
    }

    /// A word for a question of this rank, that no other question has.
    pub fn word(self, rank: i32) -> String {
        let name = Self::ALL.iter().find(|(kind, _)| *kind == self).map_or("", |(_, name)| name);
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        format!("{name}-{rank}-{}", now.as_nanos())
    }

    pub fn leaves_dumps(self) -> bool {
        matches!(self, Self::Report | Self::Hung)
    }
}

impl Peers {
    /// Asks the ranks of this folder what they do; answers repeat the word.
    pub fn ask(&self, word: &str) -> io::Result<()> {
        self.write("ask", word)?;
        self.look();
        self.here().iter().filter(|&rank| rank != self.rank).for_each(|rank| self.ring(rank));
        Ok(())
    }

    /// The word of the last question.
    pub fn asked(&self) -> Option<String> {
        self.listed("ask")
    }

    pub fn answer(&self, word: &str, answer: &Answer, dump: Option<&str>) -> io::Result<()> {
        if let Some(dump) = dump {
            self.write(&file(self.rank, "json"), dump)?;
        }
        let Answer { seconds, state, marks, last } = answer;
        self.write(&file(self.rank, "state"), &format!("{word}\n{seconds:.3}\n{state}\n{marks}\n{last}"))
    }

    pub fn answer_of(&self, rank: i32, word: &str) -> Option<Answer> {
        let (answered, answer) = self.last_answer(rank)?;
        (answered == word).then_some(answer)
    }

    /// The last answer of a rank, and the word of the question.
    pub fn last_answer(&self, rank: i32) -> Option<(String, Answer)> {
        let text = self.listed(&file(rank, "state"))?;
        let mut lines = text.splitn(5, '\n');
        let mut next = || lines.next().map(str::to_owned);
        let (word, seconds) = (next()?, next()?.parse().ok()?);
        Some((word, Answer { seconds, state: next()?, marks: next()?, last: next()? }))
    }

    /// Makes this rank the one that reports; another one's rank if that was faster.
    pub fn become_reporter(&self) -> Result<(), i32> {
        let Ok(folder) = &self.folder else { return Ok(()) };
        for _ in 0..2 {
            match folder.create("reporter", &self.rank.to_string()) {
                Ok(()) => return Ok(()),
                Err(_) if self.read("reporter").is_none() => folder.remove("reporter"), // an earlier job's
                Err(_) => break,
            }
        }
        // The winner may have created the file without having written to it.
        std::thread::sleep(Duration::from_millis(20));
        match self.read("reporter").and_then(|text| text.parse().ok()) {
            Some(rank) if rank != self.rank => Err(rank),
            _ => Ok(()),
        }
    }

    pub fn resign_as_reporter(&self) {
        self.remove("reporter");
    }

    /// What one rank says for all is out: a line about a long wait (`told`), or a report that was asked for (`shown`).
    pub fn tell(&self, what: &str) {
        let _ = self.write(what, &self.rank.to_string());
    }

    /// Which rank has said that last, and how long ago.
    pub fn told(&self, what: &str) -> Option<(i32, Duration)> {
        let (text, written) = self.folder.as_ref().ok()?.read(what)?;
        let ago = written.elapsed().ok().filter(|_| written >= self.since)?;
        Some((text.parse().ok()?, ago))
    }

    /// The job is about to be ended, by this rank, which has said why. Files that are not needed to find that out go.
    pub fn end(&self) {
        let has_dump = self.folder.as_ref().is_ok_and(|folder| folder.has(&file(self.rank, "json")));
        if has_dump {
            let _ = self.write("ending", "");
        } else {
            self.clean();
        }
    }

    /// Whether a rank has ended the job.
    pub fn is_ending(&self) -> bool {
        self.broken().is_none() && (!self.is_under_way() || self.read("ending").is_some())
    }
}
