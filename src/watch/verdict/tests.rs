//! What has been learned of programs that hang, and of those that only look like it: a row each.

mod large;

use super::*;
use crate::comm::origin::UNKNOWN;
use crate::record::messages::weight;
use crate::watch::state::{WaitId, compare_origins};

/// A communicator of all ranks.
const A: CommId = CommId { class: 1, origin: 3, name: 0 };
/// Another one with the same members.
const B: CommId = CommId { class: 1, origin: 4, name: 0 };
/// One of these that no duplicating has made, or another.
const U: CommId = CommId { class: 1, origin: UNKNOWN, name: 0 };
/// One with other members.
const C: CommId = CommId { class: 2, origin: 3, name: 0 };
/// Under what messages on A are counted.
const KEY: u64 = 5;

fn wait_among(need: Need, members: Ranks) -> Wait {
    let (late, words) = (String::new(), "it, a.py:9".into());
    Wait { id: WaitId::Operation(1), need, members, seconds: 0.0, late, words, has_line: true }
}

fn wait(need: Need) -> Wait {
    wait_among(need, Ranks::all(3))
}

fn all(comm: CommId, number: u64) -> Wait {
    wait(Need::Collective { comm, number, what: 0 })
}

/// Another operation than `all`.
fn other(comm: CommId, number: u64) -> Wait {
    wait(Need::Collective { comm, number, what: 1 })
}

fn peer(rank: i32, tag: i32) -> Option<Peer> {
    // As MPI's wildcards, in these rows.
    Some(Peer { rank: (rank >= 0).then_some(rank), tag: (tag >= 0).then_some(tag) })
}

fn message(from: Option<Peer>, to: Option<Peer>) -> Wait {
    wait(Need::Message { comm: A, key: KEY, from, to })
}

fn recv(rank: i32, tag: i32) -> Wait {
    message(peer(rank, tag), None)
}

fn send(rank: i32, tag: i32) -> Wait {
    message(None, peer(rank, tag))
}

fn send_on(comm: CommId, rank: i32, tag: i32) -> Wait {
    wait(Need::Message { comm, key: KEY, from: None, to: peer(rank, tag) })
}

fn sendrecv(source: i32, dest: i32) -> Wait {
    message(peer(source, 0), peer(dest, 0))
}

/// A rank that waits, and has begun what it waits for.
fn waits(waits: impl IntoIterator<Item = Wait>) -> RankStatus {
    let mut rank = RankStatus { waits: waits.into_iter().collect(), ..runs() };
    for (i, wait) in rank.waits.iter_mut().enumerate() {
        wait.id = WaitId::Operation(1 + i as u64);
        if let Need::Collective { comm, number, .. } = wait.need {
            rank.counts.push((comm, number));
        }
    }
    rank
}

fn runs() -> RankStatus {
    RankStatus { state: State::Runs, ..RankStatus::default() }
}

fn finished(collectives: u64) -> RankStatus {
    let counts = vec![(CommId { origin: FREED, ..A }, collectives)];
    RankStatus { state: State::Finished, counts, ..RankStatus::default() }
}

fn gone() -> RankStatus {
    RankStatus { state: State::Gone, ..RankStatus::default() }
}

fn with(rank: RankStatus, change: impl FnOnce(&mut RankStatus)) -> RankStatus {
    let mut rank = rank;
    change(&mut rank);
    rank
}

const NOTHING: &str = "";
const STUCK: &str = "stuck";
const FINISHED: &str = "finished";
const ALL_FINISHED: &str = "all finished";
const GONE: &str = "gone";

fn outcome(world: &World, size: i32) -> &'static str {
    let verdict = Verdict::new(world);
    let each = world.iter().flat_map(|(&rank, it)| it.waits.iter().map(move |wait| (rank, wait)));
    match each.filter_map(|(rank, wait)| verdict.certain(rank, wait)).next() {
        Some(Why::Gone(_)) => GONE,
        Some(Why::Finished(None)) => ALL_FINISHED,
        Some(Why::Finished(_)) => FINISHED,
        _ if verdict.is_stuck(size) => {
            assert!(verdict.stuck().is_some());
            STUCK
        }
        _ => NOTHING,
    }
}

#[test]
fn what_is_certain_what_is_stuck_and_what_goes_on() {
    let goes_on = |rank: &mut RankStatus| rank.goes_on = Some("another thread".into());
    let started = |need: Wait| move |rank: &mut RankStatus| rank.started.push(need.need);
    let begun = |comm, number| move |rank: &mut RankStatus| rank.counts.push((comm, number));
    // So many messages of tag 7, and of another one.
    let sent_with = |tag, to, count| {
        move |rank: &mut RankStatus| {
            rank.messages.push((KEY, to, weight(tag).wrapping_mul(count), 0));
            rank.tags.push(tag);
        }
    };
    let sent = |to, count| sent_with(7, to, count);
    let received = |from, count| {
        move |rank: &mut RankStatus| rank.messages.push((KEY, from, 0, weight(7).wrapping_mul(count)))
    };
    let in_barrier = || waits([all(A, 1)]);
    let rows: Vec<(&str, [RankStatus; 3], &str)> = vec![
        // ---- No rank goes on
        ("a ring", [waits([recv(1, 0)]), waits([recv(2, 0)]), waits([recv(0, 0)])], STUCK),
        ("two receives", [waits([recv(1, 7)]), waits([recv(0, 7)]), waits([recv(0, 7)])], STUCK),
        ("two large sends", [waits([send(1, 7)]), waits([send(0, 7)]), finished(0)], STUCK),
        ("tags that differ", [waits([recv(1, 7)]), waits([send(0, 8)]), finished(0)], STUCK),
        ("a receive from itself", [waits([recv(0, 7)]), finished(0), finished(0)], STUCK),
        ("all receive from any", [waits([recv(-1, 7)]), waits([recv(-1, 7)]), waits([recv(-1, 7)])], STUCK),
        ("a collective and a message", [in_barrier(), waits([recv(0, 7)]), in_barrier()], STUCK),
        ("two communicators", [in_barrier(), waits([all(B, 1)]), in_barrier()], STUCK),
        ("other members", [in_barrier(), waits([all(C, 1)]), in_barrier()], STUCK),
        ("two threads", [waits([recv(1, 7), recv(2, 7)]), waits([recv(0, 7)]), waits([recv(1, 7)])], STUCK),
        (
            "a call that takes all",
            [waits([wait(Need::Call)]), waits([recv(0, 7)]), waits([wait(Need::Call)])],
            STUCK,
        ),
        ("an exchange with both", [waits([sendrecv(1, 2)]), waits([recv(0, 7)]), waits([recv(0, 7)])], STUCK),
        (
            "a message that has come",
            [waits([recv(1, 7)]), with(waits([recv(0, 7)]), sent(0, 3)), waits([recv(0, 7)])],
            NOTHING,
        ),
        // ---- What looks like it
        ("one computes", [waits([recv(1, 7)]), waits([recv(0, 7)]), runs()], NOTHING),
        ("a receive and its send", [waits([recv(1, 7)]), waits([send(0, 7)]), in_barrier()], NOTHING),
        ("a receive of any tag", [waits([recv(1, -1)]), waits([send(0, 7)]), in_barrier()], NOTHING),
        ("a receive from any", [waits([recv(-1, -1)]), waits([send(0, 7)]), waits([recv(0, 7)])], NOTHING),
        ("another thread", [waits([recv(1, 7)]), with(waits([recv(0, 7)]), goes_on), in_barrier()], NOTHING),
        (
            "a started send",
            [waits([recv(1, 7)]), with(waits([recv(0, 7)]), started(send(0, 7))), in_barrier()],
            NOTHING,
        ),
        (
            "a started send, and a receive of any tag",
            [waits([recv(1, -1)]), with(waits([recv(0, 7)]), started(send(0, 7))), in_barrier()],
            NOTHING,
        ),
        (
            "of another tag",
            [waits([recv(1, 7)]), with(waits([recv(0, 7)]), started(send(0, 8))), in_barrier()],
            STUCK,
        ),
        (
            "of another communicator",
            [waits([recv(1, 7)]), with(waits([recv(0, 7)]), started(send_on(C, 0, 7))), in_barrier()],
            STUCK,
        ),
        (
            "a rank whose wait is reported as late",
            [
                with(waits([recv(1, 0)]), |rank| rank.waits[0].late = "for 60 s".into()),
                waits([recv(2, 0)]),
                waits([recv(0, 0)]),
            ],
            NOTHING,
        ),
        (
            "messages that were not counted by rank, and received",
            [
                with(waits([recv(1, 7)]), |rank| rank.others = [weight(7); 2]),
                waits([recv(0, 7)]),
                waits([recv(0, 7)]),
            ],
            STUCK,
        ),
        (
            "messages that were not counted by rank, and not received",
            [
                with(waits([recv(1, 7)]), |rank| rank.others = [weight(7), 0]),
                waits([recv(0, 7)]),
                waits([recv(0, 7)]),
            ],
            NOTHING,
        ),
        ("half an exchange", [waits([sendrecv(2, 1)]), waits([recv(0, 7)]), waits([send(0, 0)])], NOTHING),
        ("all have come", [in_barrier(), in_barrier(), in_barrier()], NOTHING),
        ("of unknown origin", [waits([all(U, 1)]), waits([all(U, 1)]), waits([all(U, 1)])], NOTHING),
        (
            "of names that differ",
            [waits([all(U, 1)]), waits([all(CommId { name: 1, ..U }, 1)]), waits([all(U, 1)])],
            NOTHING,
        ),
        (
            "counted from another import on",
            [in_barrier(), with(waits([all(B, 1)]), |rank| rank.copies = 1), in_barrier()],
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
                with(waits([recv(0, 0)]), |rank| rank.state = State::Stopped),
            ],
            NOTHING,
        ),
        (
            "a ring with a rank that gets no time",
            [
                waits([recv(1, 0)]),
                waits([recv(2, 0)]),
                with(waits([recv(0, 0)]), |rank| rank.is_silent = true),
            ],
            NOTHING,
        ),
        (
            "a rank that has not been heard of",
            [waits([recv(1, 7)]), RankStatus::default(), waits([recv(0, 7)])],
            NOTHING,
        ),
        (
            "a stream that waits",
            [waits([recv(1, 7)]), waits([recv(0, 7), wait(Need::Stream)]), in_barrier()],
            NOTHING,
        ),
        (
            "messages under way elsewhere",
            [
                waits([recv(1, 7)]),
                with(waits([recv(2, 7)]), received(2, 4)),
                with(waits([recv(0, 7)]), sent(1, 5)),
            ],
            NOTHING,
        ),
        (
            "messages that were received",
            [
                waits([recv(1, 7)]),
                with(waits([recv(2, 7)]), received(2, 5)),
                with(waits([recv(0, 7)]), sent(1, 5)),
            ],
            STUCK,
        ),
        (
            "a message of another tag",
            [waits([recv(1, 7)]), with(waits([recv(0, 7)]), sent_with(8, 0, 1)), waits([recv(0, 7)])],
            STUCK,
        ),
        (
            "messages of another tag",
            [waits([recv(1, 7)]), with(waits([recv(0, 7)]), sent_with(8, 0, 5)), waits([recv(0, 7)])],
            STUCK,
        ),
        (
            "a receiver that waits for any tag",
            [waits([recv(1, -1)]), with(waits([recv(0, 7)]), sent_with(8, 0, 1)), waits([recv(0, 7)])],
            NOTHING,
        ),
        (
            "a receiver that waits for any rank",
            [waits([recv(-1, 7)]), with(waits([recv(0, 7)]), sent(0, 1)), waits([recv(0, 7)])],
            NOTHING,
        ),
        (
            "a receiver that waits for another rank",
            [waits([recv(2, 7)]), with(waits([recv(0, 7)]), sent(0, 1)), waits([recv(0, 7)])],
            STUCK,
        ),
        (
            "a receiver that is in a collective",
            [in_barrier(), with(waits([recv(0, 7)]), sent(0, 1)), in_barrier()],
            STUCK,
        ),
        (
            "a receiver that has started to receive",
            [with(in_barrier(), started(recv(1, 7))), with(waits([recv(0, 7)]), sent(0, 1)), in_barrier()],
            NOTHING,
        ),
        (
            "a receiver that has started to receive, and finished",
            [
                waits([recv(1, 7)]),
                with(waits([recv(0, 7)]), sent(2, 1)),
                with(finished(0), started(recv(1, 7))),
            ],
            STUCK,
        ),
        (
            "a receiver of messages that were not counted by rank, which has finished",
            [
                with(waits([send(1, 7)]), |rank| rank.others = [weight(7), 0]),
                waits([send(0, 7)]),
                with(finished(0), started(recv(0, 7))),
            ],
            STUCK,
        ),
        (
            "two communicators, beside a rank that has counted other duplicates and waits for nothing",
            [in_barrier(), waits([all(B, 1)]), with(finished(1), |rank| rank.copies = 1)],
            STUCK,
        ),
        ("a collective that differs", [waits([all(A, 1)]), waits([other(A, 1)]), waits([all(A, 1)])], STUCK),
        (
            "one that differs, and one that computes",
            [waits([all(A, 1)]), waits([other(A, 1)]), runs()],
            NOTHING,
        ),
        (
            "another operation of a later number",
            [waits([all(A, 1)]), with(waits([other(A, 2)]), begun(A, 1)), waits([all(A, 1)])],
            NOTHING,
        ),
        // ---- Ranks that have finished
        (
            "whose message has another tag",
            [waits([recv(1, 7)]), with(finished(0), sent_with(8, 0, 1)), runs()],
            FINISHED,
        ),
        ("a sender", [waits([recv(1, 7)]), finished(0), runs()], FINISHED),
        ("whatever else runs", [with(waits([recv(1, 7)]), goes_on), finished(0), runs()], FINISHED),
        ("whose message is under way", [waits([recv(1, 7)]), with(finished(0), sent(0, 1)), runs()], NOTHING),
        (
            "whose message has come",
            [with(waits([recv(1, 7)]), received(1, 1)), with(finished(0), sent(0, 1)), runs()],
            FINISHED,
        ),
        ("a receiver", [waits([send(1, 7)]), finished(0), runs()], FINISHED),
        ("all senders", [waits([recv(-1, 7)]), finished(0), finished(0)], ALL_FINISHED),
        (
            "all senders of a communicator",
            [
                waits([wait_among(
                    Need::Message { comm: C, key: KEY, from: peer(-1, 7), to: None },
                    (0..2).collect(),
                )]),
                finished(0),
                runs(),
            ],
            ALL_FINISHED,
        ),
        (
            "a sender that has never waited for its send",
            [waits([recv(1, 7)]), with(finished(0), started(send(0, 7))), runs()],
            FINISHED,
        ),
        ("all ranks", [finished(0), finished(0), finished(0)], NOTHING),
        ("not all senders", [waits([recv(-1, 7)]), finished(0), runs()], NOTHING),
        ("one of an exchange", [waits([sendrecv(1, 2)]), finished(0), runs()], NOTHING),
        ("both of an exchange", [waits([sendrecv(1, 2)]), finished(0), finished(0)], FINISHED),
        ("without a collective", [waits([all(A, 2)]), finished(1), waits([all(A, 2)])], FINISHED),
        ("in which another is not", [waits([all(A, 2)]), finished(1), runs()], NOTHING),
        ("after it", [waits([all(A, 2)]), finished(2), waits([all(A, 2)])], NOTHING),
        (
            "in one that is not told apart",
            [waits([all(U, 1)]), with(finished(0), begun(U, 1)), waits([all(U, 1)])],
            NOTHING,
        ),
        (
            "in another one that is not told apart",
            [
                with(waits([all(U, 1)]), begun(U, 1)),
                with(finished(0), begun(U, 1)),
                with(waits([all(U, 1)]), begun(U, 1)),
            ],
            FINISHED,
        ),
        (
            "on a communicator that is forgotten",
            [waits([all(A, 2)]), with(finished(1), |rank| rank.forgotten = 2), waits([all(A, 2)])],
            NOTHING,
        ),
        (
            "after as many on another communicator",
            [waits([all(A, 2)]), with(finished(1), begun(B, 2)), waits([all(A, 2)])],
            FINISHED,
        ),
        // ---- Ranks that have died
        ("one that takes part", [in_barrier(), gone(), runs()], GONE),
        ("one that had come", [in_barrier(), with(gone(), begun(A, 1)), in_barrier()], NOTHING),
        (
            "one that died in it",
            [in_barrier(), with(with(gone(), begun(A, 1)), started(all(A, 1))), in_barrier()],
            GONE,
        ),
        ("a sender that died", [waits([recv(1, 7)]), gone(), runs()], GONE),
        (
            "whose message is under way still",
            [waits([recv(1, 7)]), with(gone(), sent(0, 1)), runs()],
            NOTHING,
        ),
        ("another one than the sender", [waits([recv(2, 7)]), gone(), runs()], NOTHING),
        ("where no rank waits", [runs(), gone(), runs()], NOTHING),
    ];
    for (name, ranks, expected) in rows {
        let mut world: World = (0..).zip(ranks).collect();
        compare_origins(&mut world);
        assert_eq!(outcome(&world, 3), expected, "{name}");
    }
}

#[test]
fn a_message_that_a_receive_does_not_match_is_lost() {
    let sender = with(waits([recv(0, 7)]), |rank| {
        rank.messages.push((KEY, 0, weight(8), 0));
        rank.tags.push(8);
    });
    for (tag, expected) in [(7, Some((1, 8))), (8, None), (-1, None)] {
        let receive = recv(1, tag);
        let world: World = (0..).zip([waits([receive.clone()]), sender.clone()]).collect();
        assert_eq!(Verdict::new(&world).lost(0, &receive.need), expected, "tag {tag}");
    }
}

#[test]
fn a_rank_that_has_not_come_may_do_anything() {
    let world: World = (0..).zip([waits([recv(1, 7)]), waits([recv(0, 7)])]).collect();
    assert_eq!((outcome(&world, 3), outcome(&world, 2)), (NOTHING, STUCK));
}

#[test]
fn a_finished_rank_is_the_reason_only_if_no_other_rank_is_missing() {
    for (first, expected) in [
        (recv(1, 7), Why::Finished(Some(1))),
        (sendrecv(1, 2), Why::Stuck(vec![1, 2])),
        (recv(-1, 7), Why::Stuck(vec![0, 1, 2])),
    ] {
        let world: World = (0..).zip([waits([first]), finished(0), waits([recv(0, 7)])]).collect();
        assert_eq!(Verdict::new(&world).stuck().unwrap().1, expected);
    }
}
