//! Where Python is, as it writes its frames.

use std::fmt;

use super::threads::Thread;

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

/// Threads and their frames: `Thread 17`, and below it its frames.
pub fn threads(text: &str) -> Vec<Thread> {
    let mut threads: Vec<Thread> = Vec::new();
    for line in text.lines() {
        if let Some(number) = line.strip_prefix("Thread ") {
            threads.push(Thread { number: number.parse().unwrap_or(0), frames: Vec::new() });
        } else if let (Some(thread), Some(frame)) = (threads.last_mut(), frame(line)) {
            thread.frames.push(frame);
        }
    }
    threads
}

/// `  File "/home/me/solver.py", line 97 in step`
fn frame(line: &str) -> Option<Frame> {
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
        let text = "Thread 17\n  File \"/v/site-packages/jax/api.py\", line 9 in f\n  \
                    File \"/home/me/solver.py\", line 97 in step\n  File \"/home/me/solver.py\", line 120 in <module>\n\
                    Thread 18\n  File \"/x/pool.py\", line 3 in wait\n";
        let threads = threads(text);
        assert_eq!([(17, 3), (18, 1)], [0, 1].map(|i| (threads[i].number, threads[i].frames.len())));
        let user = user_frame(&threads[0].frames).unwrap();
        assert_eq!((user.line, &*user.function), (97, "step"));
        assert_eq!((user_frame(&[]), activity(&threads[0].frames)), (None, None));
        let frame = |file: &str| Frame { file: file.into(), line: 1, function: "f".into() };
        let stack = ["a.py", "/v/jax/_src/compiler.py", "/v/jax/_src/interpreters/mlir.py"].map(frame);
        assert_eq!(activity(&stack), Some("JAX compiles"));
    }
}
