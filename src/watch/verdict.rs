//! Whether an operation can still end.
//!
//! A job is ended for what is proved. What is not known is not held against anybody: a rank that runs may still come,
//! a rank may have done its part by other means, and half of an exchange may be done.

use super::peers::Peers;
use crate::comm::Comm;
use crate::mpilib::wildcards;
use crate::record::recorder::Record;

impl Peers {
    /// Why an operation that has waited for a while cannot end any more, if that is certain.
    pub fn hopeless(&self, record: &Record) -> Option<String> {
        self.missing(&record.what.comm.world).or_else(|| {
            let row = record.what.op.row();
            if row.is_collective() { self.lost_collective(record) } else { self.lost_message(record) }
        })
    }

    /// Why nothing that takes these ranks can end any more, if the process of one is gone.
    pub fn missing(&self, ranks: &[i32]) -> Option<String> {
        let gone = ranks.iter().filter(|&&rank| rank != self.rank).find_map(|&rank| {
            let name = self.gone(rank).filter(|_| !self.has_finished(rank))?;
            Some(format!("cannot end: rank {rank}, {name}, is gone"))
        });
        // Where the files are gone too, it had finished.
        gone.filter(|_| self.is_under_way())
    }

    fn others(&self, comm: &Comm) -> impl Iterator<Item = i32> {
        comm.world.iter().copied().filter(|&rank| rank != self.rank)
    }

    /// A rank has finished that did not take part, and nobody is left who could make up for it: all others have
    /// finished, or wait in the same operation. So it does not matter if the rank did its part by other means: then
    /// they would not wait.
    fn lost_collective(&self, record: &Record) -> Option<String> {
        let comm = &record.what.comm;
        let is_missing =
            |&rank: &i32| self.finished_collectives(rank, comm).is_some_and(|done| done < record.sequence);
        let missing = self.others(comm).find(is_missing)?;
        let is_known = |rank| self.has_finished(rank) || self.waits_in(rank, record);
        self.others(comm).all(is_known).then(|| format!("cannot end: rank {missing} has finished"))
    }

    /// Whoever could send or receive has finished: on both sides of an exchange, of which one may be done.
    fn lost_message(&self, record: &Record) -> Option<String> {
        let (comm, row, any) = (&record.what.comm, record.what.op.row(), wildcards());
        let sides = [(record.source, row.receives()), (record.dest, row.sends())];
        let mut last = None;
        for (peer, _) in sides.into_iter().filter(|&(peer, takes_part)| takes_part && peer != any.proc_null) {
            if peer == any.source {
                if !self.others(comm).all(|rank| self.has_finished(rank)) {
                    return None;
                }
                last = last.or(Some("all other ranks have finished".to_owned()));
            } else {
                let rank =
                    comm.world_rank(peer).filter(|&rank| rank != self.rank && self.has_finished(rank))?;
                last = Some(format!("rank {rank} has finished"));
            }
        }
        last.map(|words| format!("cannot end: {words}"))
    }
}
