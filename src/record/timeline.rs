//! Timelines: with `MPI4JAX_TRACE`, every operation becomes a span of a Chrome trace.
//!
//! The spans are made of the recorder's records, so that a timeline and a report cannot disagree.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use super::clock::Epoch;
use super::files;
use super::json::{self, quoted};
use super::recorder::{Record, Running};

struct Trace {
    file: BufWriter<File>,
    rank: i32,
    records: Vec<Record>,
}

static ENABLED: AtomicBool = AtomicBool::new(false);
static TRACE: Mutex<Option<Trace>> = Mutex::new(None);

/// Records are turned into text by the thousand.
const BATCH: usize = 1024;

#[inline]
pub fn is_enabled() -> bool {
    ENABLED.load(Ordering::Relaxed)
}

/// Writes all operations from now on to a file, as spans of process `rank`.
pub fn start(path: &Path, rank: i32) -> io::Result<()> {
    let mut file = BufWriter::new(files::create(path)?);
    // The array need not be closed: a job that is aborted leaves a file that viewers accept.
    writeln!(
        file,
        "[{{\"ph\": \"M\", \"name\": \"process_name\", \"pid\": {rank}, \
         \"args\": {{\"name\": \"rank {rank}\", \"host\": {}}}}}",
        quoted(&super::host())
    )?;
    file.flush()?;
    *TRACE.lock().unwrap_or_else(PoisonError::into_inner) = Some(Trace { file, rank, records: Vec::new() });
    // SAFETY: registers a function that touches nothing but its statics.
    unsafe { libc::atexit(flush) };
    ENABLED.store(true, Ordering::Relaxed);
    Ok(())
}

/// Ends an operation, and keeps its record.
#[cold]
pub fn write(running: Running) {
    let before = running.record().map(|record| record.ticket);
    let record = running.end().filter(|record| Some(record.ticket) == before);
    if let (Some(trace), Some(record)) =
        (TRACE.lock().unwrap_or_else(PoisonError::into_inner).as_mut(), record)
    {
        trace.records.push(record);
        if trace.records.len() >= BATCH {
            let _ = trace.write();
        }
    }
}

/// Writes what is still in memory.
pub extern "C" fn flush() {
    if let Ok(mut trace) = TRACE.try_lock()
        && let Some(trace) = trace.as_mut()
    {
        let _ = trace.write();
    }
}

impl Trace {
    fn write(&mut self) -> io::Result<()> {
        if self.records.is_empty() {
            return Ok(());
        }
        let epoch = Epoch::now();
        for record in self.records.drain(..) {
            let comm = &record.info.comm;
            let bytes = record.dtype.map_or(0, |dtype| record.count * dtype.size() as u64);
            writeln!(
                self.file,
                ",{{\"ph\": \"X\", \"name\": {}, \"cat\": \"mpi\", \"pid\": {}, \"tid\": 0, \"ts\": {:.3}, \
                 \"dur\": {:.3}, \"args\": {{\"bytes\": {bytes}, \"key\": {}, \"members\": \"{:016x}\", \"record\": {}}}}}",
                quoted(record.info.name()),
                self.rank,
                1e6 * epoch.unix(record.started),
                1e6 * record.seconds(&epoch),
                quoted(&comm.key),
                comm.class,
                json::record(&record, 0, &epoch)
            )?;
        }
        self.file.flush()
    }
}
