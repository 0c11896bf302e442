//! Ranks by what they do, in a bounded number of lines, each of bounded length, however many ranks there are.

use std::collections::HashMap;

use super::frames;

/// How many lines a report has of what the ranks do.
const LINES: usize = 16;
/// How many runs of ranks are named in one place.
const RUNS: usize = 8;

/// What a rank is in that is in none of ours.
pub const NO_OPERATION: &str = "in no operation";

/// Ranks that do the same.
#[derive(Debug, PartialEq)]
pub struct Group {
    pub members: Vec<i32>,
    pub state: String,
    /// The longest time that one of them has done so.
    pub seconds: f64,
}

/// "ranks 0-2, 5"; of many, the first, and how many more.
pub fn ranks(ranks: &[i32]) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut rest = ranks;
    while let Some(&first) = rest.first() {
        if parts.len() == RUNS && rest.len() > 1 {
            parts.push(format!("... ({} in all)", ranks.len()));
            break;
        }
        let run = rest.iter().zip(first..).take_while(|&(&rank, expected)| rank == expected).count();
        let last = rest[run - 1];
        parts.push(if run == 1 { first.to_string() } else { format!("{first}-{last}") });
        rest = &rest[run..];
    }
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, parts.join(", "))
}

/// Ranks by what they do, most first, in so many groups if need be. They come in order.
fn grouped(ranks: impl Iterator<Item = (i32, String, f64)>) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    let mut known: HashMap<String, usize> = HashMap::new();
    for (rank, state, seconds) in ranks {
        let i = *known.entry(state).or_insert_with_key(|state| {
            groups.push(Group { members: Vec::new(), state: state.clone(), seconds });
            groups.len() - 1
        });
        groups[i].members.push(rank);
        groups[i].seconds = groups[i].seconds.max(seconds);
    }
    groups.sort_by_key(|group| std::cmp::Reverse(group.members.len()));
    groups
}

/// The same, where what only some say of peers, and then also of sizes, is left out as long as there are more groups
/// than this.
pub fn at_most(count: usize, states: impl Iterator<Item = (i32, String, f64)>) -> Vec<Group> {
    let mut groups = grouped(states);
    for simpler in [without_peers, without_sizes] {
        if groups.len() <= count {
            break;
        }
        let mut merged: Vec<(i32, String, f64)> = Vec::new();
        for Group { members, state, seconds } in groups {
            let state = simpler(&state);
            merged.extend(members.into_iter().map(|rank| (rank, state.clone(), seconds)));
        }
        merged.sort_by_key(|(rank, ..)| *rank);
        groups = grouped(merged.into_iter());
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
pub fn lines(states: impl Iterator<Item = (i32, String, f64)>) -> String {
    let groups = at_most(LINES, states);
    // Of the rest, one line.
    let shown = if groups.len() > LINES { LINES - 1 } else { groups.len() };
    let mut text = String::new();
    for Group { members, state, seconds } in &groups[..shown] {
        let verb = if members.len() == 1 { "is" } else { "are" };
        let since = if *seconds > 0.0 { format!(" (for {seconds:.1} s)") } else { String::new() };
        text += &format!("  {} {verb} {state}{since}\n", ranks(members));
    }
    if shown < groups.len() {
        text += &format!("  {} do {} other things\n", ranks(&all(&groups[shown..])), groups.len() - shown);
    }
    text
}

/// Whom is waited for, most first, in some words: " for rank 3, which is in Python at io.py:40".
pub fn waited_for(states: impl Iterator<Item = (i32, String, f64)>) -> String {
    let groups = at_most(3, states);
    let total: usize = groups.iter().map(|group| group.members.len()).sum();
    let mut text = if groups.len() > 1 { format!(" for {total} ranks:") } else { " for".into() };
    for (i, Group { members, state, .. }) in groups.iter().take(3).enumerate() {
        let verb = if members.len() == 1 { "is" } else { "are" };
        text += &format!("{} {}, which {verb} {state}", if i == 0 { "" } else { ";" }, ranks(members));
    }
    if groups.len() > 3 {
        text += &format!("; and {}", ranks(&all(&groups[3..])));
    }
    text
}

fn all(groups: &[Group]) -> Vec<i32> {
    let mut members: Vec<i32> = groups.iter().flat_map(|group| group.members.iter().copied()).collect();
    members.sort_unstable();
    members
}

/// A state in few words: where Python is, for a rank that is in no operation.
pub fn brief(state: &str) -> String {
    let (what, python) = match state.rsplit_once("Python is at ") {
        Some((what, at)) => (what, Some(at)),
        None => (state, None),
    };
    match python {
        Some(at) if what.starts_with(NO_OPERATION) => {
            let activity = frames::ACTIVITIES.iter().find(|(_, words)| what.contains(words));
            let activity = activity.map_or_else(String::new, |(_, words)| format!(", where {words}"));
            format!("in Python at {at}{activity}")
        }
        _ => what.trim_end_matches([';', ' ']).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_named_in_runs() {
        assert_eq!(ranks(&[3]), "rank 3");
        assert_eq!(ranks(&[0, 1, 2, 5, 7, 8]), "ranks 0-2, 5, 7-8");
        let even: Vec<i32> = (0..5000).map(|i| 2 * i).collect();
        assert_eq!(ranks(&even), "ranks 0, 2, 4, 6, 8, 10, 12, 14, ... (5000 in all)");
        assert_eq!(ranks(&even[..9]), "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16");
    }

    #[test]
    fn a_state_is_put_briefly() {
        let state = "in no operation; the last one was barrier #1 on c; Python is at io.py:40 in load";
        assert_eq!(brief(state), "in Python at io.py:40 in load");
        let state = "in no operation; JAX compiles; the last one was barrier #1; Python is at a.py:4 in f";
        assert_eq!(brief(state), "in Python at a.py:4 in f, where JAX compiles");
        assert_eq!(
            brief("in recv from 1, tag 0 on c; Python is at a.py:4 in f"),
            "in recv from 1, tag 0 on c"
        );
        assert_eq!(brief("finished"), "finished");
    }

    /// A ring of receives: no two ranks do quite the same. The odd one among them is named.
    #[test]
    fn ten_thousand_ranks_are_a_few_lines() {
        let n = 10_000;
        let ring = |rank: i32| match rank {
            4711 => "in no operation; Python is at io.py:40 in load".to_owned(),
            _ => format!("in recv from {}, tag 7 (3 x float32) on c, a.py:8", (rank + 1) % n),
        };
        let text = lines((0..n).map(|rank| (rank, ring(rank), 1.0)));
        assert_eq!(
            text,
            "  ranks 0-4710, 4712-9999 are in recv from others, tag 7 (3 x float32) on c, a.py:8 (for 1.0 s)\n  \
             rank 4711 is in no operation; Python is at io.py:40 in load (for 1.0 s)\n"
        );
        let sizes =
            (0..n).map(|rank| (rank, format!("in allreduce #{} ({rank} x int8) on c", rank % 3), 0.0));
        assert_eq!(lines(sizes).lines().count(), 3);
        let different = lines((0..n).map(|rank| (rank, format!("in Python at a.py:{rank}"), 0.0)));
        assert_eq!(different.lines().count(), LINES);
        assert!(different.ends_with("  ranks 15-9999 do 9985 other things\n"), "{different}");
    }

    #[test]
    fn slow_ranks_are_counted_and_odd_ones_named() {
        let of = |states: &[(i32, &str)]| {
            waited_for(states.iter().map(|&(rank, state)| (rank, state.to_owned(), 0.0)))
        };
        assert_eq!(of(&[(3, "in Python at io.py:40")]), " for rank 3, which is in Python at io.py:40");
        assert_eq!(of(&[(3, "a"), (4, "a")]), " for ranks 3-4, which are a");
        assert_eq!(
            of(&[(1, "a"), (2, "b"), (3, "b"), (5, "b"), (7, "c"), (8, "d"), (10, "e")]),
            " for 7 ranks: ranks 2-3, 5, which are b; rank 1, which is a; rank 7, which is c; and ranks 8, 10"
        );
    }
}
