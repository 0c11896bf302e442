use super::*;
use crate::comm::CommId;
use crate::mpilib::wildcards;
use crate::record::messages::weight;
use crate::watch::state::WaitId;

const COMM: CommId = CommId { class: 1, origin: 3, name: 0 };
const WAIT: WaitId = WaitId::Operation(1);

fn waits(need: Need, words: &str) -> RankStatus {
    let wait = Wait {
        id: WAIT,
        need,
        members: Ranks::all(2),
        seconds: 40.0,
        late: String::new(),
        words: words.into(),
        has_line: true,
    };
    RankStatus { state: State::Runs, waits: vec![wait], ..RankStatus::default() }
}

fn recv(rank: i32, words: &str) -> RankStatus {
    let from = Some(Peer { rank: Some(rank), tag: None });
    waits(Need::Message { comm: COMM, key: 1, from, to: None }, words)
}

fn all(origin: u64) -> RankStatus {
    waits(Need::Collective { comm: CommId { origin, ..COMM }, number: 1, what: 0 }, "barrier #1")
}

fn world(ranks: [RankStatus; 2]) -> World {
    (0..).zip(ranks).collect()
}

fn line(world: &World) -> String {
    let facts = Facts { world, size: 2, has_board: true, asks_hosts: false };
    facts.line((0, WAIT)).unwrap()
}

#[test]
fn what_a_rank_does_is_told() {
    let python = |python: &str, activity: &str| RankStatus {
        state: State::Runs,
        process: "process 7 on x".into(),
        before: "; the last one was barrier #1".into(),
        python: python.into(),
        activity: activity.into(),
        ..RankStatus::default()
    };
    let idle = python("io.py:40 in load", "");
    let silent = |status| RankStatus { is_silent: true, ..status };
    let of = |state| RankStatus { state, ..idle.clone() };
    let mut without_line = recv(1, "recv from 1");
    without_line.waits[0].has_line = false;
    without_line.python = "a.py:4 in f".into();
    let doing = "in no operation; the last one was barrier #1; Python is at io.py:40 in load";
    for (status, expected) in [
        (&idle, doing),
        (
            &python("a.py:4 in f", "JAX compiles"),
            "in no operation; JAX compiles; the last one was barrier #1; Python is at a.py:4 in f",
        ),
        (&without_line, "in recv from 1; Python is at a.py:4 in f"),
        (&silent(without_line.clone()), "in recv from 1;  gets no time"),
        (
            &python("", "C code keeps Python's lock"),
            "in no operation; C code keeps Python's lock; the last one was barrier #1",
        ),
        (&of(State::Finished), "finished; the last one was barrier #1"),
        (&of(State::Gone), "gone: process 7 on x has died; the last one was barrier #1"),
        (&silent(idle.clone()), "silent: process 7 on x does not answer"),
    ] {
        assert_eq!(super::doing(status), expected);
    }
}

#[test]
fn a_line_says_whom_a_rank_waits_for() {
    let text = line(&world([all(3), all(3)]));
    assert!(
        text.contains("barrier #1 has waited for 40 s: all ranks have called it, and it is in progress;"),
        "{text}"
    );
    let thread = RankStatus { goes_on: Some("another thread".into()), ..all(3) };
    let text = line(&world([thread, all(4)]));
    assert!(text.contains(": rank 1 is in barrier #1; rank 0 has another thread; the job"), "{text}");
    let text = line(&world([all(0), all(0)]));
    assert!(text.contains("different communicators of the same ranks, which is a deadlock;"), "{text}");
    let text = line(&world([waits(Need::Call, "making"), waits(Need::Call, "freeing")]));
    assert!(text.contains("making has waited for 40 s: rank 1 is in freeing;"), "{text}");
    let text = line(&world([waits(Need::Call, "making"), waits(Need::Call, "making")]));
    assert!(text.contains("all ranks have called it"), "{text}");
    let text = line(&World::from([(0, recv(1, "recv from 1"))]));
    assert!(text.contains(": rank 1 is unknown: it has not imported mpi4jax"), "{text}");
}

#[test]
fn a_receive_that_no_rank_sends_to_has_a_hint() {
    let on_default = |tag, words: &str| {
        let comm = CommId { class: comm::hash("mpi4jax.default"), origin: 1, name: 0 };
        let from = Some(Peer { rank: Some(1), tag });
        waits(Need::Message { comm, key: 1, from, to: None }, words)
    };
    let text = line(&world([on_default(None, "recv from 1"), all(0)]));
    assert!(text.contains("; if mpi4py sends the message: the default communicator is a clone"), "{text}");
    let sent = RankStatus { messages: vec![(1, 0, weight(4), 0)], tags: vec![3, 4], ..all(0) };
    let text = line(&world([on_default(Some(7), "recv from 1"), sent]));
    assert!(
        text.contains("; rank 1 has sent a message with tag 4 to rank 0, which has not received it;"),
        "{text}"
    );
    let of_derivative = Some(wildcards().derivative + 7);
    let text = line(&world([on_default(of_derivative, "recv from 1"), all(0)]));
    assert!(!text.contains("clone"), "mpi4py has no such tag: {text}");
    let text = line(&world([on_default(Some(0), "wait for irecv from 1, tag 0"), all(0)]));
    assert!(text.contains("; irecv takes tag 0 unless it is given another one,"), "{text}");
    for (tag, words) in [(5, "wait for irecv from 1, tag 5"), (0, "recv from 1, tag 0")] {
        let text = line(&world([on_default(Some(tag), words), all(0)]));
        assert!(!text.contains("irecv takes tag 0"), "the program has chosen the tag: {text}");
    }
    let mut sender = on_default(None, "send to 0");
    let Need::Message { from, to, .. } = &mut sender.waits[0].need else { return };
    (*from, *to) = (None, Some(Peer { rank: Some(0), tag: Some(7) }));
    let text = line(&world([on_default(Some(7), "recv from 1"), sender]));
    assert!(!text.contains("clone"), "{text}");
}

#[test]
fn what_is_stuck_is_a_line_with_the_time_that_is_left() {
    let world = world([recv(1, "recv from 1, a.py:8"), recv(0, "recv from 0, a.py:9")]);
    let facts = Facts { world: &world, size: 2, has_board: true, asks_hosts: false };
    let text = facts.stuck_line((0, WAIT), &Why::Stuck(vec![1]), 290.0);
    assert!(
        text.starts_with("r0 | mpi4jax: this looks like a deadlock: rank 0 is in recv from 1, a.py:8, and"),
        "{text}"
    );
    assert!(
        text.ends_with("; aborting the job in 290 s unless a rank goes on (MPI4JAX_DEADLOCK_AFTER)\n"),
        "{text}"
    );
    let text = facts.stuck_line((0, WAIT), &Why::Stuck(vec![1]), f64::INFINITY);
    assert!(text.ends_with("; the job is not aborted (MPI4JAX_DEADLOCK_AFTER=0)\n"), "{text}");
}

#[test]
fn a_deadlock_is_told_with_both_lines_and_its_remedy() {
    let text = |ranks| {
        let world = world(ranks);
        headline(&world, (0, WAIT), &world[&0].waits[0], &Why::Stuck(vec![1]))
    };
    assert_eq!(
        text([recv(1, "recv from 1, a.py:8"), recv(0, "recv from 0, a.py:9")]),
        "deadlock: rank 0 is in recv from 1, a.py:8, and waits for rank 1, which is in recv from 0, a.py:9, and waits for \
         rank 0; let one of them send first, or use sendrecv"
    );
    let mixed = text([all(3), recv(0, "recv from 0, a.py:9")]);
    assert!(mixed.ends_with("let all ranks call the collective before the message, or after it"), "{mixed}");
    let mut gather = all(3);
    gather.waits[0] = Wait {
        need: Need::Collective { comm: COMM, number: 1, what: 1 },
        words: "gatherv #1, a.py:7".into(),
        ..gather.waits[0].clone()
    };
    let differ = [all(3), gather];
    assert_eq!(
        text(differ.clone()),
        "deadlock: rank 0 is in barrier #1, and waits for rank 1, which is in gatherv #1, a.py:7, and waits for rank 0; the \
         operations of the ranks do not match: let all ranks call the same collective"
    );
    assert!(
        line(&world(differ)).contains("barrier #1 has waited for 40 s: rank 1 is in gatherv #1, a.py:7;")
    );
    let other = text([all(3), all(4)]);
    assert!(other.contains("which is in barrier #1, on another communicator,"), "{other}");
    assert!(other.ends_with("let all ranks use the communicators in the same order"), "{other}");
}
