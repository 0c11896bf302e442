//! What NCCL carries, and the settings that decide it.

use std::sync::OnceLock;

use super::queue::{put, reduced};
use crate::call::{Call, Envelope, Site};
use crate::error::Cause;
use crate::mpilib::wildcards;
use crate::ops::{Dtype, Op, Reduction};

/// The tag of messages that go through NCCL, which has none.
pub const TAG: i32 = 0;

pub const MESSAGES: &str = "MPI4JAX_NCCL_MESSAGES";

/// How `send`, `recv` and `sendrecv` go, on all ranks and all communicators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Messages {
    /// Through NCCL, which matches nothing: messages between two ranks arrive in the order in which they were
    /// sent. So all have tag 0, and sources are named.
    Nccl,
    /// Through staging, with all that MPI allows.
    Staged,
}

impl Messages {
    const ALL: [(&str, Self); 2] = [("nccl", Self::Nccl), ("staged", Self::Staged)];

    /// What a setting means; one that says nothing means `otherwise`.
    fn parse(setting: Option<&str>, otherwise: Self) -> Result<Self, Cause> {
        let Some(text) = setting else { return Ok(otherwise) };
        let found = Self::ALL.into_iter().find(|(name, _)| *name == text);
        found.map(|(_, messages)| messages).ok_or_else(|| {
            let valid = Self::ALL.map(|(name, _)| name).join(", ");
            Cause::Setting {
                message: format!("{MESSAGES}={text} is not understood: expected one of {valid}"),
            }
        })
    }

    pub fn name(self) -> &'static str {
        Self::ALL[self as usize].0
    }
}

static SETTING: OnceLock<Messages> = OnceLock::new();

/// Reads the environment, once. A program that runs with other transports runs with the one that `auto` takes.
pub fn settings(auto: bool) -> Result<Option<String>, Cause> {
    let value = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    let otherwise = if auto { Messages::Staged } else { Messages::Nccl };
    let messages = Messages::parse(value(MESSAGES).as_deref(), otherwise)?;
    let messages = SETTING.get_or_init(|| messages);
    Ok(Some(format!("messages: {}", messages.name())))
}

pub fn messages() -> Messages {
    SETTING.get().copied().unwrap_or(Messages::Nccl)
}

/// Why messages do not meet those of MPI, if they do not.
pub fn messages_apart() -> Option<&'static str> {
    let reason = "send and recv go through NCCL, and do not meet the messages of MPI; MPI4JAX_NCCL_MESSAGES=staged \
                  lets all messages go through MPI";
    (messages() == Messages::Nccl).then_some(reason)
}

/// Whether NCCL carries a call; else it goes through staging. An error for a message that has to be matched.
pub fn carries(call: &Call) -> Result<bool, Cause> {
    let Site { op, reduction, .. } = *call.site;
    let features =
        Features { op, dtype: call.send.map(|buffer| buffer.dtype()), reduction, envelope: call.envelope };
    features.carried(messages())
}

/// What decides that.
struct Features {
    op: Op,
    /// Of the operand; `None` without one.
    dtype: Option<Dtype>,
    reduction: Option<Reduction>,
    envelope: Envelope,
}

impl Features {
    fn carried(&self, messages: Messages) -> Result<bool, Cause> {
        let row = self.op.row();
        if put(self.op).is_none() || row.has_peer && messages == Messages::Staged {
            return Ok(false);
        }
        if row.has_reduction {
            return Ok(self.reduction.zip(self.dtype).is_some_and(|(r, dtype)| reduced(r, dtype).is_some()));
        }
        Ok((!row.sends() || self.sends_in_order()?) && (!row.receives() || self.receives_in_order()?))
    }

    /// An error where the receiver might have to look for what is sent.
    fn sends_in_order(&self) -> Result<bool, Cause> {
        let Envelope { dest, sendtag, .. } = self.envelope;
        is_known(dest, sendtag)?;
        if dest != wildcards().proc_null && !is_plain(sendtag) {
            return Err(needs_matching(format!("sending with tag {sendtag}")));
        }
        Ok(true)
    }

    /// An error where a message would have to be looked for. With tag 0 alone, `ANY_TAG` is that.
    fn receives_in_order(&self) -> Result<bool, Cause> {
        let any = wildcards();
        let Envelope { source, recvtag, .. } = self.envelope;
        is_known(source, recvtag)?;
        if source == any.proc_null {
            return Ok(true);
        }
        if source == any.source {
            return Err(needs_matching("receiving from ANY_SOURCE".into()));
        }
        if !is_plain(recvtag) && recvtag != any.tag {
            return Err(needs_matching(format!("receiving with tag {recvtag}")));
        }
        Ok(true)
    }
}

/// An error where an operand says it: to read that would mean to wait for the stream.
fn is_known(rank: i32, tag: i32) -> Result<(), Cause> {
    if [rank, tag].contains(&Envelope::TRACED) {
        return Err(needs_matching("a source, destination or tag that is traced".into()));
    }
    Ok(())
}

/// What derivatives send is told apart by its place in the order.
fn is_plain(tag: i32) -> bool {
    tag == TAG || tag == TAG + wildcards().derivative
}

fn needs_matching(feature: String) -> Cause {
    Cause::Unsupported {
        feature,
        reason: "messages go through NCCL, which knows no tags and no wildcards; set \
                 MPI4JAX_NCCL_MESSAGES=staged, so that messages go through MPI and all else through NCCL, \
                 or name the source and leave the tags at 0",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(messages: Messages, envelope: [i32; 4]) -> [Result<bool, Cause>; 3] {
        let [source, recvtag, dest, sendtag] = envelope;
        let envelope = Envelope { source, recvtag, dest, sendtag };
        [Op::Send, Op::Recv, Op::Sendrecv].map(|op| {
            Features { op, dtype: Some(Dtype::Float32), reduction: None, envelope }.carried(messages)
        })
    }

    #[test]
    fn all_messages_go_one_way() {
        let any = wildcards();
        let nobody = any.proc_null;
        for (envelope, fit) in [
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
            for (answer, fit) in message(Messages::Nccl, envelope).into_iter().zip(fit) {
                assert!(matches!((answer, fit), (Ok(true), true) | (Err(_), false)), "{envelope:?}");
            }
            let staged = message(Messages::Staged, envelope);
            assert!(staged.iter().all(|answer| matches!(answer, Ok(false))), "{envelope:?}");
        }
    }

    #[test]
    fn settings_of_messages() {
        assert_eq!(Messages::parse(None, Messages::Staged).unwrap(), Messages::Staged);
        for (name, messages) in Messages::ALL {
            assert_eq!(Messages::parse(Some(name), Messages::Nccl).unwrap(), messages);
            assert_eq!(messages.name(), name);
        }
        let error = Messages::parse(Some("pigeon"), Messages::Nccl).unwrap_err().to_string();
        assert!(error.contains("pigeon") && error.contains("nccl, staged"), "{error}");
    }

    #[test]
    fn reductions_that_nccl_lacks_go_elsewhere() {
        let carried = |name, dtype| {
            let reduction = Reduction::from_name(name);
            let envelope = Envelope { source: -1, recvtag: -1, dest: -1, sendtag: -1 };
            let features = Features { op: Op::Allreduce, dtype: Some(dtype), reduction, envelope };
            features.carried(Messages::Nccl).unwrap()
        };
        assert!(carried("SUM", Dtype::Bfloat16) && carried("MAX", Dtype::Int64));
        assert!(carried("LOR", Dtype::Bool) && carried("SUM", Dtype::Complex128));
        assert!(!carried("PROD", Dtype::Complex64) && !carried("LXOR", Dtype::Bool));
        assert!(!carried("SUM", Dtype::Int16) && !carried("BAND", Dtype::Int32));
        assert!(!carried("MAXLOC", Dtype::Float32) && !carried("MAX", Dtype::Float32));
    }
}
