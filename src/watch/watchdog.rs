//! The thread that notices operations that do not complete.
//!
//! It looks once a second, and waits at a bell meanwhile, which signals, messages and other ranks ring. Of the ranks of a
//! host that wait, one leads: it reads the states of all from the board, asks other hosts, and carries out what
//! [`decide`](super::decide) returns. A leader that does not look any more is replaced by the next rank that does.

use std::collections::{HashMap, HashSet};
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::compare::{CheckLevel, check_level};
use super::decide::{self, Action, Memory};
use super::end::{self, HUNG};
use super::hosts::QuestionKind;
use super::report::{self, Facts};
use super::settings::{self, Watchdog};
use super::state::{Key, WaitId, World, compare_origins, wait_of};
use super::verdict::{Verdict, Why};
use super::waits::{self, Limit, Waits};
use super::{between, compare, default, link, python, read};
use crate::board::ranks::Ranks;
use crate::board::slot::milliseconds;
use crate::board::{Life, board, own};
use crate::output::print;
use crate::record::{recorder, timeline};
use crate::system::{folder, os, signal};

/// How often the watchdog looks, in seconds; and how often at least while an operation waits for long.
const BEATS: [f64; 2] = [1.0, 2.5];
/// How often a rank that has finished looks whether its launcher lives.
const LOOK: f64 = 5.0;
/// A leader that has not looked for this many milliseconds is replaced.
const LEASE: u64 = 6_000;
/// For how many milliseconds one report answers the requests of all ranks of the host.
const ONE_REQUEST: u64 = 3_000;
/// The age of a wait at which other hosts are asked, and the bounds of the intervals after that, which are half of its age.
const ASK_AFTER: f64 = 3.0;
const ASK_EVERY: [f64; 2] = [3.0, 15.0];
/// A thread that uses more than this part of a processor makes progress.
const BUSY: f64 = 0.01;

pub fn run(watchdog: &'static Watchdog) {
    let launcher = end::launcher(&watchdog.settings.launchers);
    let (mut observer, mut seen, mut asking) = (Observer::new(watchdog), 0, 0.0);
    loop {
        let pause = observer.pause();
        let began = Instant::now();
        let signals = signal::wait(&own().bell, &mut seen, pause);
        // A process that was stopped has not waited meanwhile.
        let paused = began.elapsed().as_secs_f64().min(2.0 * pause.min(BEATS[1]));
        let (passed, began) = (paused + asking, Instant::now());
        if let Some(launcher) = &launcher {
            end::end_with_launcher(launcher, watchdog.settings.rank);
        }
        // Whatever goes wrong here, the next hang is noticed.
        let step = AssertUnwindSafe(|| observer.step(passed, &signals));
        if std::panic::catch_unwind(step).is_err() {
            observer = Observer::new(watchdog);
            std::thread::sleep(Duration::from_secs(1));
        }
        // While it asks other hosts, its operations wait.
        asking = began.elapsed().min(link::ANSWER_TIME).as_secs_f64();
    }
}

/// How many bits of a turn are the time, in milliseconds. Above them is the rank that took the turn last, plus one.
const TIME: u32 = 40;

/// This rank, as a turn holds it.
fn me() -> u64 {
    board().rank as u64 + 1
}

/// Whether this rank takes a turn that only one rank of a host takes within `lease` milliseconds.
fn takes(turn: &AtomicU64, me: u64, now: u64, lease: u64) -> bool {
    let before = turn.load(Ordering::Acquire);
    let (rank, at) = (before >> TIME, before & ((1 << TIME) - 1));
    (rank == 0 || rank == me || now.saturating_sub(at) > lease)
        && turn.compare_exchange(before, me << TIME | now, Ordering::AcqRel, Ordering::Relaxed).is_ok()
}

/// Lets another rank take a turn at once, if this rank has it. Returns whether it had it.
fn gives_up(turn: &AtomicU64, me: u64) -> bool {
    let before = turn.load(Ordering::Acquire);
    let has_it = before >> TIME == me;
    if has_it {
        let _ = turn.compare_exchange(before, 0, Ordering::AcqRel, Ordering::Relaxed);
    }
    has_it
}

/// What the watchdog has observed.
struct Observer {
    watchdog: &'static Watchdog,
    /// Seconds in which this process ran.
    clock: f64,
    waits: Waits,
    /// Processor time of the threads, and when.
    threads: (HashMap<i32, f64>, f64),
    memory: Memory,
    /// When each wait began, by the clock.
    since: HashMap<Key, f64>,
    /// What other hosts have answered, and when they were asked.
    far: World,
    asked_at: f64,
    /// Waits that were too long and have been reported.
    late: HashSet<WaitId>,
    /// When a rank was last seen stopped, or traced, while a wait was too long.
    halted_at: f64,
}

impl Observer {
    fn new(watchdog: &'static Watchdog) -> Self {
        Self {
            watchdog,
            clock: 0.0,
            waits: Waits::default(),
            threads: (HashMap::new(), 0.0),
            memory: Memory::default(),
            since: HashMap::new(),
            far: World::new(),
            asked_at: f64::NEG_INFINITY,
            late: HashSet::new(),
            halted_at: f64::NEG_INFINITY,
        }
    }

    fn limit(&self) -> Limit {
        waits::current_limit(self.watchdog.settings.timeout)
    }

    /// For how long this thread sleeps, in seconds.
    fn pause(&mut self) -> f64 {
        let limit = self.limit();
        let settings = &self.watchdog.settings;
        let shortest = limit.seconds.min(settings.report_after).min(settings.deadlock_after) / 4.0;
        let pause = if !self.waits.is_empty() {
            (self.waits.longest() / 8.0).clamp(BEATS[0], BEATS[1]).min(shortest)
        } else if own().life() == Life::Finished {
            LOOK
        } else {
            BEATS[0].min(shortest)
        };
        pause.max(0.02)
    }

    fn step(&mut self, passed: f64, signals: &[i32]) {
        self.clock += passed;
        own().looked.store(milliseconds(), Ordering::Relaxed);
        timeline::flush();
        recorder::keep_words();
        python::pass_on();
        default::serve(self.watchdog);
        self.waits.update(passed, &self.limit());
        for &signal in signals {
            match signal {
                libc::SIGUSR1 => self.report(),
                signal => end::end_by_signal(signal),
            }
        }
        if self.waits.is_empty() {
            self.threads.0.clear();
            self.give_up_lead();
            return;
        }
        self.look_at_threads();
        if self.waits.longest() < 1.0 && self.waits.late().is_none() {
            return;
        }
        self.compare_settings();
        self.end_late();
        if self.leads() && self.learn_of_hosts() {
            self.compare_hosts();
            let world = self.world();
            self.act(&world);
        }
    }

    /// Notes whether threads that are neither in an operation nor of this package have used the processor.
    fn look_at_threads(&mut self) {
        let (before, at) = &self.threads;
        let elapsed = self.clock - at;
        if !before.is_empty() && elapsed < BEATS[0] {
            return;
        }
        let mut waiting = recorder::waiting();
        waiting.extend(waits::threads());
        waiting.push(python::answering_thread());
        let now: HashMap<i32, f64> = os::threads()
            .into_iter()
            .filter(|(number, name, _)| !name.starts_with("mpi4jax-") && !waiting.contains(number))
            .map(|(number, _, seconds)| (number, seconds))
            .collect();
        let used: f64 = now.iter().filter_map(|(number, seconds)| Some(seconds - before.get(number)?)).sum();
        if !before.is_empty() && used > BUSY * elapsed {
            own().busy.store(milliseconds(), Ordering::Relaxed);
        }
        self.threads = (now, self.clock);
    }

    /// Compares settings once more. At the first collective of a communicator, the settings of some ranks may not have been known;
    /// and a rank that waits for a message has not compared them.
    fn compare_settings(&self) {
        settings::builds_differ();
        let differs = |members: &Ranks| settings::difference_among(members.iter());
        if let Some(difference) = self.waits.collectives().find_map(differs) {
            compare::end_different(&difference, &[]);
        }
    }

    /// Compares the collectives of this host's ranks with the collectives of other hosts that have
    /// answered.
    fn compare_hosts(&self) {
        if check_level() != CheckLevel::Neighbors || self.far.is_empty() || settings::builds_differ() {
            return;
        }
        if let Some(found) = between::difference(&read::world(), &self.far) {
            compare::between_hosts(&found, &between::words(&self.far[&found.far], found.number));
        }
    }

    // ---- Of the ranks of a host that wait, one leads

    fn leads(&self) -> bool {
        takes(&board().header().leader, me(), milliseconds(), LEASE)
    }

    fn give_up_lead(&mut self) {
        if gives_up(&board().header().leader, me()) {
            self.memory = Memory::default();
            self.since.clear();
            self.far.clear();
        }
    }

    /// The states of all ranks, as far as they are known. The age of a wait counts from when this process has seen it first.
    fn world(&mut self) -> World {
        let mut world = self.far.clone();
        world.extend(read::world());
        let mut found = HashMap::new();
        for (rank, status) in &mut world {
            for wait in &mut status.waits {
                let key = (*rank, wait.id);
                let began = self.since.get(&key).copied().unwrap_or(self.clock - wait.seconds);
                wait.seconds = self.clock - began;
                found.insert(key, began);
            }
        }
        self.since = found;
        compare_origins(&mut world);
        world
    }

    // ---- Other hosts

    /// Asks the other hosts for the states of their ranks if it is time. Returns whether they are known now.
    fn learn_of_hosts(&mut self) -> bool {
        if !link::is_open() {
            return true;
        }
        let longest = self.waits.longest();
        let every = if self.memory.is_suspicious() { ASK_EVERY[0] } else { longest / 2.0 };
        let every = every.clamp(ASK_EVERY[0], ASK_EVERY[1]);
        let others_ask = link::mail().leaves_asking_to_others(Duration::from_secs_f64(2.0 * ASK_EVERY[1]));
        let is_due = longest > ASK_AFTER && self.clock - self.asked_at > every && !others_ask;
        if is_due {
            self.ask_hosts(QuestionKind::Status);
        }
        is_due
    }

    fn ask_hosts(&mut self, kind: QuestionKind) {
        if link::is_open() {
            self.far = link::ask(kind);
            self.asked_at = self.clock;
        }
    }

    /// The states of all ranks, with what they do in Python.
    fn fresh_world(&mut self, kind: QuestionKind) -> World {
        self.ask_hosts(kind);
        python::ask(|_| true, python::PATIENCE);
        self.world()
    }

    // ---- Actions

    fn act(&mut self, world: &World) {
        let settings = &self.watchdog.settings;
        let line_at = &board().header().line_at;
        // Another leader may have printed a line.
        let age = milliseconds().saturating_sub(line_at.load(Ordering::Relaxed)) as f64 / 1e3;
        self.memory.note_line(self.clock - age);
        match decide::decide(world, &mut self.memory, settings, self.clock) {
            None => {}
            Some(Action::Line(key)) => {
                line_at.store(milliseconds(), Ordering::Relaxed);
                let world = self.fresh_world(QuestionKind::Report);
                print(&self.facts(&world).line(key).unwrap_or_default());
            }
            Some(Action::Stuck(key, why, left)) => {
                let world = self.fresh_world(QuestionKind::Report);
                print(&self.facts(&world).stuck_line(key, &why, left));
            }
            Some(Action::End(key, why)) => {
                let world = self.fresh_world(QuestionKind::End);
                let verdict = Verdict::new(&world);
                let is_halted = world.values().any(|it| it.is_halted);
                let holds = wait_of(&world, key).is_some_and(|wait| match &why {
                    Why::Stuck(_) => verdict.is_stuck(settings.size),
                    _ => verdict.certain(key.0, wait).is_some() || verdict.is_stuck(settings.size),
                });
                if holds && !is_halted {
                    self.end(&world, key, &why);
                } else {
                    self.memory = Memory::default();
                }
            }
        }
    }

    /// Aborts the job for a wait of this rank that exceeds the time limit, or that has failed.
    fn end_late(&mut self) {
        let Some(wait) = self.waits.late().filter(|wait| !self.late.contains(&wait.id)).cloned() else {
            return;
        };
        if read::is_halted() {
            self.halted_at = self.clock;
            return;
        }
        // The limit counts anew from when the last halted rank has continued.
        let limit = self.limit().seconds;
        if limit.is_finite() && self.clock - self.halted_at < limit {
            return;
        }
        let key = (self.watchdog.settings.rank, wait.id);
        let mut world = self.fresh_world(QuestionKind::End);
        // A rank, also one of another host, may have been stopped meanwhile.
        if world.values().any(|it| it.is_halted) {
            self.halted_at = self.clock;
            return;
        }
        self.late.insert(wait.id);
        let waits = world.get_mut(&key.0).map(|status| &mut status.waits);
        if let Some(found) = waits.and_then(|waits| waits.iter_mut().find(|it| it.id == wait.id)) {
            found.late = wait.late;
            self.end(&world, key, &Why::Late);
        }
    }

    /// The user asks for a report. Launchers pass the signal on to all ranks, which is one request.
    fn report(&mut self) {
        if !takes(&board().header().report_at, me(), milliseconds(), ONE_REQUEST) {
            return;
        }
        let rank = self.watchdog.settings.rank;
        let world = self.fresh_world(QuestionKind::Report);
        let facts = self.facts(&world);
        print(&facts.report("report (SIGUSR1)", (rank, None), rank));
        print(&facts.left(read::leave_board(&self.watchdog.settings)));
    }

    fn facts<'a>(&self, world: &'a World) -> Facts<'a> {
        let (size, has_board, asks_hosts) =
            (self.watchdog.settings.size, board().is_shared(), link::is_open());
        Facts { world, size, has_board, asks_hosts }
    }

    /// A wait hangs: this rank reports for all ranks, and aborts the job.
    fn end(&self, world: &World, key: Key, why: &Why) {
        let Some(wait) = wait_of(world, key) else { return };
        let ends = self.watchdog.settings.abort;
        if ends {
            end::arm(HUNG);
        }
        let headline = report::headline(world, key, wait, why);
        let facts = self.facts(world);
        let mut text = facts.report(&headline, (key.0, Some(key)), board().rank as i32);
        text += if ends {
            "  aborting the job (set MPI4JAX_ON_TIMEOUT=continue to keep it running)\n"
        } else {
            "  the job continues (MPI4JAX_ON_TIMEOUT=continue)\n"
        };
        // A file system that hangs, here or on another host, must not keep the report from the user.
        print(&text);
        if link::is_open() {
            link::ask(QuestionKind::Leave);
        }
        let mut more = facts.left(read::leave_board(&self.watchdog.settings));
        let file = self.watchdog.settings.directory.join("report.txt");
        if folder::write(&file, (text + &more).as_bytes()).is_ok() {
            more += &format!("  this report: {}\n", file.display());
        }
        print(&more);
        if ends {
            end::end_job(HUNG);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_rank_has_a_turn_until_it_gives_it_up_or_is_late() {
        let turn = AtomicU64::new(0);
        assert!(takes(&turn, 1, 5_000, 100), "nobody has it");
        assert!(!takes(&turn, 2, 5_100, 100) && takes(&turn, 1, 5_050, 100), "it takes the turn again");
        assert!(!takes(&turn, 2, 5_150, 100), "the lease counts from when it took the turn last");
        assert!(takes(&turn, 2, 5_151, 100) && !takes(&turn, 1, 5_200, 100), "it was late");
        assert!(!gives_up(&turn, 1) && !takes(&turn, 1, 5_200, 100), "another rank has it");
        assert!(gives_up(&turn, 2) && takes(&turn, 1, 5_200, 100));
        // The largest rank and time do not touch each other.
        let (rank, time) = ((1 << (64 - TIME)) - 1, (1 << TIME) - 1);
        turn.store(0, Ordering::Relaxed);
        assert!(takes(&turn, rank, time, 0) && !takes(&turn, 1, time, 0) && gives_up(&turn, rank));
    }
}
