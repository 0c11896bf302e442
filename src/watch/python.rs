//! Where Python's threads are, and whether one of them could go on with the program while others wait.
//!
//! A thread of Python's says where they are: it holds Python's lock meanwhile, so that no frame changes under it. If C code keeps
//! the lock, it cannot, and that is all that is known.

use std::fmt;
use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::Serialize;

use super::waits;
use crate::system::os;

/// A line of Python that a thread is at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
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

/// What a report says where Python cannot say where it is.
pub const IN_C: &str = "C code keeps Python's lock";

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

/// For how long an answer is waited for, in steps: a process that is stopped and goes on has waited for one of them.
const STEPS: usize = 50;
const STEP: Duration = Duration::from_millis(10);

/// A thread of Python's, as Python knows it, and its frames, the innermost first.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Thread {
    pub number: u64,
    pub frames: Vec<Frame>,
}

/// What is known of Python.
pub enum Python {
    /// Its threads, the main one first.
    At {
        threads: Vec<Thread>,
        /// A signal may have the main thread call a function of the program's.
        handles_signals: bool,
    },
    /// C code keeps Python's lock, or the process has no time.
    Silent,
    /// There is none, or it ends.
    Nothing,
}

impl Python {
    /// Where the main thread is.
    pub fn main(&self) -> &[Frame] {
        match self {
            Self::At { threads, .. } => threads.first().map_or(&[], |thread| &thread.frames),
            Self::Silent | Self::Nothing => &[],
        }
    }
}

/// What has been asked, and answered.
struct Answers {
    /// At its other end a thread of Python's waits for questions.
    socket: Option<UnixStream>,
    /// The last question, and the last one that has been answered.
    asked: u64,
    answered: u64,
    threads: Vec<Thread>,
    handles_signals: bool,
}

static ANSWERS: Mutex<Answers> =
    Mutex::new(Answers { socket: None, asked: 0, answered: 0, threads: Vec::new(), handles_signals: false });
static ANSWERED: Condvar = Condvar::new();

fn answers() -> MutexGuard<'static, Answers> {
    ANSWERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A socket for a thread of Python's, which calls [`answer`] each time that there is something to read. In `recv`, it is seen to
/// sleep.
pub fn questions() -> io::Result<UnixStream> {
    let (ours, theirs) = UnixStream::pair()?;
    answers().socket = Some(ours);
    Ok(theirs)
}

/// Answers what has been asked so far; `threads` looks where they are, the main one first.
pub fn answer(threads: impl FnOnce() -> Vec<Thread>, handles_signals: bool) {
    let number = answers().asked;
    let threads = threads();
    let mut answers = answers();
    (answers.answered, answers.threads, answers.handles_signals) = (number, threads, handles_signals);
    ANSWERED.notify_all();
}

/// Where Python's threads are.
pub fn python() -> Python {
    let mut answers = answers();
    if waits::has_finished() {
        return Python::Nothing;
    }
    // An older question that still waits for Python's lock is this one too.
    if answers.answered == answers.asked {
        let is_sent = answers.socket.as_mut().is_some_and(|socket| socket.write_all(b"?").is_ok());
        if !is_sent {
            return Python::Nothing;
        }
        answers.asked += 1;
    }
    let number = answers.asked;
    for _ in 0..STEPS {
        answers = ANSWERED.wait_timeout(answers, STEP).unwrap_or_else(PoisonError::into_inner).0;
        if answers.answered >= number {
            let Answers { threads, handles_signals, .. } = &*answers;
            return Python::At { threads: threads.clone(), handles_signals: *handles_signals };
        }
    }
    Python::Silent
}

/// For how long the main thread must not have run to count as waiting for JAX, in seconds.
const STILL: f64 = 2.5;
/// Files whose code waits for JAX, during which Python handles no signals.
const WAITS_FOR_JAX: [&str; 3] = ["/jax/", "/jaxlib/", "/mpi4jax/"];
/// The file whose code waits for another thread of Python's.
const WAITS_FOR_THREAD: &str = "/threading.py";

/// Watches for threads that could go on with the program.
#[derive(Default)]
pub struct OtherThreads {
    /// How often the main thread had been given a processor, and when that was first seen.
    main: Option<(u64, f64)>,
}

impl OtherThreads {
    /// A thread that could go on with the program, in words, while these threads wait. None: there is none.
    pub fn find(&mut self, python: &Python, waiting: &[(u64, i32)], now: f64) -> Option<String> {
        let (threads, handles_signals) = match python {
            Python::At { threads, handles_signals } => (threads, *handles_signals),
            Python::Silent => return Some("a thread in C code that keeps Python's lock".into()),
            Python::Nothing => return Some("threads that cannot be examined".into()),
        };
        self.of_python(threads, handles_signals, waiting, now).or_else(|| {
            // XLA may run a program in a thread of its own after the thread of Python's that started it has ended.
            let waiting: Vec<i32> = waiting.iter().map(|(_, thread)| *thread).collect();
            (!os::others_sleep(&waiting)).then(|| "a library's thread that runs".into())
        })
    }

    fn of_python(
        &mut self,
        threads: &[Thread],
        handles_signals: bool,
        waiting: &[(u64, i32)],
        now: f64,
    ) -> Option<String> {
        let waits = |thread: &Thread| waiting.iter().any(|(number, _)| *number == thread.number);
        for (i, thread) in threads.iter().enumerate().filter(|(_, thread)| !waits(thread)) {
            if i == 0 && self.main_waits(&thread.frames, handles_signals, now) {
                continue;
            }
            let at = user_frame(&thread.frames).map_or("in C code".into(), |frame| format!("at {frame}"));
            let which = if i == 0 { "a main thread that is" } else { "another thread, which is" };
            return Some(format!("{which} {at}"));
        }
        None
    }

    /// Whether the main thread waits for what the other threads do: it sleeps until another thread wakes it, and has done so
    /// for a while, in a function that waits for nothing else.
    fn main_waits(&mut self, frames: &[Frame], handles_signals: bool, now: f64) -> bool {
        let Some(runs) = os::runs_of_main() else { return false };
        let since = match self.main {
            Some((before, since)) if before == runs => since,
            _ => now,
        };
        self.main = Some((runs, since));
        let waits = |file: &str| {
            WAITS_FOR_JAX.iter().any(|part| file.contains(part))
                || (file.ends_with(WAITS_FOR_THREAD) && !handles_signals)
        };
        now - since >= STILL && frames.first().is_some_and(|frame| waits(&frame.file)) && os::main_sleeps()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

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

    fn thread(number: u64, file: &str) -> Thread {
        Thread { number, frames: vec![Frame { file: file.into(), line: 9, function: "f".into() }] }
    }

    #[test]
    fn threads_that_do_not_wait_could_go_on() {
        let mut others = OtherThreads::default();
        let mut find = |waiting: &[u64]| {
            let waiting: Vec<(u64, i32)> = waiting.iter().map(|number| (*number, 0)).collect();
            others.of_python(&[thread(1, "a.py"), thread(2, "b.py")], false, &waiting, 0.0)
        };
        assert_eq!(find(&[1, 2]), None);
        assert_eq!(find(&[1]).as_deref(), Some("another thread, which is at b.py:9 in f"));
        assert_eq!(find(&[2]).as_deref(), Some("a main thread that is at a.py:9 in f"));
        assert!(others.find(&Python::Silent, &[(1, 0)], 0.0).is_some());
        assert!(others.find(&Python::Nothing, &[(1, 0)], 0.0).is_some());
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_main_thread_that_waits_and_a_library_that_does_nothing_go_on_with_no_program() {
        // Not the test's thread is the main one, but the one that waits for it.
        let mut others = OtherThreads::default();
        let in_file = |file: &str| thread(1, file).frames;
        let waits_for_jax = in_file("/x/jax/_src/api.py");
        assert!(!others.main_waits(&waits_for_jax, true, 0.0), "not for long enough");
        assert!(!others.main_waits(&in_file("/home/me/a.py"), false, 100.0));
        assert!(!others.main_waits(&in_file("/x/threading.py"), true, 100.0), "a signal could end that");
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ended.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
            std::thread::sleep(std::time::Duration::from_millis(20));
            let mine = unsafe { libc::gettid() };
            assert!(!os::others_sleep(&[mine]), "a thread that computes");
            ended.store(true, Ordering::Relaxed);
        });
    }
}
