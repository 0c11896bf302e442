//! A message's communicator, sender and tag in the 64 bits that UCX matches under a mask.

use crate::error::Cause;
use crate::mpilib::wildcards;

const TAG_BITS: u32 = 31;
const SOURCE_BITS: u32 = 18;
const CONTEXT_BITS: u32 = 64 - TAG_BITS - SOURCE_BITS;

/// Communicators that a process can use at a time.
pub const CONTEXTS: u64 = 1 << CONTEXT_BITS;

/// What a message carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label {
    /// Of the communicator, the same on all of its ranks.
    pub context: u64,
    /// Rank of the sender in the communicator.
    pub source: i32,
    pub tag: i32,
}

/// What a receive accepts; `None` is anything, of tags: but for those of derivatives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub context: u64,
    pub source: Option<i32>,
    pub tag: Option<i32>,
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

impl Wanted {
    /// The label and the mask of the bits that have to be equal.
    pub fn encode(self) -> Result<(u64, u64), Cause> {
        let Self { context, source, tag } = self;
        let label = Label { context, source: source.unwrap_or(0), tag: tag.unwrap_or(0) };
        let of_source = if source.is_some() { (1 << SOURCE_BITS) - 1 } else { 0 };
        let of_tag = if tag.is_some() { (1 << TAG_BITS) - 1 } else { wildcards().derivative as u64 };
        let mask = (CONTEXTS - 1) << (SOURCE_BITS + TAG_BITS) | of_source << TAG_BITS | of_tag;
        Ok((label.encode()?, mask))
    }
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
        let accepts = |wanted: Wanted, label: Label| {
            let (bits, mask) = wanted.encode().unwrap();
            (label.encode().unwrap() ^ bits) & mask == 0
        };
        let message = Label { context: 7, source: 2, tag: 9 };
        let exact = Wanted { context: 7, source: Some(2), tag: Some(9) };
        assert!(accepts(exact, message));
        for (source, tag) in [(None, Some(9)), (Some(2), None), (None, None)] {
            assert!(accepts(Wanted { context: 7, source, tag }, message));
            assert!(!accepts(Wanted { context: 8, source, tag }, message));
            let derivative = Label { tag: 9 + wildcards().derivative, ..message };
            assert!(!accepts(Wanted { context: 7, source, tag }, derivative));
        }
        assert!(!accepts(Wanted { source: Some(1), ..exact }, message));
        assert!(!accepts(Wanted { tag: Some(0), ..exact }, message));
    }
}
