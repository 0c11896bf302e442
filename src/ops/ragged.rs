//! Exchanges of rows from each rank to each, whose numbers are arrays that are known at run time.

use serde::Deserialize;
use smallvec::SmallVec;

use super::parts::{Part, Parts, PerRank};
use crate::error::Cause;

/// Numbers of rows, for each rank, or two lists of them.
pub type Counts = SmallVec<[i32; 32]>;

/// The exchange as a program gives it.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RaggedFields {
    /// Rows of the array that is sent from.
    pub rows: usize,
    /// Rows of the array that is received into.
    pub capacity: usize,
    /// Elements of a row.
    pub row: usize,
    /// `migrate` has made the counts. A negative count says what it has found wrong: see `Wrong`.
    #[serde(default)]
    pub has_owners: bool,
}

/// What is wrong on a rank, and a number that the message shows. It is compared between ranks as `(8 * number + kind, rank)`.
/// `migrate` in `layouts.py` passes counts of `-(8 * number + kind)`.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Wrong {
    kind: u64,
    number: u64,
    rank: usize,
}

impl Wrong {
    /// Counts that are no numbers of rows, or differ within a batch (then they are -1: `of_batch` in `primitive.py`).
    const COUNTS: u64 = 1;
    const OWNER: u64 = 2;
    const NEGATIVE_OWNER: u64 = 3;
    const COUNT: u64 = 4;
    const NEGATIVE_COUNT: u64 = 5;
    const CAPACITY: u64 = 6;
    const KINDS: u64 = 8;
    /// The largest number that counts in int32 can hold beside a kind.
    const LIMIT: u64 = (1 << 28) - 1;

    fn to_bits(self) -> u64 {
        (Self::KINDS * self.number + self.kind) << 32 | self.rank as u64
    }

    fn from_bits(bits: u64) -> Option<Self> {
        let (code, rank) = (bits >> 32, bits as u32 as usize);
        (code > 0).then_some(Self { kind: code % Self::KINDS, number: code / Self::KINDS, rank })
    }
}

/// For row counts that are known only when an operation runs: the capacity for rows.
#[derive(Debug)]
pub struct Ragged {
    rank: usize,
    size: usize,
    fields: RaggedFields,
    /// The rows go back: from what was received to where they came from.
    adjoint: bool,
}

impl Ragged {
    pub fn new(rank: i32, size: i32, fields: RaggedFields, adjoint: bool) -> Result<Self, Cause> {
        let RaggedFields { rows, capacity, row, .. } = fields;
        if rows.checked_mul(row).is_none() || capacity.checked_mul(row).is_none() {
            let (expected, actual) = ("rows that fit into memory", format!("{fields:?}"));
            return Err(Cause::Attribute { name: "rows", expected, actual });
        }
        Ok(Self { rank: rank as usize, size: size as usize, fields, adjoint })
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.size
    }

    /// Whether errors name `migrate` and its arguments.
    pub fn has_owners(&self) -> bool {
        self.fields.has_owners
    }

    /// What goes to each rank, and comes from each. `counts` are both, or the first of them; then `exchange` gives
    /// each rank its number, and has theirs. `largest` then has the largest number of all ranks: what is wrong on one rank raises an
    /// error on all, so that none waits for it. `line` is the user's.
    pub fn agree(
        &self,
        counts: &[i32],
        line: &str,
        exchange: impl FnOnce(&[i32], &mut [i32]) -> Result<(), Cause>,
        largest: impl FnOnce(u64) -> Result<u64, Cause>,
    ) -> Result<(Counts, Counts), Cause> {
        let (to, from) = counts.split_at(self.size.min(counts.len()));
        if !from.is_empty() {
            return Ok((to.into(), from.into()));
        }
        let told: Counts =
            if self.fits(to, self.fields.rows) { to.into() } else { smallvec::smallvec![0; self.size] };
        let mut from: Counts = smallvec::smallvec![0; self.size];
        exchange(&told, &mut from)?;
        let own = self.wrong(to, &from);
        match Wrong::from_bits(largest(own.map_or(0, Wrong::to_bits))?) {
            Some(found) => Err(self.refuse(own.unwrap_or(found), to, &from, line)),
            None => Ok((to.into(), from)),
        }
    }

    /// Whether these are valid counts, and the buffer has that number of rows.
    fn fits(&self, counts: &[i32], rows: usize) -> bool {
        counts.len() == self.size && counts.iter().all(|&count| count >= 0) && total(counts) <= rows
    }

    /// What is wrong on this rank.
    fn wrong(&self, to: &[i32], from: &[i32]) -> Option<Wrong> {
        let (kind, number) = if self.fits(to, self.fields.rows) {
            if self.fits(from, self.fields.capacity) {
                return None;
            }
            (Wrong::CAPACITY, (total(from) as u64).min(Wrong::LIMIT))
        } else {
            let code = to.first().map_or(0, |count| u64::from(count.min(&0).unsigned_abs()));
            if self.fields.has_owners && code > Wrong::COUNTS {
                (code % Wrong::KINDS, code / Wrong::KINDS)
            } else {
                (Wrong::COUNTS, 0)
            }
        };
        Some(Wrong { kind, number, rank: self.rank })
    }

    /// The error about an argument, of this rank or another.
    #[cold]
    fn refuse(&self, found: Wrong, to: &[i32], from: &[i32], line: &str) -> Cause {
        let Wrong { kind, number, rank } = found;
        let (place, is_own) = (format!("on rank {rank}"), rank == self.rank);
        let more = if number == Wrong::LIMIT { " or more" } else { "" };
        let (argument, expected, value) = match kind {
            Wrong::OWNER | Wrong::NEGATIVE_OWNER | Wrong::COUNT | Wrong::NEGATIVE_COUNT => {
                let sign = if kind == Wrong::OWNER || kind == Wrong::COUNT { "" } else { "-" };
                let value = format!("{sign}{number}{more} {place}");
                if kind == Wrong::OWNER || kind == Wrong::NEGATIVE_OWNER {
                    ("owners", format!("ranks from 0 to {}", self.size.saturating_sub(1)), value)
                } else {
                    ("count", "from 0 to the number of rows of 'x'".into(), value)
                }
            }
            Wrong::CAPACITY if is_own => {
                let each = from.iter().enumerate().filter(|(_, count)| **count > 0);
                let each: Vec<String> =
                    each.map(|(rank, count)| format!("{count} from rank {rank}")).collect();
                let (rows, each) = (total(from), each.join(", "));
                let expected = format!("at least the {rows} rows that rank {rank} receives ({each})");
                ("capacity", expected, self.fields.capacity.to_string())
            }
            Wrong::CAPACITY => {
                let expected = format!("at least the {number}{more} rows that rank {rank} receives");
                ("capacity", expected, "less there".into())
            }
            _ if self.fields.has_owners => {
                let expected =
                    "integers by which each rank gets the same number of rows from all elements of a batch";
                ("owners", expected.into(), format!("other numbers {place}"))
            }
            _ if is_own => {
                let expected = format!(
                    "{} numbers of rows, no more than the {} of x, and under vmap the same for all elements",
                    self.size, self.fields.rows
                );
                ("send_counts", expected, listed(to))
            }
            _ => {
                let expected = "numbers of rows that fit the array, on all ranks".into();
                ("send_counts", expected, format!("others {place}"))
            }
        };
        Cause::Argument { argument, value, expected, line: line.into() }
    }

    /// Which elements go where. `line` is the user's.
    pub fn parts(&self, to: &[i32], from: &[i32], line: &str) -> Result<Parts, Cause> {
        if let Some(wrong) = self.wrong(to, from) {
            return Err(self.refuse(wrong, to, from, line));
        }
        let [to, from] = [to, from].map(|counts| self.side_by_side(counts));
        let (send, recv) = if self.adjoint { (from, to) } else { (to, from) };
        Ok(Parts::of(self.rank, self.size, &send, &recv))
    }

    /// In the order of the ranks.
    fn side_by_side(&self, counts: &[i32]) -> PerRank {
        let mut start = 0;
        let part = |(rank, &count): (usize, &i32)| {
            let part = Part { rank, start, count: count as usize * self.fields.row };
            start += part.count;
            part
        };
        counts.iter().enumerate().map(part).collect()
    }
}

fn total(counts: &[i32]) -> usize {
    counts.iter().map(|&count| count.max(0) as usize).sum()
}

/// `12: 5, 7`; of many, the first.
fn listed(counts: &[i32]) -> String {
    const SHOWN: usize = 16;
    let first: Vec<String> = counts.iter().take(SHOWN).map(i32::to_string).collect();
    let more = if counts.len() > SHOWN { ", ..." } else { "" };
    format!("{} ({}{more})", counts.iter().map(|&count| i64::from(count)).sum::<i64>(), first.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ragged(rows: usize, capacity: usize) -> Ragged {
        Ragged::new(1, 2, RaggedFields { rows, capacity, row: 3, has_owners: false }, false).unwrap()
    }

    fn said(result: Result<Parts, Cause>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn what_is_too_much_names_rank_and_rows() {
        let what = said(ragged(9, 11).parts(&[1, 2], &[5, 7], ""));
        assert!(what.contains("'capacity' must be at least the 12 rows that rank 1 receives"), "{what}");
        assert!(what.contains("(5 from rank 0, 7 from rank 1), got 11"), "{what}");
        assert!(ragged(9, 12).parts(&[1, 2], &[5, 7], "").is_ok());
        let what = said(ragged(9, 11).parts(&[1, 2], &[0, 12], ""));
        assert!(what.contains("receives (12 from rank 1), got 11"), "{what}");
    }

    #[test]
    fn what_is_not_there_cannot_be_sent() {
        let what = said(ragged(2, 9).parts(&[1, 2], &[1, 1], "solver.py:3"));
        assert!(what.contains("2 numbers of rows, no more than the 2 of x, and under vmap the same for all elements, got 3 (1, 2)"), "{what}");
        assert!(what.ends_with(", solver.py:3"), "{what}");
        assert!(said(ragged(2, 9).parts(&[3, -1], &[1, 1], "")).contains("got 2 (3, -1)"));
        assert_eq!([16, 17].map(|n| listed(&vec![1; n]).ends_with(", ...)")), [false, true]);
    }

    /// What two ranks say. One of them passes counts that are wrong, or has too small a capacity.
    fn both(ragged: [Ragged; 2], counts: [[i32; 2]; 2]) -> [String; 2] {
        let wrong = |rank: usize| {
            let from = [0, 1].map(|other: usize| counts[other][rank].max(0));
            ragged[rank].wrong(&counts[rank], &from).map_or(0, Wrong::to_bits)
        };
        [0, 1].map(|rank| {
            let exchange = |_: &[i32], theirs: &mut [i32]| {
                theirs.copy_from_slice(&[0, 1].map(|other: usize| counts[other][rank].max(0)));
                Ok(())
            };
            let agreed = ragged[rank].agree(&counts[rank], "", exchange, |own| {
                assert_eq!(own, wrong(rank));
                Ok(wrong(0).max(wrong(1)))
            });
            agreed.unwrap_err().to_string()
        })
    }

    fn of_rank(rank: i32, capacity: usize, has_owners: bool) -> Ragged {
        Ragged::new(rank, 2, RaggedFields { rows: 9, capacity, row: 1, has_owners }, false).unwrap()
    }

    #[test]
    fn all_learn_of_wrong_counts() {
        let [own, other] = both([0, 1].map(|rank| of_rank(rank, 20, false)), [[1, 9], [1, 1]]);
        assert!(own.contains("no more than the 9 of x") && own.contains("got 10 (1, 9)"), "{own}");
        assert!(other.contains("'send_counts' must be") && other.contains("got others on rank 0"), "{other}");
    }

    #[test]
    fn all_learn_of_too_small_a_capacity() {
        let [other, own] = both([of_rank(0, 20, true), of_rank(1, 4, true)], [[1, 3], [2, 2]]);
        let needed = "'capacity' must be at least the 5 rows that rank 1 receives";
        assert!(own.contains(&format!("{needed} (3 from rank 0, 2 from rank 1), got 4")), "{own}");
        assert!(other.contains(&format!("{needed}, got less there")), "{other}");
    }

    #[test]
    fn all_learn_what_migrate_has_found_wrong() {
        for (code, expected) in [
            (8 * 5 + 2, "'owners' must be ranks from 0 to 1, got 5 on rank 1"),
            (8 * 5 + 3, "'owners' must be ranks from 0 to 1, got -5 on rank 1"),
            (8 * 12 + 4, "'count' must be from 0 to the number of rows of 'x', got 12 on rank 1"),
            (8 + 5, "'count' must be from 0 to the number of rows of 'x', got -1 on rank 1"),
            (i32::MAX - 5, "'owners' must be ranks from 0 to 1, got 268435455 or more on rank 1"),
            (1, "got other numbers on rank 1"),
        ] {
            let found = both([0, 1].map(|rank| of_rank(rank, 20, true)), [[1, 1], [-code, -code]]);
            for what in found {
                assert!(what.contains(expected), "{what}");
            }
        }
    }

    #[test]
    fn counts_that_are_known_are_not_exchanged() {
        let (to, from) = ragged(9, 9)
            .agree(&[1, 2, 3, 4], "", |_, _| panic!("exchanged"), |_| panic!("compared"))
            .unwrap();
        assert_eq!((&to[..], &from[..]), (&[1, 2][..], &[3, 4][..]));
    }

    #[test]
    fn nothing_is_larger_than_memory() {
        let fields = RaggedFields { rows: 1 << 40, capacity: 1, row: 1 << 40, has_owners: false };
        assert!(Ragged::new(0, 1, fields, false).is_err());
    }
}
