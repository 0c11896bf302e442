//! Timelines: with `MPI4JAX_TRACE`, every operation becomes a span of a Chrome trace.
//!
//! The spans are made of the recorder's records, so that a timeline and a report cannot disagree.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;

use super::recorder::{Record, Running};
use super::{clock, json};
use crate::sync::lock;

struct Trace {
    file: BufWriter<File>,
    rank: i32,
}

static ENABLED: AtomicBool = AtomicBool::new(false);
static TRACE: Mutex<Option<Trace>> = Mutex::new(None);

#[inline]
pub fn is_enabled() -> bool {
    ENABLED.load(Ordering::Relaxed)
}

/// Writes all operations from now on to a file, as spans of process `rank`.
pub fn start(path: &Path, rank: i32) -> io::Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    // The array need not be closed: a job that is aborted leaves a file that viewers accept.
    let args = json!({"name": format!("rank {rank}"), "host": crate::system::host()});
    writeln!(file, "[{}", json!({"ph": "M", "name": "process_name", "pid": rank, "args": args}))?;
    file.flush()?;
    *lock(&TRACE) = Some(Trace { file, rank });
    // SAFETY: registers a function that touches nothing but its statics.
    unsafe { libc::atexit(flush) };
    ENABLED.store(true, Ordering::Relaxed);
    Ok(())
}

/// Ends an operation of a site, and writes its record. `messages` is how many messages it sends, if that is known here.
#[cold]
pub fn write(running: Running, messages: Option<usize>) {
    let before = running.record().map(|record| record.ticket);
    let record = running.end().filter(|record| Some(record.ticket) == before);
    if let (Some(trace), Some(record)) = (lock(&TRACE).as_mut(), record) {
        let _ = trace.write(&record, messages);
    }
}

/// Writes what is still in memory.
pub extern "C" fn flush() {
    if let Ok(mut trace) = TRACE.try_lock()
        && let Some(trace) = trace.as_mut()
    {
        let _ = trace.file.flush();
    }
}

impl Trace {
    fn write(&mut self, record: &Record, messages: Option<usize>) -> io::Result<()> {
        let comm = &record.comm;
        let args = json!({
            "bytes": record.dtype.map_or(0, |dtype| record.count * dtype.size() as u64),
            "messages": messages,
            "key": comm.key,
            "members": format!("{:016x}", comm.id.class),
            "record": json::record(record),
        });
        let span = json!({
            "ph": "X",
            "name": record.name(),
            "cat": "mpi",
            "pid": self.rank,
            "tid": 0,
            "ts": 1e6 * clock::unix(record.started),
            "dur": 1e6 * record.seconds().unwrap_or_default(),
            "args": args,
        });
        writeln!(self.file, ",{span}")
    }
}
