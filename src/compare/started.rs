//! The description of a message that is started: another message that is started, just before it.

use std::mem::size_of;

use super::{Header, expect};
use crate::call::{Call, Envelope, Site, Stream};
use crate::error::Cause;
use crate::mpilib::wildcards;
use crate::ops::{Buffer, Dtype};
use crate::record::recorder::Record;
use crate::transport::{Ahead, Posted, post};

struct Started {
    /// Where MPI reads it, or writes it.
    header: Box<Header>,
    posted: Posted,
    site: Site,
    envelope: Envelope,
    record: Record,
}

impl Started {
    fn call(&self) -> Call<'_> {
        let data = (&raw const *self.header).cast_mut().cast();
        // SAFETY: the header, which outlives the message.
        let bytes = unsafe { Buffer::new(data, Dtype::Uint8, size_of::<Header>()) };
        let row = self.site.op.row();
        Call {
            send: row.sends().then_some(bytes),
            recv: row.receives().then_some(bytes),
            envelope: self.envelope,
            ..Call::of(&self.site, Stream::NONE)
        }
    }
}

/// Sends the description of a message, or receives it. None: there is no other end.
pub fn describe(call: &Call, record: Record) -> Result<Option<Box<dyn Ahead>>, Cause> {
    let (row, any) = (call.site.op.row(), wildcards());
    let other = if row.receives() { call.envelope.source } else { call.envelope.dest };
    if other == any.proc_null {
        return Ok(None);
    }
    if row.receives() && other == any.source {
        // Its description could come from one rank, and the message from another.
        let feature = format!("{} from any rank", call.site.name());
        return Err(Cause::Unsupported {
            feature,
            reason: "MPI4JAX_CHECK compares it with a named rank's message",
        });
    }
    let header = Box::new(Header::new(call, &record));
    let (site, envelope) = (call.site.clone(), call.envelope);
    let mut started = Started { header, posted: Posted::default(), site, envelope, record };
    // SAFETY: the header is on the heap, and stays until the message has ended; after an error, none is under way.
    let posted = unsafe { post(&started.call())? };
    started.posted = posted;
    Ok(Some(Box::new(started)))
}

impl Ahead for Started {
    fn finish(mut self: Box<Self>) -> Result<(), Cause> {
        let mut posted = std::mem::take(&mut self.posted);
        posted.wait(&self.call())?;
        if !self.site.op.row().receives() {
            return Ok(());
        }
        // SAFETY: MPI has written it since the compiler saw it last.
        let header = unsafe { (&raw const *self.header).read_volatile() };
        let expected = (self.record.count, self.record.dtype.map_or(0, Dtype::xla_code));
        expect(&header, self.envelope.source, expected, false, &self.record)
    }
}
