//! The status of this rank, which it publishes to the ranks of its host.

use std::sync::Mutex;

use super::dump::dump;
use super::python::{self, OtherThreads, Python};
use super::report;
use super::traffic::Traffic;
use super::waits::{self, Waits};
use crate::comm::origin;
use crate::record::clock;
use crate::record::recorder::{self, Record, RecordState};
use crate::sync::lock;
use crate::watch::job::host::HostFolder;
use crate::watch::job::mail::{Question, QuestionKind};
use crate::watch::job::status::{Life, RankStatus};

/// How many of its last operations a rank publishes.
const LAST: usize = 8;
/// For how long an operation waits before it is published, in seconds.
const PUBLISH_AFTER: f64 = 1.0;

/// The state of this rank: its waits, and the status that was published last.
#[derive(Default)]
pub struct ThisRank {
    pub waits: Waits,
    other_threads: OtherThreads,
    traffic: Traffic,
    published: Option<RankStatus>,
    /// The time of the last question that it has answered.
    answered: u64,
    /// Why it could not publish its status, if so.
    pub trouble: Option<String>,
}

impl ThisRank {
    pub fn published(&self) -> Option<&RankStatus> {
        self.published.as_ref()
    }

    /// Publishes the status of this rank, if it waits or there is a question. True if its waits have changed.
    pub fn publish(&mut self, host: &HostFolder, question: Option<Question>, now: f64) -> bool {
        let moves = !self.waits.is_empty() && self.traffic.moves(now);
        if self.waits.is_empty() {
            self.traffic.forget();
        }
        let question = question.filter(|question| question.time > self.answered);
        let is_current = |before: &RankStatus| before.waits.is_empty() && before.life == life();
        let is_due = self.published.as_ref().is_some_and(|before| !is_current(before));
        if question.is_none() && !is_due && self.waits.longest() < PUBLISH_AFTER {
            return false;
        }
        let python = python::python();
        let other = self.other_threads.find(&python, self.waits.threads(), now);
        let mut status = RankStatus { moves, ..status(&self.waits, &python, other) };
        if let Some(question) = &question {
            self.answered = question.time;
            if question.kind != QuestionKind::Status {
                let dump = dump(host, question.kind, &report::doing(&status), python.main());
                self.note(host.dump(&dump));
            }
        }
        status.answered = self.answered;
        let is_news = self.published.as_ref().is_none_or(|before| status.is_news(before));
        if is_news {
            self.note(publish(host, &status));
        }
        self.published = Some(RankStatus { process: host.process.name(), ..status });
        // The leader polls for answers, and notices by itself that a wait has ended.
        is_news && question.is_none() && !self.waits.is_empty()
    }

    /// Remembers an error.
    fn note(&mut self, result: std::io::Result<()>) {
        if let Err(error) = result {
            self.trouble = Some(error.to_string());
        }
    }
}

/// Publishes a status, unless this rank has finished and the status is older.
pub fn publish(host: &HostFolder, status: &RankStatus) -> std::io::Result<()> {
    static PUBLISHING: Mutex<()> = Mutex::new(());
    let _publishing = lock(&PUBLISHING);
    if status.life == life() { host.publish(status) } else { Ok(()) }
}

/// How far this rank has come.
fn life() -> Life {
    match (waits::has_ended(), waits::has_finished()) {
        (_, true) => Life::Finished,
        (true, _) => Life::Ends,
        _ => Life::Runs,
    }
}

/// "1.2 s", "3.4 ms", "5.6 us"
fn time(seconds: f64) -> String {
    match seconds {
        1e-1.. => format!("{seconds:.1} s"),
        1e-3.. => format!("{:.1} ms", 1e3 * seconds),
        _ => format!("{:.1} us", 1e6 * seconds),
    }
}

fn last_operations(records: &[Record]) -> Vec<String> {
    let line = |record: &Record| {
        let seconds = record.seconds();
        match record.state {
            RecordState::Started => format!("{record}: for {}", time(seconds)),
            RecordState::Failed => format!("{record}: failed after {}", time(seconds)),
            RecordState::Done => {
                let ago = time(clock::seconds_since(record.ended));
                format!("{record}: took {}, ended {ago} ago", time(seconds))
            }
        }
    };
    match records {
        [] => vec!["none".into()],
        _ => records[records.len().saturating_sub(LAST)..].iter().map(line).collect(),
    }
}

/// The status of this rank, with its waits, and with a thread that could go on meanwhile.
pub fn status(waits: &Waits, python: &Python, other: Option<String>) -> RankStatus {
    let records = recorder::records();
    let at = python::user_frame(python.main()).map_or_else(String::new, |frame| frame.to_string());
    let last = records.last();
    let before = match last {
        Some(record) if record.state == RecordState::Failed => format!("; the last one, {record}, failed"),
        Some(record) => format!("; the last one was {record}"),
        None => "; it has called no operation".into(),
    };
    let activity = match python {
        Python::Silent => python::IN_C,
        _ => python::activity(python.main()).unwrap_or_default(),
    };
    RankStatus {
        life: life(),
        other,
        waits: waits.list().to_vec(),
        started: waits::started(),
        counts: waits::counts(),
        copies: origin::copies(),
        seconds: last.map_or(0.0, |record| clock::seconds_since(record.ended)),
        before,
        activity: activity.into(),
        python: at,
        last: last_operations(&records),
        ..RankStatus::default()
    }
}

/// The same without asking Python, whose lock this thread may hold.
pub fn status_now(size: i32) -> RankStatus {
    let mut waits = Waits::default();
    waits.update(0.0, &waits::current_limit(f64::INFINITY), size);
    status(&waits, &Python::Nothing, Some("threads that were not examined".into()))
}
