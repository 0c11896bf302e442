//! Log lines: one when an MPI call starts, one when it ends.

use std::fmt;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::call::Call;
use crate::error::Error;
use crate::mpilib::Tag;
use crate::ops::Extent;

static ENABLED: AtomicBool = AtomicBool::new(false);

/// The cost of logging to a call that is not logged.
#[inline]
pub fn is_enabled() -> bool {
    ENABLED.load(Ordering::Relaxed)
}

pub fn set_enabled(enabled: bool) {
    if enabled {
        static SUBSCRIBER: Once = Once::new();
        // Ignore a failure: then a program that embeds this crate has a subscriber of its own.
        SUBSCRIBER.call_once(|| {
            let lines = tracing_subscriber::fmt()
                .with_level(false)
                .with_target(false)
                .with_ansi(false)
                .without_time()
                .with_max_level(tracing::Level::DEBUG);
            let _ = lines.try_init();
        });
    }
    ENABLED.store(enabled, Ordering::Relaxed);
}

/// Reads `MPI4JAX_DEBUG`.
pub fn init() {
    let wanted = std::env::var("MPI4JAX_DEBUG").unwrap_or_default();
    if matches!(wanted.to_ascii_lowercase().as_str(), "1" | "true" | "on" | "yes") {
        set_enabled(true);
    }
}

/// Executes a call between its two lines.
#[cold]
pub fn logged(call: &Call, execute: impl FnOnce(&Call) -> Result<(), Error>) -> Result<(), Error> {
    let rank = call.site.comm.rank;
    let id = next_id(rank);
    tracing::debug!("r{rank} | {id:08x} | {}", Line(call));
    let start = Instant::now();
    let result = execute(call);
    let elapsed = Seconds(start.elapsed().as_secs_f64());
    let code = result.as_ref().err().map_or(0, |error| error.cause.code());
    tracing::debug!("r{rank} | {id:08x} | {} done with code {code} ({elapsed})", call.site.mpi_name());
    result
}

/// A duration as C and Python print it, with two digits in the exponent.
struct Seconds(f64);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = format!("{:.2e}", self.0);
        let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, digits) = exponent.strip_prefix('-').map_or(('+', exponent), |digits| ('-', digits));
        write!(f, "{mantissa}e{sign}{digits:0>2}s")
    }
}

/// Something that makes the two lines of one call easy to find among those of all ranks.
fn next_id(rank: i32) -> u32 {
    static CALLS: AtomicU64 = AtomicU64::new(0);
    let call = CALLS.fetch_add(1, Ordering::Relaxed);
    let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_nanos() as u64);
    // The finaliser of splitmix64: every bit of the input reaches every bit of the output.
    let mut x = time ^ (call << 40) ^ ((rank as u64) << 52);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (x ^ (x >> 31)) as u32
}

/// What a call is about to do.
struct Line<'a>(&'a Call<'a>);

impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Line(call) = self;
        let (name, envelope, items) = (call.site.mpi_name(), call.envelope, call.items());
        let row = call.site.op.row();
        write!(f, "{name}")?;
        match (row.receives(), row.sends()) {
            (true, true) => {
                let received = call.recv.map_or(0, |buffer| buffer.count());
                write!(f, " <- {} ({}, {received} items)", envelope.source, Tag(envelope.recvtag))?;
                write!(f, " / -> {} ({}, {items} items)", envelope.dest, Tag(envelope.sendtag))?;
            }
            (true, false) => {
                write!(f, " <- {} with {} and {items} items", envelope.source, Tag(envelope.recvtag))?;
            }
            (false, true) => {
                write!(f, " -> {} with {} and {items} items", envelope.dest, Tag(envelope.sendtag))?;
            }
            _ if row.has_root => write!(f, " -> root {} with {items} items", call.site.root)?,
            _ if row.has_blocks => write!(f, " for ghost cells, with {items} items")?,
            _ if row.elsewhere.send != Extent::None => write!(f, " with {items} items")?,
            _ => {}
        }
        if let (Some(reduction), true) = (call.site.reduction, call.site.extents().send != Extent::None) {
            write!(f, " ({reduction})")?;
        }
        Ok(())
    }
}
