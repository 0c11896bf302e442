//! What has been learned of programs that hang, and of those that only look like it: a row each.

use super::*;
use crate::comm::origin::{FREED, UNKNOWN};
use crate::watch::job::ranks::Ranks;
use crate::watch::job::status::{CommId, Peer, compare_origins};

/// A communicator of all ranks.
const A: CommId = CommId { class: 1, origin: 3, name: 0 };
/// Another one with the same members.
const B: CommId = CommId { class: 1, origin: 4, name: 0 };
/// One of these that no duplicating has made, or another.
const U: CommId = CommId { class: 1, origin: UNKNOWN, name: 0 };
/// One with other members.
const C: CommId = CommId { class: 2, origin: 3, name: 0 };

fn wait(need: Need) -> Wait {
    let members = Ranks::all(3);
    Wait {
        id: WaitId::Operation(1),
        need,
        members,
        seconds: 0.0,
        bytes: 12,
        late: String::new(),
        words: "it".into(),
        has_line: true,
    }
}

fn all(comm: CommId, number: u64) -> Wait {
    wait(Need::Collective { comm, number })
}

fn peer(rank: i32, tag: i32) -> Option<Peer> {
    // As MPI's wildcards, in these rows.
    Some(Peer { rank: (rank >= 0).then_some(rank), tag: (tag >= 0).then_some(tag) })
}

fn recv(rank: i32, tag: i32) -> Wait {
    wait(Need::Message { comm: A, from: peer(rank, tag), to: None })
}

fn send(rank: i32, tag: i32) -> Wait {
    wait(Need::Message { comm: A, from: None, to: peer(rank, tag) })
}

fn sendrecv(source: i32, dest: i32) -> Wait {
    wait(Need::Message { comm: A, from: peer(source, 0), to: peer(dest, 0) })
}

/// A rank all of whose threads wait, and that has begun what they wait for.
fn waits(waits: impl IntoIterator<Item = Wait>) -> RankStatus {
    let mut rank =
        RankStatus { life: Life::Runs, waits: waits.into_iter().collect(), ..RankStatus::default() };
    for (i, wait) in rank.waits.iter_mut().enumerate() {
        wait.id = WaitId::Operation(1 + i as u64);
        if let Need::Collective { comm, number } = wait.need {
            rank.counts.push((comm, number));
        }
    }
    rank
}

fn runs() -> RankStatus {
    RankStatus { life: Life::Runs, ..RankStatus::default() }
}

fn finished(collectives: u64) -> RankStatus {
    let counts = vec![(CommId { origin: FREED, ..A }, collectives)];
    RankStatus { life: Life::Finished, counts, ..RankStatus::default() }
}

fn gone() -> RankStatus {
    RankStatus { life: Life::Gone, ..RankStatus::default() }
}

fn with(rank: RankStatus, change: impl FnOnce(&mut RankStatus)) -> RankStatus {
    let mut rank = rank;
    change(&mut rank);
    rank
}

/// The leader of the ranks, and what it has decided.
struct Job {
    state: Observation,
    memory: Memory,
    settings: Settings,
}

impl Job {
    fn new() -> Self {
        let settings = Settings { report_after: 30.0, host: (0, 1) };
        Self {
            state: Observation { is_answered: true, ..Observation::default() },
            memory: Memory::default(),
            settings,
        }
    }

    /// Decides once about these ranks, whose waits have taken `now` seconds.
    fn decide(&mut self, ranks: &[RankStatus], now: f64) -> Vec<Action> {
        self.state.world = (0..).zip(ranks.iter().cloned()).collect();
        compare_origins(&mut self.state.world);
        self.state.world.values_mut().flat_map(|rank| &mut rank.waits).for_each(|wait| wait.seconds = now);
        let (memory, actions) = decide(&self.state, &self.memory, &self.settings, now);
        self.memory = memory;
        actions
    }

    /// The same, with the answers to a question.
    fn step(&mut self, ranks: &[RankStatus], now: f64) -> Vec<Action> {
        let mut actions = self.decide(ranks, now);
        if self.memory.question.is_some() {
            actions.extend(self.decide(ranks, now));
        }
        actions
    }
}

/// What becomes of these ranks, that wait together from 0 on: why the job is ended, and when.
fn outcome(ranks: &[RankStatus], until: u32) -> Option<(Why, f64)> {
    let mut job = Job::new();
    (0..until).map(f64::from).find_map(|now| {
        job.step(ranks, now).into_iter().find_map(|action| match action {
            Action::End(_, why) => Some((why, now)),
            _ => None,
        })
    })
}

const NOTHING: &str = "";
const STUCK: &str = "stuck";
const FINISHED: &str = "finished";
const ALL_FINISHED: &str = "all finished";
const GONE: &str = "gone";
const LATE: &str = "late";

#[test]
fn jobs_end_for_what_is_proved_and_for_nothing_else() {
    let thread = |rank: &mut RankStatus| rank.other = Some("another thread".into());
    let started = |need: Wait| move |rank: &mut RankStatus| rank.started.push(need.need);
    let begun = |comm, number| move |rank: &mut RankStatus| rank.counts.push((comm, number));
    let rows: Vec<(&str, [RankStatus; 3], &str)> = vec![
        // ---- Knots
        ("two receives", [waits([recv(1, 7)]), waits([recv(0, 7)]), runs()], STUCK),
        ("a ring", [waits([recv(1, 0)]), waits([recv(2, 0)]), waits([recv(0, 0)])], STUCK),
        ("two large sends", [waits([send(1, 7)]), waits([send(0, 7)]), runs()], STUCK),
        ("tags that differ", [waits([recv(1, 7)]), waits([send(0, 8)]), runs()], STUCK),
        ("a receive from itself", [waits([recv(0, 7)]), runs(), runs()], STUCK),
        ("all receive from any", [waits([recv(-1, 7)]), waits([recv(-1, 7)]), waits([recv(-1, 7)])], STUCK),
        (
            "a rank that waits for a knot",
            [waits([recv(1, 7)]), waits([recv(0, 7)]), waits([recv(0, 1)])],
            STUCK,
        ),
        ("a collective and a message", [waits([all(A, 1)]), waits([recv(0, 7)]), waits([all(A, 1)])], STUCK),
        ("two communicators", [waits([all(A, 1)]), waits([all(B, 1)]), waits([all(A, 1)])], STUCK),
        ("other members", [waits([all(A, 1)]), waits([all(C, 1)]), waits([all(A, 1)])], STUCK),
        ("two threads", [waits([recv(1, 7), recv(2, 7)]), waits([recv(0, 7)]), waits([recv(1, 7)])], STUCK),
        (
            "a call that takes all",
            [waits([wait(Need::Call)]), waits([recv(0, 7)]), waits([wait(Need::Call)])],
            STUCK,
        ),
        ("an exchange with both", [waits([sendrecv(1, 2)]), waits([recv(0, 7)]), waits([recv(0, 7)])], STUCK),
        // ---- What looks like one
        ("a receive and its send", [waits([recv(1, 7)]), waits([send(0, 7)]), runs()], NOTHING),
        ("a receive of any tag", [waits([recv(1, -1)]), waits([send(0, 7)]), runs()], NOTHING),
        ("a receive from any", [waits([recv(-1, -1)]), waits([send(0, 7)]), waits([recv(0, 7)])], NOTHING),
        ("another thread", [waits([recv(1, 7)]), with(waits([recv(0, 7)]), thread), runs()], NOTHING),
        (
            "a started send",
            [waits([recv(1, 7)]), with(waits([recv(0, 7)]), started(send(0, 7))), runs()],
            NOTHING,
        ),
        (
            "of another tag",
            [waits([recv(1, 7)]), with(waits([recv(0, 7)]), started(send(0, 8))), runs()],
            STUCK,
        ),
        ("a thread that is served", [waits([recv(1, 7), recv(2, 7)]), waits([recv(0, 7)]), runs()], NOTHING),
        ("half an exchange", [waits([sendrecv(2, 1)]), waits([recv(0, 7)]), runs()], NOTHING),
        ("one computes", [waits([all(A, 1)]), waits([recv(0, 7)]), runs()], NOTHING),
        ("all have come", [waits([all(A, 1)]), waits([all(A, 1)]), waits([all(A, 1)])], NOTHING),
        ("of unknown origin", [waits([all(U, 1)]), waits([all(U, 1)]), waits([all(U, 1)])], NOTHING),
        (
            "of names that differ",
            [waits([all(U, 1)]), waits([all(CommId { name: 1, ..U }, 1)]), waits([all(U, 1)])],
            NOTHING,
        ),
        ("of which one is behind", [waits([all(U, 2)]), waits([all(U, 1)]), waits([all(U, 2)])], NOTHING),
        ("one of which is a duplicate", [waits([all(A, 1)]), waits([all(U, 1)]), waits([all(U, 1)])], STUCK),
        (
            "counted from another import on",
            [waits([all(A, 1)]), with(waits([all(B, 1)]), |rank| rank.copies = 1), waits([all(A, 1)])],
            NOTHING,
        ),
        (
            "its root is ahead",
            [waits([all(A, 5)]), with(waits([recv(0, 7)]), begun(A, 5)), waits([all(A, 5)])],
            NOTHING,
        ),
        (
            "a ring with a stopped rank",
            [
                waits([recv(1, 0)]),
                waits([recv(2, 0)]),
                with(waits([recv(0, 0)]), |rank| rank.life = Life::Stopped),
            ],
            NOTHING,
        ),
        ("a rank of which nothing is known", [waits([recv(1, 7)]), RankStatus::default(), runs()], NOTHING),
        (
            "a stream that waits",
            [waits([recv(1, 7)]), waits([recv(0, 7), wait(Need::Stream)]), runs()],
            NOTHING,
        ),
        (
            "both free communicators",
            [waits([wait(Need::Call)]), waits([wait(Need::Call)]), waits([recv(0, 7)])],
            STUCK,
        ),
        (
            "two of them, one that they have",
            {
                let call = || Wait { members: Ranks::all(2), ..wait(Need::Call) };
                [waits([call()]), waits([call()]), waits([recv(0, 7)])]
            },
            NOTHING,
        ),
        (
            "all free communicators",
            [waits([wait(Need::Call)]), waits([wait(Need::Call)]), waits([wait(Need::Call)])],
            NOTHING,
        ),
        // ---- Ranks that have finished
        ("a sender", [waits([recv(1, 7)]), finished(0), runs()], FINISHED),
        ("whatever else runs", [with(waits([recv(1, 7)]), thread), finished(0), runs()], FINISHED),
        ("all senders", [waits([recv(-1, 7)]), finished(0), finished(0)], ALL_FINISHED),
        ("not all senders", [waits([recv(-1, 7)]), finished(0), runs()], NOTHING),
        ("one of an exchange", [waits([sendrecv(1, 2)]), finished(0), runs()], NOTHING),
        ("both of an exchange", [waits([sendrecv(1, 2)]), finished(0), finished(0)], FINISHED),
        ("without a collective", [waits([all(A, 2)]), finished(1), waits([all(A, 2)])], FINISHED),
        ("in which another is not", [waits([all(A, 2)]), finished(1), runs()], NOTHING),
        ("after it", [waits([all(A, 2)]), finished(2), waits([all(A, 2)])], NOTHING),
        (
            "after as many on another communicator",
            [waits([all(A, 2)]), with(finished(1), begun(B, 2)), waits([all(A, 2)])],
            FINISHED,
        ),
        ("while one waits elsewhere", [waits([all(A, 2)]), finished(1), waits([recv(0, 7)])], FINISHED),
        (
            "all wait for the end",
            [with(finished(1), |rank| rank.waits.push(wait(Need::End))), runs(), finished(1)],
            NOTHING,
        ),
        // ---- Ranks that are gone
        ("one that takes part", [waits([all(A, 1)]), gone(), runs()], GONE),
        ("any of a job", [waits([recv(2, 7)]), gone(), runs()], GONE),
        ("at the end", [with(finished(1), |rank| rank.waits.push(wait(Need::End))), gone(), runs()], GONE),
        ("where no rank waits", [runs(), gone(), runs()], NOTHING),
        // ---- Limits
        (
            "a limit",
            [with(waits([all(A, 1)]), |rank| rank.waits[0].late = "too long".into()), runs(), runs()],
            LATE,
        ),
    ];
    for (name, ranks, expected) in rows {
        let end = outcome(&ranks, 20);
        let found = match &end {
            None => NOTHING,
            Some((Why::Late, _)) => LATE,
            Some((Why::Gone(..), _)) => GONE,
            Some((Why::Finished(None), _)) => ALL_FINISHED,
            Some((Why::Finished(Some(_)), _)) => FINISHED,
            Some((Why::Stuck(_), _)) => STUCK,
        };
        assert_eq!(found, expected, "{name}: {end:?}");
        assert!(end.is_none_or(|(_, at)| at < 6.0), "{name}");
    }
}

#[test]
fn a_large_message_may_take_its_time() {
    let large = |mut wait: Wait| {
        wait.bytes = 200_000_000;
        wait
    };
    // The largest of a knot decides.
    let small = [waits([large(recv(1, 7))]), waits([recv(0, 7)]), runs()];
    for ranks in [[waits([large(recv(1, 7))]), waits([large(recv(0, 7))]), runs()], small] {
        let (_, at) = outcome(&ranks, 100).unwrap();
        assert!((10.0..30.0).contains(&at), "{at}");
    }
}

#[test]
fn what_moves_proves_nothing() {
    let moves = |rank: &mut RankStatus| rank.moves = true;
    let knot = [waits([recv(1, 7)]), with(waits([recv(0, 7)]), moves), runs()];
    assert_eq!(outcome(&knot, 100), None);
    let from_finished = [with(waits([recv(1, 7)]), moves), finished(0), runs()];
    assert_eq!(outcome(&from_finished, 100), None);
    let from_gone = [with(waits([recv(1, 7)]), moves), gone(), runs()];
    assert!(outcome(&from_gone, 10).is_some());
    let beside = [waits([recv(1, 7)]), waits([recv(0, 7)]), with(runs(), moves)];
    assert!(outcome(&beside, 10).is_some(), "of a rank that does not take part");
}

#[test]
fn a_proof_has_to_hold_all_the_time() {
    let mut job = Job::new();
    let mut end = None;
    for second in 0..20 {
        let mut knot = [waits([recv(1, 7)]), waits([recv(0, 7)]), runs()];
        // Now and then a thread is seen that could go on.
        if second % 3 == 0 && second < 10 {
            knot[0].other = Some("another thread".into());
        }
        job.state.is_debugged = second == 11;
        if job.step(&knot, f64::from(second)).iter().any(|action| matches!(action, Action::End(..))) {
            end.get_or_insert(second);
        }
    }
    assert_eq!(end, Some(16), "more than three seconds after the debugger has gone");
}

/// The job is ended for what holds when all ranks have been asked once more.
#[test]
fn a_proof_is_confirmed_by_the_ranks() {
    let knot = [waits([recv(1, 7)]), waits([recv(0, 7)]), runs()];
    let is_silent = |rank: &mut RankStatus| rank.is_silent = true;
    let silent = [knot[0].clone(), with(knot[1].clone(), is_silent), runs()];
    let served = [knot[0].clone(), waits([]), runs()];
    let late = [with(waits([all(A, 1)]), |rank| rank.waits[0].late = "too long".into()), runs(), runs()];
    let in_time = [waits([]), runs(), runs()];
    for (before, after, answers, ends) in [
        (&knot, &knot, true, true),
        (&knot, &knot, false, true),
        (&knot, &served, true, false),
        (&knot, &silent, false, false),
        (&late, &late, true, true),
        (&late, &in_time, true, false),
    ] {
        let mut job = Job::new();
        job.state.is_answered = answers;
        let (mut asked, mut ended) = (false, false);
        for second in 0..20 {
            for action in job.decide(if asked { after } else { before }, f64::from(second)) {
                asked |= action == Action::Ask(QuestionKind::End);
                ended |= matches!(action, Action::End(..));
            }
        }
        assert_eq!((asked, ended), (true, ends), "{after:?}");
    }
}

/// Of two leaders that ask at once, the one that comes first reports.
#[test]
fn one_host_ends_the_job() {
    let knot = [waits([recv(1, 7)]), waits([recv(0, 7)]), runs()];
    for is_first in [true, false] {
        let mut job = Job::new();
        let mut ended = false;
        for second in 0..12 {
            let now = f64::from(second);
            for action in job.decide(&knot, now) {
                ended |= matches!(action, Action::End(..));
                if action == Action::Ask(QuestionKind::End) {
                    let before_this = if is_first { f64::NEG_INFINITY } else { now };
                    job.state.heard = Heard { last: now, end: now, before_this };
                }
            }
        }
        assert_eq!(ended, is_first);
    }
}

/// What is done in ten minutes for two ranks that wait for a third.
fn slow(job: &mut Job) -> Vec<(u32, Action)> {
    let ranks = [waits([all(A, 1)]), runs(), waits([all(A, 1)])];
    let each = |second| job.step(&ranks, f64::from(second)).into_iter().map(move |action| (second, action));
    (0..600).flat_map(each).collect()
}

/// The seconds at which something is done.
fn at(done: &[(u32, Action)], is_it: impl Fn(&Action) -> bool) -> Vec<u32> {
    done.iter().filter(|(_, action)| is_it(action)).map(|(second, _)| *second).collect()
}

#[test]
fn lines_come_after_30_seconds_and_after_twice_as_long_each_time() {
    let is_line = |action: &Action| matches!(action, Action::PrintLine(_));
    assert_eq!(at(&slow(&mut Job::new()), is_line), [30, 60, 120, 240, 480]);
    // Another leader has asked just before.
    let mut job = Job::new();
    job.state.heard.last = 29.0;
    assert_eq!(at(&slow(&mut job), is_line), [60, 120, 240, 480]);
    // No line is wanted.
    job = Job::new();
    job.settings.report_after = f64::INFINITY;
    assert_eq!(slow(&mut job), []);
}

#[test]
fn other_hosts_are_asked_early_and_lines_come_with_the_same_questions() {
    let mut job = Job::new();
    job.settings.host = (0, 2);
    let done = slow(&mut job);
    assert_eq!(at(&done, |it| *it == Action::Ask(QuestionKind::Status)), [4, 8, 15, 30, 60, 120, 240, 480]);
    assert_eq!(at(&done, |it| matches!(it, Action::PrintLine(_))), [30, 60, 120, 240, 480]);
    // The second host leaves it to the first, if that asks.
    job = Job::new();
    job.settings.host = (1, 2);
    assert_eq!(slow(&mut job)[0].0, 5);
    job = Job::new();
    (job.settings.host, job.state.heard.last) = ((1, 2), 4.0);
    assert_eq!(slow(&mut job)[0].0, 9);
}

#[test]
fn a_wait_of_another_age_has_lines_of_its_own() {
    let mut job = Job::new();
    let mut said = Vec::new();
    for second in 0..100 {
        let now = f64::from(second);
        let mut ranks = [waits([all(A, 1)]), runs(), runs()];
        if second >= 55 {
            ranks[2] = waits([all(B, 1)]);
        }
        job.state.world = (0..).zip(ranks).collect();
        for (rank, status) in &mut job.state.world {
            let seconds = if *rank == 2 { now - 55.0 } else { now };
            status.waits.iter_mut().for_each(|wait| wait.seconds = seconds);
        }
        for _ in 0..2 {
            let (memory, actions) = decide(&job.state, &job.memory, &job.settings, now);
            job.memory = memory;
            said.extend(actions.into_iter().map(|action| (second, action)));
        }
    }
    let lines = said.iter().filter_map(|(at, action)| match action {
        Action::PrintLine((rank, _)) => Some((*at, *rank)),
        _ => None,
    });
    assert_eq!(lines.collect::<Vec<_>>(), [(30, 0), (60, 0), (85, 2)]);
}

#[test]
fn a_user_gets_the_report_that_he_asks_for() {
    let mut job = Job::new();
    job.state.report_for = Some(1);
    let done = job.step(&[waits([all(A, 1)]), runs(), runs()], 1.0);
    assert_eq!(done, [Action::Ask(QuestionKind::Report), Action::PrintReport(1)]);
}
