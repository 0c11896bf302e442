//! A thread that notices operations that do not end, says so, and ends the job.

use std::io::Write as _;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::end::{self, Launcher};
use super::limits::{self, Limit};
use super::peers::Peers;
use super::questions::Answer;
use super::report::{GRACE, Reporter, python};
use super::samples::Difference;
use super::waits::{self, Wait, blocked, under_way};
use super::{desk, faulthandler, frames, link, signal, terminate};
use crate::error::Error;
use crate::record::recorder::{self, Record};
use crate::record::timeline;
use crate::transport::{self, Unfinished};
use crate::{comm, mpilib};

/// How the watchdog was told to behave.
#[derive(Debug)]
pub struct Settings {
    /// Of this process, in `MPI_COMM_WORLD`.
    pub rank: i32,
    pub size: i32,
    pub directory: PathBuf,
    /// After how many seconds an operation counts as hung; 0: never.
    pub timeout: f64,
    /// After how many seconds a line says what an operation waits for; 0: never.
    pub report_after: f64,
    /// Whether a hung operation ends the job.
    pub abort: bool,
    /// Whether the program has no use of its own for `SIGUSR1`.
    pub takes_signal: bool,
}

struct Watchdog {
    settings: Settings,
    reporter: Reporter,
    /// The process that this is about.
    process: u32,
    /// Where the signal handler writes.
    wake: RawFd,
    everybody: Vec<i32>,
    /// The collectives that the other ranks know this one to wait in.
    told: Mutex<Vec<u64>>,
}

static WATCHDOG: OnceLock<Watchdog> = OnceLock::new();

/// How often the watchdog looks.
const TICK: Duration = Duration::from_millis(500);
/// For how long an operation waits before others are asked about, and for how long it then has to be certain that it
/// cannot end: messages may be under way.
const PATIENCE: Duration = Duration::from_secs(3);
/// How often it is looked at whether an operation can still end, at most and at least.
const LOOK: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(3)];
/// How often a rank looks at the process of the next one.
const NEIGHBOUR: Duration = Duration::from_secs(1);
/// For how long at least a rank that has finished waits for the others before it says so.
const END_PATIENCE: Duration = Duration::from_secs(10);
/// How much later than the first rank the last one says that it waits, on several hosts.
const TURN: Duration = Duration::from_secs(5);
/// The number of the wait of a rank that has finished.
const AT_END: u64 = 0;
/// When a rank compares what it did with its neighbours for the first time, and then after twice as long each time.
const COMPARE: Duration = Duration::from_secs(5);
/// The job's exit status where ranks did different things.
const DIFFERENT: i32 = 1;
/// The job's exit status where an operation hangs. Not 124, which is timeout(1)'s, nor what shells and signals use.
const HUNG: i32 = 97;

extern "C" fn at_exit() {
    // A forked child is no rank.
    if let Some(watchdog) = WATCHDOG.get()
        && watchdog.process == std::process::id()
    {
        let Watchdog { settings: Settings { rank, .. }, reporter: Reporter { peers, .. }, .. } = watchdog;
        let is_expected = waits::is_finished() || peers.is_ending();
        if let (false, Some(record)) = (is_expected, recorder::running().first()) {
            // MPICH does so by itself after some errors, whatever is to be done with errors.
            print(&format!("r{rank} | mpi4jax: a library has ended this rank in {record}\n"));
            end::let_launcher_read();
        }
        peers.leave();
    }
}

/// Starts the watchdog, once per process.
pub fn start(settings: Settings) {
    let wake = signal::install(settings.takes_signal);
    // SAFETY: registers a function that touches nothing but its statics and files.
    unsafe { libc::atexit(at_exit) };
    let reporter = Reporter::new(Peers::new(settings.directory.clone(), settings.rank, settings.size));
    if let Some(why) = reporter.peers.broken()
        && settings.size > 1
    {
        print(&format!(
            "r{} | mpi4jax: {why}; this rank neither reads nor leaves files: it learns nothing of ranks that have ended, \
             and leaves no dumps (MPI4JAX_DUMP_DIR names another directory)\n",
            settings.rank
        ));
    }
    let process = std::process::id();
    let everybody = (0..settings.size).collect();
    let watchdog = Watchdog { settings, reporter, process, wake, everybody, told: Mutex::default() };
    if WATCHDOG.set(watchdog).is_ok() {
        let thread = std::thread::Builder::new().name("mpi4jax-watchdog".into());
        // Without a thread there is no watchdog, and all else works.
        let _ = thread.spawn(|| WATCHDOG.get().map(Watchdog::run));
    }
    // For programs that end MPI themselves.
    let _ = mpilib::at_finalize(tell_finished);
}

/// Lets the ranks ask each other through MPI, if all of them want that. Collective.
///
/// # Safety
/// `comm` is the handle of a live communicator, with the ranks of `MPI_COMM_WORLD`.
pub unsafe fn open_link(comm: usize, wanted: bool) -> Result<(), Error> {
    let respond = |word: &str| match WATCHDOG.get() {
        Some(watchdog) => watchdog.reporter.answer(word, "another rank asked").0,
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
    waits::set_finished();
    faulthandler::stop();
    let Some(watchdog) = WATCHDOG.get() else { return };
    for comm in comm::live() {
        if let Some((source, tag)) = comm.unreceived() {
            print(&format!(
                "r{} | mpi4jax: warning: a message from {source}, tag {tag}, on {} was never received\n",
                watchdog.settings.rank, comm.key
            ));
        }
    }
    tell_finished();
}

fn tell_finished() {
    if let Some(watchdog) = WATCHDOG.get()
        && watchdog.process == std::process::id()
    {
        watchdog.compare();
        watchdog.reporter.peers.finish();
    }
}

/// How the default communicator is made. The ranks' first choice holds for all of them; `choice` is this rank's. Without
/// one, `None` until a rank has chosen.
pub fn choose_default(choice: Option<&str>) -> Option<String> {
    let Some(Watchdog { reporter: Reporter { peers, .. }, .. }) = WATCHDOG.get() else {
        return choice.map(Into::into);
    };
    if let Some(choice) = choice {
        return Some(peers.choose_default(choice));
    }
    peers.look();
    peers.chosen_default()
}

/// Whether all other ranks that have come have finished, and whether all have come; `None` where files do not say.
pub fn others_have_finished() -> Option<(bool, bool)> {
    let peers = &WATCHDOG.get()?.reporter.peers;
    peers.look();
    peers.broken().is_none().then(|| peers.others_have_finished())
}

/// The report that `SIGUSR1` prints, for tests and for the curious.
pub fn report() -> Option<String> {
    WATCHDOG.get().and_then(|watchdog| watchdog.reporter.report("report", "asked for", false).ok())
}

/// Where the user's program is, as far as Python can tell.
pub fn user_frame() -> Option<String> {
    frames::user_frame(&python()).map(|frame| frame.to_string())
}

/// Ends the job with this status unless the process has ended by itself after so many seconds.
pub fn abort_after(seconds: f64, code: i32) {
    end::abort_after(seconds, code, ending);
}

/// Lets `SIGTERM` and `SIGINT` end this rank with a line, unless the program has a use of its own for them. `ask`: see
/// [`terminate::install`].
pub fn take_signals(ask: Option<fn()>) {
    terminate::install(ask, last_words);
}

/// What there is to be said where a signal ends this rank; nothing if who ends the job has said why.
fn last_words(signal: i32) -> Option<String> {
    timeline::flush();
    let Watchdog { reporter, settings, .. } = WATCHDOG.get()?;
    if reporter.peers.is_ending() || link::reporter(2 * GRACE).is_some() {
        return None;
    }
    let name = if signal == libc::SIGINT { "SIGINT" } else { "SIGTERM" };
    let place = reporter.briefly();
    Some(format!("r{} | mpi4jax: {name} ends this rank, which is {place}\n", settings.rank))
}

/// The job is about to be ended, by this rank, which has said why.
pub fn ending() {
    if let Some(Watchdog { reporter: Reporter { peers, .. }, .. }) = WATCHDOG.get() {
        peers.end();
    }
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

impl Watchdog {
    fn run(&'static self) {
        let Settings { timeout, report_after, .. } = self.settings;
        let seconds =
            |seconds: f64| if seconds > 0.0 { Duration::from_secs_f64(seconds) } else { Duration::MAX };
        let tell_after = seconds(report_after);
        let mut waits: Vec<Wait> = Vec::new();
        let mut finished = None;
        let (mut last, mut looked) = (Instant::now(), Instant::now());
        let (start, mut compare_at) = (Instant::now(), COMPARE);
        let mut seen = 0;
        let launcher = Launcher::parent();
        let peers = &self.reporter.peers;
        loop {
            let limit = limits::current(timeout);
            let shortest = tell_after.min(seconds(limit.seconds));
            let tick = (shortest / 4).clamp(Duration::from_millis(20), TICK);
            if signal::wait(self.wake, tick) {
                self.show();
            }
            timeline::flush();
            let listed = peers.look();
            if listed != seen
                && let Some(word) = peers.asked()
                && word != *self.reporter.answered()
            {
                let _ = self.reporter.answer(&word, "another rank asked");
            }
            seen = listed;
            if looked.elapsed() >= NEIGHBOUR {
                peers.watch_neighbour();
                if let Some(launcher) = launcher.as_ref().filter(|launcher| launcher.is_gone()) {
                    let say = |why: &str| print(&format!("r{} | mpi4jax: {why}\n", peers.rank));
                    launcher.follow(HUNG, say, ending);
                }
                looked = Instant::now();
            }
            if start.elapsed() >= compare_at {
                self.compare();
                compare_at *= 2;
            }
            let passed = last.elapsed().min(2 * tick);
            waits::update(&mut waits, passed, &limit, tell_after);
            last = Instant::now();
            self.tell_of_waits(&waits);
            if waits::is_finished() {
                let end = finished.get_or_insert_with(|| Wait::new(AT_END, tell_after.max(END_PATIENCE)));
                end.pass(passed, &limit);
                self.look_at_end(end);
            }
            for wait in waits.iter_mut().filter(|wait| !wait.reported) {
                self.look_at(wait, &limit);
            }
        }
    }

    /// Reports what all ranks do, because somebody wants to know. Launchers ask all of them at once, and one answers.
    fn show(&self) {
        let peers = &self.reporter.peers;
        if peers.become_reporter().is_ok() {
            if peers.told("shown", GRACE).is_none_or(|rank| rank == peers.rank) {
                print(&self.reporter.report("report (SIGUSR1)", "SIGUSR1", false).unwrap_or_default());
                peers.tell("shown");
            }
            peers.resign_as_reporter();
        }
    }

    /// Tells the other ranks which collectives have begun to look as if they hung.
    fn tell_of_waits(&self, waits: &[Wait]) {
        let is_long =
            |ticket| waits.iter().any(|wait| wait.number == ticket && wait.waited > PATIENCE.min(TICK * 2));
        let running = recorder::running();
        let long: Vec<&Record> = running
            .iter()
            .filter(|record| record.what.op.row().is_collective() && is_long(record.ticket))
            .collect();
        let tickets: Vec<u64> = long.iter().map(|record| record.ticket).collect();
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if *told != tickets {
            self.reporter.peers.wait_in(long.into_iter());
            *told = tickets;
            self.compare();
        }
    }

    /// Ends the job if this rank did something else than its neighbours. What may be so is said, once.
    fn compare(&self) {
        static SAID: AtomicBool = AtomicBool::new(false);
        let Some(Difference { is_proved, report }) = self.reporter.peers.difference() else { return };
        let line = format!("r{} | mpi4jax: {report}\n", self.settings.rank);
        if !is_proved {
            if !SAID.swap(true, Ordering::Relaxed) {
                print(&line);
            }
            return;
        }
        if self.reporter.peers.become_reporter().is_err() {
            // The other rank ends the job.
            std::thread::sleep(2 * GRACE);
        }
        print(&line);
        end::end_job(DIFFERENT, ending);
    }

    /// Says what is to be said of a wait, and ends the job if it has to be.
    fn look_at(&self, wait: &mut Wait, limit: &Limit) {
        let record = recorder::running().into_iter().find(|record| record.ticket == wait.number);
        let unfinished = transport::unfinished().into_iter().find(|op| op.number == wait.number);
        let name = match (&record, &unfinished) {
            (Some(record), _) => record.to_string(),
            (None, Some(op)) => op.to_string(),
            (None, None) => match &*blocked() {
                Some(call) => call.what.clone(),
                None => return,
            },
        };
        let reason = match &unfinished {
            Some(Unfinished { failure: Some(failure), .. }) => Some(format!("failed: {failure}")),
            _ => self.is_lost(wait, record.as_ref(), unfinished.as_ref()),
        };
        let late = || wait.exceeds(limit).then(|| format!("has not ended after {}", limit.name()));
        if let Some(reason) = reason.or_else(late) {
            if is_debugged() {
                (wait.limited.1, wait.lost) = (Duration::ZERO, None);
                return;
            }
            wait.reported = true;
            self.hung(wait.number, &name, &reason);
        } else if self.is_time_to_tell(wait) {
            self.tell(wait, &name, record.as_ref());
        }
    }

    /// Why a wait cannot end, if that has been certain for long enough.
    fn is_lost(&self, wait: &mut Wait, record: Option<&Record>, op: Option<&Unfinished>) -> Option<String> {
        if wait.waited < wait.look_at.max(LOOK[0]) {
            return None;
        }
        let peers = &self.reporter.peers;
        let judge = || match (record, op) {
            (Some(record), _) => peers.hopeless(record),
            (None, Some(op)) => peers.missing(&op.comm.world),
            // What takes all ranks.
            (None, None) => peers.missing(&self.everybody),
        };
        let listed = peers.look();
        let reason = match wait.judged.take() {
            Some((at, reason)) if at == listed => reason,
            _ => judge(),
        };
        wait.judged = Some((listed, reason.clone()));
        wait.look_at = wait.waited + (wait.waited / 8).clamp(LOOK[0], LOOK[1]);
        let Some(reason) = reason else {
            wait.lost = None;
            return None;
        };
        let since = *wait.lost.get_or_insert(wait.waited);
        (wait.waited - since >= PATIENCE).then_some(reason)
    }

    /// For how long this rank lets lower ones speak first, where files do not decide who speaks.
    fn turn(&self, longest: Duration) -> Duration {
        let Settings { rank, size, .. } = self.settings;
        if self.reporter.peers.all_have_come() { Duration::ZERO } else { desk::turn(rank, size, longest) }
    }

    fn is_time_to_tell(&self, wait: &Wait) -> bool {
        let late = || self.turn(TURN.min(wait.tell_at / 6));
        wait.waited > wait.tell_at && wait.waited > wait.tell_at + late()
    }

    /// An operation takes long: a line says so, and the job goes on.
    fn tell(&self, wait: &mut Wait, name: &str, record: Option<&Record>) {
        let interval = wait.tell_at;
        wait.tell_at = wait.waited + wait.waited;
        // Ranks ask each other before the line, which so is out a little later.
        let recently = interval / 3;
        let peers = &self.reporter.peers;
        if is_debugged() || link::teller(recently).is_some() || peers.told("told", recently).is_some() {
            return;
        }
        if peers.become_reporter().is_ok() {
            if let Some(line) = self.reporter.waits_for(name, wait.waited, record) {
                peers.tell("told");
                print(&line);
            }
            peers.resign_as_reporter();
        }
    }

    /// This rank has finished, and MPI_Finalize waits for the others: one rank says whom for. That may be
    /// right, so the job goes on, unless a rank has died.
    fn look_at_end(&self, wait: &mut Wait) {
        let peers = &self.reporter.peers;
        let has_finished = |&rank: &i32| rank == self.settings.rank || peers.has_finished(rank);
        if wait.reported {
            return;
        }
        if let Some(reason) = self.is_lost(wait, None, None) {
            if is_debugged() {
                wait.lost = None;
                return;
            }
            wait.reported = true;
            self.hung(wait.number, "the end of the job", &reason);
        } else if self.is_time_to_tell(wait) && !self.everybody.iter().all(has_finished) {
            self.tell(wait, "this rank has finished, and", None);
        }
    }

    /// An operation hangs: one rank reports for all.
    fn hung(&self, number: u64, name: &str, reason: &str) {
        let headline = format!("{name} {reason}");
        std::thread::sleep(self.turn(TURN / 5));
        let reporter = match link::reporter(2 * GRACE) {
            Some(other) => Err(other),
            None => self.reporter.peers.become_reporter(),
        };
        let mut ends = self.settings.abort;
        match reporter.and_then(|()| self.reporter.report(&headline, reason, true)) {
            Ok(mut report) => {
                // Others may have been waited for to answer, and what hung has ended since.
                let is_over = number != AT_END && !under_way().contains(&number);
                report += match (ends, is_over) {
                    (_, true) => "  it has ended meanwhile: the job goes on\n",
                    (true, _) => "  the job is ended (MPI4JAX_ON_TIMEOUT=continue: it goes on)\n",
                    (false, _) => "  the job goes on (MPI4JAX_ON_TIMEOUT=continue)\n",
                };
                print(&report);
                ends &= !is_over;
            }
            // The other rank speaks for all.
            Err(_) => {
                if let Some(word) = self.reporter.peers.asked() {
                    let _ = self.reporter.answer(&word, reason);
                }
                if ends {
                    // It ends the job when it has reported.
                    std::thread::sleep(2 * GRACE);
                    if !under_way().contains(&number) {
                        return;
                    }
                    print(&self.reporter.report(&headline, reason, false).unwrap_or_default());
                }
            }
        }
        if ends {
            end::end_job(HUNG, ending);
        }
        self.reporter.peers.resign_as_reporter();
    }
}
