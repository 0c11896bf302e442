//! Whether an operation can still end.

use super::peers::Peers;
use crate::comm::Comm;
use crate::record::recorder::Record;

impl Peers {
    /// Why an operation cannot end any more, if that is certain.
    pub fn hopeless(&self, record: &Record) -> Option<String> {
        let (comm, row) = (&record.what.comm, record.what.op.row());
        let others = || comm.world.iter().copied().filter(|&rank| rank != self.rank);
        if let Some(reason) = self.missing(comm) {
            return Some(reason);
        }
        let finished = |rank| format!("cannot end: rank {rank} has finished");
        if row.is_collective() {
            let is_missing = |&rank: &i32| {
                self.finished_collectives(rank, comm).is_some_and(|done| done < record.sequence)
            };
            return others().find(is_missing).map(finished);
        }
        let sides = [(record.source, row.receives()), (record.dest, row.sends())];
        for (peer, takes_part) in sides {
            if takes_part
                && let Some(rank) = comm.world_rank(peer)
                && rank != self.rank
                && self.has_finished(rank)
            {
                return Some(finished(rank));
            }
        }
        // From whomever: nobody is left.
        let from_any = row.receives() && !row.sends() && record.source < 0;
        (from_any && others().count() > 0 && others().all(|rank| self.has_finished(rank)))
            .then(|| "cannot end: all other ranks have finished".into())
    }

    /// Why nothing on a communicator can end any more, if one of its processes is gone.
    pub fn missing(&self, comm: &Comm) -> Option<String> {
        comm.world.iter().filter(|&&rank| rank != self.rank).find_map(|&rank| {
            let name = self.gone(rank).filter(|_| !self.has_finished(rank))?;
            Some(format!("cannot end: rank {rank}, {name}, is gone"))
        })
    }
}
