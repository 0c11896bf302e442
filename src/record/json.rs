//! Records as JSON, for `python -m mpi4jax.report` and `.timeline`.

use std::fmt::Write;

use super::clock::Epoch;
use super::recorder::Record;
use crate::call::Phase;

/// A JSON string.
pub fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            c if c < ' ' => drop(write!(out, "\\u{:04x}", c as u32)),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

fn or_null(text: Option<String>) -> String {
    text.map_or("null".into(), |text| quoted(&text))
}

/// One operation; `comm` is the index of its communicator in the same file.
pub fn record(record: &Record, comm: usize, epoch: &Epoch) -> String {
    let info = &record.info;
    format!(
        "{{\"op\": {}, \"comm\": {comm}, \"sequence\": {}, \"collective\": {}, \"reduction\": {}, \
         \"dtype\": {}, \"count\": {}, \"any_size\": {}, \"root\": {}, \"source\": {}, \"recvtag\": {}, \"dest\": {}, \
         \"sendtag\": {}, \"site\": {}, \"transport\": {}, \"state\": {}, \"started\": {:.6}, \
         \"seconds\": {:.9}, \"text\": {}}}",
        quoted(info.name()),
        record.sequence,
        info.op.row().is_collective() && info.phase != Phase::Wait,
        or_null(info.reduction.map(|reduction| reduction.to_string())),
        or_null(record.dtype.map(|dtype| dtype.name().to_owned())),
        record.count,
        info.op.row().has_any_size(),
        if info.op.row().has_root { info.root } else { -1 },
        record.source,
        record.recvtag,
        record.dest,
        record.sendtag,
        quoted(&info.location),
        quoted(info.transport),
        quoted(record.state.name()),
        epoch.unix(record.started),
        record.seconds(epoch),
        quoted(&record.to_string()),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_quoted() {
        assert_eq!(quoted("a\"b\\c\nd"), r#""a\"b\\c\u000ad""#);
    }
}
