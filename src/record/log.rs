//! Log lines: one when an MPI call starts, one when it ends.

use std::fmt;
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Instant, SystemTime};

use crate::call::Call;
use crate::comm::hash;
use crate::error::Error;
use crate::mpilib::Tag;
use crate::ops::Extent;

static ENABLED: AtomicBool = AtomicBool::new(false);

/// The cost of logging to a call that is not logged.
#[inline]
#[cfg_attr(feature = "python", pyo3::pyfunction(name = "get_debug"))]
pub fn is_enabled() -> bool {
    ENABLED.load(Ordering::Relaxed)
}

#[cfg_attr(feature = "python", pyo3::pyfunction(name = "set_debug"))]
pub fn set_enabled(enabled: bool) {
    ENABLED.store(enabled, Ordering::Relaxed);
}

/// Reads `MPI4JAX_DEBUG`.
pub fn init() {
    let wanted = std::env::var("MPI4JAX_DEBUG").unwrap_or_default();
    if matches!(wanted.to_ascii_lowercase().as_str(), "1" | "true" | "on" | "yes") {
        set_enabled(true);
    }
}

/// Executes a call between its two lines, which name a function of MPI's.
#[cold]
pub fn logged(
    name: &'static str,
    call: &Call,
    execute: impl FnOnce(&Call) -> Result<(), Error>,
) -> Result<(), Error> {
    static CALLS: AtomicU64 = AtomicU64::new(0);
    let rank = call.site.comm.rank;
    // Makes the two lines of one call easy to find among those of all ranks.
    let id = hash((SystemTime::now(), CALLS.fetch_add(1, Ordering::Relaxed), rank)) as u32;
    let say = |words: &dyn fmt::Display| {
        // Standard output may be closed.
        let _ = writeln!(std::io::stdout(), "r{rank} | {id:08x} | {words}");
    };
    say(&Line(name, call));
    let start = Instant::now();
    let result = execute(call);
    let elapsed = Seconds(start.elapsed().as_secs_f64());
    let code = result.as_ref().err().map_or(0, |error| error.cause.code());
    say(&format_args!("{name} done with code {code} ({elapsed})"));
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

/// What a call is about to do.
struct Line<'a>(&'static str, &'a Call<'a>);

impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Line(name, call) = self;
        let (envelope, items) = (call.envelope, call.items());
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
