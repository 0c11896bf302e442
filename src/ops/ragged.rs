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
        let RaggedFields { rows, capacity, row } = fields;
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

    /// What goes to each rank, and comes from each. `counts` are both, or the first of them; then `exchange` gives
    /// each rank its number, and has theirs. A rank whose counts are wrong sends an error to all others, so that none waits for it.
    pub fn agree(
        &self,
        counts: &[i32],
        exchange: impl FnOnce(&[i32], &mut [i32]) -> Result<(), Cause>,
    ) -> Result<(Counts, Counts), Cause> {
        let (to, from) = counts.split_at(self.size.min(counts.len()));
        if !from.is_empty() {
            return Ok((to.into(), from.into()));
        }
        let told: Counts =
            if self.fits(to, self.fields.rows) { to.into() } else { smallvec::smallvec![-1; self.size] };
        let mut from: Counts = smallvec::smallvec![0; self.size];
        exchange(&told, &mut from)?;
        Ok((to.into(), from))
    }

    /// Whether these are valid counts, and the buffer has that number of rows.
    fn fits(&self, counts: &[i32], rows: usize) -> bool {
        counts.len() == self.size && counts.iter().all(|&count| count >= 0) && total(counts) <= rows
    }

    /// Which elements go where. `line` is the user's.
    pub fn parts(&self, to: &[i32], from: &[i32], line: &str) -> Result<Parts, Cause> {
        let wrong =
            |argument, expected, value| Cause::Argument { argument, value, expected, line: line.into() };
        if !self.fits(to, self.fields.rows) {
            let expected = format!(
                "{} numbers of rows, no more than the {} of x, and under vmap the same for all elements",
                self.size, self.fields.rows
            );
            return Err(wrong("send_counts", expected, listed(to)));
        }
        if let Some(rank) = from.iter().position(|&count| count < 0) {
            let expected = "numbers of rows that fit the array, on all ranks".into();
            return Err(wrong("send_counts", expected, format!("others on rank {rank}")));
        }
        if !self.fits(from, self.fields.capacity) {
            let each = from.iter().enumerate().filter(|(_, count)| **count > 0);
            let each: Vec<String> = each.map(|(rank, count)| format!("{count} from rank {rank}")).collect();
            let (rows, rank) = (total(from), self.rank);
            let expected =
                format!("at least the {rows} rows that rank {rank} receives ({})", each.join(", "));
            return Err(wrong("capacity", expected, self.fields.capacity.to_string()));
        }
        let [to, from] = [to, from].map(|counts| self.side_by_side(counts));
        let (send, recv) = if self.adjoint { (from, to) } else { (to, from) };
        Ok(Parts::of(self.rank, send, recv))
    }

    /// In the order of the ranks.
    fn side_by_side(&self, counts: &[i32]) -> PerRank {
        let mut start = 0;
        let part = |&count: &i32| {
            let part = Part { start, count: count as usize * self.fields.row };
            start += part.count;
            part
        };
        counts.iter().map(part).collect()
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
        Ragged::new(1, 2, RaggedFields { rows, capacity, row: 3 }, false).unwrap()
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
    }

    #[test]
    fn what_is_not_there_cannot_be_sent() {
        let what = said(ragged(2, 9).parts(&[1, 2], &[1, 1], "solver.py:3"));
        assert!(what.contains("2 numbers of rows, no more than the 2 of x, and under vmap the same for all elements, got 3 (1, 2)"), "{what}");
        assert!(what.ends_with(", solver.py:3"), "{what}");
        assert!(said(ragged(2, 9).parts(&[3, -1], &[1, 1], "")).contains("got 2 (3, -1)"));
    }

    #[test]
    fn all_learn_of_wrong_counts() {
        let mut told = Counts::new();
        let (_, from) = ragged(2, 9)
            .agree(&[1, 2], |mine, theirs| {
                told.extend_from_slice(mine);
                theirs.copy_from_slice(&[-1, 4]);
                Ok(())
            })
            .unwrap();
        assert_eq!(told[..], [-1, -1]);
        let what = said(ragged(2, 9).parts(&[1, 1], &from, ""));
        assert!(what.contains("got others on rank 0"), "{what}");
    }

    #[test]
    fn counts_that_are_known_are_not_exchanged() {
        let (to, from) = ragged(9, 9).agree(&[1, 2, 3, 4], |_, _| panic!("exchanged")).unwrap();
        assert_eq!((&to[..], &from[..]), (&[1, 2][..], &[3, 4][..]));
    }

    #[test]
    fn nothing_is_larger_than_memory() {
        let fields = RaggedFields { rows: 1 << 40, capacity: 1, row: 1 << 40 };
        assert!(Ragged::new(0, 1, fields, false).is_err());
    }
}
