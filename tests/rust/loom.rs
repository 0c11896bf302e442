//! The board under loom, which tries the reorderings that the memory model allows. x86 does none of them, Arm does.

mod sync {
    pub use loom::sync::atomic;

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

use board::cell::{Cell, PRINTS};
use board::raw::{Plain, Raw};
use board::slot::{MESSAGES, Peer};
use board::words::Words;
use loom::sync::Arc;
use loom::thread;

/// One thread writes while another one reads, in all orders that the memory model allows.
fn explore<T: Send + Sync + 'static>(
    make: impl Fn() -> T + Send + Sync + 'static,
    write: impl Fn(&T) + Send + Sync + Copy + 'static,
    read: impl Fn(&T) + Send + Sync + 'static,
) {
    let mut model = loom::model::Builder::new();
    // A record has 14 numbers, whose reorderings cannot all be tried. A missing fence is found in less than a second.
    model.max_duration = Some(std::time::Duration::from_secs(3));
    model.check(move || {
        let shared = Arc::new(make());
        let writer = {
            let shared = shared.clone();
            thread::spawn(move || write(&shared))
        };
        read(&shared);
        writer.join().expect("the writer");
    });
}

fn noted() -> Cell {
    let cell = Cell::default();
    (1..=PRINTS as u64).for_each(|number| assert_eq!(cell.note(100 + number, 0), number));
    cell
}

#[test]
fn an_entry_is_not_torn() {
    let read = |cell: &Cell| {
        if let Some(found) = cell.print(1) {
            assert_eq!(
                found.print, 101,
                "the print of a later collective under the number of an earlier one"
            );
        }
    };
    explore(noted, |cell| assert_ne!(cell.note(999, 0), 0), read);
}

/// The period changes, because no collective is repeated.
#[test]
fn an_entry_is_not_found_in_the_place_of_another_period() {
    let make = || {
        let cell = Cell::default();
        (1..24).for_each(|number| assert_eq!(cell.note(100 + number, 0), number));
        cell
    };
    let read = |cell: &Cell| assert!(cell.print(23).is_none_or(|found| found.print == 123));
    explore(make, |cell| assert_eq!(cell.note(124, 0), 24), read);
}

#[test]
fn the_hash_of_all_collectives_has_their_number() {
    let make = || {
        let cell = Cell::default();
        assert_eq!(cell.note(1, 0), 1);
        cell
    };
    let first = {
        static FIRST: std::sync::OnceLock<u64> = std::sync::OnceLock::new();
        loom::model(move || assert!(*FIRST.get_or_init(|| make().own_past(1)) != 0));
        *FIRST.get().expect("the hash of one collective")
    };
    let read = move |cell: &Cell| assert!(cell.past(1).is_none_or(|past| past == first));
    let write = |cell: &Cell| [2, 3].into_iter().for_each(|what| assert_ne!(cell.note(what, 0), 0));
    explore(make, write, read);
}

#[test]
fn the_entry_of_a_message_is_not_torn() {
    let make = || {
        let peer = Peer::default();
        (1..=MESSAGES as u64).for_each(|number| peer.note(8, [number, number, number]));
        peer
    };
    let read = |peer: &Peer| {
        for [key, meaning, form] in peer.sent_last() {
            assert!(key == 0 || [key, meaning, form] == [key; 3], "{key} {meaning} {form}");
        }
    };
    explore(make, |peer| peer.note(8, [9, 9, 9]), read);
}

#[test]
fn a_record_is_not_torn() {
    let of = |ticket: u32| Plain { ticket: ticket.into(), number: ticket, line: ticket, ..Plain::default() };
    let make = move || {
        let raw = Raw::default();
        raw.write(&of(1));
        raw
    };
    let read = |raw: &Raw| {
        if let Some(found) = raw.read() {
            assert_eq!((u64::from(found.number), u64::from(found.line)), (found.ticket, found.ticket));
        }
    };
    explore(make, move |raw| raw.write(&of(2)), read);
}

#[test]
fn words_are_not_torn() {
    let make = || {
        let words = Words::<2>::default();
        words.write("aa");
        words
    };
    let read = |words: &Words<2>| {
        let found = words.read_once().unwrap_or_default();
        assert!(["", "aa", "b"].contains(&&*found), "{found}");
    };
    explore(make, |words| words.write("b"), read);
}
