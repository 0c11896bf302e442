//! Ranks by what they do, in a bounded number of lines, each of bounded length, however many ranks there are.

use std::cmp::Reverse;

use crate::board::ranks::{Ranks, grouped};

/// How many lines a report has of what the ranks do.
const LINES: usize = 16;
/// How many runs of ranks are named in one place.
const RUNS: usize = 8;

/// What ranks do, and which.
type Group = (String, Ranks);

/// "ranks 0-2, 5"; of many, the first, and how many more.
pub fn ranks_in_words(ranks: &Ranks) -> String {
    let count = ranks.count();
    let mut each: Vec<[i32; 2]> = Vec::new();
    for rank in ranks.iter() {
        let is_full = each.len() > RUNS + 1;
        match each.last_mut() {
            Some([_, last]) if *last + 1 == rank => *last = rank,
            _ if is_full => break,
            _ => each.push([rank, rank]),
        }
    }
    let run = |[a, b]: &[i32; 2]| if a == b { a.to_string() } else { format!("{a}-{b}") };
    let runs: Vec<String> = each.iter().map(run).collect();
    let mut text = format!("rank{} ", if count == 1 { "" } else { "s" });
    if runs.len() > RUNS + 1 {
        text += &format!("{}, ... ({count} in all)", runs[..RUNS].join(", "));
    } else {
        text += &runs.join(", ");
    }
    text
}

/// Ranks grouped by what they do, the largest group first. As long as there are more than `count` groups, peers are left out, and
/// then sizes.
fn at_most(count: usize, ranks: impl IntoIterator<Item = (String, i32)>) -> Vec<Group> {
    let mut groups = grouped(ranks);
    for simpler in [without_peers, without_sizes] {
        if groups.len() <= count {
            break;
        }
        let simplified = groups.iter().map(|(state, ranks)| (simpler(state), ranks));
        groups = grouped(
            simplified.flat_map(|(state, ranks)| ranks.iter().map(move |rank| (state.clone(), rank))),
        );
    }
    groups.sort_by_key(|(_, ranks)| (Reverse(ranks.count()), ranks.first()));
    groups
}

/// `recv from 3, tag 7` is `recv from others, tag 7`.
fn without_peers(state: &str) -> String {
    let mut words: Vec<&str> = Vec::new();
    for word in state.split(' ') {
        let rank = word.trim_end_matches(',');
        let is_peer = matches!(words.last(), Some(&("from" | "to"))) && rank.parse::<i32>().is_ok();
        words.push(match (is_peer, word.ends_with(',')) {
            (false, _) => word,
            (true, true) => "others,",
            (true, false) => "others",
        });
    }
    words.join(" ")
}

/// `allreduce #3 (SUM, 7 x float32) on c` is `allreduce #3 on c`.
fn without_sizes(state: &str) -> String {
    let mut text = String::new();
    let mut rest = state;
    while let Some((before, after)) = rest.split_once(" (")
        && let Some((_, after)) = after.split_once(')')
    {
        text += before;
        rest = after;
    }
    text + rest
}

/// What all ranks do, most first, a line a group, with the longest time that one of its ranks has done so.
pub fn lines(ranks: impl IntoIterator<Item = (String, i32)>, seconds: impl Fn(i32) -> f64) -> String {
    let groups = at_most(LINES, ranks);
    // The last line is about all other groups.
    let shown = if groups.len() > LINES { LINES - 1 } else { groups.len() };
    let mut text = String::new();
    for (state, members) in &groups[..shown] {
        let longest = members.iter().map(&seconds).fold(0.0, f64::max);
        let since = if longest > 0.0 { format!(" (for {longest:.1} s)") } else { String::new() };
        text += &format!("  {} {} {state}{since}\n", ranks_in_words(members), verb(members));
    }
    if shown < groups.len() {
        let rest = ranks_in_words(&all(&groups[shown..]));
        text += &format!("  {rest} do {} other things\n", groups.len() - shown);
    }
    text
}

/// What ranks do, most first, in some words: "ranks 0-2 are in barrier #1; rank 3 is in Python at io.py:40".
pub fn in_words(ranks: impl IntoIterator<Item = (String, i32)>) -> String {
    let groups = at_most(3, ranks);
    let part = |(state, members): &Group| format!("{} {} {state}", ranks_in_words(members), verb(members));
    let mut parts: Vec<String> = groups.iter().take(3).map(part).collect();
    if groups.len() > 3 {
        parts.push(format!("{} do other things", ranks_in_words(&all(&groups[3..]))));
    }
    parts.join("; ")
}

fn verb(members: &Ranks) -> &'static str {
    if members.count() == 1 { "is" } else { "are" }
}

fn all(groups: &[Group]) -> Ranks {
    groups.iter().flat_map(|(_, members)| members.iter()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_named_in_runs() {
        let of = |list: &[i32]| ranks_in_words(&list.iter().copied().collect());
        assert_eq!(of(&[3]), "rank 3");
        assert_eq!(of(&[0, 1, 2, 5, 7, 8]), "ranks 0-2, 5, 7-8");
        let even: Vec<i32> = (0..5000).map(|i| 2 * i).collect();
        assert_eq!(of(&even), "ranks 0, 2, 4, 6, 8, 10, 12, 14, ... (5000 in all)");
        assert_eq!(of(&even[..9]), "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16");
    }

    /// A ring of receives: no two ranks do quite the same. The odd one among them is named.
    #[test]
    fn ten_thousand_ranks_are_a_few_lines() {
        let n = 10_000;
        let ring = |rank: i32| match rank {
            4711 => "in no operation; Python is at io.py:40 in load".to_owned(),
            _ => format!("in recv from {}, tag 7 (3 x float32) on c, a.py:8", (rank + 1) % n),
        };
        let text = lines((0..n).map(|rank| (ring(rank), rank)), |_| 1.0);
        assert_eq!(
            text,
            "  ranks 0-4710, 4712-9999 are in recv from others, tag 7 (3 x float32) on c, a.py:8 (for 1.0 s)\n  \
             rank 4711 is in no operation; Python is at io.py:40 in load (for 1.0 s)\n"
        );
        let sizes = (0..n).map(|rank| (format!("in allreduce #{} ({rank} x int8) on c", rank % 3), rank));
        assert_eq!(lines(sizes, |_| 0.0).lines().count(), 3);
        let different = lines((0..n).map(|rank| (format!("in Python at a.py:{rank}"), rank)), |_| 0.0);
        assert_eq!(different.lines().count(), LINES);
        assert!(different.ends_with("  ranks 15-9999 do 9985 other things\n"), "{different}");
    }

    #[test]
    fn slow_ranks_are_in_groups_and_odd_ones_named() {
        let of =
            |states: &[(i32, &str)]| in_words(states.iter().map(|&(rank, state)| (state.to_owned(), rank)));
        assert_eq!(of(&[(3, "in Python at io.py:40")]), "rank 3 is in Python at io.py:40");
        assert_eq!(of(&[(3, "a"), (4, "a")]), "ranks 3-4 are a");
        assert_eq!(
            of(&[(1, "a"), (2, "b"), (3, "b"), (5, "b"), (7, "c"), (8, "d"), (10, "e")]),
            "ranks 2-3, 5 are b; rank 1 is a; rank 7 is c; ranks 8, 10 do other things"
        );
    }
}
