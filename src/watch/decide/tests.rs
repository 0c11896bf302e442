use super::*;
use crate::board::ranks::Ranks;
use crate::comm::CommId;
use crate::watch::state::{Need, Peer, RankStatus, State, WaitId};

const A: CommId = CommId { class: 1, origin: 3, name: 0 };

fn waits(need: Need) -> RankStatus {
    let counts =
        if let Need::Collective { comm, number, .. } = need { vec![(comm, number)] } else { Vec::new() };
    let wait = Wait {
        id: WaitId::Operation(1),
        need,
        members: Ranks::all(2),
        seconds: 0.0,
        late: String::new(),
        words: "it".into(),
        has_line: true,
    };
    RankStatus { state: State::Runs, waits: vec![wait], counts, ..RankStatus::default() }
}

fn recv(rank: i32) -> RankStatus {
    let from = Some(Peer { rank: Some(rank), tag: None });
    waits(Need::Message { comm: A, key: 1, from, to: None })
}

fn barrier() -> RankStatus {
    waits(Need::Collective { comm: A, number: 1, what: 0 })
}

fn of(state: State) -> RankStatus {
    RankStatus { state, ..RankStatus::default() }
}

/// What is done about these ranks, that wait together from 0 on, at which second.
fn actions(settings: &Settings, until: u32, world: impl Fn(u32) -> [RankStatus; 2]) -> Vec<(u32, Action)> {
    let mut memory = Memory::default();
    let step = |second: u32| {
        let mut world: World = (0..).zip(world(second)).collect();
        world.values_mut().flat_map(|it| &mut it.waits).for_each(|wait| wait.seconds = second.into());
        decide(&world, &mut memory, settings, second.into()).map(|action| (second, action))
    };
    (0..until).filter_map(step).collect()
}

fn settings(deadlock_after: f64) -> Settings {
    Settings { size: 2, report_after: 30.0, deadlock_after, ..Settings::default() }
}

fn ends(done: &[(u32, Action)]) -> Vec<u32> {
    done.iter().filter(|(_, action)| matches!(action, Action::End(..))).map(|(second, _)| *second).collect()
}

fn lines(done: &[(u32, Action)]) -> Vec<u32> {
    done.iter().filter(|(_, action)| matches!(action, Action::Line(_))).map(|(second, _)| *second).collect()
}

#[test]
fn what_is_certain_ends_within_ten_seconds() {
    for other in [of(State::Finished), of(State::Gone)] {
        for first in [recv(1), barrier()] {
            assert_eq!(ends(&actions(&settings(300.0), 60, |_| [first.clone(), other.clone()])), [5]);
        }
    }
}

#[test]
fn a_job_that_is_stuck_is_named_after_10_s_and_ended_later() {
    let stuck = |_| [recv(1), recv(0)];
    let done = actions(&settings(300.0), 400, stuck);
    let (at, Action::Stuck(key, Why::Stuck(_), left)) = &done[0] else { panic!("{done:?}") };
    assert_eq!((*at, *key, *left), (11, (0, WaitId::Operation(1)), 290.0));
    assert_eq!(done.iter().filter(|(_, action)| matches!(action, Action::Stuck(..))).count(), 1);
    assert_eq!(ends(&done), [301]);
    let done = actions(&settings(f64::INFINITY), 400, stuck);
    assert!(matches!(done[0], (11, Action::Stuck(_, _, f64::INFINITY))) && ends(&done).is_empty());
    assert_eq!(ends(&actions(&settings(3.0), 60, stuck)), [4]);
}

#[test]
fn a_job_in_which_a_rank_goes_on_now_and_then_is_not_stuck() {
    let done = actions(&settings(20.0), 300, |second| {
        let other = RankStatus { begun: u64::from(second / 15), ..recv(0) };
        [recv(1), other]
    });
    assert!(ends(&done).is_empty(), "{done:?}");
    let done = actions(&settings(20.0), 300, |second| {
        let goes_on = (second % 15 == 0).then(|| "another thread".into());
        [recv(1), RankStatus { goes_on, ..recv(0) }]
    });
    assert!(ends(&done).is_empty(), "{done:?}");
    // A part of an operation, and a call that is no operation.
    let done = actions(&settings(20.0), 300, |second| {
        let messages = vec![(1, 0, 0, u64::from(second / 15))];
        [recv(1), RankStatus { messages, ..recv(0) }]
    });
    assert!(ends(&done).is_empty(), "{done:?}");
    let done = actions(&settings(20.0), 300, |second| {
        let mut other = recv(0);
        other.waits[0].id = WaitId::Call(u64::from(second / 15));
        [recv(1), other]
    });
    assert!(ends(&done).is_empty(), "{done:?}");
}

#[test]
fn nothing_ends_while_a_rank_is_stopped_or_debugged() {
    let halted = |second: u32, it: RankStatus| RankStatus { is_halted: (3..100).contains(&second), ..it };
    for (of, expected) in [(recv(0), 120), (self::of(State::Finished), 104)] {
        let done = actions(&settings(20.0), 200, |second| [halted(second, recv(1)), of.clone()]);
        assert_eq!(ends(&done), [expected], "{done:?}");
        assert_eq!(lines(&done)[..2], [30, 60], "{done:?}");
    }
}

#[test]
fn lines_come_after_30_seconds_and_after_twice_as_long_each_time() {
    let slow = |_| [barrier(), of(State::Runs)];
    assert_eq!(lines(&actions(&settings(300.0), 600, slow)), [30, 60, 120, 240, 480]);
    let never = Settings { report_after: f64::INFINITY, ..settings(300.0) };
    assert_eq!(actions(&never, 600, slow), []);
}
