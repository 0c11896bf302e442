//! Ranks in runs: however many there are, mostly a few numbers.

use std::collections::HashMap;
use std::hash::Hash;

use serde::{Deserialize, Serialize};

/// Ranks of `MPI_COMM_WORLD`, in order: the first and the last of each run, and the step from one rank of it to the next.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Ranks(Vec<[i32; 3]>);

impl Ranks {
    /// A rank of another job.
    pub const ELSEWHERE: i32 = i32::MAX;

    pub fn all(size: i32) -> Self {
        Self(vec![[0, size - 1, 1]])
    }

    pub fn iter(&self) -> impl Iterator<Item = i32> {
        self.0.iter().flat_map(|&[first, last, step]| (first..=last).step_by(step as usize))
    }

    pub fn contains(&self, rank: i32) -> bool {
        let run = self.0.partition_point(|&[_, last, _]| last < rank);
        self.0.get(run).is_some_and(|&[first, _, step]| first <= rank && (rank - first) % step == 0)
    }

    pub fn count(&self) -> usize {
        self.0.iter().map(|[first, last, step]| ((last - first) / step + 1) as usize).sum()
    }

    /// The rank at this place, in order.
    pub fn nth(&self, place: usize) -> Option<i32> {
        let mut left = place;
        self.0.iter().find_map(|[first, last, step]| {
            let count = ((last - first) / step + 1) as usize;
            let found = (left < count).then(|| first + left as i32 * step);
            left = left.saturating_sub(count);
            found
        })
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
        ranks.dedup();
        let mut runs: Vec<[i32; 3]> = Vec::new();
        for rank in ranks {
            match &mut runs[..] {
                [.., [_, last, step]] if *last + *step == rank => *last = rank,
                // Two ranks are a run of a larger step only if a third one follows.
                [.., [a, b, 1], [first, last, 1]]
                    if a == b && first == last && rank - *last == *last - *a =>
                {
                    (*b, *first) = (rank, *last - *a);
                    let step = *first;
                    runs.pop();
                    if let Some(run) = runs.last_mut() {
                        run[2] = step;
                    }
                }
                _ => runs.push([rank, rank, 1]),
            }
        }
        Self(runs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_runs() {
        let ranks: Ranks = [5, 0, 2, 1, 7, 7].into_iter().collect();
        assert_eq!(ranks, Ranks(vec![[0, 2, 1], [5, 5, 1], [7, 7, 1]]));
        assert_eq!(ranks.iter().collect::<Vec<_>>(), [0, 1, 2, 5, 7]);
        assert!(ranks.contains(1) && ranks.contains(7) && !ranks.contains(3) && !ranks.contains(8));
        assert_eq!(ranks.count(), 5);
        let even: Vec<i32> = (0..10_000).step_by(2).collect();
        for (list, runs) in
            [(&even[..], 1), (&[0, 1, 2, 5, 7], 3), (&[], 0), (&[1, 4, 6, 8, 20], 3), (&[0, 7], 2)]
        {
            let ranks: Ranks = list.iter().copied().collect();
            assert_eq!((ranks.0.len(), ranks.count()), (runs, list.len()));
            assert_eq!(ranks.iter().collect::<Vec<_>>(), list);
            let half = list.len() / 2;
            assert_eq!((ranks.nth(half), ranks.nth(list.len())), (list.get(half).copied(), None));
            assert!((0..30).all(|rank| ranks.contains(rank) == list.contains(&rank)));
        }
    }
}
