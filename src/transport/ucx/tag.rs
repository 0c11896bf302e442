//! A message's communicator, sender and tag in the 64 bits that UCX matches under a mask.

use crate::error::Cause;
use crate::mpilib::wildcards;

const TAG_BITS: u32 = 31;
const SOURCE_BITS: u32 = 18;
const CONTEXT_BITS: u32 = 64 - TAG_BITS - SOURCE_BITS;

/// Communicators that a process can use at a time.
pub const CONTEXTS: u64 = 1 << CONTEXT_BITS;

/// The parts of a UCX tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label {
    /// Of the communicator, the same on all of its ranks.
    pub context: u64,
    /// Rank of the sender in the communicator.
    pub source: i32,
    pub tag: i32,
}

fn bits(field: &'static str, value: i32, width: u32) -> Result<u64, Cause> {
    match u64::try_from(value) {
        Ok(value) if value >> width == 0 => Ok(value),
        _ => Err(Cause::Unsupported {
            feature: format!("{field} {value}"),
            reason: "the transport ucx has 31 bits for tags and 18 for ranks",
        }),
    }
}

impl Label {
    pub fn encode(self) -> Result<u64, Cause> {
        let source = bits("source", self.source, SOURCE_BITS)?;
        let tag = bits("tag", self.tag, TAG_BITS)?;
        Ok(self.context << (SOURCE_BITS + TAG_BITS) | source << TAG_BITS | tag)
    }

    pub fn decode(bits: u64) -> Self {
        Self {
            context: bits >> (SOURCE_BITS + TAG_BITS),
            source: (bits >> TAG_BITS & ((1 << SOURCE_BITS) - 1)) as i32,
            tag: (bits & ((1 << TAG_BITS) - 1)) as i32,
        }
    }
}

/// The label of the messages that a receive takes, and the mask of the bits that have to be equal.
/// A receive of any tag does not match messages of derivatives.
pub fn wanted(context: u64, source: i32, tag: i32) -> Result<(u64, u64), Cause> {
    let any = wildcards();
    let (source, of_source) = if source == any.source { (0, 0) } else { (source, (1 << SOURCE_BITS) - 1) };
    let (tag, of_tag) = if tag == any.tag { (0, any.derivative as u64) } else { (tag, (1 << TAG_BITS) - 1) };
    let mask = (CONTEXTS - 1) << (SOURCE_BITS + TAG_BITS) | of_source << TAG_BITS | of_tag;
    Ok((Label { context, source, tag }.encode()?, mask))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_round_trip() {
        for (context, source, tag) in [(0, 0, 0), (CONTEXTS - 1, (1 << 18) - 1, i32::MAX), (5, 3, 42)] {
            let label = Label { context, source, tag };
            assert_eq!(Label::decode(label.encode().unwrap()), label);
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        assert!(Label { context: 0, source: 1 << 18, tag: 0 }.encode().is_err());
        assert!(Label { context: 0, source: 0, tag: -1 }.encode().is_err());
    }

    #[test]
    fn wildcards_accept_what_the_others_do_not() {
        let any = wildcards();
        let takes = |context, source, tag, label: Label| {
            let (bits, mask) = wanted(context, source, tag).unwrap();
            (label.encode().unwrap() ^ bits) & mask == 0
        };
        let message = Label { context: 7, source: 2, tag: 9 };
        assert!(takes(7, 2, 9, message));
        for (source, tag) in [(any.source, 9), (2, any.tag), (any.source, any.tag)] {
            assert!(takes(7, source, tag, message));
            assert!(!takes(8, source, tag, message));
            assert!(!takes(7, source, tag, Label { tag: 9 + any.derivative, ..message }));
        }
        assert!(!takes(7, 1, 9, message));
        assert!(!takes(7, 2, 0, message));
    }
}
