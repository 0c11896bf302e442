//! What the watchdog does where something is to be said, or the job is to be ended.

use std::io::Write as _;
use std::time::Duration;

use super::decide::{self, Key, Reason, State};
use super::end;
use super::graph::{Need, Why, World};
use super::link;
use super::questions::Kind;
use super::report::{GRACE, Overview};
use super::watchdog::{Watchdog, ending};

/// The job's exit status where ranks did different things.
const DIFFERENT: i32 = 1;
/// The job's exit status where an operation hangs. Not 124, which is timeout(1)'s, nor what shells and signals use.
pub const HUNG: i32 = 97;

pub fn print(text: &str) {
    let mut stderr = std::io::stderr().lock();
    // One write, so that ranks do not mix their lines.
    let _ = stderr.write_all(text.as_bytes());
    let _ = stderr.flush();
}

/// Reports what all ranks do, because somebody wants to know. Launchers ask all of them at once, and one answers.
pub fn show(watchdog: &Watchdog) {
    let (reporter, rank) = (&watchdog.reporter, watchdog.settings.rank);
    if reporter.peers.become_reporter().is_ok() {
        let is_due = |(who, ago): (i32, Duration)| who == rank || ago > GRACE;
        if reporter.peers.told("shown").is_none_or(is_due) {
            print(&reporter.report("report (SIGUSR1)", "SIGUSR1", Kind::Report, rank).0);
            reporter.peers.tell("shown");
        }
        reporter.peers.resign_as_reporter();
    }
}

/// Ranks did different things, which this line says.
pub fn differs(watchdog: &Watchdog, line: &str) {
    if watchdog.reporter.peers.become_reporter().is_err() {
        // The other rank ends the job.
        std::thread::sleep(2 * GRACE);
    }
    print(line);
    end::end_job(DIFFERENT, ending);
}

/// An operation takes long: a line says so, and the job goes on.
pub fn tell(watchdog: &Watchdog, state: &State, key: Key) {
    let peers = &watchdog.reporter.peers;
    if let Some(wait) = state.wait(key)
        && peers.become_reporter().is_ok()
    {
        if let Some(line) = watchdog.reporter.line(&state.world, key, wait) {
            // Another host's leader that began at the same time speaks, if it is a lower one.
            let other =
                link::heard(Kind::Line).filter(|(_, at)| link::now() - at < 2.0 * GRACE.as_secs_f64());
            if other.is_none_or(|(rank, _)| rank > peers.rank) {
                peers.tell("told");
                print(&line);
            }
        }
        peers.resign_as_reporter();
    }
}

/// An operation hangs: this rank reports for all, and ends the job. Whether it did not turn out otherwise. `look` finds out what
/// ranks wait for now.
pub fn hung(
    watchdog: &Watchdog,
    state: &State,
    key: Key,
    reason: &Reason,
    turn: Duration,
    look: fn(&Watchdog, &World) -> World,
) -> bool {
    let Some(wait) = state.wait(key) else { return false };
    let reporter = &watchdog.reporter;
    std::thread::sleep(turn);
    if link::heard(Kind::Hung).is_some_and(|(_, at)| link::now() - at < GRACE.as_secs_f64()) {
        // It ends the job when it has reported.
        std::thread::sleep(2 * GRACE);
    }
    let name = if wait.need == Need::End { "the end of the job" } else { &*wait.words };
    let headline = match reason {
        Reason::Late(words) => format!("{name} {words}"),
        Reason::Proof(Why::Gone(rank, process)) => {
            format!("{name} cannot end: rank {rank}, {process}, is gone")
        }
        Reason::Proof(Why::Finished(Some(rank))) => format!("{name} cannot end: rank {rank} has finished"),
        Reason::Proof(Why::Finished(None)) => format!("{name} cannot end: all other ranks have finished"),
        Reason::Proof(Why::Stuck(_)) => format!("deadlock: {}", decide::deadlock(&state.world, key)),
    };
    if reporter.peers.become_reporter().is_err() {
        std::thread::sleep(2 * GRACE);
    }
    let (mut report, overview) = reporter.report(&headline, &headline, Kind::Hung, key.0);
    let has_ended = overview.is_under_way(key) == Some(false);
    let holds = match reason {
        Reason::Late(_) => true,
        Reason::Proof(Why::Gone(..)) => reporter.peers.is_under_way(),
        Reason::Proof(_) => decide::why(&confirmed(look(watchdog, &state.world), &overview), key).is_some(),
    };
    let ends = watchdog.settings.abort && !has_ended;
    if holds {
        report += match (watchdog.settings.abort, has_ended) {
            (_, true) => "  it has ended meanwhile: the job goes on\n",
            (true, _) => "  the job is ended (MPI4JAX_ON_TIMEOUT=continue: it goes on)\n",
            (false, _) => "  the job goes on (MPI4JAX_ON_TIMEOUT=continue)\n",
        };
        print(&report);
        if ends {
            end::end_job(HUNG, ending);
        }
    }
    reporter.peers.resign_as_reporter();
    holds
}

/// What is known of the ranks' waits, without what they did not say once more. Who has not answered may do anything.
fn confirmed(mut world: World, overview: &Overview) -> World {
    for (rank, it) in &mut world {
        match overview.marks_of(*rank) {
            Some(_) => it.waits.retain(|wait| overview.is_under_way((*rank, wait.number)) == Some(true)),
            None => it.other = it.other.take().or(Some("threads that do not answer".into())),
        }
    }
    world
}
