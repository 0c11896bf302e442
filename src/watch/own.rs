//! What this rank says of itself.

use super::python::{self, Python};
use super::waits::{self, Waits};
use crate::comm::origin;
use crate::job::status::{Life, RankStatus};
use crate::record::clock::Epoch;
use crate::record::recorder::{self, Record, State};

/// How many of its last operations a rank tells.
const LAST: usize = 8;

/// "1.2 s", "3.4 ms", "5.6 us"
fn time(seconds: f64) -> String {
    match seconds {
        1e-1.. => format!("{seconds:.1} s"),
        1e-3.. => format!("{:.1} ms", 1e3 * seconds),
        _ => format!("{:.1} us", 1e6 * seconds),
    }
}

fn last_operations(records: &[Record], epoch: &Epoch) -> Vec<String> {
    let line = |record: &Record| {
        let seconds = record.seconds(epoch);
        match record.state {
            State::Started => format!("{record}: for {}", time(seconds)),
            State::Failed => format!("{record}: failed after {}", time(seconds)),
            State::Done => {
                let ago = time(epoch.seconds_since(record.ended));
                format!("{record}: took {}, ended {ago} ago", time(seconds))
            }
        }
    };
    match records {
        [] => vec!["none".into()],
        _ => records[records.len().saturating_sub(LAST)..].iter().map(line).collect(),
    }
}

/// What this rank does, with what it waits for, and with what could go on meanwhile.
pub fn status(waits: &Waits, python: &Python, other: Option<String>) -> RankStatus {
    let (epoch, records) = (Epoch::now(), recorder::records());
    let at = python::user_frame(python.main()).map_or_else(String::new, |frame| frame.to_string());
    let life = waits::life();
    let last = records.last();
    let before = match last {
        Some(record) if record.state == State::Failed => format!("; the last one, {record}, failed"),
        Some(record) => format!("; the last one was {record}"),
        None => "; it has called no operation".into(),
    };
    let activity = match python {
        Python::Silent => python::IN_C,
        _ => python::activity(python.main()).unwrap_or_default(),
    };
    RankStatus {
        life,
        other,
        waits: waits.list(&at),
        started: waits::started(),
        counts: waits::counts(life == Life::Finished),
        copies: origin::copies(),
        seconds: last.map_or(0.0, |record| epoch.seconds_since(record.ended)),
        before,
        activity: activity.into(),
        python: at,
        last: last_operations(&records, &epoch),
        ..RankStatus::default()
    }
}

/// The same without asking Python, which this thread may hold up.
pub fn status_now(size: i32) -> RankStatus {
    let mut waits = Waits::default();
    waits.update(0.0, &waits::current_limit(f64::INFINITY), size);
    status(&waits, &Python::Nothing, Some("threads that were not examined".into()))
}
