//! Where Python is, as its faulthandler writes.

use std::fmt;

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

/// What JAX does on the user's behalf, by the file of its that is at work.
pub const ACTIVITIES: [(&str, &str); 3] = [
    ("/jax/_src/compiler.py", "JAX compiles"),
    ("/jax/_src/interpreters/mlir.py", "JAX lowers"),
    ("/jax/_src/interpreters/partial_eval.py", "JAX traces"),
];

/// Of these, the one that is nearest to what runs now.
pub fn activity(frames: &[Frame]) -> Option<&'static str> {
    let of = |frame: &Frame| ACTIVITIES.iter().find(|(file, _)| frame.file.ends_with(file));
    frames.iter().find_map(of).map(|(_, words)| *words)
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
    fn frames_are_found() {
        let text = "Stack (most recent call first):\n  File \"/x/pool.py\", line 3 in wait\n\
                    Stack (most recent call first):\n  File \"/v/site-packages/jax/api.py\", line 9 in f\n  \
                    File \"/home/me/solver.py\", line 97 in step\n  File \"/home/me/solver.py\", line 120 in <module>\n";
        let frames = python_frames(text);
        assert_eq!(frames.len(), 3);
        let user = user_frame(&frames).unwrap();
        assert_eq!((user.line, &*user.function), (97, "step"));
        assert_eq!(user_frame(&[]), None);
        assert_eq!(activity(&frames), None);
        let frame = |file: &str| Frame { file: file.into(), line: 1, function: "f".into() };
        let stack = ["a.py", "/v/jax/_src/compiler.py", "/v/jax/_src/interpreters/mlir.py"].map(frame);
        assert_eq!(activity(&stack), Some("JAX compiles"));
    }
}
