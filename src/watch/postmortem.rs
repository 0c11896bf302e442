//! What the board of a job has, in JSON, for `python -m mpi4jax.report`: also of one that was killed.

use std::io;
use std::path::Path;
use std::sync::atomic::Ordering;

use serde_json::{Value, json};

use super::python::Place;
use super::{read, report};
use crate::board::{self, Slot};
use crate::comm::CommWords;
use crate::record::recorder::{self, Record};
use crate::record::{clock, json};
use crate::system::host;

/// What each rank did last that has a slot on a board.
pub fn read_board(path: &Path) -> io::Result<String> {
    let slots = board::read(path)?;
    let here = (0..).zip(slots).filter(|(_, slot)| slot.pid.load(Ordering::Relaxed) != 0);
    Ok(here.map(|(rank, slot)| of_rank(rank, slots.len(), slot)).collect::<Value>().to_string())
}

fn of_rank(rank: i32, size: usize, slot: &Slot) -> Value {
    let records = recorder::records(slot);
    let mut comms: Vec<CommWords> = Vec::new();
    for record in &records {
        if !comms.iter().any(|comm| is_same(comm, &record.comm)) {
            comms.push(record.comm.clone());
        }
    }
    let index = |of: &CommWords| comms.iter().position(|comm| is_same(comm, of)).unwrap_or(0);
    let operation = |record: &Record| {
        let mut fields = json::record(record);
        fields["comm"] = index(&record.comm).into();
        fields
    };
    let communicator = |comm: &CommWords| {
        let numbers = records.iter().filter(|it| is_same(&it.comm, comm) && it.op.row().is_collective());
        json!({
            "key": comm.key,
            "generation": comm.generation,
            "world": comm.world.iter().collect::<Vec<_>>(),
            "collectives": numbers.map(|it| it.sequence).max().unwrap_or(0),
        })
    };
    let place: Place = serde_json::from_str(&slot.python.read()).unwrap_or_default();
    let now =
        records.iter().map(|record| record.started.max(record.ended)).max().unwrap_or_else(clock::ticks);
    json!({
        "rank": rank,
        "size": size,
        "host": host(),
        "pid": slot.pid.load(Ordering::Relaxed),
        "time": clock::unix(now),
        "state": report::doing(&read::status(slot, false)),
        "python": place.frames,
        "communicators": comms.iter().map(communicator).collect::<Vec<_>>(),
        "records": records.iter().map(operation).collect::<Vec<_>>(),
    })
}

fn is_same(one: &CommWords, other: &CommWords) -> bool {
    (&one.key, one.generation, one.id) == (&other.key, other.generation, other.id)
}
