//! Log events of each call: one when it starts, one when it ends.

use std::fmt;
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime};

use super::events::{OP, is_debug};
use crate::call::Call;
use crate::comm::hash;
use crate::error::Error;
use crate::mpilib::Tag;
use crate::ops::Extent;

/// Executes a call between its two events, whose messages are the lines of `MPI4JAX_DEBUG`: they name a function of MPI's.
#[cold]
pub fn logged(
    name: &'static str,
    call: &Call,
    execute: impl FnOnce(&Call) -> Result<(), Error>,
) -> Result<(), Error> {
    static CALLS: AtomicU64 = AtomicU64::new(0);
    let rank = call.site.comm.rank;
    // Makes the two lines of one call easy to find among the lines of all ranks.
    let id = hash((SystemTime::now(), CALLS.fetch_add(1, Ordering::Relaxed), rank)) as u32;
    let id = format!("{id:08x}");
    let (op, comm) = (call.site.name(), &*call.site.comm.key);
    let debug = |line: &dyn fmt::Display| {
        if is_debug() {
            // Standard output may be closed.
            let _ = writeln!(std::io::stdout(), "r{rank} | {id} | {line}");
        }
    };
    debug(&CallLine(name, call));
    tracing::info!(target: OP, rank, call = &*id, op, comm, "{}", CallLine(name, call));
    let start = Instant::now();
    let result = execute(call);
    let seconds = start.elapsed().as_secs_f64();
    let code = result.as_ref().err().map_or(0, |error| error.cause.code());
    let elapsed = Seconds(seconds);
    let line = format!("{name} done with code {code} ({elapsed})");
    debug(&line);
    tracing::info!(target: OP, rank, call = &*id, op, comm, code, seconds, "{line}");
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

/// The text of the first event: the function of MPI, its peers, and the number of items.
struct CallLine<'a>(&'static str, &'a Call<'a>);

impl fmt::Display for CallLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CallLine(name, call) = self;
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
        if let Some(reduction) = call.site.reduction {
            write!(f, " ({reduction})")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::{Envelope, Site, Stream};
    use crate::comm::Comm;
    use crate::ops::{Builtin, Op, Reduction};

    #[test]
    fn a_line_names_what_the_operation_takes() {
        let comm = std::sync::Arc::new(Comm::new("log-test", 0, 2));
        let line = |op: Op, change: fn(&mut Site)| {
            let mut site = Site::new(op, &comm);
            site.envelope = Envelope { source: 1, recvtag: 5, dest: 0, sendtag: 7 };
            change(&mut site);
            CallLine(op.mpi_name(), &Call::of(&site, Stream::NONE)).to_string()
        };
        let plain: fn(&mut Site) = |_| {};
        let sum: fn(&mut Site) = |site| site.reduction = Some(Reduction::Builtin(Builtin::Sum));
        assert_eq!(line(Op::Allreduce, sum), "MPI_Allreduce with 0 items (SUM)");
        assert_eq!(line(Op::Reduce, sum), "MPI_Reduce -> root 0 with 0 items (SUM)");
        assert_eq!(line(Op::Barrier, plain), "MPI_Barrier");
        assert_eq!(line(Op::HaloExchange, plain), "MPI_Wait for ghost cells, with 0 items");
        assert_eq!(line(Op::Send, plain), "MPI_Send -> 0 with tag 7 and 0 items");
        assert_eq!(line(Op::Recv, plain), "MPI_Recv <- 1 with tag 5 and 0 items");
        assert_eq!(line(Op::Sendrecv, plain), "MPI_Sendrecv <- 1 (tag 5, 0 items) / -> 0 (tag 7, 0 items)");
    }

    #[test]
    fn seconds_have_two_digits_in_the_exponent() {
        let text = |seconds| Seconds(seconds).to_string();
        assert_eq!([0.0, 1.5e-6, 123.0].map(text), ["0.00e+00s", "1.50e-06s", "1.23e+02s"]);
    }
}
