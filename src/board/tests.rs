use super::*;
use crate::board::slot::{FREED, MESSAGES, PEERS, RECORDS};

fn slot() -> &'static Slot {
    // SAFETY: all-zero is a value of a slot, whose fields are atomics.
    Box::leak(unsafe { Box::<Slot>::new_zeroed().assume_init() })
}

#[test]
fn a_slot_is_as_large_as_the_page_says() {
    assert_eq!(size_of::<Slot>(), 56 << 10, "docs/debugging.md says how much memory a rank takes");
    assert_eq!(bytes_of(0), 20 << 10, "docs/debugging.md says how large the table is");
    assert_eq!((size_of::<Raw>(), RECORDS), (64, 256));
}

#[test]
fn words_are_read_back_until_others_take_their_place() {
    let slot = slot();
    let first = Entry::default();
    let at = first.at(slot, || "solver.py:97".into());
    assert_eq!(slot.read(at), "solver.py:97");
    assert_eq!(first.at(slot, || unreachable!()), at);
    assert_eq!(slot.read(slot.write("a\nr0 | \u{1b}[31mforged")), "a\\nr0 | \\u{1b}[31mforged");
    for i in 0..2000 {
        slot.write(&format!("line {i}"));
    }
    assert_eq!(slot.read(at), "");
    assert_eq!(slot.read(first.at(slot, || "again".into())), "again");
    slot.settings.write(&"x".repeat(3000));
    assert_eq!(slot.settings.read().len(), 1024);
}

#[test]
fn collectives_are_compared_by_number() {
    let (one, other) = (Cell::default(), Cell::default());
    for number in 1..20 {
        assert_eq!(one.note(7, 1), number);
    }
    assert_eq!((one.print(1), one.print(20)), (None, None), "far ahead, and not there yet");
    (0..18).for_each(|_| assert_ne!(other.note(7, 1), 0));
    assert_eq!(one.print(18), other.print(18));
    other.note(8, 1);
    assert_ne!(one.print(19).unwrap().print, other.print(19).unwrap().print);
}

#[test]
fn cells_of_freed_communicators_are_used_again() {
    let slot = slot();
    let all: Vec<&Cell> =
        std::iter::from_fn(|| slot.claim().inspect(|cell| cell.id.store(9, Ordering::Relaxed)))
            .take(64)
            .collect();
    assert_eq!(all.len(), slot.cells.len());
    (0..5).for_each(|_| assert_ne!(all[3].note(1, 0), 0));
    all[3].set(FREED);
    assert!(std::ptr::eq(slot.claim().unwrap(), all[3]));
    assert_eq!((all[3].number.load(Ordering::Relaxed), slot.lost_number.load(Ordering::Relaxed)), (0, 5));
}

#[test]
fn messages_are_counted_by_rank_and_totals_stay() {
    let slot = slot();
    for rank in 0..3 * PEERS as i32 {
        slot.peer(5, rank).sent.fetch_add(1, Ordering::Relaxed);
    }
    assert!(std::ptr::eq(slot.peer(5, 191), slot.peer(5, 191)) && MESSAGES > 1);
    let here: u64 = slot.peers.iter().map(|peer| peer.sent.load(Ordering::Relaxed)).sum();
    assert_eq!(here + slot.lost_sent.load(Ordering::Relaxed), 3 * PEERS as u64);
}

#[test]
fn ranks_of_a_job_share_a_file_and_a_later_job_of_its_name_does_not() {
    let directory = std::env::temp_dir().join(format!("mpi4jax-board-{}", std::process::id()));
    folder::make_one(&directory).unwrap();
    let (job, bytes) = (directory.join("job"), bytes_of(2));
    let first = open_file(&job, bytes).unwrap();
    flock(&first, FlockOperation::LockShared).unwrap();
    let second = File::open(&job).unwrap();
    assert!(flock(&second, FlockOperation::NonBlockingLockExclusive).is_err(), "its job lives");
    assert_eq!(first.metadata().unwrap().len(), bytes as u64);
    drop((first, second));
    // A file that is older than this process, of a job without processes.
    let old = File::options().write(true).open(&job).unwrap();
    old.set_modified(SystemTime::UNIX_EPOCH).unwrap();
    drop(old);
    let third = open_file(&job, bytes).unwrap();
    assert!(third.metadata().unwrap().modified().unwrap() > SystemTime::UNIX_EPOCH);
    let (_, slots) = map(&third, MapFlags::SHARED, 2).unwrap();
    slots[1].set_life(Life::Finished);
    assert!(read(&job).is_err(), "nobody has written what it is");
    let (_, copy) = map(&third, MapFlags::PRIVATE, 2).unwrap();
    assert_eq!((copy[0].life(), copy[1].life()), (Life::Absent, Life::Finished));
    fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn a_board_is_as_large_as_its_host_whatever_the_world_is() {
    let directory = std::env::temp_dir().join(format!("mpi4jax-claims-{}", std::process::id()));
    folder::make_one(&directory).unwrap();
    let job = directory.join("job");
    let file = open_file(&job, bytes_of(1)).unwrap();
    // Three ranks of 100,000 are on this host.
    let (header, slots) = map(&file, MapFlags::SHARED, 3).unwrap();
    header.magic.store(MAGIC, Ordering::Release);
    header.size.store(100_000, Ordering::Relaxed);
    let ranks = [70_000, 0, 99_999];
    for (place, rank) in (0..).zip(ranks) {
        assert_eq!(header.find(slots, rank), None);
        assert_eq!(header.claim(slots, rank, &file).unwrap(), place);
        assert_eq!(file.metadata().unwrap().len(), bytes_of(place + 1) as u64);
        slots[place].pid.store(1, Ordering::Release);
    }
    assert_eq!(ranks.map(|rank| header.find(slots, rank)), [Some(0), Some(1), Some(2)]);
    let full = header.claim(slots, 7, &file).unwrap_err().to_string();
    assert_eq!(full, "it has slots for 3 ranks of a host");
    let (size, found) = read(&job).unwrap();
    assert_eq!((size, here(found).map(|(rank, _)| rank).collect::<Vec<_>>()), (100_000, ranks.to_vec()));
    fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn ranks_of_a_host_are_found_in_a_few_steps() {
    // Consecutive ranks, and one rank of each node and socket of a job that places them cyclically.
    for stride in [1, 2, 64, 1000, 1024, 4096, 8192] {
        let mut used = [false; PLACES];
        let steps = (0..256u32).map(|i| {
            let start = first_place(i * stride);
            let step = (0..PLACES).find(|step| !used[(start + step) % PLACES]).unwrap();
            used[(start + step) % PLACES] = true;
            step
        });
        assert!(steps.max() <= Some(2), "stride {stride}");
    }
}
