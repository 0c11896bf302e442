//! How a rank asks the others what they do, and says what it has found out, by files.

use std::io;
use std::time::{Duration, SystemTime};

use super::peers::{Peers, file};

/// What a rank answers.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// Seconds for which it has been doing that.
    pub seconds: f64,
    pub state: String,
}

/// A word for a question of this rank. Whether those who are asked leave a dump too is a part of it.
pub fn word(rank: i32, dumps: bool) -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    format!("{}{rank}-{}", if dumps { "" } else { BRIEF }, now.as_nanos())
}

const BRIEF: &str = "brief-";

pub fn wants_dumps(word: &str) -> bool {
    !word.starts_with(BRIEF)
}

impl Peers {
    /// Asks all ranks for their state; answers repeat the word.
    pub fn ask(&self, word: &str) -> io::Result<()> {
        self.write("ask", word)
    }

    /// The word of the last question.
    pub fn asked(&self) -> Option<String> {
        self.listed("ask")
    }

    pub fn answer(&self, word: &str, answer: &Answer, dump: Option<&str>) -> io::Result<()> {
        if let Some(dump) = dump {
            self.write(&file(self.rank, "json"), dump)?;
        }
        let line = format!("{word}\n{:.3}\n{}\n", answer.seconds, answer.state);
        self.write(&file(self.rank, "state"), &line)
    }

    /// Whether this rank has left a dump.
    pub fn has_dump(&self) -> bool {
        self.folder.as_ref().is_ok_and(|folder| folder.has(&file(self.rank, "json")))
    }

    pub fn answer_of(&self, rank: i32, word: &str) -> Option<Answer> {
        let (answered, answer) = self.last_answer(rank)?;
        (answered == word).then_some(answer)
    }

    /// The last answer of a rank, and the word of the question.
    pub fn last_answer(&self, rank: i32) -> Option<(String, Answer)> {
        let text = self.listed(&file(rank, "state"))?;
        let mut lines = text.lines();
        let word = lines.next()?.to_owned();
        Some((word, Answer { seconds: lines.next()?.parse().ok()?, state: lines.next()?.to_owned() }))
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

    /// Which rank has said that in this time.
    pub fn told(&self, what: &str, within: Duration) -> Option<i32> {
        let (text, written) = self.folder.as_ref().ok()?.read(what)?;
        let is_recent = written >= self.since && written.elapsed().is_ok_and(|ago| ago < within);
        if is_recent { text.parse().ok() } else { None }
    }

    /// The job is about to be ended, by this rank, which has said why. Files that are not needed to find that out go.
    pub fn end(&self) {
        if self.has_dump() {
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

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::peers::Status;
    use super::super::peers::tests::two;
    use super::*;

    #[test]
    fn ranks_ask_and_answer() {
        let (a, b) = two("ask");
        assert_eq!(a.broken(), None);
        let word = word(0, true);
        a.ask(&word).unwrap();
        b.look();
        assert_eq!(b.asked().as_ref(), Some(&word));
        assert_eq!(a.answer_of(1, &word), None);
        let answer = Answer { seconds: 1.5, state: "in barrier #1".into() };
        b.answer(&word, &answer, Some("{}")).unwrap();
        a.look();
        assert_eq!(a.answer_of(1, &word), Some(answer));
        assert_eq!(a.answer_of(1, "another"), None);
        assert_eq!(a.last_answer(1).unwrap().0, word);
        assert_eq!(a.become_reporter(), Ok(()));
        assert_eq!(b.become_reporter(), Err(0));
        assert!(matches!(a.status(1), Status::Silent(_)));
        assert_eq!(a.others_have_finished(), (false, true));
        b.finish();
        a.look();
        assert_eq!(a.others_have_finished(), (true, true));
        assert_eq!(a.status(1), Status::Finished);
        b.leave();
        assert!(a.directory.exists());
        let _ = fs::remove_file(a.directory.join("rank1.json"));
        a.finish();
        a.leave();
        assert!(!a.directory.exists());
        fs::remove_dir_all(a.directory.parent().unwrap().parent().unwrap()).unwrap();
    }
}
