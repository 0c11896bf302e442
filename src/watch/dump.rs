//! The state of this process as JSON, for `python -m mpi4jax.report`.

use std::fmt::{self, Write};

use super::clock::Epoch;
use super::recorder::{self, Group, Record};

/// A line of Python that a thread is at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    pub file: String,
    pub line: u32,
    pub function: String,
}

impl fmt::Display for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{} in {}", self.file, self.line, self.function)
    }
}

/// What a dump says besides what the recorder knows.
pub struct Header<'a> {
    pub rank: i32,
    pub size: i32,
    pub host: &'a str,
    /// Why it was written.
    pub reason: &'a str,
    /// What this rank is doing, in words.
    pub state: &'a str,
    /// The main thread's Python frames, the innermost first.
    pub python: &'a [Frame],
}

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

fn list<T>(items: impl IntoIterator<Item = T>, item: impl Fn(T) -> String) -> String {
    items.into_iter().map(item).collect::<Vec<_>>().join(",\n  ")
}

fn group(group: &Group) -> String {
    let comm = group.comm;
    format!(
        "{{\"key\": {}, \"rank\": {}, \"size\": {}, \"world\": {:?}, \"collectives\": {}}}",
        quoted(&comm.key),
        comm.rank,
        comm.size,
        group.world,
        group.collectives()
    )
}

/// One operation, also of a timeline.
pub fn record(record: &Record, groups: &[&'static Group], epoch: &Epoch) -> String {
    let what = record.what;
    let comm = groups.iter().position(|group| std::ptr::eq(*group, what.group)).unwrap_or(0);
    let or_null = |text: Option<String>| text.map_or("null".into(), |text| quoted(&text));
    format!(
        "{{\"op\": {}, \"comm\": {comm}, \"sequence\": {}, \"collective\": {}, \"reduction\": {}, \
         \"dtype\": {}, \"count\": {}, \"root\": {}, \"source\": {}, \"recvtag\": {}, \"dest\": {}, \
         \"sendtag\": {}, \"site\": {}, \"transport\": {}, \"state\": {}, \"started\": {:.6}, \
         \"seconds\": {:.9}, \"text\": {}}}",
        quoted(what.op.name()),
        record.sequence,
        what.is_collective(),
        or_null(what.reduction.map(|reduction| reduction.to_string())),
        or_null(record.dtype.map(|dtype| dtype.name().to_owned())),
        record.count,
        what.root,
        record.source,
        record.recvtag,
        record.dest,
        record.sendtag,
        quoted(&what.location),
        quoted(what.transport),
        quoted(record.state.name()),
        epoch.unix(record.started),
        record.seconds(epoch),
        quoted(&record.to_string()),
    )
}

/// The whole dump.
pub fn json(header: &Header) -> String {
    let epoch = Epoch::now();
    let groups = recorder::groups();
    let frame = |frame: &Frame| {
        format!(
            "{{\"file\": {}, \"line\": {}, \"function\": {}}}",
            quoted(&frame.file),
            frame.line,
            quoted(&frame.function)
        )
    };
    format!(
        "{{\"version\": 1, \"rank\": {}, \"size\": {}, \"host\": {}, \"pid\": {}, \"time\": {:.6},\n\
         \"reason\": {}, \"state\": {},\n\"python\": [{}],\n\"communicators\": [{}],\n\"records\": [\n  {}]}}\n",
        header.rank,
        header.size,
        quoted(header.host),
        std::process::id(),
        epoch.unix(super::clock::ticks()),
        quoted(header.reason),
        quoted(header.state),
        list(header.python, frame),
        list(&groups, |g| group(g)),
        list(&recorder::records(), |r| record(r, &groups, &epoch)),
    )
}

/// A thread's frames in what Python's faulthandler has written; of several blocks, the last one.
pub fn python_frames(text: &str) -> Vec<Frame> {
    let mut frames = Vec::new();
    for line in text.lines() {
        if line.ends_with("(most recent call first):") {
            frames.clear();
        } else if let Some(frame) = python_frame(line) {
            frames.push(frame);
        }
    }
    frames
}

/// `  File "/home/me/solver.py", line 97 in step`
fn python_frame(line: &str) -> Option<Frame> {
    let (file, rest) = line.trim_start().strip_prefix("File \"")?.rsplit_once("\", line ")?;
    let (line, function) = rest.split_once(" in ")?;
    Some(Frame { file: file.into(), line: line.parse().ok()?, function: function.into() })
}

/// The frame that the user wrote: the innermost one outside of installed packages.
pub fn user_frame(frames: &[Frame]) -> Option<&Frame> {
    let foreign = ["/site-packages/", "/dist-packages/", "/mpi4jax/", "/lib/python", "<frozen "];
    frames.iter().find(|frame| !foreign.iter().any(|part| frame.file.contains(part))).or(frames.first())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_quoted() {
        assert_eq!(quoted("a\"b\\c\nd"), r#""a\"b\\c\u000ad""#);
    }

    #[test]
    fn frames_are_found() {
        let text = "Stack (most recent call first):\n  File \"/x/pool.py\", line 3 in wait\n\
                    Stack (most recent call first):\n  File \"/v/site-packages/jax/api.py\", line 9 in f\n  \
                    File \"/home/me/solver.py\", line 97 in step\n  File \"/home/me/solver.py\", line 120 in <module>\n";
        let frames = python_frames(text);
        assert_eq!(frames.len(), 3);
        let user = user_frame(&frames).unwrap();
        assert_eq!((user.line, &*user.function), (97, "step"));
        assert_eq!(user_frame(&[]), None);
    }
}
