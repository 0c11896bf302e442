//! What the board of a job has, in JSON, for `python -m mpi4jax.report`: also of one that was killed.

use std::io;
use std::path::Path;
use std::sync::atomic::Ordering;

use serde_json::{Value, json};

use super::{python, read, report};
use crate::board::{self, Slot};
use crate::record::recorder::{self, Record};
use crate::record::{clock, json};
use crate::system::host;

/// What each rank did last that has a slot on a board.
pub fn read_board(path: &Path) -> io::Result<String> {
    let (size, slots) = board::read(path)?;
    Ok(board::here(slots).map(|(rank, slot)| of_rank(rank, size, slot)).collect::<Value>().to_string())
}

fn of_rank(rank: i32, size: usize, slot: &Slot) -> Value {
    let records = recorder::records(slot);
    let operation = |record: &Record| {
        let mut fields = json::record(record);
        fields["comm"] = json!((&record.comm.key, record.comm.generation, &record.comm.world));
        fields
    };
    let now = records.iter().map(|record| record.ended).max().unwrap_or_else(clock::ticks);
    json!({
        "rank": rank,
        "size": size,
        "host": host(),
        "pid": slot.pid.load(Ordering::Relaxed),
        "time": clock::unix(now),
        "state": report::doing(&read::status(slot)),
        "python": python::place(slot).frames,
        "records": records.iter().map(operation).collect::<Vec<_>>(),
    })
}
