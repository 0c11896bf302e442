//! What other ranks read of a communicator on the board.

use std::sync::atomic::Ordering::Relaxed;

use serde::{Deserialize, Serialize};

use super::Comm;
use super::origin::{ONLY_ONE, UNKNOWN};
use crate::board::ranks::Ranks;
use crate::board::slot::hash;
use crate::board::words::printable;
use crate::board::{Cell, Once, Slot, board, own};
use crate::output::print;

/// What all ranks of a communicator can compute alike without messages: its class (see `comm::register`), and its origin, which
/// distinguishes communicators with the same members.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CommId {
    pub class: u64,
    pub origin: u64,
    /// A hash of the name that the program has given the communicator; 0 if it has no name, or if its origin is known. Ranks may
    /// name one communicator differently, so the name proves nothing.
    pub name: u64,
}

impl CommId {
    /// What is certain.
    pub fn without_name(self) -> Self {
        Self { name: 0, ..self }
    }

    /// Under what messages are counted.
    pub fn key(self) -> u64 {
        hash(self)
    }

    pub fn of_cell(cell: &Cell) -> Self {
        Self {
            class: cell.class.load(Relaxed),
            origin: cell.origin.load(Relaxed),
            name: cell.name.load(Relaxed),
        }
    }
}

/// The words of a communicator, and its ranks in `MPI_COMM_WORLD`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct CommWords {
    pub key: String,
    pub generation: u32,
    pub id: CommId,
    /// Empty: there are too many to be written down.
    pub world: Ranks,
    /// The members by rank, if that is not their order.
    order: Vec<i32>,
}

/// The most bytes with a list of members.
const LONGEST: usize = 2048;

impl CommWords {
    fn encode(&self) -> String {
        let text = serde_json::to_string(self).unwrap_or_default();
        let is_short = text.len() <= LONGEST || self.world.count() == 0;
        let without = || Self { world: Ranks::default(), order: Vec::new(), ..self.clone() }.encode();
        if is_short { text } else { without() }
    }

    pub fn decode(text: &str) -> Self {
        let unknown = |_| Self { key: "a communicator".into(), ..Self::default() };
        serde_json::from_str(text).unwrap_or_else(unknown)
    }

    /// The rank in `MPI_COMM_WORLD` of a rank.
    pub fn world_rank(&self, rank: i32) -> Option<i32> {
        let place = usize::try_from(rank).ok()?;
        if self.order.is_empty() { self.world.nth(place) } else { self.order.get(place).copied() }
    }
}

impl Comm {
    pub fn comm_id(&self) -> CommId {
        let is_named = self.has_own_name() && self.origin == UNKNOWN;
        CommId { class: self.class, origin: self.origin, name: if is_named { self.id } else { 0 } }
    }

    /// What ranks of one board know it by.
    #[inline]
    pub fn shared_id(&self) -> u64 {
        self.shared_id
    }

    /// Under what its messages are counted.
    #[inline]
    pub fn message_key(&self) -> u64 {
        self.message_key
    }

    pub(super) fn find_shared_id(&self) -> u64 {
        let id = if self.origin == UNKNOWN { (0, self.id, self.generation) } else { (1, self.class, 0) };
        hash((id, self.origin)).max(1)
    }

    /// Whether it is one of the two that there is only one of.
    pub fn has_one_origin(&self) -> bool {
        self.origin == ONLY_ONE
    }

    /// How many different neighbors a rank has: in a communicator of two ranks, both are the same rank.
    #[inline]
    pub fn neighbors(&self) -> usize {
        self.size.min(3) as usize - 1
    }

    /// The cell of another rank, if it has used the communicator. `None` if the two ranks may have counted different duplicates of
    /// `MPI_COMM_WORLD`.
    #[inline]
    pub fn cell_of(&self, rank: i32) -> Option<&'static Cell> {
        let slot = board().slot(rank)?;
        // The numbers of duplicates are read only where they matter: each call pays for it.
        let its = if self.has_one_origin() { None } else { Some(slot.copies.load(Relaxed)) };
        match its {
            Some(its) if its != own().copies.load(Relaxed) => self.is_unsure(rank, its),
            _ => slot.cell(self.shared_id()),
        }
    }

    /// One of the ranks is duplicating `MPI_COMM_WORLD`, or they began to count at different points of the program. What cannot be
    /// compared now is compared as soon as both have counted the same.
    #[cold]
    fn is_unsure(&self, rank: i32, its: u64) -> Option<&'static Cell> {
        self.cell().unchecked.fetch_or((1 << self.neighbors()) - 1, Relaxed);
        // No rank leaves a duplication before all ranks have entered it.
        if its < self.copies && board().is_first_to(Once::Copies) {
            print(&format!(
                "r{} | mpi4jax: rank {rank} imported mpi4jax after MPI_COMM_WORLD was duplicated, and this rank before: their collectives \
                 are compared only on MPI_COMM_WORLD and on the default communicator (import mpi4jax at the same point of the program \
                 on all ranks)\n",
                board().rank
            ));
        }
        None
    }

    /// The communicator is not used any more: says what was not compared, also if the other rank came after this one's last collective.
    pub(super) fn look_back(&self) {
        for step in [1, self.size - 1].into_iter().filter(|_| self.cell().number.load(Relaxed) > 0) {
            let _ = self.world_rank((self.rank + step) % self.size).and_then(|rank| self.cell_of(rank));
        }
    }

    #[inline]
    pub fn cell(&self) -> &'static Cell {
        self.cell
    }

    /// Where its words are in the slot of this rank.
    #[inline]
    pub fn words(&self, slot: &Slot) -> u32 {
        self.words.number(&slot.text, || {
            let world = self.world.iter().copied().collect();
            let order = if self.world.is_sorted() { Vec::new() } else { self.world.to_vec() };
            let (key, generation, id) = (printable(&self.key), self.generation, self.comm_id());
            CommWords { key, generation, id, world, order }.encode()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        for (key, order) in [("c", vec![]), ("a/b/c", vec![4, 0, 8]), ("", vec![])] {
            let id = CommId { class: 0xabc, origin: 7, name: 1 << 63 };
            let ranks = if order.is_empty() { vec![0, 1, 2, 4, 6, 8] } else { order.clone() };
            let world = ranks.iter().copied().collect();
            let words = CommWords { key: key.into(), generation: 3, id, world, order };
            let read = CommWords::decode(&words.encode());
            assert_eq!(read.world_rank(1), Some(ranks[1]));
            assert_eq!((read.key, read.generation, read.id, read.world), (key.into(), 3, id, words.world));
        }
        assert_eq!(CommWords::decode("").key, "a communicator");
        let many: Vec<i32> = (0..2000).map(|rank| rank * rank).collect();
        let words = CommWords { key: "c".into(), world: many.into_iter().collect(), ..CommWords::default() };
        let read = CommWords::decode(&words.encode());
        assert_eq!((&*read.key, read.world), ("c", Ranks::default()));
    }
}
