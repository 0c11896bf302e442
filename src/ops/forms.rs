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
    /// The ghost cells of a halo exchange, in words: `widths 1+1 and 2+0 along axes -2 and -1`.
    pub ghosts: Box<str>,
    /// The counts that all ranks have alike, in words: `with counts [2, 1] (in elements)`.
    #[serde(skip)]
    pub counts: Box<str>,
}

const OF_PLAN: &str = ", of ghosts.Plan ";
const OF_TRANSFORM: &str = ", of a transform ";
const OF_GHOSTS: &str = ", widths ";
const OF_COUNTS: &str = ", with counts ";
const IN_SHARD_MAP: &str = ", in shard_map of ";
/// Between a line and forms. It is no control character, which the board would escape.
const BEHIND: char = '\u{241f}';
/// Of a collective in a `shard_map` over several axes: the other axes over which its operand varies, as `collectives.py` writes it.
const OPERAND: &str = ", with an operand that ";
/// Between the arguments of a `shard_map`, as `boundary.py` writes them.
const ARGUMENTS: &str = "; ";

/// A collective in a `shard_map`, in words.
struct InShardMap<'a> {
    /// All words up to the name of the function.
    function: &'a str,
    arguments: Vec<&'a str>,
    operand: &'a str,
}

impl<'a> InShardMap<'a> {
    fn parse(words: &'a str) -> Option<Self> {
        let name = words.find(IN_SHARD_MAP)? + IN_SHARD_MAP.len();
        let open = name + words[name..].find('(')?;
        let end = words.find(OPERAND).unwrap_or(words.len());
        let arguments = words.get(open + 1..end)?.strip_suffix(')')?;
        Some(Self {
            function: &words[..open],
            arguments: arguments.split(ARGUMENTS).collect(),
            operand: &words[end..],
        })
    }
}

impl Forms {
    /// What a collective belongs to, for reports: `, of ghosts.Plan 2, in shard_map of f([0]: float32[3] P('i'))`. It is equal on all
    /// ranks. The number of a plan and the axes of a transform are in the name of the leaves, which `ghosts.py` and `fft.py` give them.
    pub fn belongs_to(&self) -> String {
        let name = self.sent.strip_prefix("['").and_then(|rest| rest.split_once('\''));
        let mut words = name.map(|(name, _)| format!(", of {name}")).unwrap_or_default();
        if ![OF_PLAN, OF_TRANSFORM].iter().any(|start| words.starts_with(start)) {
            words.clear();
        }
        for (start, rest) in [(", ", &self.ghosts), (", ", &self.counts), (IN_SHARD_MAP, &self.boundary)] {
            if !rest.is_empty() {
                words += &format!("{start}{rest}");
            }
        }
        words
    }

    /// What is sent, and what it belongs to, as it is written on the board behind a line.
    pub fn behind_line(&self) -> String {
        let words = format!("{}{}", self.sent, self.belongs_to());
        if words.is_empty() { words } else { format!("{BEHIND}{words}") }
    }

    /// The line, and the words behind it.
    pub fn split(words: &str) -> (&str, &str) {
        words.split_once(BEHIND).unwrap_or((words, ""))
    }

    /// What another rank's collective belongs to, from words that end with it.
    pub fn found_in(words: &str) -> &str {
        let starts = [OF_PLAN, OF_TRANSFORM, OF_GHOSTS, OF_COUNTS, IN_SHARD_MAP];
        let found = starts.into_iter().filter_map(|start| words.find(start)).min();
        found.map_or("", |start| &words[start..])
    }

    /// Whether operations that ranks call, in words, differ in the other axes over which their operands vary.
    pub fn are_of_other_axes(one: &str, other: &str) -> bool {
        let operand = |words: &str| words.split_once(OPERAND).map(|(_, operand)| operand.to_owned());
        operand(one).zip(operand(other)).is_some_and(|(one, other)| one != other)
    }

    /// In the words of several ranks, leaves out the arguments of a `shard_map` that all of them pass alike, if others differ.
    pub fn without_equal_arguments(words: &mut [String]) {
        let Some(parsed) = words.iter().map(|words| InShardMap::parse(words)).collect::<Option<Vec<_>>>()
        else {
            return;
        };
        let is_equal = |argument: &&str| parsed.iter().all(|rank| rank.arguments.contains(argument));
        if parsed.iter().all(|rank| rank.arguments.iter().all(is_equal)) {
            return;
        }
        let shorter = |rank: &InShardMap| {
            let mut shown: Vec<&str> = rank.arguments.iter().copied().filter(|it| !is_equal(it)).collect();
            if shown.len() < rank.arguments.len() {
                shown.push("the others are equal");
            }
            format!("{}({}){}", rank.function, shown.join(ARGUMENTS), rank.operand)
        };
        let shorter: Vec<String> = parsed.iter().map(shorter).collect();
        words.clone_from_slice(&shorter);
    }

    /// Whether a collective belongs, in words, to something that mpi4py does not have: a plan, ghost cells, or a transform.
    pub fn are_of_this_package(words: &str) -> bool {
        [OF_PLAN, OF_TRANSFORM, OF_GHOSTS].iter().any(|start| words.starts_with(start))
    }
}

#[cfg(test)]
mod tests {
    use super::Forms;

    #[test]
    fn a_collective_belongs_to_a_plan_and_a_shard_map() {
        for (sent, boundary, expected) in [
            ("['a'] (3)", "", ""),
            ("['ghosts.Plan 12'] (3)", "", ", of ghosts.Plan 12"),
            ("['ghosts.Plan 2']['a']", "f()", ", of ghosts.Plan 2, in shard_map of f()"),
            ("(3)", "f()", ", in shard_map of f()"),
            ("['a transform along axes 0'] (3)", "", ", of a transform along axes 0"),
        ] {
            let forms = Forms { sent: sent.into(), boundary: boundary.into(), ..Forms::default() };
            assert_eq!(forms.belongs_to(), expected);
            let (line, words) = (format!("a.py:1{}", forms.behind_line()), format!("{sent}{expected}"));
            assert_eq!(Forms::split(&line), ("a.py:1", &*words));
            assert_eq!(Forms::found_in(&words), expected);
            assert_eq!(Forms::are_of_this_package(expected), expected.starts_with(", of"));
        }
        let forms = Forms { ghosts: "widths 1+1 along axis 0".into(), ..Forms::default() };
        assert_eq!(Forms::found_in(&forms.behind_line()), ", widths 1+1 along axis 0");
        let counts = Forms { counts: "with counts [2, 1] (in elements)".into(), ..Forms::default() };
        assert_eq!(Forms::found_in(&counts.behind_line()), ", with counts [2, 1] (in elements)");
        assert!(!Forms::are_of_this_package(&counts.belongs_to()));
        assert_eq!(Forms::split(&format!("a.py:1{}", Forms::default().behind_line())), ("a.py:1", ""));
    }

    #[test]
    fn arguments_that_differ_are_named() {
        let of = |arguments: &str| format!("allreduce #1, in shard_map of step({arguments})");
        let shortened = |words: &[String]| {
            let mut words = words.to_vec();
            Forms::without_equal_arguments(&mut words);
            words
        };
        let [one, other] =
            [8, 6].map(|n| format!("[0]['w']: int8[3] P(); [1]: int8[{n},4] P('i', 'j'); [2]: int8[] P()"));
        let [first, second] =
            [8, 6].map(|n| of(&format!("[1]: int8[{n},4] P('i', 'j'); the others are equal")));
        assert_eq!(shortened(&[of(&one), of(&other), of(&one)]), [first.clone(), second, first]);
        let operand = ", with an operand that varies over 'b'";
        let differs = [of("[0]: int8[1] P()") + operand, of("[0]: int8[2] P()") + operand];
        assert_eq!(shortened(&differs), differs, "no argument is equal");
        for unchanged in [[of(&one), of(&one) + operand], [of(&one), "scan #1".into()], [of(&one), of(&one)]]
        {
            assert_eq!(shortened(&unchanged), unchanged);
        }
    }

    #[test]
    fn operands_vary_over_other_axes() {
        let [one, other] = ["varies over 'b'", "is replicated over 'b'"]
            .map(|operand| format!("allreduce #1, in shard_map of f(), with an operand that {operand}"));
        assert!(Forms::are_of_other_axes(&one, &other));
        assert!(!Forms::are_of_other_axes(&one, &one) && !Forms::are_of_other_axes(&one, "scan #1"));
    }
}
