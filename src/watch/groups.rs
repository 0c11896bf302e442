//! Ranks by what they do, in a bounded number of lines, each of bounded length, however many ranks there are.

use std::collections::HashMap;

use crate::job::ranks::Ranks;

/// How many lines a report has of what the ranks do.
const LINES: usize = 16;
/// How many runs of ranks are named in one place.
const RUNS: usize = 8;

/// Ranks that do the same.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    pub members: Ranks,
    pub state: String,
    /// The longest time that one of them has done so.
    pub seconds: f64,
}

/// "ranks 0-2, 5"; of many, the first, and how many more.
pub fn ranks(ranks: &Ranks) -> String {
    let (count, all) = (ranks.count(), ranks.to_string());
    let runs: Vec<&str> = all.split(',').collect();
    let mut text = format!("rank{} ", if count == 1 { "" } else { "s" });
    if runs.len() > RUNS + 1 {
        text += &format!("{}, ... ({count} in all)", runs[..RUNS].join(", "));
    } else {
        text += &runs.join(", ");
    }
    text
}

/// Ranks by what they do, most first.
fn grouped(groups: impl IntoIterator<Item = Group>) -> Vec<Group> {
    let mut by_state: HashMap<String, (Vec<i32>, f64)> = HashMap::new();
    for Group { members, state, seconds } in groups {
        let (ranks, longest) = by_state.entry(state).or_default();
        ranks.extend(members.iter());
        *longest = longest.max(seconds);
    }
    let group = |(state, (ranks, seconds)): (String, (Vec<i32>, f64))| Group {
        members: ranks.into_iter().collect(),
        state,
        seconds,
    };
    let mut groups: Vec<Group> = by_state.into_iter().map(group).collect();
    groups.sort_by_key(|group| (std::cmp::Reverse(group.members.count()), group.members.first()));
    groups
}

/// The same, where what only some say of peers, and then also of sizes, is left out as long as there are more groups
/// than this.
fn at_most(count: usize, groups: impl IntoIterator<Item = Group>) -> Vec<Group> {
    let mut groups = grouped(groups);
    for simpler in [without_peers, without_sizes] {
        if groups.len() <= count {
            break;
        }
        groups = grouped(groups.into_iter().map(|group| Group { state: simpler(&group.state), ..group }));
    }
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

/// What all ranks do, most first, a line a group.
pub fn lines(groups: impl IntoIterator<Item = Group>) -> String {
    let groups = at_most(LINES, groups);
    // Of the rest, one line.
    let shown = if groups.len() > LINES { LINES - 1 } else { groups.len() };
    let mut text = String::new();
    for Group { members, state, seconds } in &groups[..shown] {
        let verb = if members.count() == 1 { "is" } else { "are" };
        let since = if *seconds > 0.0 { format!(" (for {seconds:.1} s)") } else { String::new() };
        text += &format!("  {} {verb} {state}{since}\n", ranks(members));
    }
    if shown < groups.len() {
        text += &format!("  {} do {} other things\n", ranks(&all(&groups[shown..])), groups.len() - shown);
    }
    text
}

/// Whom is waited for, most first, in some words: " for rank 3, which is in Python at io.py:40".
pub fn waited_for(groups: impl IntoIterator<Item = Group>) -> String {
    let groups = at_most(3, groups);
    let total: usize = groups.iter().map(|group| group.members.count()).sum();
    let mut text = if groups.len() > 1 { format!(" for {total} ranks:") } else { " for".into() };
    for (i, Group { members, state, .. }) in groups.iter().take(3).enumerate() {
        let verb = if members.count() == 1 { "is" } else { "are" };
        text += &format!("{} {}, which {verb} {state}", if i == 0 { "" } else { ";" }, ranks(members));
    }
    if groups.len() > 3 {
        text += &format!("; and {}", ranks(&all(&groups[3..])));
    }
    text
}

fn all(groups: &[Group]) -> Ranks {
    groups.iter().flat_map(|group| group.members.iter()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(rank: i32, state: String, seconds: f64) -> Group {
        Group { members: [rank].into_iter().collect(), state, seconds }
    }

    #[test]
    fn ranks_are_named_in_runs() {
        let of = |list: &[i32]| ranks(&list.iter().copied().collect());
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
        let text = lines((0..n).map(|rank| group(rank, ring(rank), 1.0)));
        assert_eq!(
            text,
            "  ranks 0-4710, 4712-9999 are in recv from others, tag 7 (3 x float32) on c, a.py:8 (for 1.0 s)\n  \
             rank 4711 is in no operation; Python is at io.py:40 in load (for 1.0 s)\n"
        );
        let sizes =
            (0..n).map(|rank| group(rank, format!("in allreduce #{} ({rank} x int8) on c", rank % 3), 0.0));
        assert_eq!(lines(sizes).lines().count(), 3);
        let different = lines((0..n).map(|rank| group(rank, format!("in Python at a.py:{rank}"), 0.0)));
        assert_eq!(different.lines().count(), LINES);
        assert!(different.ends_with("  ranks 15-9999 do 9985 other things\n"), "{different}");
    }

    #[test]
    fn slow_ranks_are_counted_and_odd_ones_named() {
        let of = |states: &[(i32, &str)]| {
            waited_for(states.iter().map(|&(rank, state)| group(rank, state.to_owned(), 0.0)))
        };
        assert_eq!(of(&[(3, "in Python at io.py:40")]), " for rank 3, which is in Python at io.py:40");
        assert_eq!(of(&[(3, "a"), (4, "a")]), " for ranks 3-4, which are a");
        assert_eq!(
            of(&[(1, "a"), (2, "b"), (3, "b"), (5, "b"), (7, "c"), (8, "d"), (10, "e")]),
            " for 7 ranks: ranks 2-3, 5, which are b; rank 1, which is a; rank 7, which is c; and ranks 8, 10"
        );
    }
}
