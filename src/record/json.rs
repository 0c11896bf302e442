//! A record as JSON, for `python -m mpi4jax.report` and `.timeline`.

use serde_json::{Value, json};

use super::clock;
use super::recorder::Record;
use crate::call::Phase;
use crate::ops::Dtype;

pub fn record(record: &Record) -> Value {
    let row = record.op.row();
    json!({
        "op": record.name(),
        "sequence": record.sequence,
        "collective": row.is_collective() && record.phase != Phase::Wait,
        "reduction": record.reduction,
        "dtype": record.dtype.map(Dtype::name),
        "count": record.count,
        "any_size": row.has_any_size(),
        "root": if row.has_root { record.root } else { -1 },
        "source": record.source,
        "recvtag": record.recvtag,
        "dest": record.dest,
        "sendtag": record.sendtag,
        "site": record.line,
        "state": record.state,
        "started": clock::unix(record.started),
        "seconds": record.seconds(),
        "text": record.to_string(),
    })
}
