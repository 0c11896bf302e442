//! The state of this process as JSON, for `python -m mpi4jax.report`.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::clock::{self, Epoch};
use super::json::{self, quoted};
use super::recorder;
use crate::comm::{self, Comm};

/// What a dump says besides what the recorder knows.
pub struct Header<'a> {
    pub rank: i32,
    pub size: i32,
    pub host: &'a str,
    /// Why it was written.
    pub reason: &'a str,
    /// What this rank is doing, in words.
    pub state: &'a str,
    /// File, line and function of the main thread's Python frames, the innermost first.
    pub python: Vec<(String, u32, String)>,
}

fn list<T>(items: impl IntoIterator<Item = T>, item: impl Fn(T) -> String) -> String {
    items.into_iter().map(item).collect::<Vec<_>>().join(",\n  ")
}

/// The first and the last rank of each run: of a large communicator there is mostly one.
fn runs(ranks: &[i32]) -> Vec<[i32; 2]> {
    let mut runs: Vec<[i32; 2]> = Vec::new();
    for &rank in ranks {
        match runs.last_mut() {
            Some([_, last]) if *last + 1 == rank => *last = rank,
            _ => runs.push([rank, rank]),
        }
    }
    runs
}

fn json_of(comm: &Arc<Comm>) -> String {
    format!(
        "{{\"key\": {}, \"id\": \"{:016x}\", \"generation\": {}, \"rank\": {}, \"size\": {}, \"world\": {:?}, \"collectives\": {}}}",
        quoted(&comm.key),
        comm.id,
        comm.generation,
        comm.rank,
        comm.size,
        runs(&comm.world),
        comm.collectives.load(Ordering::Relaxed)
    )
}

/// The whole dump.
pub fn json(header: &Header) -> String {
    let epoch = Epoch::now();
    let records = recorder::records();
    let mut comms = comm::live();
    for record in &records {
        if !comms.iter().any(|comm| Arc::ptr_eq(comm, &record.info.comm)) {
            comms.push(record.info.comm.clone());
        }
    }
    let index = |of: &Arc<Comm>| comms.iter().position(|comm| Arc::ptr_eq(comm, of)).unwrap_or(0);
    let frame = |(file, line, function): &(String, u32, String)| {
        let (file, function) = (quoted(file), quoted(function));
        format!("{{\"file\": {file}, \"line\": {line}, \"function\": {function}}}")
    };
    format!(
        "{{\"version\": 2, \"rank\": {}, \"size\": {}, \"host\": {}, \"pid\": {}, \"time\": {:.6},\n\
         \"reason\": {}, \"state\": {},\n\"python\": [{}],\n\"communicators\": [{}],\n\"records\": [\n  {}]}}\n",
        header.rank,
        header.size,
        quoted(header.host),
        std::process::id(),
        epoch.unix(clock::ticks()),
        quoted(header.reason),
        quoted(header.state),
        list(&header.python, frame),
        list(&comms, json_of),
        list(&records, |record| json::record(record, index(&record.info.comm), &epoch)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_written_in_runs() {
        assert_eq!(format!("{:?}", runs(&[0, 1, 2, 7, 6, 5])), "[[0, 2], [7, 7], [6, 6], [5, 5]]");
        assert_eq!(runs(&[]), [[0; 2]; 0]);
    }
}
