//! Forms of messages (names and shapes of leaves), which ranks compare.

use serde::Deserialize;

/// The form of what is sent, and of what is received: names and shapes of the leaves of a tree, or the shape of an array. Point-to-point
/// messages have one for trees only. Empty where ranks may differ.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default, deny_unknown_fields)]
pub struct Forms {
    pub sent: Box<str>,
    pub received: Box<str>,
    /// Of a collective in a `shard_map`: the function with the shapes, dtypes and specs of its arguments, which all ranks have alike.
    pub boundary: Box<str>,
}
