//! A thread that notices operations that do not end, says so, and ends the job.

use std::io::Write as _;
use std::os::fd::RawFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::clock::{self, Epoch};
use super::peers::{self, Answer, Peers, Status};
use super::recorder::{self, Group, Record, State};
use super::{dump, link, mpi};
use crate::error::Error;
use crate::ops::Op;
use crate::transport::{self, Unfinished};

/// How the watchdog was told to behave.
#[derive(Debug)]
pub struct Settings {
    /// Of this process, in `MPI_COMM_WORLD`.
    pub rank: i32,
    pub size: i32,
    pub directory: PathBuf,
    /// After how many seconds an operation counts as hung; 0: never.
    pub timeout: f64,
    /// Whether a hung operation ends the job.
    pub abort: bool,
    /// Whether the program has no use of its own for `SIGUSR1`.
    pub takes_signal: bool,
}

struct Watchdog {
    settings: Settings,
    peers: Peers,
    /// The process that this is about.
    process: u32,
    /// Where the signal handler writes.
    wake: RawFd,
    /// The word of the last question that this rank has answered.
    answered: Mutex<String>,
}

static WATCHDOG: OnceLock<Watchdog> = OnceLock::new();
/// Where a `SIGUSR1` is passed on to.
static SIGNALLED: AtomicI32 = AtomicI32::new(-1);
/// Whether Python may still be looked at, and operations may still come.
static FINISHED: AtomicBool = AtomicBool::new(false);
/// Whether the next `SIGUSR1` is our own, to see where Python is.
static LOOKING: AtomicBool = AtomicBool::new(false);
/// Whether Python has answered it.
static LOOKED: AtomicBool = AtomicBool::new(false);
/// The file that Python's faulthandler writes to on `SIGUSR1`, and its handler.
static STACKS: OnceLock<(RawFd, usize)> = OnceLock::new();

/// A collective call of Python's that is no operation, such as the duplication of a communicator.
struct Blocked {
    number: u64,
    what: String,
    started: u64,
}

static BLOCKED: Mutex<Option<Blocked>> = Mutex::new(None);

/// Numbers of [`Blocked`] calls, apart from those of records.
static CALLS: AtomicU64 = AtomicU64::new(1 << 63);

/// Python is about to wait for other ranks, in `what`.
pub fn enter(what: String) {
    let number = CALLS.fetch_add(1, Ordering::Relaxed);
    *blocked() = Some(Blocked { number, what, started: clock::ticks() });
}

/// What Python waited for has come.
pub fn leave() {
    *blocked() = None;
}

fn blocked() -> MutexGuard<'static, Option<Blocked>> {
    BLOCKED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How often the watchdog looks.
const TICK: Duration = Duration::from_millis(500);
/// For how long a report waits for the answers of the other ranks.
const GRACE: Duration = Duration::from_secs(3);
/// For how long Python's main thread is waited for to say where it is.
const LOOK: Duration = Duration::from_millis(500);
/// After how long an operation is held against ranks that are gone: messages may be under way.
const PATIENCE: Duration = Duration::from_secs(3);
/// For how long at least a rank that has finished waits for the others before it says so.
const END_PATIENCE: Duration = Duration::from_secs(10);
/// How many seconds a launcher has to end after the job.
const LAUNCHER_GRACE: u32 = 10;
/// Programs that start ranks, and that are ended if they outlive them.
const LAUNCHERS: [&str; 7] =
    ["prterun", "prted", "orted", "mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy"];
/// The job's exit status after a time-out, as that of timeout(1).
const TIMED_OUT: i32 = 124;

type SignalAction = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);

/// A handler of another library: MPICH's launcher tells ranks by `SIGUSR1` that one of them has ended.
static PREVIOUS: OnceLock<SignalAction> = OnceLock::new();

/// Async-signal-safe: atomics, a write, and the handler that was there before.
extern "C" fn on_signal(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    if LOOKING.swap(false, Ordering::Relaxed) {
        LOOKED.store(true, Ordering::Release);
        return;
    }
    // SAFETY: a pipe that is never closed. If it is full, a report is due anyway.
    unsafe { libc::write(SIGNALLED.load(Ordering::Relaxed), c"!".as_ptr().cast(), 1) };
    if let Some(previous) = PREVIOUS.get() {
        previous(signal, info, context);
    }
}

/// Sends `SIGUSR1` to the main thread, whose number is that of the process.
#[cfg(target_os = "linux")]
fn signal_main_thread() {
    // SAFETY: a plain system call.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), libc::getpid(), libc::SIGUSR1) };
}

/// Nobody asks: [`STACKS`] is a file in memory, which only Linux has.
#[cfg(not(target_os = "linux"))]
fn signal_main_thread() {}

/// What is done at a `SIGUSR1` now.
fn signal_action() -> libc::sigaction {
    // SAFETY: a plain system call, which fills the memory it is given.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGUSR1, std::ptr::null(), &mut action);
        action
    }
}

/// Python's faulthandler is now the handler of `SIGUSR1`; it writes to `file`, which stays open.
pub fn use_stacks(file: RawFd) {
    let _ = STACKS.set((file, signal_action().sa_sigaction));
}

extern "C" fn at_exit() {
    // A forked child is no rank.
    if let Some(watchdog) = WATCHDOG.get()
        && watchdog.process == std::process::id()
    {
        watchdog.peers.leave();
    }
}

/// Starts the watchdog, once per process. Returns whether `SIGUSR1` makes it report: not if the program
/// has a use of its own for that signal.
pub fn start(settings: Settings) -> bool {
    let mut ends = [-1; 2];
    // SAFETY: plain system calls on memory of ours; the handler is async-signal-safe.
    let has_signal = unsafe {
        if libc::pipe(ends.as_mut_ptr()) != 0 {
            ends = [-1; 2];
        }
        for end in ends {
            libc::fcntl(end, libc::F_SETFD, libc::FD_CLOEXEC);
            libc::fcntl(end, libc::F_SETFL, libc::O_NONBLOCK);
        }
        SIGNALLED.store(ends[1], Ordering::Relaxed);
        let mut action = signal_action();
        let free = settings.takes_signal && ends[0] >= 0;
        if free {
            if ![libc::SIG_DFL, libc::SIG_IGN].contains(&action.sa_sigaction) {
                // A handler that takes the number alone does not notice the other arguments.
                let _ = PREVIOUS.set(std::mem::transmute::<usize, SignalAction>(action.sa_sigaction));
            }
            action.sa_sigaction = on_signal as SignalAction as usize;
            action.sa_flags = libc::SA_RESTART | libc::SA_SIGINFO;
            libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut());
        }
        libc::atexit(at_exit);
        free
    };
    let peers = Peers::new(settings.directory.clone(), settings.rank, settings.size);
    let process = std::process::id();
    let watchdog = Watchdog { settings, peers, process, wake: ends[0], answered: Mutex::default() };
    if WATCHDOG.set(watchdog).is_ok() {
        let thread = std::thread::Builder::new().name("mpi4jax-watchdog".into());
        // Without a thread there is no watchdog, and all else works.
        let _ = thread.spawn(|| WATCHDOG.get().map(Watchdog::run));
    }
    has_signal
}

/// Lets the ranks ask each other through MPI, if all of them want that. Collective.
///
/// # Safety
/// `comm` is the handle of a live communicator, with the ranks of `MPI_COMM_WORLD`.
pub unsafe fn open_link(comm: usize, wanted: bool) -> Result<(), Error> {
    let respond = |word: &str| match WATCHDOG.get() {
        Some(watchdog) => watchdog.answer(word, "another rank asked").0,
        None => Answer { seconds: 0.0, state: "not watched".into() },
    };
    if WATCHDOG.get().is_some_and(|watchdog| watchdog.settings.size > 1) {
        // SAFETY: promised by the caller.
        unsafe { link::open(comm, wanted, respond)? };
    }
    Ok(())
}

/// Tells the other ranks that this one has done its last operation.
pub fn finish() {
    FINISHED.store(true, Ordering::Relaxed);
    let Some(watchdog) = WATCHDOG.get() else { return };
    for group in recorder::groups() {
        if let Some((source, tag)) = mpi::unreceived(group.comm) {
            print(&format!(
                "r{} | mpi4jax: warning: a message from {source}, tag {tag}, on {} was never received\n",
                watchdog.settings.rank, group.comm.key
            ));
        }
    }
    watchdog.peers.finish();
}

/// The report that `SIGUSR1` prints, for tests and for the curious.
pub fn report() -> Option<String> {
    WATCHDOG.get().and_then(|watchdog| watchdog.report("report", "asked for", false).ok())
}

/// Where the user's program is, as far as Python can tell.
pub fn user_frame() -> Option<String> {
    dump::user_frame(&Watchdog::python()).map(|frame| frame.to_string())
}

/// Ends the job with this status unless the process has ended by itself after so many seconds.
pub fn abort_after(seconds: f64, code: i32) {
    if let Some(watchdog) = WATCHDOG.get() {
        watchdog.clean();
    }
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs_f64(seconds));
        end_job(code);
    });
}

/// Ends the job.
fn end_job(code: i32) -> ! {
    // Whatever state MPI is in: launchers end a job of which a process dies.
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(5));
        // SAFETY: ends the process.
        unsafe { libc::_exit(code) };
    });
    // Launchers lose lines that are written just before the end.
    std::thread::sleep(Duration::from_millis(200));
    if let Some(watchdog) = WATCHDOG.get() {
        watchdog.clean();
    }
    end_launcher();
    mpi::abort(code);
    // SAFETY: ends the process.
    unsafe { libc::_exit(code) }
}

/// Makes sure that the launcher ends too: Open MPI's waits for ever for a host that it cannot reach. A
/// process outside of the job gives it [`LAUNCHER_GRACE`] seconds to end by itself.
fn end_launcher() {
    // SAFETY: takes nothing.
    let parent = unsafe { libc::getppid() };
    let name = std::fs::read_to_string(format!("/proc/{parent}/comm")).unwrap_or_default();
    if !LAUNCHERS.contains(&name.trim()) {
        return;
    }
    // Twice: Open MPI takes the first signal for a request, and the second for an order.
    let script = format!(
        "trap '' TERM HUP; for i in $(seq {LAUNCHER_GRACE}); do sleep 1; kill -0 {parent} || exit; done; \
         kill -TERM {parent}; sleep 2; kill -TERM {parent}; sleep 2; kill -KILL {parent}"
    );
    let mut command = Command::new("/bin/sh");
    command.args(["-c", &script]).process_group(0);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // Nor does it keep this process's connections: MPICH's launcher waits until they are closed.
    let close = || {
        // SAFETY: async-signal-safe calls, as must be between fork and exec.
        for file in 3..unsafe { libc::sysconf(libc::_SC_OPEN_MAX) }.clamp(256, 1 << 16) {
            unsafe { libc::fcntl(file as RawFd, libc::F_SETFD, libc::FD_CLOEXEC) };
        }
        Ok(())
    };
    // SAFETY: as above. Without a shell the launcher is left to itself.
    let _ = unsafe { command.pre_exec(close) }.spawn();
}

fn print(text: &str) {
    let mut stderr = std::io::stderr().lock();
    // One write, so that ranks do not mix their lines.
    let _ = stderr.write_all(text.as_bytes());
    let _ = stderr.flush();
}

fn is_debugged() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    status.lines().any(|line| line.strip_prefix("TracerPid:").is_some_and(|pid| pid.trim() != "0"))
}

/// "1.2 s", "3.4 ms", "5.6 us"
fn time(seconds: f64) -> String {
    match seconds {
        1e-1.. => format!("{seconds:.1} s"),
        1e-3.. => format!("{:.1} ms", 1e3 * seconds),
        _ => format!("{:.1} us", 1e6 * seconds),
    }
}

/// "ranks 0-2, 5"
fn ranks(ranks: &[i32]) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut rest = ranks;
    while let Some(&first) = rest.first() {
        let run = rest.iter().zip(first..).take_while(|&(&rank, expected)| rank == expected).count();
        let last = rest[run - 1];
        parts.push(if run == 1 { first.to_string() } else { format!("{first}-{last}") });
        rest = &rest[run..];
    }
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, parts.join(", "))
}

/// What is under way: the numbers of the operations, or of a call of Python's.
fn under_way() -> Vec<u64> {
    let mut numbers: Vec<u64> = recorder::running().iter().map(|record| record.ticket).collect();
    numbers.extend(blocked().as_ref().map(|call| call.number));
    numbers.extend(transport::unfinished().iter().map(|op| op.number));
    numbers
}

/// An operation that is watched.
struct Wait {
    number: u64,
    /// For how long it has run while this process ran: a stopped process does not count.
    waited: Duration,
    reported: bool,
}

impl Watchdog {
    fn run(&'static self) {
        let timeout = (self.settings.timeout > 0.0).then(|| Duration::from_secs_f64(self.settings.timeout));
        let tick = timeout.map_or(TICK, |timeout| (timeout / 4).clamp(Duration::from_millis(20), TICK));
        let mut waits: Vec<Wait> = Vec::new();
        let mut finished = None;
        let mut last = Instant::now();
        loop {
            if self.sleep(tick) {
                print(&self.report("report (SIGUSR1)", "SIGUSR1", false).unwrap_or_default());
            }
            if let Some(word) = self.peers.asked()
                && word != *self.answered()
            {
                let _ = self.answer(&word, "another rank asked");
            }
            let numbers = under_way();
            let passed = last.elapsed().min(2 * tick);
            last = Instant::now();
            waits.retain(|wait| numbers.contains(&wait.number));
            for number in numbers {
                match waits.iter_mut().find(|wait| wait.number == number) {
                    Some(wait) => wait.waited += passed,
                    None => waits.push(Wait { number, waited: Duration::ZERO, reported: false }),
                }
            }
            let Some(timeout) = timeout else { continue };
            if FINISHED.load(Ordering::Relaxed) {
                let (since, told) = finished.get_or_insert((Instant::now(), false));
                if !*told && since.elapsed() > timeout.max(END_PATIENCE) {
                    *told = true;
                    self.waits_at_end(since.elapsed());
                }
            }
            for wait in waits.iter_mut().filter(|wait| !wait.reported) {
                let record = recorder::running().into_iter().find(|record| record.ticket == wait.number);
                let unfinished = transport::unfinished().into_iter().find(|op| op.number == wait.number);
                let hopeless = match (&record, &unfinished) {
                    (_, Some(Unfinished { failure: Some(failure), .. })) => {
                        Some(format!("failed: {failure}"))
                    }
                    _ if wait.waited <= PATIENCE.min(timeout) => None,
                    (Some(record), _) => self.hopeless(record),
                    (None, Some(op)) => recorder::group_of(op.comm).and_then(|group| self.gone(group)),
                    _ => None,
                };
                let reason = match hopeless {
                    Some(reason) => reason,
                    None if wait.waited > timeout => {
                        format!("has not ended after MPI4JAX_TIMEOUT={} s", self.settings.timeout)
                    }
                    None => continue,
                };
                if is_debugged() {
                    wait.waited = Duration::ZERO;
                    continue;
                }
                let name = match (record, unfinished) {
                    (Some(record), _) => record.to_string(),
                    (None, Some(op)) => op.to_string(),
                    (None, None) => match &*blocked() {
                        Some(call) => call.what.clone(),
                        None => continue,
                    },
                };
                wait.reported = true;
                self.hung(wait.number, &name, &reason);
                last = Instant::now();
            }
        }
    }

    /// This rank has finished, and MPI_Finalize waits for the others: one rank says what they do. That may be
    /// right, so the job goes on.
    fn waits_at_end(&self, since: Duration) {
        let has_finished = |rank| rank == self.settings.rank || self.peers.has_finished(rank);
        if is_debugged() || (0..self.settings.size).all(has_finished) {
            return;
        }
        let reason =
            format!("has finished, and has waited for the other ranks for {:.0} s", since.as_secs_f64());
        if self.peers.become_reporter().is_ok() {
            let report = self.report(&format!("this rank {reason}"), &reason, false);
            print(&(report.unwrap_or_default() + "  the job goes on\n"));
            self.peers.resign_as_reporter();
        }
    }

    /// Removes the job's files when the job is about to be ended, unless they are needed to find out why.
    fn clean(&self) {
        if !self.peers.has_dump() {
            self.peers.clean();
        }
    }

    /// Waits for the next look; whether a signal came.
    fn sleep(&self, tick: Duration) -> bool {
        let mut poll = libc::pollfd { fd: self.wake, events: libc::POLLIN, revents: 0 };
        // SAFETY: the structs are ours; the pipe does not block.
        unsafe {
            if libc::poll(&mut poll, 1, tick.as_millis() as libc::c_int) <= 0 {
                return false;
            }
            let mut bytes = [0u8; 64];
            libc::read(self.wake, bytes.as_mut_ptr().cast(), bytes.len()) > 0
        }
    }

    /// Why an operation cannot end any more, if that is certain.
    fn hopeless(&self, record: &Record) -> Option<String> {
        let group = record.what.group;
        let others = || group.world.iter().copied().filter(|&rank| rank != self.settings.rank);
        if let Some(reason) = self.gone(group) {
            return Some(reason);
        }
        let finished = |rank| format!("cannot end: rank {rank} has finished");
        if record.what.is_collective() {
            let missing = |&rank: &i32| {
                self.peers.finished_collectives(rank, group).is_some_and(|done| done < record.sequence)
            };
            return others().find(missing).map(finished);
        }
        let sides = [(record.source, record.what.op != Op::Send), (record.dest, record.what.op != Op::Recv)];
        for (peer, takes_part) in sides {
            if takes_part
                && let Some(rank) = group.world_rank(peer)
                && rank != self.settings.rank
                && self.peers.has_finished(rank)
            {
                return Some(finished(rank));
            }
        }
        // From whomever: nobody is left.
        let from_any = record.what.op == Op::Recv && record.source < 0;
        (from_any && others().count() > 0 && others().all(|rank| self.peers.has_finished(rank)))
            .then(|| "cannot end: all other ranks have finished".into())
    }

    /// Why nothing on a communicator can end any more, if one of its processes is gone.
    fn gone(&self, group: &Group) -> Option<String> {
        group.world.iter().filter(|&&rank| rank != self.settings.rank).find_map(|&rank| {
            let name = self.peers.gone(rank).filter(|_| !self.peers.has_finished(rank))?;
            Some(format!("cannot end: rank {rank}, {name}, is gone"))
        })
    }

    /// An operation hangs: one rank reports for all.
    fn hung(&self, number: u64, name: &str, reason: &str) {
        let rank = self.settings.rank;
        let headline = format!("{name} {reason}");
        let reporter = match link::reporter(2 * GRACE) {
            Some(other) => Err(other),
            None => self.peers.become_reporter(),
        };
        match reporter.and_then(|()| self.report(&headline, reason, true)) {
            Ok(mut report) => {
                report += if self.settings.abort {
                    "  the job is aborted (MPI4JAX_ON_TIMEOUT=continue: it goes on; MPI4JAX_TIMEOUT sets the time)\n"
                } else {
                    "  the job goes on (MPI4JAX_ON_TIMEOUT=continue)\n"
                };
                print(&report);
            }
            Err(other) => {
                print(&format!("r{rank} | mpi4jax: {headline}; see the report of rank {other}\n"));
                if let Some(word) = self.peers.asked() {
                    let _ = self.answer(&word, reason);
                }
                if self.settings.abort {
                    // The other rank ends the job when it has reported.
                    std::thread::sleep(2 * GRACE);
                    if !under_way().contains(&number) {
                        return;
                    }
                    print(&self.report(&headline, reason, false).unwrap_or_default());
                }
            }
        }
        if self.settings.abort {
            end_job(TIMED_OUT);
        }
        self.peers.resign_as_reporter();
    }

    /// Where the main thread is in Python, as its faulthandler writes. That reads the frames of a thread,
    /// which that thread must not change meanwhile, so it is done there, by a signal to it alone.
    fn python() -> Vec<dump::Frame> {
        let Some(&(file, handler)) = STACKS.get() else { return Vec::new() };
        if FINISHED.load(Ordering::Relaxed) {
            return Vec::new();
        }
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _guard = ONE_AT_A_TIME.lock();
        // Python's handler steps aside for a moment while it handles another signal.
        for _ in 0..3 {
            if signal_action().sa_sigaction != handler {
                std::thread::sleep(Duration::from_millis(20));
                continue; // the program may have taken the signal for itself since
            }
            // SAFETY: the file is ours.
            unsafe {
                libc::ftruncate(file, 0);
                libc::lseek(file, 0, libc::SEEK_SET);
            }
            LOOKED.store(false, Ordering::Relaxed);
            LOOKING.store(true, Ordering::Relaxed);
            signal_main_thread();
            let start = Instant::now();
            while !LOOKED.load(Ordering::Acquire) {
                if start.elapsed() > LOOK {
                    return Vec::new(); // it does not run, or does not take signals
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            let mut text = vec![0u8; 1 << 16];
            // SAFETY: as above, and a buffer of the length that is given.
            let length = unsafe { libc::pread(file, text.as_mut_ptr().cast(), text.len(), 0) };
            text.truncate(usize::try_from(length).unwrap_or(0));
            let frames = dump::python_frames(&String::from_utf8_lossy(&text));
            if !frames.is_empty() {
                return frames;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Vec::new()
    }

    /// What this rank is doing.
    fn state(&self, python: &[dump::Frame]) -> Answer {
        let epoch = Epoch::now();
        let running = recorder::running();
        if let Some(first) = running.first() {
            let mut state = format!("in {first}");
            for other in &running[1..] {
                state += &format!("; and in {other}");
            }
            // An operation outside of compiled functions has no line of its own.
            if first.what.location.is_empty()
                && let Some(frame) = dump::user_frame(python)
            {
                state += &format!("; Python is at {frame}");
            }
            return Answer { seconds: first.seconds(&epoch), state };
        }
        if let Some(call) = &*blocked() {
            let mut state = format!("in {}", call.what);
            if let Some(frame) = dump::user_frame(python) {
                state += &format!("; Python is at {frame}");
            }
            return Answer { seconds: epoch.seconds_since(call.started), state };
        }
        if let [first, ..] = transport::unfinished().as_slice() {
            let mut state = format!("in {first}");
            if let Some(frame) = dump::user_frame(python) {
                state += &format!(" Python is at {frame}");
            }
            return Answer { seconds: first.seconds, state: state.trim_end_matches(',').into() };
        }
        let last = recorder::records().pop();
        let mut state: String =
            if FINISHED.load(Ordering::Relaxed) { "finished" } else { "in no operation" }.into();
        match &last {
            Some(record) if record.state == State::Failed => {
                state += &format!("; the last one, {record}, failed");
            }
            Some(record) => state += &format!("; the last one was {record}"),
            None => state += ", and was in none before",
        }
        if let Some(frame) = dump::user_frame(python) {
            state += &format!("; Python is at {frame}");
        }
        Answer { seconds: last.map_or(0.0, |record| epoch.seconds_since(record.ended)), state }
    }

    fn answered(&self) -> MutexGuard<'_, String> {
        self.answered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What this rank is doing; also written to its files, once for each question.
    fn answer(&self, word: &str, reason: &str) -> (Answer, std::io::Result<()>) {
        // Held for as long as it takes: the link and the watchdog may be asked at the same time.
        let mut answered = self.answered();
        let python = Self::python();
        let answer = self.state(&python);
        if *answered == word {
            return (answer, Ok(()));
        }
        let dump = dump::json(&dump::Header {
            rank: self.settings.rank,
            size: self.settings.size,
            host: &self.peers.host,
            reason,
            state: &answer.state,
            python: &python,
        });
        let written = self.peers.answer(word, &answer, &dump);
        word.clone_into(&mut answered);
        (answer, written)
    }

    /// What all ranks are doing, as far as one can find out; or which rank reports that, where two began
    /// to at the same time.
    fn report(&self, headline: &str, reason: &str, hung: bool) -> Result<String, i32> {
        let Settings { rank, size, .. } = self.settings;
        let mut text = format!("r{rank} | mpi4jax: {headline}\n");
        let word = peers::word(rank);
        link::ask(&word, hung, rank, size);
        let asked = self.peers.ask(&word);
        let (own, written) = self.answer(&word, reason);
        let asked = asked.and(written);
        if asked.is_ok() || link::is_open() {
            for (members, line) in self.gather(&word, own) {
                text += &format!("  {} {line}\n", ranks(&members));
            }
            if hung
                && let Some(other) = link::reporter(2 * GRACE)
                && other < rank
            {
                return Err(other);
            }
        } else {
            text += &format!("  rank {rank} is {} (for {:.1} s)\n", own.state, own.seconds);
            if let Err(error) = &asked
                && size > 1
            {
                text += &format!(
                    "  the other ranks cannot be asked: writing to {} failed: {error}; MPI4JAX_DUMP_DIR \
                     names another directory\n",
                    self.peers.directory.display()
                );
            }
        }
        let epoch = Epoch::now();
        let records = recorder::records();
        text += &format!("  last operations of rank {rank}:\n");
        for record in &records[records.len().saturating_sub(8)..] {
            let seconds = record.seconds(&epoch);
            text += &match record.state {
                State::Started => format!("    {record}: for {}\n", time(seconds)),
                State::Failed => format!("    {record}: failed after {}\n", time(seconds)),
                State::Done => format!(
                    "    {record}: took {}, ended {} ago\n",
                    time(seconds),
                    time(epoch.seconds_since(record.ended))
                ),
            };
        }
        if records.is_empty() {
            text += "    none\n";
        }
        let directory = self.peers.directory.display();
        match asked {
            Ok(()) => text += &format!("  more: python -m mpi4jax.report {directory}\n"),
            Err(error) if link::is_open() => {
                text += &format!("  no dumps are left: writing to {directory} failed: {error}\n");
            }
            Err(_) => {}
        }
        Ok(text)
    }

    /// What a rank was doing when it last told, if it ever did.
    fn before(&self, rank: i32) -> String {
        let told = self.peers.last_answer(rank);
        told.map_or_else(String::new, |(_, Answer { state, .. })| format!("; before, it was {state}"))
    }

    /// The ranks, grouped by what they do, most first.
    fn gather(&self, word: &str, own: Answer) -> Vec<(Vec<i32>, String)> {
        let size = self.settings.size;
        let mut answers: Vec<Option<Answer>> = vec![None; size as usize];
        answers[self.settings.rank as usize] = Some(own);
        let start = Instant::now();
        loop {
            for rank in 0..size {
                let answer = &mut answers[rank as usize];
                if answer.is_none() {
                    *answer = self.peers.answer_of(rank, word).or_else(|| link::answer_of(rank, word));
                }
            }
            // Those that cannot answer are not waited for.
            let waiting = |rank: i32| {
                answers[rank as usize].is_none()
                    && !matches!(self.peers.status(rank), Status::Stopped(_) | Status::Gone(_))
            };
            if start.elapsed() > GRACE || !(0..size).any(waiting) {
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let mut groups: Vec<(Vec<i32>, String, f64)> = Vec::new();
        for rank in 0..size {
            let status = match answers[rank as usize].take() {
                Some(answer) => Status::Answered(answer),
                None => self.peers.status(rank),
            };
            let (line, seconds) = match status {
                Status::Answered(answer) => (answer.state, answer.seconds),
                Status::Finished => ("finished".into(), 0.0),
                Status::Stopped(name) => {
                    (format!("stopped: {name} gets no time (SIGSTOP, or a debugger)"), 0.0)
                }
                Status::Gone(name) => (format!("gone: {name} has ended{}", self.before(rank)), 0.0),
                Status::Silent(name) => (format!("silent: {name} does not answer{}", self.before(rank)), 0.0),
                Status::Unknown if link::is_open() => (
                    "silent: it does not answer over MPI; its process, or the network, may be gone".into(),
                    0.0,
                ),
                Status::Unknown => {
                    ("unknown: it has not imported mpi4jax, or does not share this directory".into(), 0.0)
                }
            };
            match groups.iter_mut().find(|(_, other, _)| *other == line) {
                Some((members, _, longest)) => {
                    members.push(rank);
                    *longest = longest.max(seconds);
                }
                None => groups.push((vec![rank], line, seconds)),
            }
        }
        groups.sort_by_key(|(members, ..)| std::cmp::Reverse(members.len()));
        let words = |(members, line, seconds): (Vec<i32>, String, f64)| {
            let verb = if members.len() == 1 { "is" } else { "are" };
            let since = if seconds > 0.0 { format!(" (for {seconds:.1} s)") } else { String::new() };
            (members, format!("{verb} {line}{since}"))
        };
        groups.into_iter().map(words).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_named_in_runs() {
        assert_eq!(ranks(&[3]), "rank 3");
        assert_eq!(ranks(&[0, 1, 2, 5, 7, 8]), "ranks 0-2, 5, 7-8");
    }
}
