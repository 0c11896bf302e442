//! Counts the cache lines of the board that move between two ranks in an operation, with a model of their caches.

#[path = "board/counted.rs"]
pub mod counted;

mod sync {
    pub use super::counted as atomic;

    pub fn lock<T: ?Sized>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
        mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

mod system {
    pub fn now() -> f64 {
        0.0
    }
}

#[allow(dead_code)]
#[path = "../../src/board"]
mod board {
    pub mod cell;
    pub mod raw;
    pub mod slot;
    pub mod words;
}

use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;

use board::cell::{Cell, Print};
use board::raw::Plain;
use board::slot::{MESSAGES, Peer, Slot};
use counted::Access;

const COMM: u64 = 0x9e37_79b9_7f4a_7c15;
const RECORDS: usize = board::slot::RECORDS;

/// Two ranks with caches of their own. A line that both have is clean; a line that one rank has written is in its cache alone.
#[derive(Default)]
struct Caches {
    holders: HashMap<usize, [bool; 2]>,
    /// How many lines were fetched from the other cache, or taken away from it.
    transfers: u64,
}

impl Caches {
    fn access(&mut self, me: usize, (at, access): (usize, Access)) {
        let holders = self.holders.entry(at / 64).or_default();
        let is_elsewhere = holders[1 - me];
        match access {
            Access::Load if holders[me] => {}
            Access::Load => {
                holders[me] = true;
                self.transfers += u64::from(is_elsewhere);
            }
            Access::Write => {
                *holders = [me == 0, me == 1];
                self.transfers += u64::from(is_elsewhere);
            }
        }
    }
}

struct Job {
    slots: &'static [Slot; 2],
    cells: [&'static Cell; 2],
}

impl Job {
    fn new() -> Self {
        // SAFETY: all-zero is a value of a slot, whose fields are atomics.
        let slots: &[Slot; 2] = Box::leak(Box::new(unsafe { std::mem::zeroed() }));
        slots.iter().for_each(|slot| slot.pid.store(1, Relaxed));
        Self { slots, cells: slots.each_ref().map(|slot| slot.claim(COMM, [1, 1, 0]).expect("a cell")) }
    }

    /// A record, as `recorder::begin` writes it.
    fn record(&self, me: usize) {
        let ticket = self.slots[me].next.fetch_add(1, Relaxed) + 1;
        self.slots[me].records[ticket as usize % RECORDS].write(&Plain { ticket, ..Plain::default() });
    }

    /// What `recorder::begin` and `compare::before` read and write in a collective.
    fn begins(&self, me: usize, what: u64) {
        let (own, its) = (self.cells[me], &self.slots[1 - me]);
        let number = own.note(what, 0);
        self.record(me);
        assert_eq!(own.flags.load(Relaxed), 0);
        let ours = own.print(number).expect("it was noted");
        assert!(
            its.pid.load(Relaxed) == 1 && its.copies.load(Relaxed) == self.slots[me].copies.load(Relaxed)
        );
        let its = its.cell(COMM).expect("both use the communicator");
        if !its.repeats(number, &ours) {
            assert!(its.print(number).is_none_or(|it| it == ours));
        }
        assert_eq!(own.unchecked.load(Relaxed), 0);
    }

    fn ends(&self, me: usize) {
        self.cells[me].end(self.cells[me].number.load(Relaxed));
    }

    fn peer(&self, me: usize) -> &Peer {
        let (slot, rank) = (&self.slots[me], 1 - me as i32);
        slot.known_peer(COMM, rank).unwrap_or_else(|| slot.claim_peer(COMM, rank).0)
    }

    /// What `messages::sends` and `has_sent` do.
    fn sends(&self, me: usize, kind: u64) {
        self.record(me);
        let peer = self.peer(me);
        peer.note(kind << 3, [kind, kind, 0]);
        peer.sent.fetch_add(1, Relaxed);
    }

    /// What `messages::received` does.
    fn receives(&self, me: usize, kind: u64) {
        self.peer(me).received.fetch_add(1, Relaxed);
        let its: &Peer = self.slots[1 - me].known_peer(COMM, me as i32).expect("it has sent");
        if its.steady.load(Relaxed) != kind << 3 {
            assert!(its.sent_last().iter().any(|entry| entry[0] == kind) && its.noted.load(Relaxed) > 0);
        }
    }

    /// How many lines move per operation of a rank in a loop over these operations, after the first rounds of it.
    fn transfers(&self, steps: &[Step]) -> f64 {
        let (mut caches, first, last) = (Caches::default(), 4000, 4000 + 24 * steps.len());
        for i in 0..last {
            if i == first {
                caches.transfers = 0;
            }
            // Now one rank comes first, now the other one.
            let order = if i % 5 < 2 { [0, 1] } else { [1, 0] };
            let mut both = |of: &dyn Fn(usize)| {
                for me in order {
                    counted::log(|| of(me)).into_iter().for_each(|it| caches.access(me, it));
                }
            };
            match steps[i % steps.len()] {
                Step::Collective(what) => {
                    both(&|me| self.begins(me, what));
                    both(&|me| self.ends(me));
                }
                Step::Sendrecv(kind) => {
                    both(&|me| self.sends(me, kind));
                    both(&|me| self.receives(me, kind));
                }
            }
        }
        caches.transfers as f64 / (2 * (last - first)) as f64
    }
}

#[derive(Clone, Copy)]
enum Step {
    /// A collective, as a halo exchange is one too.
    Collective(u64),
    Sendrecv(u64),
}
use Step::{Collective, Sendrecv};

#[test]
fn no_line_moves_while_a_program_repeats_itself() {
    for length in 1..=12 {
        let steps: Vec<Step> = (0..length).map(|i| Collective(7 + i)).collect();
        assert_eq!(Job::new().transfers(&steps), 0.0, "a loop of {length} collectives");
    }
    // Before its loop, the program calls collectives that it does not repeat.
    let job = Job::new();
    let setup: Vec<Step> = (100..400).map(Collective).collect();
    assert!(job.transfers(&setup) > 1.0);
    assert_eq!([12, 5, 1].map(|length| job.transfers(&setup[..length])), [0.0; 3]);
    for steps in
        [&[Sendrecv(3)][..], &[Collective(1), Sendrecv(3)], &[Sendrecv(3), Sendrecv(3), Collective(9)]]
    {
        assert_eq!(Job::new().transfers(steps), 0.0);
    }
}

#[test]
fn what_changes_moves_a_bounded_number_of_lines() {
    let others = [
        ("13 collectives in turns", (0..13).map(Collective).collect()),
        ("messages of two types in turns", [Sendrecv(1), Sendrecv(2)].repeat(MESSAGES)),
    ];
    for (words, steps) in others {
        let transfers = Job::new().transfers(&steps);
        assert!(0.0 < transfers && transfers < 5.0, "{words}: {transfers}");
    }
}

#[test]
fn the_model_counts() {
    let mut caches = Caches::default();
    for (me, at, access, transfers) in [
        (0, 0, Access::Write, 0),
        (0, 8, Access::Write, 0),
        (1, 0, Access::Load, 1),
        (1, 63, Access::Load, 1),
        (0, 8, Access::Write, 2),
        (1, 64, Access::Load, 2),
        (1, 0, Access::Write, 3),
    ] {
        caches.access(me, (at, access));
        assert_eq!(caches.transfers, transfers);
    }
    let cell = Cell::default();
    assert!(counted::log(|| assert_eq!(cell.note(1, 0), 1)).len() > 5);
    assert_eq!(cell.print(1), Some(Print { print: 1, form: 0 }));
}
