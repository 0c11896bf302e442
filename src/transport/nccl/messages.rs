//! Which operations, data types and messages NCCL carries, and the setting `MPI4JAX_NCCL_MESSAGES`.

use std::sync::OnceLock;

use crate::call::{Call, Envelope};
use crate::device::nccl::{DataType, RedOp};
use crate::error::Cause;
use crate::mpilib::wildcards;
use crate::ops::{Builtin, Class, Dtype, Op, Reduction};
use crate::system::variable;

/// The tag of messages that go through NCCL, which has none.
pub const TAG: i32 = 0;

pub const MESSAGES: &str = "MPI4JAX_NCCL_MESSAGES";

/// What carries `send`, `recv` and `sendrecv`, on all ranks and all communicators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessagePath {
    /// Through NCCL, which has no tags or wildcards: messages between two ranks arrive in the order in which they were
    /// sent. All have tag 0 and a named source.
    Nccl,
    /// Through staging, with all that MPI allows.
    Staged,
}

/// Whether NCCL has an operation; what it lacks goes through the memory of the host.
fn has(op: Op) -> bool {
    !matches!(op, Op::Exscan | Op::HaloExchange | Op::Scan)
}

static SETTING: OnceLock<MessagePath> = OnceLock::new();
static IS_AUTO: OnceLock<bool> = OnceLock::new();

/// Whether `auto` has chosen NCCL, so that it must refuse nothing that `staged` carries.
pub fn is_auto() -> bool {
    IS_AUTO.get().copied().unwrap_or(false)
}

impl MessagePath {
    /// The path that a setting names; an empty one means `default`.
    fn parse(setting: &str, default: Self) -> Result<Self, Cause> {
        match setting {
            "" => Ok(default),
            "nccl" => Ok(Self::Nccl),
            "staged" => Ok(Self::Staged),
            other => Err(Cause::Setting {
                message: format!("{MESSAGES}={other} is not understood: expected one of nccl, staged"),
            }),
        }
    }

    /// Reads the environment, once. A program that runs with other transports runs with the one that `auto` takes.
    pub fn read(is_auto: bool) -> Result<Self, Cause> {
        IS_AUTO.get_or_init(|| is_auto);
        let setting = variable(MESSAGES).unwrap_or_default();
        let messages = Self::parse(&setting, if is_auto { Self::Staged } else { Self::Nccl })?;
        Ok(*SETTING.get_or_init(|| messages))
    }

    /// The setting that was read.
    pub fn setting() -> Self {
        SETTING.get().copied().unwrap_or(Self::Nccl)
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Nccl => "nccl",
            Self::Staged => "staged",
        }
    }

    /// Whether NCCL carries a call; else it goes through staging. An error for a message that has to be matched.
    pub fn carries(self, call: &Call) -> Result<bool, Cause> {
        let (site, row) = (call.site, call.site.op.row());
        if !has(site.op) || row.has_peer && self == Self::Staged {
            return Ok(false);
        }
        if row.has_reduction {
            let reduction = site.reduction.zip(call.send);
            return Ok(reduction.is_some_and(|(it, buffer)| reduced(it, buffer.dtype()).is_some()));
        }
        if row.sends() {
            sends_in_order(&call.envelope)?;
        }
        if row.receives() {
            receives_in_order(&call.envelope)?;
        }
        Ok(true)
    }
}

/// NCCL's type and operation for a reduction, and how many of its elements one of ours is.
pub fn reduced(reduction: Reduction, dtype: Dtype) -> Option<(DataType, RedOp, usize)> {
    let Reduction::Builtin(builtin) = reduction else { return None };
    let op = match builtin {
        Builtin::Sum => RedOp::ncclSum,
        Builtin::Prod => RedOp::ncclProd,
        Builtin::Max => RedOp::ncclMax,
        Builtin::Min => RedOp::ncclMin,
        // On values 0 and 1.
        Builtin::Lor | Builtin::Bor if dtype == Dtype::Bool => RedOp::ncclMax,
        Builtin::Land | Builtin::Band if dtype == Dtype::Bool => RedOp::ncclMin,
        _ => return None,
    };
    // NCCL's MAX and MIN of floats ignore NaN; the other transports do not.
    if matches!(dtype.class(), Class::Float | Class::Half) && matches!(op, RedOp::ncclMax | RedOp::ncclMin) {
        return None;
    }
    let data = match dtype {
        Dtype::Bool if matches!(op, RedOp::ncclMax | RedOp::ncclMin) => DataType::ncclUint8,
        Dtype::Int8 => DataType::ncclInt8,
        Dtype::Uint8 => DataType::ncclUint8,
        Dtype::Int32 => DataType::ncclInt32,
        Dtype::Uint32 => DataType::ncclUint32,
        Dtype::Int64 => DataType::ncclInt64,
        Dtype::Uint64 => DataType::ncclUint64,
        Dtype::Float16 => DataType::ncclFloat16,
        Dtype::Bfloat16 => DataType::ncclBfloat16,
        Dtype::Float32 => DataType::ncclFloat32,
        Dtype::Float64 => DataType::ncclFloat64,
        Dtype::Complex64 if op == RedOp::ncclSum => return Some((DataType::ncclFloat32, op, 2)),
        Dtype::Complex128 if op == RedOp::ncclSum => return Some((DataType::ncclFloat64, op, 2)),
        _ => return None,
    };
    Some((data, op, 1))
}

/// An error where the receiver might have to look for what is sent.
fn sends_in_order(&Envelope { dest, sendtag, .. }: &Envelope) -> Result<(), Cause> {
    is_known(dest, sendtag)?;
    if dest != wildcards().proc_null && !is_plain(sendtag) {
        return Err(needs_matching(format!("sending with tag {sendtag}")));
    }
    Ok(())
}

/// An error where a message would have to be looked for. With tag 0 alone, `ANY_TAG` is that.
fn receives_in_order(&Envelope { source, recvtag, .. }: &Envelope) -> Result<(), Cause> {
    let any = wildcards();
    is_known(source, recvtag)?;
    if source == any.source {
        return Err(needs_matching("receiving from ANY_SOURCE".into()));
    }
    if source != any.proc_null && recvtag != any.tag && !is_plain(recvtag) {
        return Err(needs_matching(format!("receiving with tag {recvtag}")));
    }
    Ok(())
}

/// An error if an operand holds it: reading that would mean waiting for the stream.
fn is_known(rank: i32, tag: i32) -> Result<(), Cause> {
    if [rank, tag].contains(&Envelope::TRACED) {
        return Err(needs_matching("a source, destination or tag that is traced".into()));
    }
    Ok(())
}

/// Tag 0, or the tag of derivatives, whose messages are matched by order, like all others.
fn is_plain(tag: i32) -> bool {
    tag == TAG || tag == TAG + wildcards().derivative
}

fn needs_matching(feature: String) -> Cause {
    Cause::Unsupported {
        feature,
        reason: "messages go through NCCL, which has no tags and no wildcards; set \
                 MPI4JAX_NCCL_MESSAGES=staged, so that messages go through MPI and all else through NCCL, \
                 or name the source and leave the tags at 0",
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::call::{Site, Stream};
    use crate::comm::Comm;
    use crate::ops::{Buffer, Op};

    fn carried(messages: MessagePath, site: &Site, dtype: Dtype) -> Result<bool, Cause> {
        // SAFETY: an empty array.
        let send = unsafe { Buffer::new(std::ptr::null_mut(), dtype, 0) };
        messages.carries(&Call { send: Some(send), ..Call::of(site, Stream::NONE) })
    }

    #[test]
    fn all_messages_go_one_way() {
        let any = wildcards();
        let nobody = any.proc_null;
        let comm = Arc::new(Comm::new("messages", 0, 2));
        for (envelope, fits) in [
            ([0, 0, 1, 0], [true, true, true]),
            ([0, any.tag, 1, 0], [true, true, true]),
            ([0, 0, 1, 3], [false, true, false]),
            ([0, 3, 1, 0], [true, false, false]),
            ([any.source, 0, 1, 0], [true, false, false]),
            ([any.source, any.tag, nobody, 3], [true, false, false]),
            ([any.source, 3, 1, 3], [false, false, false]),
            ([Envelope::TRACED, 0, 1, Envelope::TRACED], [false, false, false]),
            ([0, 0, Envelope::TRACED, 0], [false, true, false]),
            ([nobody, 3, nobody, 3], [true, true, true]),
        ] {
            let [source, recvtag, dest, sendtag] = envelope;
            let envelope = Envelope { source, recvtag, dest, sendtag };
            for (op, fits) in [Op::Send, Op::Recv, Op::Sendrecv].into_iter().zip(fits) {
                let site = Site { envelope, ..Site::new(op, &comm) };
                let through_nccl = carried(MessagePath::Nccl, &site, Dtype::Float32);
                assert!(matches!((through_nccl, fits), (Ok(true), true) | (Err(_), false)), "{envelope:?}");
                let staged = carried(MessagePath::Staged, &site, Dtype::Float32);
                assert!(matches!(staged, Ok(false)), "{envelope:?}");
            }
        }
    }

    #[test]
    fn settings_of_messages() {
        assert_eq!(MessagePath::parse("", MessagePath::Staged).unwrap(), MessagePath::Staged);
        for messages in [MessagePath::Nccl, MessagePath::Staged] {
            assert_eq!(MessagePath::parse(messages.name(), MessagePath::Nccl).unwrap(), messages);
        }
        let error = MessagePath::parse("pigeon", MessagePath::Nccl).unwrap_err().to_string();
        assert!(error.contains("pigeon") && error.contains("nccl, staged"), "{error}");
    }

    #[test]
    fn reductions_that_nccl_lacks_go_elsewhere() {
        let comm = Arc::new(Comm::new("reductions", 0, 2));
        let carried = |name, dtype| {
            let site = Site { reduction: Reduction::from_name(name), ..Site::new(Op::Allreduce, &comm) };
            carried(MessagePath::Nccl, &site, dtype).unwrap()
        };
        assert!(carried("SUM", Dtype::Bfloat16) && carried("MAX", Dtype::Int64));
        assert!(carried("LOR", Dtype::Bool) && carried("SUM", Dtype::Complex128));
        assert!(!carried("PROD", Dtype::Complex64) && !carried("LXOR", Dtype::Bool));
        assert!(!carried("SUM", Dtype::Int16) && !carried("BAND", Dtype::Int32));
        assert!(!carried("MAXLOC", Dtype::Float32) && !carried("MAX", Dtype::Float32));
    }
}
