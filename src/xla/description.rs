//! Descriptions of operations in programs: the only attribute of a custom call, a text in JSON.
//!
//! A program may have been exported elsewhere, or changed. serde checks names, types and missing fields; what the
//! values mean is checked when they become a [`Site`].

use std::sync::Arc;

use serde::Deserialize;

use super::c_api;
use super::statuses;
use crate::call::{Envelope, Operand, Phase, Site};
use crate::comm::Comm;
use crate::error::{Cause, Error};
use crate::ops::{
    Forms, Halo, HaloFields, Op, Parts, PartsFields, Ragged, RaggedFields, Reduction, named_line,
};
use crate::transport::RequestLayout;

/// What `describe` in `_compile/description.py` writes.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    pub op: Op,
    /// The key of the communicator; `None` where an operand gives its number at run time.
    pub comm: Option<Box<str>>,
    #[serde(default)]
    pub operand: Operand,
    #[serde(default)]
    root: i32,
    reduction: Option<Box<str>>,
    #[serde(default)]
    reverse: bool,
    #[serde(default)]
    envelope: Envelope,
    #[serde(default)]
    envelope_result: bool,
    #[serde(default)]
    may_be_short: bool,
    /// The address of an `MPI_Status`, or 0.
    #[serde(default)]
    status: usize,
    halo: Option<HaloFields>,
    parts: Option<PartsFields>,
    ragged: Option<RaggedFields>,
    #[serde(default)]
    forms: Forms,
    /// The memory of a nonblocking operation, in its start and its wait.
    pub request: Option<RequestLayout>,
    /// The name of the user's line.
    #[serde(default)]
    line: Box<str>,
}

impl Description {
    /// # Safety
    /// `attrs` is what XLA passed: its arrays have `size` members, valid as long as the frame.
    pub unsafe fn of(attrs: &c_api::Attrs) -> Result<Self, Cause> {
        let wrong = |actual| Cause::Attribute { name: "call", expected: "a description in JSON", actual };
        if attrs.size != 1 {
            return Err(wrong(format!("{} attributes", attrs.size)));
        }
        // SAFETY: promised by the caller; the type of an attribute says what its address points to.
        unsafe {
            match *attrs.types {
                c_api::ATTR_STRING => {
                    serde_json::from_slice((*(*attrs.attrs).cast::<c_api::ByteSpan>()).bytes())
                        .map_err(|error| wrong(error.to_string()))
                }
                kind => Err(wrong(format!("an attribute of kind {kind}"))),
            }
        }
    }

    /// The memory of a nonblocking operation; an error if the program gives none.
    pub fn layout(&self) -> Result<&RequestLayout, Cause> {
        let (expected, actual) = ("the layout of its memory", "none".into());
        self.request.as_ref().ok_or(Cause::Attribute { name: "request", expected, actual })
    }

    /// The user's line; the function, for a program that was not lowered in this process.
    pub fn location(&self) -> Box<str> {
        named_line(&self.line)
    }

    /// The operation on a communicator, whose call came from a line, and which the transport of this name carries.
    pub fn site(
        &self,
        phase: Phase,
        comm: Arc<Comm>,
        location: Box<str>,
        transport: &'static str,
    ) -> Result<Site, Error> {
        let mut site = Site {
            phase,
            transport,
            reverse: self.reverse,
            root: self.root,
            envelope: self.envelope,
            operand: self.operand,
            envelope_result: self.envelope_result,
            forms: self.forms.clone(),
            may_be_short: self.may_be_short,
            location,
            ..Site::new(self.op, &comm)
        };
        self.decode(&mut site).map_err(|cause| site.error(cause))?;
        site.validated()
    }

    fn decode(&self, site: &mut Site) -> Result<(), Cause> {
        let (rank, size) = (site.comm.rank, site.comm.size);
        site.status = statuses::checked(self.status)?;
        if let Some(key) = &self.reduction {
            let unknown = || Cause::UnknownReduction { key: key.clone() };
            site.reduction = Some(Reduction::from_name(key).ok_or_else(unknown)?);
        }
        if let Some(fields) = &self.halo {
            site.halo = Some(Arc::new(Halo::new(rank, size, fields)?));
        }
        if let Some(fields) = &self.parts {
            let parts = Parts::new(rank, size, fields)?;
            site.forms.counts = parts.same_on_all(self.op).unwrap_or_default().into();
            site.parts = Some(Arc::new(parts));
        }
        if let Some(fields) = self.ragged {
            site.ragged = Some(Arc::new(Ragged::new(rank, size, fields, self.reverse)?));
        }
        Ok(())
    }

    /// An error of this operation where no communicator is known.
    #[cold]
    pub fn error(&self, phase: Phase, cause: Cause) -> Error {
        Error { op: Some(self.op.name_of(phase)), cause }
    }
}
