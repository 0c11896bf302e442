//! Where Python's main thread is, and which exception it handles.
//!
//! A Python thread reads the frames: it holds Python's lock meanwhile, so that no frame changes. If C code keeps the lock, the
//! report says only that.

use std::fmt;
use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::board::slot::printable;
use crate::board::{Life, own};
use crate::sync::lock;
use crate::system::this_thread;

/// A line of Python that a thread is at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

/// In a report, in the place of Python's frames, if they cannot be read.
pub const IN_C: &str = "C code keeps Python's lock";

/// What JAX is doing, by the file of JAX's whose code runs.
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

/// For how long an answer is waited for, in steps: a pause of the whole process counts as one of them.
const STEPS: usize = 50;
const STEP: Duration = Duration::from_millis(10);
/// How many frames are told to other ranks.
const FRAMES: usize = 12;

/// Where Python is, as others read it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Place {
    pub at: String,
    pub activity: String,
    pub exception: String,
    pub frames: Vec<Frame>,
}

/// What has been asked, and answered.
#[derive(Default)]
struct Answers {
    /// At its other end a thread of Python's waits for questions.
    socket: Option<UnixStream>,
    /// The last question, and the last one that has been answered.
    asked: u64,
    answered: u64,
    /// Of the main thread, the innermost first.
    frames: Vec<Frame>,
    exception: String,
    /// The thread that has answered.
    by: i32,
}

static ANSWERS: LazyLock<Mutex<Answers>> = LazyLock::new(Mutex::default);
static ANSWERED: Condvar = Condvar::new();

fn answers() -> MutexGuard<'static, Answers> {
    lock(&ANSWERS)
}

/// A socket for a thread of Python's, which calls [`answer`] each time that there is something to read.
pub fn questions() -> io::Result<UnixStream> {
    let (ours, theirs) = UnixStream::pair()?;
    answers().socket = Some(ours);
    Ok(theirs)
}

/// Answers what has been asked so far; `look` finds out where the main thread is, and the exception that is handled.
pub fn answer(look: impl FnOnce() -> (Vec<Frame>, String)) {
    let number = answers().asked;
    let (frames, exception) = look();
    let mut answers = answers();
    (answers.answered, answers.frames, answers.exception) = (number, frames, exception);
    answers.by = this_thread();
    ANSWERED.notify_all();
}

/// The thread that answers, by the system's number.
pub fn answering_thread() -> i32 {
    answers().by
}

/// Where Python is.
pub fn place() -> Place {
    let mut answers = answers();
    if own().life() == Life::Finished {
        return Place::default();
    }
    // An older question that still waits for Python's lock is this one too.
    if answers.answered == answers.asked {
        let is_sent = answers.socket.as_mut().is_some_and(|socket| socket.write_all(b"?").is_ok());
        if !is_sent {
            return Place::default();
        }
        answers.asked += 1;
    }
    let number = answers.asked;
    for _ in 0..STEPS {
        answers = ANSWERED.wait_timeout(answers, STEP).unwrap_or_else(PoisonError::into_inner).0;
        if answers.answered >= number {
            let frames = &answers.frames;
            return Place {
                at: user_frame(frames).map_or_else(String::new, |frame| printable(&frame.to_string())),
                activity: activity(frames).unwrap_or_default().into(),
                exception: printable(&answers.exception),
                frames: frames[..frames.len().min(FRAMES)].to_vec(),
            };
        }
    }
    Place { activity: IN_C.into(), ..Place::default() }
}

/// Writes where Python is, for others.
pub fn publish() {
    static PUBLISHING: Mutex<()> = Mutex::new(());
    let mut place = place();
    let _publishing = lock(&PUBLISHING);
    let mut text = serde_json::to_string(&place).unwrap_or_default();
    while text.len() > 4096 && place.frames.pop().is_some() {
        text = serde_json::to_string(&place).unwrap_or_default();
    }
    own().python.write(&text);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_users_frame_is_the_innermost_outside_of_packages() {
        let frame = |file: &str| Frame { file: file.into(), line: 1, function: "f".into() };
        let stack = ["/v/site-packages/jax/api.py", "/home/me/solver.py", "/home/me/main.py"].map(frame);
        assert_eq!(user_frame(&stack), Some(&stack[1]));
        assert_eq!((user_frame(&[]), activity(&stack)), (None, None));
        let stack = ["a.py", "/v/jax/_src/compiler.py", "/v/jax/_src/interpreters/mlir.py"].map(frame);
        assert_eq!(activity(&stack), Some("JAX compiles"));
    }
}
