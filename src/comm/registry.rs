//! The communicators of this process, which compiled programs refer to by key.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, Once};

use super::origin::UNKNOWN;
use super::{Comm, calling, hash};
use crate::board::cell::{FREED, MIXED};
use crate::board::slot::CELLS;
use crate::board::{Cell, board, own};
use crate::error::Cause;
use crate::finalize;
use crate::output;
use crate::sync::lock;

struct Registry {
    live: BTreeMap<Box<str>, Arc<Comm>>,
    /// Those that were freed last, the last one at the end: their keys, ids and generations.
    past: VecDeque<(Box<str>, u64, u32)>,
}

static REGISTRY: Mutex<Registry> = Mutex::new(Registry { live: BTreeMap::new(), past: VecDeque::new() });

/// How many that were freed are remembered.
const PAST: usize = 256;

fn registry() -> MutexGuard<'static, Registry> {
    lock(&REGISTRY)
}

impl Registry {
    fn remove(&mut self, key: &str) -> Option<Arc<Comm>> {
        let comm = self.live.remove(key)?;
        comm.look_back();
        comm.freed.store(true, Ordering::Relaxed);
        comm.cell().set(FREED);
        if self.past.len() == PAST {
            self.past.pop_front();
        }
        self.past.push_back((comm.key.clone(), comm.id, comm.generation));
        Some(comm)
    }
}

/// Makes a communicator's key name it. Programs compiled for an earlier one of that name keep the earlier one, which
/// counts as freed. Local: ranks register when they first use a communicator, and some never do.
///
/// Its id can therefore not be agreed on. It is computed from what is equal on all of its ranks: its name, its members, and how
/// many others of the same name and members there are. A communicator of unknown origin is counted among others of unknown
/// origin: ranks do not confuse it with a duplicate whose origin is known.
pub fn register(mut comm: Comm) -> Arc<Comm> {
    let _ = finalize::at_finalize(end);
    let mut registry = registry();
    let replaced = match registry.live.get(&comm.key) {
        Some(old) if (old.handle, old.rank, old.size) == (comm.handle, comm.rank, comm.size) => {
            return old.clone();
        }
        Some(_) => registry.remove(&comm.key),
        None => None,
    };
    while registry.live.values().any(|other| other.order == comm.order) {
        comm.order = hash(comm.order);
    }
    if comm.origin == UNKNOWN {
        comm.id = !comm.id;
    }
    let mut alike = Vec::new();
    while let Some(other) = registry.live.values().find(|other| other.id == comm.id) {
        alike.push(other.cell());
        comm.id = hash(comm.id);
    }
    let earlier =
        registry.past.iter().filter(|(_, id, _)| *id == comm.id).map(|(_, _, generation)| *generation);
    comm.generation = earlier.max().map_or(1, |last| last + 1);
    comm.copies = own().copies.load(Ordering::Relaxed);
    let id = comm.comm_id();
    (comm.shared_id, comm.message_key) = (comm.find_shared_id(), id.key());
    let claimed = own().claim(comm.shared_id, [id.class, id.origin, id.name]);
    comm.cell = claimed.unwrap_or_else(|| without_place(&comm.key));
    // Other ranks may have used another one of the same name and members first, or none before.
    if comm.origin == UNKNOWN && (comm.generation > 1 || !alike.is_empty()) {
        alike.iter().chain([&comm.cell()]).for_each(|cell| cell.set(MIXED));
        let reason = "an earlier communicator has the same ranks and name, and is not compared either (set names, or MPI4JAX_CHECK=1)";
        tracing::info!(target: "mpi4jax::comm", comm = &*comm.key, rank = comm.rank, size = comm.size, reason, "not compared");
    }
    let comm = Arc::new(comm);
    registry.live.insert(comm.key.clone(), comm.clone());
    drop(registry);
    if let Some(old) = replaced {
        old.detach();
    }
    comm
}

/// A cell that other ranks do not see.
#[cold]
fn without_place(key: &str) -> &'static Cell {
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        output::print(&format!(
            "r{} | mpi4jax: this rank uses more than {CELLS} communicators: collectives on {key} and on later \
             communicators are not compared between ranks (free communicators that are not used any more)\n",
            board().rank
        ));
    });
    Box::leak(Box::default())
}

/// Frees a communicator as a whole: from now on, an operation on it fails when it runs. Collective
/// if freeing the attached objects is.
pub fn free(key: &str) {
    let comm = registry().remove(key);
    if let Some(comm) = comm {
        tracing::debug!(target: "mpi4jax::comm", comm = key, rank = comm.rank, size = comm.size, "freed");
        calling::detach(comm);
    }
}

/// At the beginning of `MPI_Finalize`: in the same order on all ranks.
fn end() {
    let mut all = live();
    all.sort_by_key(|comm| comm.order);
    all.iter().for_each(|comm| comm.look_back());
    all.iter().for_each(|comm| comm.detach());
}

/// Finds a communicator that is not freed.
pub fn lookup(key: &str) -> Result<Arc<Comm>, Cause> {
    let registry = registry();
    match registry.live.get(key) {
        Some(comm) => Ok(comm.clone()),
        None if registry.past.iter().any(|(past, ..)| **past == *key) => {
            Err(Cause::FreedCommunicator { key: key.into() })
        }
        None => Err(Cause::UnknownCommunicator { key: key.into() }),
    }
}

/// The communicator of a number, if it is not freed.
pub fn numbered(number: i32) -> Option<Arc<Comm>> {
    registry().live.values().find(|comm| comm.number == number).cloned()
}

/// Those that are not freed.
pub fn live() -> Vec<Arc<Comm>> {
    registry().live.values().cloned().collect()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::super::Calling;
    use super::*;

    #[test]
    fn threads_that_attach_at_once_have_the_same() {
        let comm = Comm::new("attach-test", 0, 2);
        let (makes, seen) = (AtomicU64::new(0), std::sync::Barrier::new(2));
        std::thread::scope(|scope| {
            let attach = || {
                let made = comm.attach(|| {
                    assert_eq!(makes.fetch_add(1, Ordering::Relaxed), 0, "other ranks take part once");
                    seen.wait();
                    std::thread::sleep(std::time::Duration::from_millis(20));
                    Ok::<_, ()>(7)
                });
                assert_eq!(*made.unwrap(), 7);
            };
            scope.spawn(attach);
            seen.wait();
            attach();
        });
        assert_eq!(comm.look_at(|made: &i32| *made), Some(7));
    }

    #[test]
    fn what_could_not_be_made_is_made_by_the_next() {
        let comm = Comm::new("attach-again-test", 0, 2);
        assert_eq!(comm.attach(|| Err::<i32, _>("no")).unwrap_err(), "no");
        // While something is made, something else can be.
        let made = comm.attach(|| comm.attach(|| Ok::<_, ()>(1u8)).map(|one| i32::from(*one)));
        assert_eq!(*made.unwrap(), 1);
    }

    #[test]
    fn a_key_that_is_used_again_names_the_new_communicator() {
        let make = |handle| register(Comm { handle, ..Comm::new("comm-test", 0, 2) });
        let first = make(1);
        assert!(Arc::ptr_eq(&first, &make(1)));
        free("comm-test");
        assert!(first.is_freed() && matches!(lookup("comm-test"), Err(Cause::FreedCommunicator { .. })));
        let second = make(1);
        assert!(!second.is_freed() && first.is_freed());
        assert!(Arc::ptr_eq(&second, &lookup("comm-test").unwrap()));
        let third = make(2);
        assert!(second.is_freed() && !third.is_freed());
        assert!(matches!(lookup("comm-nobody"), Err(Cause::UnknownCommunicator { .. })));
        for i in 0..2 * PAST {
            let key = format!("comm-many-{i}");
            register(Comm::new(&key, 0, 2));
            free(&key);
        }
        assert_eq!(registry().past.len(), PAST, "of many that are freed, few are remembered");
    }

    #[test]
    fn what_was_made_from_a_communicator_is_dropped_with_it() {
        struct Made(Arc<Mutex<Vec<u8>>>, u8);
        impl Drop for Made {
            fn drop(&mut self) {
                self.0.lock().unwrap().push(self.1);
            }
        }
        struct Other(#[allow(dead_code)] Made);
        let dropped = Arc::new(Mutex::new(Vec::new()));
        let comm = register(Comm::new("comm-made", 0, 2));
        let first = |number| Ok::<_, Cause>(Made(dropped.clone(), number));
        assert_eq!(comm.attach(|| first(1)).unwrap().1, 1);
        assert_eq!(comm.attach(|| first(9)).unwrap().1, 1, "there is one of each type");
        comm.attach(|| Ok::<_, Cause>(Other(Made(dropped.clone(), 2)))).unwrap();
        dropped.lock().unwrap().clear();
        assert!(comm.look_at(|_: &Made| ()).is_some());
        free("comm-made");
        assert_eq!(*dropped.lock().unwrap(), [2, 1]);
        assert!(comm.look_at(|_: &Made| ()).is_none());
        drop(comm.attach(|| first(3)).unwrap());
        assert_eq!(*dropped.lock().unwrap(), [2, 1, 3], "nothing stays with a freed one");
    }

    #[test]
    fn who_looks_at_what_was_made_does_not_drop_it() {
        struct Made(std::sync::mpsc::Sender<std::thread::ThreadId>);
        impl Drop for Made {
            fn drop(&mut self) {
                self.0.send(std::thread::current().id()).unwrap();
            }
        }
        let (send, dropped_by) = std::sync::mpsc::channel();
        let comm = register(Comm::new("comm-looked-at", 0, 2));
        drop(comm.attach(|| Ok::<_, Cause>(Made(send))).unwrap());
        let looks = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                comm.look_at(|_: &Made| {
                    looks.wait();
                    std::thread::sleep(std::time::Duration::from_millis(20));
                })
            });
            looks.wait();
            free("comm-looked-at");
            assert_eq!(dropped_by.try_recv(), Ok(std::thread::current().id()), "with its communicator");
        });
    }

    #[test]
    fn what_is_freed_within_a_call_of_mpi_is_dropped_after_it() {
        struct Made(Arc<Mutex<Vec<&'static str>>>);
        impl Drop for Made {
            fn drop(&mut self) {
                assert!(calling::is_calling(), "MPI may call back here too");
                self.0.lock().unwrap().push("dropped");
            }
        }
        let did = Arc::new(Mutex::new(Vec::new()));
        let comm = register(Comm::new("comm-late", 0, 2));
        comm.attach(|| Ok::<_, Cause>(Made(did.clone()))).unwrap();
        let outer = Calling::new();
        {
            let _inner = Calling::new();
            free("comm-late");
            assert!(comm.is_freed() && lookup("comm-late").is_err());
        }
        did.lock().unwrap().push("called");
        drop(outer);
        assert_eq!(*did.lock().unwrap(), ["called", "dropped"]);
        assert!(!calling::is_calling());
    }

    #[test]
    fn a_communicator_that_is_made_again_is_told_apart() {
        let make = |key| {
            let comm = register(Comm { world: [7, 9].into(), ..Comm::new(key, 0, 2) }.named("again"));
            (comm.class, comm.id, comm.generation)
        };
        let (class, id, first) = make("again");
        free("again");
        assert_eq!(make("again"), (class, id, first + 1));
        free("again");
    }

    #[test]
    fn equal_names_and_members_have_ids_in_order() {
        let make = |key| register(Comm { world: [3, 5].into(), ..Comm::new(key, 0, 2) }.named("ids"));
        let [a, b] = ["ids-a", "ids-b"].map(|key| make(key).id);
        assert_ne!(a, b);
        ["ids-a", "ids-b"].into_iter().for_each(free);
        assert_eq!(["ids-c", "ids-d"].map(|key| make(key).id), [a, b], "keys do not matter");
    }

    #[test]
    fn duplicates_of_known_origin_are_not_confused_with_a_communicator_of_unknown_origin() {
        let make = |key, origin| register(Comm { origin, ..Comm::new(key, 0, 2) }.named("beside"));
        let is_mixed = |comm: &Comm| comm.cell().has(MIXED);
        let (first, freed) = (make("beside-a", 7), make("beside-b", 8));
        free("beside-b");
        let unknown = make("beside-c", UNKNOWN);
        assert!([&first, &freed, &unknown].iter().all(|comm| !is_mixed(comm)));
        let of_name = hash(("beside", &unknown.world));
        assert_eq!(
            (unknown.id, unknown.generation),
            (!of_name, 1),
            "as on a rank that has used no duplicate"
        );
        let second = make("beside-d", UNKNOWN);
        assert!(is_mixed(&unknown) && is_mixed(&second) && !is_mixed(&first));
        let all = [&first, &unknown, &second];
        assert!(
            all.iter()
                .enumerate()
                .all(|(i, one)| { all[..i].iter().all(|it| it.id != one.id && it.order != one.order) })
        );
    }
}
