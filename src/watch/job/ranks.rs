//! Ranks in runs: however many there are, mostly a few numbers.

use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;

use serde::{Deserialize, Serialize};

/// Ranks of `MPI_COMM_WORLD`, in order: the first and the last of each run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Ranks(Vec<[i32; 2]>);

impl Ranks {
    pub const NONE: Self = Self(Vec::new());

    /// A rank of another job.
    pub const ELSEWHERE: i32 = i32::MAX;

    pub fn all(size: i32) -> Self {
        Self(vec![[0, size - 1]])
    }

    pub fn iter(&self) -> impl Iterator<Item = i32> {
        self.0.iter().flat_map(|&[first, last]| first..=last)
    }

    pub fn contains(&self, rank: i32) -> bool {
        let run = self.0.partition_point(|&[_, last]| last < rank);
        self.0.get(run).is_some_and(|&[first, _]| first <= rank)
    }

    pub fn count(&self) -> usize {
        self.0.iter().map(|[first, last]| (last - first + 1) as usize).sum()
    }

    pub fn first(&self) -> Option<i32> {
        self.0.first().map(|run| run[0])
    }
}

/// Ranks by what they have in common, in the order in which that comes first.
pub fn grouped<K: Clone + Eq + Hash>(ranks: impl IntoIterator<Item = (K, i32)>) -> Vec<(K, Ranks)> {
    let (mut groups, mut places) = (Vec::<(K, Vec<i32>)>::new(), HashMap::new());
    for (key, rank) in ranks {
        let place = *places.entry(key).or_insert_with_key(|key| {
            groups.push((key.clone(), Vec::new()));
            groups.len() - 1
        });
        groups[place].1.push(rank);
    }
    groups.into_iter().map(|(key, ranks)| (key, ranks.into_iter().collect())).collect()
}

impl FromIterator<i32> for Ranks {
    fn from_iter<T: IntoIterator<Item = i32>>(ranks: T) -> Self {
        let known = |rank: i32| if rank < 0 { Self::ELSEWHERE } else { rank };
        let mut ranks: Vec<i32> = ranks.into_iter().map(known).collect();
        ranks.sort_unstable();
        let mut runs: Vec<[i32; 2]> = Vec::new();
        for rank in ranks {
            match runs.last_mut() {
                Some([_, last]) if *last == rank => {}
                Some([_, last]) if *last + 1 == rank => *last = rank,
                _ => runs.push([rank, rank]),
            }
        }
        Self(runs)
    }
}

impl fmt::Display for Ranks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, [first, last]) in self.0.iter().enumerate() {
            f.write_str(if i == 0 { "" } else { "," })?;
            if first == last { write!(f, "{first}")? } else { write!(f, "{first}-{last}")? }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_runs() {
        let ranks: Ranks = [5, 0, 2, 1, 7, 7].into_iter().collect();
        assert_eq!(ranks.to_string(), "0-2,5,7");
        assert_eq!(ranks.iter().collect::<Vec<_>>(), [0, 1, 2, 5, 7]);
        assert!(ranks.contains(1) && ranks.contains(7) && !ranks.contains(3) && !ranks.contains(8));
        assert_eq!(ranks.count(), 5);
        assert_eq!(Ranks::default().to_string(), "");
    }
}
