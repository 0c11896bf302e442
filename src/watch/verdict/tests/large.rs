//! Verdicts about jobs of ten thousand ranks.

use std::time::Instant;

use super::*;

/// A job of this number of ranks, and its outcome.
type Large = (&'static str, fn(i32, i32) -> RankStatus, &'static str);

#[test]
fn ten_thousand_ranks_are_judged_at_once() {
    let n = 10_000;
    const EVEN: CommId = CommId { class: 9, origin: 9, name: 0 };
    fn even(n: i32) -> Ranks {
        (0..n).step_by(2).collect()
    }
    let jobs: [Large; 6] = [
        (
            "all in recv(ANY_SOURCE)",
            |_, n| {
                let from = peer(-1, -1);
                waits([wait_among(Need::Message { comm: A, key: KEY, from, to: None }, Ranks::all(n))])
            },
            STUCK,
        ),
        (
            "half have finished, the others are in recv(ANY_SOURCE)",
            |rank, n| {
                let from = peer(-1, -1);
                let need = Need::Message { comm: A, key: KEY, from, to: None };
                if rank < n / 2 { finished(0) } else { waits([wait_among(need, Ranks::all(n))]) }
            },
            STUCK,
        ),
        (
            "all in a collective but one",
            |rank, n| {
                let need = Need::Collective { comm: A, number: 3, what: 0 };
                if rank == n / 2 { runs() } else { waits([wait_among(need, Ranks::all(n))]) }
            },
            NOTHING,
        ),
        (
            "one has finished without it",
            |rank, n| {
                let need = Need::Collective { comm: A, number: 3, what: 0 };
                if rank == n / 2 { finished(2) } else { waits([wait_among(need, Ranks::all(n))]) }
            },
            FINISHED,
        ),
        (
            "a communicator of every second rank",
            |rank, n| {
                let comm = if rank % 2 == 0 { EVEN } else { A };
                let members = if rank % 2 == 0 { even(n) } else { Ranks::all(n) };
                waits([wait_among(Need::Collective { comm, number: 3, what: 0 }, members)])
            },
            NOTHING,
        ),
        (
            "a ring of receives, with messages to 8 ranks",
            |rank, n| {
                let from = peer((rank + 1) % n, 0);
                let wait = wait_among(Need::Message { comm: A, key: KEY, from, to: None }, Ranks::all(n));
                let messages = (1..9).map(|step| (KEY, (rank + step) % n, 5, 5)).collect();
                RankStatus { messages, ..waits([wait]) }
            },
            STUCK,
        ),
    ];
    for (name, of, expected) in jobs {
        let world: World = (0..n).map(|rank| (rank, of(rank, n))).collect();
        let begin = Instant::now();
        let found = outcome(&world, n);
        println!("{name}: {:.3} s", begin.elapsed().as_secs_f64());
        assert_eq!(found, expected, "{name}");
    }
}
