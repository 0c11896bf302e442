//! The dump that this rank writes for `python -m mpi4jax.report`.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde_json::{Value, json};

use super::python::Frame;
use crate::comm::{self, Comm};
use crate::record::clock;
use crate::record::{json, recorder};
use crate::watch::job::host::HostFolder;
use crate::watch::job::mail::QuestionKind;
use crate::watch::job::ranks::Ranks;

fn communicator(comm: &Arc<Comm>) -> Value {
    json!({
        "key": comm.key,
        "generation": comm.generation,
        "world": comm.world.iter().copied().collect::<Ranks>(),
        "collectives": comm.collectives.load(Ordering::Relaxed),
    })
}

/// `state`: what this rank is doing, in words. `python`: the frames of Python's main thread, the innermost first.
pub fn dump(host: &HostFolder, reason: QuestionKind, state: &str, python: &[Frame]) -> Value {
    let records = recorder::records();
    let mut comms = comm::live();
    for record in &records {
        if !comms.iter().any(|comm| Arc::ptr_eq(comm, &record.site.comm)) {
            comms.push(record.site.comm.clone());
        }
    }
    let index = |of: &Arc<Comm>| comms.iter().position(|comm| Arc::ptr_eq(comm, of)).unwrap_or(0);
    let operation = |record| {
        let mut fields = json::record(record);
        fields["comm"] = index(&record.site.comm).into();
        fields
    };
    json!({
        "rank": host.rank,
        "size": host.size,
        "host": host.name,
        "pid": std::process::id(),
        "time": clock::unix(clock::ticks()),
        "reason": reason,
        "state": state,
        "python": python,
        "communicators": comms.iter().map(communicator).collect::<Vec<_>>(),
        "records": records.iter().map(operation).collect::<Vec<_>>(),
    })
}
