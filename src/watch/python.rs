//! Where Python's main thread is, and which exception it handles.
//!
//! A rank is asked by a number in its slot, and its watchdog wakes a Python thread, which writes the answer into the slot. This
//! thread holds Python's lock while it reads the frames, so that no frame changes. If C code keeps the lock, the report says only
//! that.

use std::fmt;
use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::board::words::printable;
use crate::board::{Life, Slot, board, own};
use crate::sync::lock;
use crate::system::{signal, this_thread};

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

/// A report says this if Python's frames cannot be read.
pub const IN_C: &str = "C code keeps Python's lock";

/// What JAX is doing, by the file of JAX's whose code runs.
pub const ACTIVITIES: [(&str, &str); 3] = [
    ("/jax/_src/compiler.py", "JAX compiles"),
    ("/jax/_src/interpreters/mlir.py", "JAX lowers"),
    ("/jax/_src/interpreters/partial_eval.py", "JAX traces"),
];

/// The activity of the innermost frame that has one.
pub fn activity(frames: &[Frame]) -> Option<&'static str> {
    let of = |frame: &Frame| ACTIVITIES.iter().find(|(file, _)| frame.file.ends_with(file));
    frames.iter().find_map(of).map(|(_, words)| *words)
}

/// The frame that the user wrote: the innermost one outside of installed packages.
pub fn user_frame(frames: &[Frame]) -> Option<&Frame> {
    let foreign = ["/site-packages/", "/dist-packages/", "/mpi4jax/", "/lib/python", "<frozen "];
    frames.iter().find(|frame| !foreign.iter().any(|part| frame.file.contains(part))).or(frames.first())
}

/// For how long an answer is waited for.
pub const PATIENCE: Duration = Duration::from_millis(1500);
/// How many frames are told to other ranks, and the most bytes of what is told.
const FRAMES: usize = 12;
const BYTES: usize = 4096;

/// Where Python is, as others read it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Place {
    pub at: String,
    pub activity: String,
    pub exception: String,
    pub frames: Vec<Frame>,
}

/// A Python thread waits for questions at the other end.
static SOCKET: Mutex<Option<UnixStream>> = Mutex::new(None);
/// The number that the system gives this thread.
static ANSWERS: AtomicI32 = AtomicI32::new(0);

/// A socket for a thread of Python's, which calls [`answer`] each time that there is something to read.
pub fn questions() -> io::Result<UnixStream> {
    let (ours, theirs) = UnixStream::pair()?;
    *lock(&SOCKET) = Some(ours);
    Ok(theirs)
}

/// Answers what this rank has been asked; `look` finds out where the main thread is, and the exception that is handled.
pub fn answer(look: impl FnOnce() -> (Vec<Frame>, String)) {
    ANSWERS.store(this_thread(), Ordering::Relaxed);
    let number = own().asked.load(Ordering::Acquire);
    let (frames, exception) = look();
    let mut place = Place {
        at: user_frame(&frames).map_or_else(String::new, |frame| printable(&frame.to_string())),
        activity: activity(&frames).unwrap_or_default().into(),
        exception: printable(&exception),
        frames: frames[..frames.len().min(FRAMES)].to_vec(),
    };
    let mut text = serde_json::to_string(&place).unwrap_or_default();
    while text.len() > BYTES && place.frames.pop().is_some() {
        text = serde_json::to_string(&place).unwrap_or_default();
    }
    own().python.write(&text);
    own().answered.store(number, Ordering::Release);
}

/// The thread that answers, by the system's number.
pub fn answering_thread() -> i32 {
    ANSWERS.load(Ordering::Relaxed)
}

/// Wakes the thread that answers, if this rank has been asked. A rank without such a thread counts as having answered.
pub fn pass_on() {
    static PASSED: AtomicU32 = AtomicU32::new(0);
    let asked = own().asked.load(Ordering::Acquire);
    if PASSED.swap(asked, Ordering::AcqRel) == asked {
        return;
    }
    let is_sent = lock(&SOCKET).as_mut().is_some_and(|socket| socket.write_all(b"?").is_ok());
    if !is_sent {
        own().answered.store(asked, Ordering::Release);
    }
}

/// Asks this rank, and these ranks of its host, where their Python is, and waits for the answers, but not for long.
pub fn ask(ranks: impl Fn(i32) -> bool, patience: Duration) {
    let me = board().rank as i32;
    let is_asked = |(rank, slot): &(i32, &Slot)| (*rank == me || ranks(*rank)) && slot.life() == Life::Runs;
    let asked: Vec<(i32, &Slot)> = board().here().filter(is_asked).collect();
    for (rank, slot) in &asked {
        slot.asked.fetch_add(1, Ordering::AcqRel);
        if *rank == me {
            pass_on();
        } else {
            signal::ring(&slot.bell);
        }
    }
    let start = Instant::now();
    while start.elapsed() < patience && !asked.iter().all(|(_, slot)| has_answered(slot)) {
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn has_answered(slot: &Slot) -> bool {
    slot.answered.load(Ordering::Acquire) == slot.asked.load(Ordering::Acquire)
}

/// Where the Python of a rank was when it answered last.
pub fn place(slot: &Slot) -> Place {
    serde_json::from_str(&slot.python.read()).unwrap_or_default()
}

/// Where the Python of a process that runs is now.
pub fn place_now(slot: &Slot) -> Place {
    if has_answered(slot) { place(slot) } else { Place { activity: IN_C.into(), ..Place::default() } }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

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

    #[test]
    fn a_rank_that_reports_asks_its_own_python_too() {
        let slot = own();
        slot.pid.store(std::process::id(), Ordering::Release);
        slot.set_life(Life::Runs);
        ask(|_| false, Duration::ZERO);
        assert!(has_answered(slot), "it has no thread that could answer");
        let mut theirs = questions().unwrap();
        ask(|_| false, Duration::ZERO);
        assert!(!has_answered(slot));
        let mut asked = [0];
        theirs.read_exact(&mut asked).unwrap();
        pass_on(); // as the watchdog does at each look; each question is passed on once
        answer(|| (Vec::new(), "ValueError: broken".into()));
        assert!(has_answered(slot) && place_now(slot).exception == "ValueError: broken");
        theirs.set_nonblocking(true).unwrap();
        assert!(theirs.read(&mut asked).is_err(), "nothing more was asked");
        *lock(&SOCKET) = None;
        slot.set_life(Life::Absent);
        slot.pid.store(0, Ordering::Release);
    }
}
