//! Comparison of the collectives of different hosts. When hosts exchange states, each state has the last collectives of each rank
//! on each communicator, by their numbers.

use std::sync::atomic::Ordering;

use super::state::{Need, Noted, RankStatus, World};
use crate::board::Slot;
use crate::board::cell::{DOUBT, FREED, MIXED, PRINTS, THREADS};
use crate::comm::CommId;
use crate::comm::origin::ONLY_ONE;

/// Collectives of one number that differ, of a rank of this host and one of another.
#[derive(Debug, PartialEq)]
pub struct Between {
    pub near: i32,
    pub far: i32,
    pub comm: u64,
    pub number: u64,
}

/// The last collectives of a rank, on the communicators on which their numbers can be compared.
pub fn noted(slot: &Slot) -> Vec<Noted> {
    let known = slot.cells.iter().filter(|cell| ![0, u64::MAX].contains(&cell.id.load(Ordering::Acquire)));
    let known = known.filter(|cell| !cell.has(FREED | THREADS | MIXED | DOUBT));
    let of = |cell: &crate::board::Cell| {
        let last = cell.number.load(Ordering::Acquire);
        let numbers = (last + 1).saturating_sub(PRINTS as u64).max(1)..=last;
        let prints = numbers.filter_map(|number| Some((number, cell.print(number)?.print)));
        let (comm, is_sure) = (cell.id.load(Ordering::Relaxed), CommId::of_cell(cell).origin == ONLY_ONE);
        Noted { comm, is_sure, prints: prints.collect() }
    };
    known.map(of).filter(|noted| !noted.prints.is_empty()).collect()
}

/// The first collective in which a rank of this host differs from one of another, if there is one.
pub fn difference(near: &World, far: &World) -> Option<Between> {
    let differ = |one: &Noted, other: &Noted| {
        let differs = |(number, print): &&(u64, u64)| {
            other.prints.iter().any(|(its, differs)| its == number && differs != print)
        };
        one.prints.iter().find(differs).map(|(number, _)| *number)
    };
    far.iter().find_map(|(&far, its)| {
        its.noted.iter().find_map(|noted| {
            // The ranks of a host are compared before their collectives run, so one of them stands for all.
            let is_same = |it: &&Noted| it.comm == noted.comm;
            let rank = near.iter().find(|(_, it)| it.noted.iter().any(|it| it.comm == noted.comm));
            let (&near, ours) = rank.filter(|(_, it)| noted.is_sure || it.copies == its.copies)?;
            let number = ours.noted.iter().find(is_same).and_then(|ours| differ(ours, noted))?;
            Some(Between { near, far, comm: noted.comm, number })
        })
    })
}

/// Describes the collective of this number on a rank of another host. Its name is known only while the rank is in it.
pub fn words(status: &RankStatus, number: u64) -> String {
    let is_it = |need: &Need| matches!(need, Need::Collective { number: it, .. } if *it == number);
    let wait = status.waits.iter().find(|wait| is_it(&wait.need));
    wait.map_or_else(|| format!("another collective #{number}"), |wait| wait.words.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(copies: u64, prints: &[(u64, u64)], is_sure: bool) -> RankStatus {
        let noted = vec![Noted { comm: 7, is_sure, prints: prints.to_vec() }];
        RankStatus { noted, copies, ..RankStatus::default() }
    }

    #[test]
    fn the_first_difference_between_hosts_is_found() {
        let near = World::from([(0, rank(1, &[(3, 30), (4, 40), (5, 50)], false))]);
        let of = |far: RankStatus| difference(&near, &World::from([(1, far)])).map(|it| it.number);
        assert_eq!(of(rank(1, &[(2, 20), (3, 30), (4, 41), (5, 51)], false)), Some(4));
        assert_eq!(of(rank(1, &[(4, 40), (5, 50), (6, 60)], false)), None, "one is ahead");
        assert_eq!(of(rank(1, &[(9, 90)], false)), None, "far ahead");
        assert_eq!(of(rank(2, &[(4, 41)], false)), None, "these may be different communicators");
        assert_eq!(of(rank(2, &[(4, 41)], true)), Some(4));
    }
}
