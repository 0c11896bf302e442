//! Where Python's threads are, and whether one of them could continue the program while others wait.
//!
//! A Python thread reads the frames: it holds Python's lock meanwhile, so that no frame changes. If C code keeps the lock, the
//! report says only that.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::Serialize;

use super::{settings, threads, waits};
use crate::record::recorder::this_thread;
use crate::sync::lock;
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

/// A thread, by Python's number of it, and its frames, the innermost first.
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
        /// The system's number of the thread that has read them.
        by: i32,
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
    by: i32,
}

static ANSWERS: Mutex<Answers> = Mutex::new(Answers {
    socket: None,
    asked: 0,
    answered: 0,
    threads: Vec::new(),
    handles_signals: false,
    by: 0,
});
static ANSWERED: Condvar = Condvar::new();

fn answers() -> MutexGuard<'static, Answers> {
    lock(&ANSWERS)
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
    answers.by = this_thread().1;
    ANSWERED.notify_all();
}

/// Where Python's threads are.
pub fn python() -> Python {
    let mut answers = answers();
    if waits::has_ended() {
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
            let Answers { threads, handles_signals, by, .. } = &*answers;
            return Python::At { threads: threads.clone(), handles_signals: *handles_signals, by: *by };
        }
    }
    Python::Silent
}

/// For how long a thread must not have run to count as waiting for others, in seconds.
const STILL: f64 = 2.5;
/// The file whose code waits for another thread of Python's, during which the main thread handles signals.
const WAITS_FOR_THREAD: &str = "/threading.py";
/// The function in which a thread of a pool waits for work; what it does then is in a function of its own.
const WAITS_FOR_WORK: (&str, &str) = ("/concurrent/futures/thread.py", "_worker");
/// A thread that prints and does nothing else.
const PRINTS: (&str, &str) = ("/tqdm/_monitor.py", "run");

fn is_in(frame: &Frame, (file, function): (&str, &str)) -> bool {
    frame.file.ends_with(file) && frame.function == function
}

/// Detects threads that could continue the program.
#[derive(Default)]
pub struct OtherThreads {
    /// For each of Python's threads, what stays the same while it only waits, and since when.
    still: HashMap<u64, (Still, f64)>,
}

/// What stays as it is while a thread waits.
#[derive(PartialEq)]
enum Still {
    /// How often it has been given a processor.
    Runs(u64),
    /// Where it is, in JAX's code that wakes up now and then.
    At(Frame),
}

impl OtherThreads {
    /// A thread that could continue the program, in words, while these threads wait. None: there is none.
    pub fn find(&mut self, python: &Python, waiting: &[(u64, i32)], now: f64) -> Option<String> {
        let (threads, handles_signals, by) = match python {
            Python::At { threads, handles_signals, by } => (threads, *handles_signals, *by),
            Python::Silent => return Some("a thread in C code that keeps Python's lock".into()),
            Python::Nothing => return Some("threads that cannot be examined".into()),
        };
        self.of_python(threads, handles_signals, waiting, now).or_else(|| {
            // XLA may run a program in a thread of its own after the thread of Python's that started it has ended.
            let of_python = threads.iter().filter_map(|thread| os::number_of(thread.number));
            let known = waiting.iter().map(|(_, thread)| *thread).chain(of_python).chain([by]);
            threads::other(&known.collect::<Vec<_>>())
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
        self.still.retain(|number, _| threads.iter().any(|thread| thread.number == *number));
        for (i, thread) in threads.iter().enumerate().filter(|(_, thread)| !waits(thread)) {
            // Python calls the program's signal handlers in its main thread.
            let may_be_called = i == 0 && handles_signals;
            if thread.frames.iter().any(|frame| is_in(frame, PRINTS))
                || self.is_idle(thread, may_be_called, now)
            {
                continue;
            }
            let at = user_frame(&thread.frames).map_or("in C code".into(), |frame| format!("at {frame}"));
            let which = if i == 0 { "a main thread that is" } else { "another thread, which is" };
            return Some(format!("{which} {at}"));
        }
        None
    }

    /// Whether a thread waits for what others do: it sleeps until another thread wakes it, and has done so for a while, in a
    /// function that waits for nothing else.
    fn is_idle(&mut self, thread: &Thread, may_be_called: bool, now: f64) -> bool {
        let (Some(system), Some(frame)) = (os::number_of(thread.number), thread.frames.first()) else {
            return false;
        };
        let Some(runs) = os::runs(system) else { return false };
        let waits_for_another = os::waits_for_another(system);
        // A method of an array's, which the user's line calls, has no frame of its own.
        let is_in_jax = os::calling_file(system).is_some_and(|file| settings::is_ours_or_jax(&file));
        // While JAX waits for an array, it looks five times a second whether a signal has come.
        let looks_for_signals = is_in_jax && !waits_for_another && !may_be_called;
        let key = if looks_for_signals { Still::At(frame.clone()) } else { Still::Runs(runs) };
        let since = match self.still.get(&thread.number) {
            Some((before, since)) if *before == key => *since,
            _ => now,
        };
        self.still.insert(thread.number, (key, since));
        let waits_for_others = is_in_jax
            || settings::is_ours_or_jax(&frame.file)
            || is_in(frame, WAITS_FOR_WORK)
            || (frame.file.ends_with(WAITS_FOR_THREAD) && !may_be_called);
        now - since >= STILL && (looks_for_signals || (waits_for_another && waits_for_others))
    }
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
    fn a_thread_that_waits_for_another_goes_on_with_no_program() {
        let mut others = OtherThreads::default();
        let lock = std::sync::Mutex::new(());
        let guard = lock.lock().unwrap();
        std::thread::scope(|scope| {
            let (send, receive) = std::sync::mpsc::channel();
            let lock = &lock;
            scope.spawn(move || {
                // SAFETY: takes nothing.
                send.send(unsafe { libc::pthread_self() } as u64).unwrap();
                drop(lock.lock());
            });
            let waiter = receive.recv().unwrap();
            let system = os::number_of(waiter).unwrap();
            while !os::waits_for_another(system) {
                std::thread::yield_now();
            }
            let at = |file: &str| thread(waiter, file);
            assert!(!others.is_idle(&at("/x/threading.py"), false, 0.0), "not for long enough");
            assert!(others.is_idle(&at("/x/threading.py"), false, 100.0));
            assert!(!others.is_idle(&at("/x/threading.py"), true, 100.0), "a signal could end that");
            assert!(!others.is_idle(&at("/home/me/a.py"), false, 100.0));
            let mut worker = at("/x/concurrent/futures/thread.py");
            assert!(!others.is_idle(&worker, false, 100.0));
            worker.frames[0].function = "_worker".into();
            assert!(others.is_idle(&worker, true, 100.0));
            assert!(!others.is_idle(&Thread::default(), false, 100.0));
            drop(guard);
        });
    }
}
