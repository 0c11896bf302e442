//! The thread that notices operations that do not end.
//!
//! It sleeps while nothing is under way. It publishes the [status](super::this_rank) of this rank, and does the work of the
//! [leader](super::leader) of the host if this rank is that.

use std::io::PipeReader;
use std::panic::AssertUnwindSafe;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::compare::samples;
use super::end;
use super::leader::Leader;
use super::settings::Watchdog;
use super::shared;
use super::succession::Succession;
use super::this_rank::ThisRank;
use super::waits::{self, Limit};
use crate::finalize;
use crate::output::print;
use crate::record::recorder;
use crate::record::timeline;
use crate::sync::lock;
use crate::system::launcher::Launcher;
use crate::system::signal::{self, Woken};
use crate::watch::job::host::HostFolder;
use crate::watch::job::link;

/// The job's exit status where ranks did different things.
const DIFFERENT: i32 = 1;
/// How long the watchdog sleeps while operations come and go; and while one waits, at first and in the end. In seconds.
const BEAT: f64 = 2.0;
const WAIT_BEATS: [f64; 2] = [1.0, 3.0];
/// How often a rank that does nothing looks whether its files are still there.
const LOOK: f64 = 10.0;
/// How often answers are looked for.
const LISTEN: f64 = 0.05;
/// When a rank compares what it did with its neighbours for the first time, and then after twice as long each time.
const COMPARE: Duration = Duration::from_secs(5);

pub fn run(watchdog: &'static Watchdog, pipe: &PipeReader) {
    let Watchdog { settings, host, .. } = watchdog;
    let launcher = Launcher::parent(&settings.launchers);
    let ended = launcher.as_ref().and_then(|launcher| launcher.ended.as_ref());
    let mut observer = Observer::new(watchdog);
    loop {
        let pause = observer.pause();
        let began = Instant::now();
        let woken = signal::wait(pipe, host.pipe().as_deref(), ended, pause);
        // A process that was stopped has not waited meanwhile.
        let passed = began.elapsed().as_secs_f64().min(2.0 * pause.min(BEAT));
        if let Some(launcher) = launcher.as_ref().filter(|launcher| launcher.is_gone()) {
            end::end_with_launcher(launcher, host.rank);
        }
        // Whatever goes wrong here, the next hang is noticed.
        let step = AssertUnwindSafe(|| observer.step(passed, &woken));
        if std::panic::catch_unwind(step).is_err() {
            observer = Observer::new(watchdog);
            std::thread::sleep(Duration::from_secs(1));
        }
    }
}

/// Ends the job if this rank's operations differ from those of its neighbours. A difference that is not proved is a line, once.
pub fn compare(host: &HostFolder) {
    /// One thread compares at a time: at the end of the program, the main thread would end the process, without an error,
    /// before this one has ended the job.
    static COMPARING: Mutex<()> = Mutex::new(());
    let _guard = lock(&COMPARING);
    let is_end = waits::has_ended() || finalize::is_ending();
    let Some(difference) = samples::difference(host, is_end) else { return };
    // Of the ranks that find one, one prints it.
    if host.is_first_to(if difference.is_proved { "differs" } else { "doubt" }) {
        print(&format!("r{} | mpi4jax: {}\n", host.rank, difference.report));
        if difference.is_proved {
            end::end_job(DIFFERENT);
        }
    }
}

/// What the watchdog has observed.
struct Observer {
    watchdog: &'static Watchdog,
    /// Seconds in which this process ran.
    clock: f64,
    this_rank: ThisRank,
    leader: Leader,
    /// Which rank leads this host; -1: not known yet.
    leader_rank: i32,
    succession: Succession,
    /// How many operations had begun at the last beat.
    begun: u64,
    compare_at: Duration,
}

impl Observer {
    fn new(watchdog: &'static Watchdog) -> Self {
        Self {
            watchdog,
            clock: 0.0,
            this_rank: ThisRank::default(),
            leader: Leader::new(&watchdog.host, &watchdog.settings),
            leader_rank: -1,
            succession: Succession::default(),
            begun: 0,
            compare_at: COMPARE,
        }
    }

    fn limit(&self) -> Limit {
        waits::current_limit(self.watchdog.settings.timeout)
    }

    /// For how long this thread sleeps, in seconds.
    fn pause(&mut self) -> f64 {
        let limit = self.limit();
        let shortest = limit.seconds.min(self.watchdog.settings.report_after) / 4.0;
        let longest = self.this_rank.waits.longest().max(self.leader.longest());
        let begun = recorder::count();
        let pause = if self.leader.is_asking() {
            LISTEN
        } else if !self.this_rank.waits.is_empty() || longest > 0.0 {
            let next = self.this_rank.waits.next_limit(&limit) + 0.01;
            (longest / 8.0).clamp(WAIT_BEATS[0], WAIT_BEATS[1]).min(next).min(shortest)
        } else if waits::has_ended() {
            WAIT_BEATS[0] // This rank finishes soon, and nothing wakes this thread then.
        } else if begun == self.begun && waits::sleep() {
            // An operation that begins, and a rank that asks or waits, wake this thread.
            let next = self.compare_at.saturating_sub(self.watchdog.started.elapsed());
            next.as_secs_f64().clamp(BEAT, LOOK)
        } else {
            // Also where this thread is about to sleep: what begins at this moment may not have seen that.
            BEAT.min(shortest)
        };
        self.begun = begun;
        pause.max(0.02)
    }

    fn step(&mut self, passed: f64, woken: &Woken) {
        let host = &self.watchdog.host;
        self.clock += passed;
        timeline::flush();
        if let Some(words) = host.mend(waits::has_finished()) {
            print(&format!("r{} | mpi4jax: {words}\n", host.rank));
        }
        if HostFolder::is_asked_to_compare(&woken.messages) {
            compare(host);
        }
        if self.watchdog.started.elapsed() >= self.compare_at {
            compare(host);
            self.compare_at *= 2;
        }
        self.this_rank.waits.update(passed, &self.limit(), host.size);
        self.compare_settings();
        if !self.this_rank.waits.is_empty() {
            waits::awake();
        }
        for &signal in &woken.signals {
            match i32::from(signal) {
                0 => {}
                libc::SIGUSR1 if host.broken().is_some() => self.leader.report(host.rank, self.clock),
                libc::SIGUSR1 => host.request_report(self.leader_rank.max(0)),
                signal => end::end_by_signal(signal, host),
            }
        }
        if self.this_rank.publish(host, host.question(), self.clock) {
            if self.leader_rank >= 0 && self.leader_rank != host.rank {
                host.wake(self.leader_rank);
            }
            compare(host);
        }
        let matters = !self.this_rank.waits.is_empty() || !woken.messages.is_empty();
        self.find_leader(matters);
        if self.leader_rank == host.rank {
            if let Some(rank) = HostFolder::requested(&woken.messages) {
                self.leader.report(rank, self.clock);
            }
            self.leader.listen(&mut self.this_rank, self.clock);
            // Without the pipe that wakes this rank, files are looked at each time.
            let may_be_news = !woken.messages.is_empty() || host.pipe().is_none();
            if may_be_news || !self.this_rank.waits.is_empty() || !self.leader.is_idle() {
                self.leader.step(&mut self.this_rank, self.clock);
            }
        }
    }

    /// Ranks compare their settings when they have made the default communicator, and at the first collective on another one. But
    /// a rank that lacks a setting may not need the default one, and wait for this rank meanwhile; or its settings were not
    /// known then.
    fn compare_settings(&self) {
        let Watchdog { host, settings, .. } = self.watchdog;
        let differs = |members| shared::difference_among(host, settings, members);
        if let Some(difference) = self.this_rank.waits.collectives(host.size).find_map(differs)
            && host.is_first_to("differs")
        {
            print(&format!("r{} | mpi4jax: {difference}\n", host.rank));
            end::end_job(DIFFERENT);
        }
    }

    /// Finds out which rank leads this host, and wakes it if it is another one than before.
    fn find_leader(&mut self, matters: bool) {
        let host = &self.watchdog.host;
        let leader = self.succession.leader(host, matters, self.clock);
        if leader != self.leader_rank {
            link::lead(leader == host.rank);
            if leader != host.rank {
                host.wake(leader);
                self.leader = Leader::new(host, &self.watchdog.settings);
            }
        }
        self.leader_rank = leader;
    }
}
