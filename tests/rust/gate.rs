//! The orders of memory accesses that a weakly ordered processor allows, tried one after the other by loom: what runs on
//! x86 does not show them.

use loom::sync::Arc;
use loom::thread;

/// What `src/record/gate.rs` is made of there is std's.
mod atomics {
    pub use loom::sync::atomic::{AtomicU64, Ordering, fence};
}
#[path = "../../src/record/gate.rs"]
mod gate;

use atomics::{AtomicU64, Ordering};
use gate::Gate;

/// A record of two fields, in which every operation writes its number.
struct Record {
    gate: Gate,
    fields: [AtomicU64; 2],
}

impl Record {
    fn new() -> Self {
        let gate = Gate { ticket: AtomicU64::new(0), ended: AtomicU64::new(1) };
        Self { gate, fields: [AtomicU64::new(0), AtomicU64::new(0)] }
    }

    /// An operation of this number; whether it had the record.
    fn operation(&self, number: u64) -> bool {
        let claimed = self.gate.claim();
        if claimed {
            self.fields.iter().for_each(|field| field.store(number, Ordering::Relaxed));
            self.gate.publish(number);
            self.gate.end(10 + number);
        }
        claimed
    }

    /// Reads the record, which must be of one operation.
    fn check(&self) -> Option<u64> {
        let copy = |_| self.fields.each_ref().map(|field| field.load(Ordering::Relaxed));
        let (ticket, ended, fields) = self.gate.read(copy)?;
        assert_eq!(fields, [ticket; 2]);
        assert!([0, 10 + ticket].contains(&ended), "record {ticket} ended as {ended}");
        Some(ticket)
    }
}

#[test]
fn a_record_is_of_one_operation() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let record = Arc::new(Record::new());
        let writers = [1, 2].map(|number| {
            let record = record.clone();
            thread::spawn(move || record.operation(number))
        });
        record.check();
        let had = writers.map(|writer| writer.join().unwrap());
        assert!(had.contains(&true));
        let last = record.check().expect("nobody writes any more");
        assert!(had[last as usize - 1]);
    });
}

#[test]
fn a_record_is_used_again() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let record = Arc::new(Record::new());
        let writer = {
            let record = record.clone();
            thread::spawn(move || assert!(record.operation(1) && record.operation(2)))
        };
        let reader = {
            let record = record.clone();
            thread::spawn(move || record.check())
        };
        writer.join().unwrap();
        reader.join().unwrap();
        assert_eq!(record.check(), Some(2));
    });
}
