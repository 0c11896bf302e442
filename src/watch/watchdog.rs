//! A thread that notices operations that do not end: around [`decide`], it observes and acts.
//!
//! It sleeps while nothing is under way. What this rank waits for, it tells the others of its host, of which one, the leader,
//! speaks for all.

use std::collections::HashMap;
use std::io::Write as _;
use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

use super::decide::{self, Action, Key, Purpose, Reason, State};
use super::dump::dump;
use super::end::{self, HUNG};
use super::own;
use super::python::{self, Others};
use super::report::{self, Facts};
use super::start::{self, Watchdog, ending};
use super::waits::{self, Limit, Waits};
use crate::compare::samples;
use crate::job::host::Host;
use crate::job::link;
use crate::job::mail::{Kind, Message, Word};
use crate::job::status::{Life, RankStatus, World, compare_origins};
use crate::mpilib;
use crate::record::recorder;
use crate::record::timeline;
use crate::system::launcher::Launcher;
use crate::system::os;
use crate::system::signal;

/// The job's exit status where ranks did different things.
const DIFFERENT: i32 = 1;
/// For how long an operation waits before others are told of it, in seconds.
const TELL: f64 = 1.0;
/// How long the watchdog sleeps while operations come and go; and while one waits, at first and in the end.
const BEAT: f64 = 2.0;
const LOOK: [f64; 2] = [1.0, 3.0];
/// How often answers are looked for.
const LISTEN: f64 = 0.05;
/// For how long a leader waits for the ranks of its host, where another host asks.
const ANSWER_TIME_HERE: f64 = 3.0;
/// When a rank compares what it did with its neighbours for the first time, and then after twice as long each time.
const COMPARE: Duration = Duration::from_secs(5);

pub fn print(text: &str) {
    let mut stderr = std::io::stderr().lock();
    // One write, so that ranks do not mix their lines.
    let _ = stderr.write_all(text.as_bytes());
    let _ = stderr.flush();
}

pub fn run(watchdog: &'static Watchdog) {
    let launcher = Launcher::parent(&watchdog.settings.launchers);
    let mut observer = Observer::new(watchdog);
    loop {
        let pause = observer.pause();
        let began = Instant::now();
        let files = [watchdog.wake, watchdog.host.bell, launcher.as_ref().map_or(-1, |it| it.ended)];
        let signalled = signal::wait(files, pause);
        // A process that was stopped has not waited meanwhile.
        let passed = began.elapsed().as_secs_f64().min(2.0 * pause.min(BEAT));
        if let Some(launcher) = launcher.as_ref().filter(|launcher| launcher.is_gone()) {
            end::follow(
                launcher,
                |why| print(&format!("r{} | mpi4jax: {why}\n", watchdog.host.rank)),
                ending,
            );
        }
        // Whatever goes wrong here, the next hang is noticed.
        let step = AssertUnwindSafe(|| observer.step(passed, signalled));
        if std::panic::catch_unwind(step).is_err() {
            observer = Observer::new(watchdog);
            std::thread::sleep(Duration::from_secs(1));
        }
    }
}

/// Ends the job if this rank did something else than its neighbours. What may be so is said, once.
pub fn compare(host: &Host) {
    let is_end = waits::life() == Life::Finished || mpilib::is_ending();
    let Some(difference) = samples::difference(host, is_end) else { return };
    // Of the ranks that find one, one says so, once.
    if host.is_first_to(if difference.is_proved { "differs" } else { "doubt" }) {
        print(&format!("r{} | mpi4jax: {}\n", host.rank, difference.report));
        if difference.is_proved {
            end::end_job(DIFFERENT, ending);
        }
    }
}

/// A question of another host that is under way: who asks what, since when, and when the ranks of this host were asked.
struct Asked {
    by: i32,
    word: Word,
    since: f64,
    time: u64,
}

/// What the watchdog has observed, and what it has told.
struct Observer {
    watchdog: &'static Watchdog,
    host: &'static Host,
    /// Seconds in which this process ran.
    clock: f64,
    waits: Waits,
    others: Others,
    /// What the others have been told of it, and the last question that was answered: its time, and when it was.
    said: Option<RankStatus>,
    answered: u64,
    answered_at: f64,
    /// How many operations had begun at the last beat.
    begun: u64,
    started: Instant,
    compare_at: Duration,
    leader: i32,
    state: State,
    /// The number of the folder's listing that `here` was read from, and when each wait in it began.
    listed: Option<u64>,
    here: World,
    since: HashMap<Key, f64>,
    /// What ranks of other hosts have said.
    far: World,
    /// A report is to be shown.
    shows: bool,
    /// When the ranks of this host were asked, by the clock of questions, and why they could not be.
    asked: u64,
    trouble: Option<String>,
    asked_by: Vec<Asked>,
}

impl Observer {
    fn new(watchdog: &'static Watchdog) -> Self {
        Self {
            watchdog,
            host: &watchdog.host,
            clock: 0.0,
            waits: Waits::default(),
            others: Others::default(),
            said: None,
            answered: 0,
            answered_at: f64::NEG_INFINITY,
            begun: 0,
            started: Instant::now(),
            compare_at: COMPARE,
            leader: -1,
            state: State::default(),
            listed: None,
            here: World::new(),
            since: HashMap::new(),
            far: World::new(),
            shows: false,
            asked: 0,
            trouble: None,
            asked_by: Vec::new(),
        }
    }

    fn limit(&self) -> Limit {
        waits::current_limit(self.watchdog.settings.timeout)
    }

    /// For how long there is nothing to do, in seconds.
    fn pause(&mut self) -> f64 {
        let limit = self.limit();
        let shortest = limit.seconds.min(self.watchdog.settings.report_after) / 4.0;
        let led = || self.state.world.values().flat_map(|rank| &rank.waits).map(|wait| wait.seconds);
        let longest = led().fold(self.waits.longest(), f64::max);
        let begun = recorder::count();
        let pause = if self.state.question.is_some() || !self.asked_by.is_empty() {
            LISTEN
        } else if !self.waits.is_empty() || longest > 0.0 {
            let next = self.waits.next_limit(&limit) + 0.01;
            (longest / 8.0).clamp(LOOK[0], LOOK[1]).min(next).min(shortest)
        } else if begun != self.begun {
            BEAT.min(shortest)
        } else if waits::sleep(signal::wake) {
            // Somebody who begins, asks or waits wakes this thread.
            self.compare_at.saturating_sub(self.started.elapsed()).as_secs_f64().max(BEAT)
        } else {
            // Once more: what begins at this moment may not have seen that this thread is about to sleep.
            BEAT.min(shortest)
        };
        self.begun = begun;
        pause.max(0.02)
    }

    fn step(&mut self, passed: f64, signalled: bool) {
        self.clock += passed;
        timeline::flush();
        let listed = self.host.look();
        if self.started.elapsed() >= self.compare_at {
            compare(self.host);
            self.compare_at *= 2;
        }
        let limit = self.limit();
        self.waits.update(passed, &limit, self.host.size);
        if !self.waits.is_empty() {
            waits::awake();
        }
        // Launchers send a signal to all ranks at once, and one reports.
        self.shows |= signalled && self.host.may_show();
        self.say(self.host.asked());
        self.asked_by.extend(link::questions().into_iter().map(|(by, word)| Asked {
            by,
            word,
            since: self.clock,
            time: 0,
        }));
        let nobody_waits = self.waits.is_empty() && self.state.world.values().all(|it| it.waits.is_empty());
        let is_quiet = nobody_waits && self.listed == Some(listed);
        if is_quiet && !self.shows && self.state.question.is_none() && self.asked_by.is_empty() {
            return;
        }
        self.lead();
        if self.leads() || self.shows || self.state.question.is_some() || !self.asked_by.is_empty() {
            self.observe(listed);
            self.respond();
            self.act();
        } else {
            self.listed = Some(listed);
            self.state.world.clear();
        }
    }

    /// Tells the other ranks of this host how this one fares, if it waits or is asked.
    fn say(&mut self, word: Option<Word>) {
        let word = word.filter(|word| word.time > self.answered);
        if word.is_none() && self.waits.longest() < TELL && self.said.is_none() {
            return;
        }
        if word.is_none() && self.waits.is_empty() && waits::life() == Life::Runs {
            // Who has asked may not have read the answer.
            let is_read = self.clock - self.answered_at > 2.0 * decide::ANSWER_TIME;
            if is_read {
                self.host.say_nothing();
                self.said = None;
            }
            if is_read || self.said.as_ref().is_some_and(|said| said.waits.is_empty()) {
                return;
            }
        }
        let python = python::python();
        let other = self.others.find(&python, &self.waits.threads(), self.clock);
        let mut status = own::status(&self.waits, &python, other);
        if let Some(word) = &word {
            (self.answered, self.answered_at) = (word.time, self.clock);
            if matches!(word.kind, Kind::Show | Kind::End) {
                let dump = dump(self.host, word.kind, &report::doing(&status), python.main());
                self.trouble =
                    self.host.dump(&dump).err().map(|error| error.to_string()).or(self.trouble.take());
            }
        }
        status.answered = self.answered;
        if self.said.as_ref().is_none_or(|before| status.is_news(before)) {
            let said = start::say(self.host, &status);
            self.trouble = said.err().map(|error| error.to_string()).or(self.trouble.take());
            if self.leader >= 0 && !self.leads() {
                self.host.ring(self.leader);
            }
            compare(self.host);
        }
        self.said = Some(RankStatus { process: self.host.process.name(), ..status });
    }

    fn leads(&self) -> bool {
        self.leader == self.host.rank
    }

    /// Finds out whether this rank speaks for its host, and wakes the one that does.
    fn lead(&mut self) {
        let leader = if self.host.broken().is_some() { self.host.rank } else { self.host.leader() };
        if leader != self.leader && leader != self.host.rank {
            self.host.ring(leader);
        }
        self.leader = leader;
        link::lead(self.leads());
    }

    /// Brings up to date what is known of all ranks.
    fn observe(&mut self, listed: u64) {
        self.here = self.host.world((self.listed == Some(listed)).then_some(&self.here));
        self.listed = Some(listed);
        self.here.extend(self.said.iter().map(|said| (self.host.rank, said.clone())));
        let mut world = self.here.clone();
        let is_asked = self.state.question.as_ref().is_some_and(|it| it.purpose != Purpose::Look);
        for status in world.values_mut() {
            status.is_silent = is_asked && !has_answered(status, self.asked);
        }
        let is_answered_here = !is_asked
            || self.trouble.is_some()
            || self.here.values().all(|status| has_answered(status, self.asked));
        let mut is_answered = true;
        if self.state.question.is_some() {
            (self.far, is_answered) = link::answers();
        }
        let far = self.far.iter().filter(|(rank, _)| !self.here.contains_key(rank));
        world.extend(far.map(|(rank, it)| (*rank, it.clone())));
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
        compare_origins(&mut world);
        let own = self.host.rank;
        let heard =
            |kind| Some((kind, link::heard(kind).map(|(by, at)| (clock - (link::now() - at), by < own))?));
        let state = &mut self.state;
        state.heard = [Kind::Look, Kind::Line, Kind::End].into_iter().filter_map(heard).collect();
        state.question.iter_mut().for_each(|question| question.is_answered = is_answered && is_answered_here);
        state.own = if self.leader == own { self.here.keys().copied().collect() } else { Default::default() };
        state.is_debugged = os::is_debugged();
        state.world = world;
        state.forget();
    }

    /// Answers the questions of other hosts: at once with what is known, or when the ranks of this one have said more.
    fn respond(&mut self) {
        for mut asked in std::mem::take(&mut self.asked_by) {
            if asked.time == 0 && asked.word.kind != Kind::Look {
                let word = Word::new(asked.word.kind, self.host.rank);
                let _ = self.host.ask(&word);
                asked.time = word.time;
                self.say(Some(word));
            }
            let is_over = self.clock - asked.since > ANSWER_TIME_HERE;
            if is_over || self.here.values().all(|status| has_answered(status, asked.time)) {
                let silent = |(rank, it): (&i32, &RankStatus)| {
                    (*rank, RankStatus { is_silent: !has_answered(it, asked.time), ..it.clone() })
                };
                let here: World = self.here.iter().map(silent).collect();
                link::answer(asked.by, Message::answer(asked.word, &here));
            } else {
                self.asked_by.push(asked);
            }
        }
    }

    /// Does what there is to do.
    fn act(&mut self) {
        let report_after = self.watchdog.settings.report_after;
        let settings = decide::Settings { report_after, host: link::hosts().place() };
        let mut actions = Vec::new();
        if self.leads() || self.state.question.is_some() {
            actions = decide::decide(&self.state, &settings, self.clock);
        }
        let asks = |action: &Action| matches!(action, Action::Ask(_));
        if self.shows && !actions.iter().any(asks) && self.state.question.is_none() {
            self.shows = false;
            actions.push(Action::Ask(Purpose::Show));
        }
        let own = self.host.rank;
        for action in actions {
            self.state.apply(&action, &settings, self.clock);
            match action {
                Action::Ask(purpose) => self.ask(&purpose),
                Action::AskAgain => link::ask_again(),
                Action::Tell(key) => print(&self.facts().line(key).unwrap_or_default()),
                Action::Show => {
                    let report = self.facts().report("report (SIGUSR1)", (own, 0), own);
                    print(&report);
                }
                Action::End(key, reason) => self.end(key, &reason),
                // It was not so, or is not any more.
                Action::Acquit(_) => self.far.clear(),
                _ => {}
            }
        }
    }

    fn ask(&mut self, purpose: &Purpose) {
        let kind = purpose.kind();
        let word = Word::new(kind, self.host.rank);
        link::ask(&word);
        if kind != Kind::Look {
            self.trouble = self.host.ask(&word).err().map(|error| error.to_string());
            self.asked = word.time;
            self.say(Some(word));
        }
    }

    fn facts(&self) -> Facts<'_> {
        Facts {
            world: &self.state.world,
            size: self.host.size,
            directory: &self.host.directory,
            trouble: self.trouble.clone(),
            asks_hosts: link::is_open(),
        }
    }

    /// An operation hangs: this rank reports for all, and ends the job.
    fn end(&mut self, key: Key, reason: &Reason) {
        let Some(wait) = self.state.wait(key) else { return };
        let headline = report::headline(&self.state.world, key, wait, reason);
        let mut text = self.facts().report(&headline, key, self.host.rank);
        let ends = self.watchdog.settings.abort;
        text += if ends {
            "  the job is ended (MPI4JAX_ON_TIMEOUT=continue: it goes on)\n"
        } else {
            "  the job goes on (MPI4JAX_ON_TIMEOUT=continue)\n"
        };
        print(&text);
        if ends {
            end::end_job(HUNG, ending);
        }
    }
}

/// Whether a rank has answered a question of this time, or cannot.
fn has_answered(status: &RankStatus, time: u64) -> bool {
    status.answered >= time || !matches!(status.life, Life::Runs | Life::Exits)
}
