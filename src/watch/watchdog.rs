//! A thread that notices operations that do not end: around [`decide`], it observes and acts.
//!
//! It sleeps while nothing is under way. What this rank waits for, it tells the others of its host, of which one, the leader,
//! speaks for all.

use std::os::fd::RawFd;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::act::{self, HUNG, print};
use super::decide::{self, State};
use super::default;
use super::end::{self, Launcher};
use super::graph::{Life, Need, Rank, World};
use super::groups::Group;
use super::mail::Hosts;
use super::peers::Peers;
use super::questions::Kind;
use super::report::Reporter;
use super::threads::{self, Others};
use super::waits::{self, Limit, Waits};
use super::{frames, link, terminate};
use crate::comm;
use crate::error::Error;
use crate::mpilib;
use crate::record::recorder;
use crate::record::timeline;
use crate::system::signal;

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
    /// Whether the ranks certainly have one directory, and whether hosts may ask each other through MPI.
    pub one_directory: bool,
    pub asks_hosts: bool,
}

pub(super) struct Watchdog {
    pub settings: Settings,
    pub reporter: Reporter,
    /// The process that this is about.
    process: u32,
    /// Where the signal handler writes, and an operation that begins while the watchdog sleeps.
    wake: RawFd,
    started: Instant,
}

static WATCHDOG: OnceLock<Watchdog> = OnceLock::new();

/// For how long an operation waits before others are told of it, in seconds.
const TELL: f64 = 1.0;
/// How long the watchdog sleeps while operations come and go; and while one waits, at first and in the end.
const BEAT: f64 = 2.0;
const LOOK: [f64; 2] = [1.0, 3.0];
/// For how long it looks out for the answers of other hosts.
const ANSWERS: f64 = 3.0;
/// When a rank compares what it did with its neighbours for the first time, and then after twice as long each time.
const COMPARE: Duration = Duration::from_secs(5);

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
    let (process, started) = (std::process::id(), Instant::now());
    let watchdog = Watchdog { settings, reporter, process, wake, started };
    if WATCHDOG.set(watchdog).is_ok() {
        let thread = std::thread::Builder::new().name("mpi4jax-watchdog".into());
        // Without a thread there is no watchdog, and all else works.
        let _ = thread.spawn(|| WATCHDOG.get().map(run));
    }
    let _ = mpilib::first_at_finalize(Box::new(finish));
}

/// Lets the ranks of several hosts ask each other through MPI, if all of them want that. Collective.
///
/// # Safety
/// `comm` is the handle of a live communicator, with the ranks of `MPI_COMM_WORLD`.
pub unsafe fn open_link(comm: usize) -> Result<(), Error> {
    let respond = |word: &str| match WATCHDOG.get() {
        Some(watchdog) => watchdog.reporter.respond(word),
        None => Vec::new(),
    };
    if let Some(Watchdog { settings, reporter, .. }) = WATCHDOG.get()
        && settings.size > 1
    {
        let (host, ranks) = (reporter.peers.place(), (settings.rank, settings.size));
        // SAFETY: promised by the caller.
        unsafe { link::open(comm, settings.asks_hosts, host, ranks, respond)? };
    }
    Ok(())
}

/// Tells the other ranks that the program of this one is at its end: what is called then may still communicate.
pub fn exit() {
    if let Some(watchdog) = WATCHDOG.get() {
        watchdog.reporter.peers.exit();
    }
}

/// `MPI_Finalize` begins: this rank has done its last operation.
fn finish() {
    let Some(watchdog) = WATCHDOG.get().filter(|watchdog| watchdog.process == std::process::id()) else {
        return;
    };
    waits::set_finished();
    for comm in comm::live() {
        if let Some((source, tag)) = comm.unreceived() {
            print(&format!(
                "r{} | mpi4jax: warning: a message from {source}, tag {tag}, on {} was never received\n",
                watchdog.settings.rank, comm.key
            ));
        }
    }
    watchdog.compare();
    watchdog.reporter.peers.finish();
    waits::notice();
    let made = |handle| {
        // SAFETY: it has just been made, of all ranks. Without a link, hosts ask each other nothing.
        let _ = unsafe { open_link(handle) };
    };
    let _ = default::join(&watchdog.reporter.peers, watchdog.started, watchdog.settings.one_directory, made);
}

/// How the default communicator is made: as the first rank has chosen, which this one is if it is the first.
pub fn choose_default(choice: &str) -> String {
    WATCHDOG.get().map_or_else(|| choice.into(), |watchdog| default::choose(&watchdog.reporter.peers, choice))
}

/// The report that `SIGUSR1` prints, for tests and for the curious.
pub fn report() -> Option<String> {
    let Watchdog { reporter, settings, .. } = WATCHDOG.get()?;
    Some(reporter.report("report", "asked for", Kind::Report, settings.rank).0)
}

/// Where the user's program is, as far as Python can tell.
pub fn user_frame() -> Option<String> {
    frames::user_frame(threads::python().main()).map(|frame| frame.to_string())
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
    reporter.peers.look();
    let is_hung = reporter.peers.asked().is_some_and(|word| Kind::of(&word) == Some(Kind::Hung));
    if reporter.peers.is_ending() || is_hung || link::heard(Kind::Hung).is_some() {
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

fn is_debugged() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    status.lines().any(|line| line.strip_prefix("TracerPid:").is_some_and(|pid| pid.trim() != "0"))
}

fn run(watchdog: &'static Watchdog) {
    let launcher = Launcher::parent();
    let mut observer = Observer::new(watchdog);
    loop {
        let pause = observer.pause();
        let began = Instant::now();
        let files =
            [watchdog.wake, watchdog.reporter.peers.bell, launcher.as_ref().map_or(-1, |it| it.ended)];
        let signalled = signal::wait(files, pause);
        // A process that was stopped has not waited meanwhile.
        let passed = began.elapsed().as_secs_f64().min(2.0 * pause.min(BEAT));
        if let Some(launcher) = launcher.as_ref().filter(|launcher| launcher.is_gone()) {
            let say = |why: &str| print(&format!("r{} | mpi4jax: {why}\n", watchdog.settings.rank));
            launcher.follow(HUNG, say, ending);
        }
        // Whatever goes wrong here, the next hang is noticed.
        let step = AssertUnwindSafe(|| observer.step(passed, signalled));
        if std::panic::catch_unwind(step).is_err() {
            observer = Observer::new(watchdog);
            std::thread::sleep(Duration::from_secs(1));
        }
    }
}

impl Watchdog {
    /// Ends the job if this rank did something else than its neighbours. What may be so is said, once.
    fn compare(&self) {
        static SAID: AtomicBool = AtomicBool::new(false);
        let Some(difference) = self.reporter.peers.difference() else { return };
        let line = format!("r{} | mpi4jax: {}\n", self.settings.rank, difference.report);
        if difference.is_proved {
            act::differs(self, &line);
        } else if !SAID.swap(true, Ordering::Relaxed) {
            print(&line);
        }
    }
}

/// What the watchdog knows, and what it has told.
struct Observer {
    watchdog: &'static Watchdog,
    /// Seconds in which this process ran.
    clock: f64,
    waits: Waits,
    others: Others,
    /// What the others have been told of it.
    told: Option<Rank>,
    /// How many operations had begun at the last beat.
    begun: u64,
    is_asleep: bool,
    started: Instant,
    compare_at: Duration,
    leader: i32,
    leads: bool,
    state: State,
    /// The number of the folder's listing that `here` was read from, and when each wait in it began.
    listed: Option<u64>,
    here: World,
    since: std::collections::HashMap<decide::Key, f64>,
    /// What ranks of other hosts wait for, and a question about it that is under way: its word, and when it was asked.
    far: World,
    question: Option<(String, f64, bool)>,
}

impl Observer {
    fn new(watchdog: &'static Watchdog) -> Self {
        Self {
            watchdog,
            clock: 0.0,
            waits: Waits::default(),
            others: Others::default(),
            told: None,
            begun: 0,
            is_asleep: false,
            started: Instant::now(),
            compare_at: COMPARE,
            leader: -1,
            leads: false,
            state: State::default(),
            listed: None,
            here: World::new(),
            since: std::collections::HashMap::new(),
            far: World::new(),
            question: None,
        }
    }

    fn peers(&self) -> &'static Peers {
        &self.watchdog.reporter.peers
    }

    fn limit(&self) -> Limit {
        waits::current_limit(self.watchdog.settings.timeout)
    }

    /// For how long there is nothing to do, in seconds.
    fn pause(&mut self) -> f64 {
        let (limit, report_after) = (self.limit(), self.watchdog.settings.report_after);
        let quarter = |seconds: f64| if seconds > 0.0 { seconds / 4.0 } else { f64::INFINITY };
        let shortest = quarter(limit.seconds).min(quarter(report_after));
        let led = || self.state.world.values().flat_map(|rank| &rank.waits).map(|wait| wait.seconds);
        let longest = led().fold(self.waits.longest(), f64::max);
        let begun = recorder::count();
        let pause = if !self.waits.is_empty() || longest > 0.0 {
            let next = self.waits.next_limit(&limit) + 0.01;
            (longest / 8.0).clamp(LOOK[0], LOOK[1]).min(next).min(shortest)
        } else if begun != self.begun {
            BEAT.min(shortest)
        } else if self.is_asleep {
            // Somebody who begins, asks or waits wakes this thread.
            self.compare_at.saturating_sub(self.started.elapsed()).as_secs_f64().max(BEAT)
        } else {
            // Once more: what begins at this moment may not have seen that this thread is about to sleep.
            waits::sleep(signal::wake);
            self.is_asleep = true;
            return BEAT.min(shortest).max(0.02);
        };
        self.begun = begun;
        let asks = self.question.as_ref().map_or(f64::INFINITY, |_| 0.1);
        pause.min(asks).max(0.02)
    }

    fn step(&mut self, passed: f64, signalled: bool) {
        self.clock += passed;
        if signalled {
            act::show(self.watchdog);
        }
        timeline::flush();
        let peers = self.peers();
        let listed = peers.look();
        if self.listed != Some(listed)
            && let Some(word) = peers.asked()
            && word != *self.watchdog.reporter.answered()
        {
            let _ = self.watchdog.reporter.answer(&word, "another rank asked");
        }
        if self.started.elapsed() >= self.compare_at {
            self.watchdog.compare();
            self.compare_at *= 2;
        }
        let limit = self.limit();
        self.waits.update(passed, &limit, peers.size);
        if !self.waits.is_empty() {
            waits::awake();
            self.is_asleep = false;
        } else if self.begun != recorder::count() {
            self.is_asleep = false;
        }
        self.tell();
        if self.waits.is_empty() && !peers.somebody_waits() {
            self.listed = Some(listed);
            self.state.world.clear();
            self.state.forget();
            return;
        }
        self.lead();
        if self.leads {
            self.observe(listed);
            self.act();
        }
    }

    /// Tells the other ranks of this host what this one waits for.
    fn tell(&mut self) {
        if self.waits.longest() < TELL && self.told.is_none() {
            return;
        }
        let peers = self.peers();
        if self.waits.is_empty() {
            peers.wait(None);
            self.told = None;
            return;
        }
        let python = threads::python();
        let other = self.others.find(&python, &self.waits.threads(), self.clock);
        let at =
            frames::user_frame(python.main()).map_or_else(String::new, |frame| format!("Python at {frame}"));
        let comms = comm::live();
        let now = Rank {
            life: if waits::is_finished() { Life::Finished } else { Life::Runs },
            other,
            waits: self.waits.told(&at),
            started: waits::started(),
            counts: waits::counts(&comms),
        };
        if self.told.as_ref().is_none_or(|before| !is_same(before, &now)) {
            peers.wait(Some(&now));
            if self.leader >= 0 && self.leader != peers.rank {
                peers.ring(self.leader);
            }
            self.watchdog.compare();
        }
        self.told = Some(now);
    }

    /// Finds out whether this rank speaks for its host, and wakes the one that does.
    fn lead(&mut self) {
        let peers = self.peers();
        let leader = if peers.broken().is_some() { peers.rank } else { peers.leader() };
        if leader != self.leader && leader != peers.rank {
            peers.ring(leader);
        }
        self.leader = leader;
        self.leads = leader == peers.rank;
        link::lead(self.leads);
    }

    /// Brings up to date what is known of all ranks.
    fn observe(&mut self, listed: u64) {
        let peers = self.peers();
        let ranks = peers.here();
        let before = (self.listed == Some(listed)).then(|| std::mem::take(&mut self.here));
        self.here = peers.world(&ranks, before);
        self.listed = Some(listed);
        if let Some(told) = &self.told {
            self.here.insert(peers.rank, told.clone());
        }
        self.hear();
        let mut world = self.here.clone();
        world.extend(
            self.far.iter().filter(|(rank, _)| !ranks.contains(**rank)).map(|(rank, it)| (*rank, it.clone())),
        );
        let clock = self.clock;
        for (rank, it) in &mut world {
            for wait in &mut it.waits {
                let since = self.since.entry((*rank, wait.number)).or_insert(clock - wait.seconds);
                wait.seconds = clock - *since;
            }
        }
        self.since.retain(|(rank, number), _| {
            world.get(rank).is_some_and(|it| it.waits.iter().any(|wait| wait.number == *number))
        });
        let ago = |kind| link::heard(kind).map(|(_, at)| clock - (link::now() - at));
        let told = peers.told("told").map(|(_, ago)| clock - ago.as_secs_f64());
        let latest = |times: [Option<f64>; 4]| times.into_iter().flatten().reduce(f64::max);
        let state = &mut self.state;
        state.spoke = latest([state.spoke, told, ago(Kind::Line), ago(Kind::Hung)]);
        state.asked = latest([state.asked, ago(Kind::Waits), None, None]);
        (state.world, state.own, state.is_debugged) = (world, ranks, is_debugged());
        state.forget();
    }

    /// What other hosts have answered.
    fn hear(&mut self) {
        let Some((word, at, again)) = &mut self.question else { return };
        let (groups, complete) = link::answers(word);
        let age = self.clock - *at;
        if !*again && age > ANSWERS / 2.0 {
            link::ask_again();
            *again = true;
        }
        self.far = World::new();
        for Group { members, state, .. } in groups {
            if let Some(rank) = super::known::decode(&state) {
                self.far.extend(members.iter().map(|member| (member, rank.clone())));
            }
        }
        if complete || age > ANSWERS {
            self.question = None;
        }
    }

    /// Does what there is to do.
    fn act(&mut self) {
        let Settings { report_after, rank, .. } = self.watchdog.settings;
        let hosts: Hosts = link::hosts();
        let report_after = if report_after > 0.0 { report_after } else { f64::INFINITY };
        let settings = decide::Settings { report_after, host: hosts.place() };
        for action in decide::decide(&self.state, &settings, self.clock) {
            self.state.apply(&action, &settings, self.clock);
            match action {
                decide::Action::Ask => {
                    let word = Kind::Waits.word(rank);
                    link::ask(&word);
                    self.question = Some((word, self.clock, false));
                }
                decide::Action::Tell(key) => act::tell(self.watchdog, &self.state, key),
                decide::Action::End(key, reason) => {
                    let (place, hosts) = settings.host;
                    let turn = Duration::from_secs_f64(place as f64 / hosts as f64);
                    if !act::hung(self.watchdog, &self.state, key, &reason, turn, is_same_now) {
                        // It was not so, or is not any more.
                        self.state.reported.remove(&key);
                        self.state.suspects.remove(&key);
                        self.far.clear();
                    }
                }
                _ => {}
            }
        }
    }
}

/// Whether what is told of a rank is the same, but for the time.
fn is_same(before: &Rank, now: &Rank) -> bool {
    let without_time = |rank: &Rank| {
        let mut rank = rank.clone();
        rank.waits.iter_mut().for_each(|wait| wait.seconds = 0.0);
        rank
    };
    without_time(before) == without_time(now)
}

/// What the ranks of this host wait for at this moment, where they are known to by what was known before.
fn is_same_now(watchdog: &Watchdog, before: &World) -> World {
    let peers = &watchdog.reporter.peers;
    peers.look();
    let mut world = before.clone();
    let here = peers.world(&peers.here(), None);
    world.extend(here.into_iter().filter(|(rank, _)| *rank != peers.rank));
    world.values_mut().for_each(|rank| rank.waits.retain(|wait| wait.need != Need::End));
    world
}
