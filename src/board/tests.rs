use super::*;
use crate::board::cell::{FREED, Print, THREADS};
use crate::board::raw::Raw;
use crate::board::slot::{MESSAGES, PEERS, RECORDS};
use crate::board::words::Words;

fn slot() -> &'static Slot {
    // SAFETY: all-zero is a value of a slot, whose fields are atomics.
    Box::leak(unsafe { Box::<Slot>::new_zeroed().assume_init() })
}

#[test]
fn a_slot_is_as_large_as_the_page_says() {
    assert_eq!(size_of::<Slot>(), 92 << 10, "docs/debugging.md says how much memory a rank takes");
    assert_eq!(bytes_of(0), 20 << 10, "docs/debugging.md says how large the table is");
    assert_eq!((size_of::<Raw>(), RECORDS), (64, 256));
    // Other ranks read these fields in each operation, so they are on cache lines that an operation does not write.
    use std::mem::offset_of;
    assert!(offset_of!(Slot, copies) < 64 && offset_of!(Slot, next) >= 64);
    assert!(offset_of!(Cell, flags) < 64 && offset_of!(Cell, number) == 256 && size_of::<Cell>() == 320);
    assert!(offset_of!(Peer, steady) < 64 && offset_of!(Peer, sent) == 64 && size_of::<Peer>() == 192);
}

#[test]
fn words_are_read_back_until_others_take_their_place() {
    let slot = slot();
    let first = Entry::default();
    let of = |entry: &Entry, words: &str| entry.number(&slot.text, || words.into());
    let number = of(&first, "solver.py:97");
    assert_eq!(slot.text.read(number), "solver.py:97");
    assert_eq!((of(&first, "not asked for"), of(&Entry::default(), "solver.py:97")), (number, number));
    let forged = of(&Entry::default(), "a\nr0 | \u{1b}[31mforged");
    assert_eq!(slot.text.read(forged), "a\\nr0 | \\u{1b}[31mforged");
    // A program with more lines than there is place for writes each once, however often it repeats them.
    let sites: Vec<Entry> = (0..2000).map(|_| Entry::default()).collect();
    let step = || sites.iter().enumerate().map(|(i, it)| of(it, &format!("line {i}"))).collect::<Vec<_>>();
    let (numbers, written) = (step(), slot.text.written());
    assert_eq!((step(), step(), slot.text.written()), (numbers.clone(), numbers.clone(), written));
    assert_eq!((slot.text.read(number), slot.text.read(numbers[0])), (String::new(), String::new()));
    assert_eq!((of(&first, ""), &*slot.text.read(numbers[1999])), (number, "line 1999"));
    slot.text.keep(number);
    assert_eq!((&*slot.text.read(number), slot.text.written() - written), ("solver.py:97", 6 + 12));
    // A process remembers 8192 words. An entry whose words it has forgotten gets a new number for them.
    (0..8192).for_each(|i| assert_ne!(of(&Entry::default(), &format!("line {i} of many")), 0));
    let again = of(&first, "solver.py:97");
    assert!(again > number && slot.text.read(again) == "solver.py:97");
    slot.settings.write(&"x".repeat(3000));
    assert_eq!(slot.settings.read().len(), 1024);
    let words: &Words<4096> = &slot.python;
    words.write(format!("a{}", "é".repeat(2049)).as_str());
    assert_eq!(words.read().len(), 4095);
}

#[test]
fn collectives_are_compared_by_number() {
    let (one, other) = (Cell::default(), Cell::default());
    for number in 1..20 {
        assert_eq!(one.note(if number < 4 { number } else { 7 }, 1), number);
    }
    assert_eq!((one.print(1), one.print(20)), (None, None), "far ahead, and not there yet");
    let one = Cell::default();
    (1..20).for_each(|number| assert_eq!(one.note(7, 1), number));
    (0..18).for_each(|_| assert_ne!(other.note(7, 1), 0));
    assert_eq!(one.print(18), other.print(18));
    other.note(8, 1);
    let of = |print: u64| Print { print, form: 0 };
    assert!(other.repeats(19, &Print { print: 8, form: 1 }) && !other.repeats(19, &of(8)));
    assert_eq!((other.print(18).map(|it| it.print), other.print(20)), (Some(7), None), "not there yet");
    // Two collectives in turns: each entry is written once.
    let turns = Cell::default();
    (0..120).for_each(|i| assert_ne!(turns.note(i % 2, 0), 0));
    assert_eq!(
        [1, 2, 50, 119, 121].map(|n| turns.print(n)),
        [Some(of(0)), Some(of(1)), Some(of(1)), Some(of(0)), None]
    );
    assert!(turns.repeats(121, &of(0)) && !turns.repeats(121, &of(1)), "unless it changes");
    let shapes = Cell::default();
    (0..24).for_each(|i| assert_ne!(shapes.note(7, (1 + i / 12) << 48), 0));
    assert_eq!(shapes.print(24).map(|it| it.form), Some(2), "an entry whose shapes alone have changed");
    // As long as a quarter of the collectives differ from those before, no entry is lost.
    let mostly = Cell::default();
    for number in 1..=200 {
        mostly.note(if number % 4 == 0 { number } else { 7 }, 0);
        assert!(number == 1 || mostly.print(number - 1).is_some(), "{number}");
    }
    turns.note(9, 0);
    assert_eq!([109, 110, 120, 121].map(|n| turns.print(n)), [None, Some(of(1)), Some(of(1)), Some(of(9))]);
}

#[test]
fn collectives_that_left_the_entries_are_compared_together() {
    let (ahead, behind) = (Cell::default(), Cell::default());
    (1..=20).for_each(|what| assert_ne!(ahead.note(what, 0), 0));
    assert_eq!((ahead.print(1), ahead.has_come(1), ahead.has_come(21)), (None, true, false));
    (1..=20).for_each(|what| assert_ne!(behind.note(if what == 3 { 99 } else { what }, 0), 0));
    assert_eq!(ahead.print(20), behind.print(20));
    assert_ne!(ahead.past(20).unwrap(), behind.own_past(20));
    assert_eq!((ahead.past(19), ahead.past(21)), (None, None), "only the last one is known to others");
    let equal = Cell::default();
    (1..=19).for_each(|what| assert_ne!(equal.note(what, 0), 0));
    assert_eq!(equal.past(19).unwrap(), ahead.own_past(19));
}

#[test]
fn collectives_of_two_threads_at_a_time_are_noticed() {
    let cell = Cell::default();
    let state = || (cell.is_running(), cell.has(THREADS));
    (0..3).for_each(|_| cell.end(cell.note(1, 0)));
    assert_eq!(state(), (false, false));
    let first = cell.note(1, 0);
    assert_eq!((first, state()), (4, (true, false)));
    assert_eq!((cell.note(1, 0), state().1), (5, true));
}

#[test]
fn collectives_are_counted_in_64_bits() {
    let (one, most) = (Cell::default(), u64::from(u32::MAX));
    one.number.store(most, Ordering::Relaxed);
    assert_eq!([one.note(7, 0), one.note(8, 0)], [most + 1, most + 2]);
    let of = |print| Some(Print { print, form: 0 });
    assert_eq!([most + 1, most + 2, 1].map(|number| one.print(number)), [of(7), of(8), None]);
}

#[test]
fn cells_of_freed_communicators_are_used_again() {
    let slot = slot();
    let all: Vec<&Cell> = (1..).map_while(|id| slot.claim(mix(id, 0), [id, 2, 3])).collect();
    assert_eq!(all.len(), slot.cells.len());
    assert!((1..).zip(&all).all(|(id, cell)| std::ptr::eq(slot.cell(mix(id, 0)).unwrap(), *cell)));
    (0..5).for_each(|_| assert_ne!(all[3].note(1, 0), 0));
    all[3].set(FREED);
    let again = slot.claim(999, [1, 1, 1]).unwrap();
    assert!(std::ptr::eq(again, all[3]) && std::ptr::eq(slot.cell(999).unwrap(), again));
    assert_eq!((again.number.load(Ordering::Relaxed), slot.lost_number.load(Ordering::Relaxed)), (0, 5));
    assert!(slot.cell(mix(4, 0)).is_none() && slot.cell(mix(5, 0)).is_some());
}

/// Two ranks note a collective at the same time, and look at the other's. If they differ, at least one rank sees the difference.
#[test]
fn of_two_ranks_that_differ_one_sees_it() {
    let (cells, rounds) = ([Cell::default(), Cell::default()], 20_000);
    let (at, seen) = (AtomicU64::new(0), [AtomicU64::new(0), AtomicU64::new(0)]);
    let meet = |number: u64| {
        at.fetch_add(1, Ordering::AcqRel);
        while at.load(Ordering::Acquire) < number {
            std::hint::spin_loop();
        }
    };
    std::thread::scope(|scope| {
        for me in 0..2 {
            let (cells, seen, meet) = (&cells, &seen, &meet);
            scope.spawn(move || {
                for round in 1..=rounds {
                    // In turns, the collective of the first rank changes, of the second rank, of
                    // both, or of neither.
                    let what = |rank: u64| if (round % 4) & (1 << rank) != 0 { 10 * round + rank } else { 5 };
                    meet(4 * round - 2);
                    let (number, ours) =
                        (cells[me].note(what(me as u64), 0), Print { print: what(me as u64), form: 0 });
                    let its = &cells[1 - me];
                    let differs =
                        !its.repeats(number, &ours) && its.print(number).is_some_and(|it| it != ours);
                    seen[me].store(u64::from(differs), Ordering::Release);
                    meet(4 * round);
                    let any = seen.iter().any(|it| it.load(Ordering::Acquire) == 1);
                    assert_eq!(any, what(0) != what(1), "round {round}");
                }
            });
        }
    });
}

#[test]
fn messages_of_one_kind_are_steady() {
    let slot = slot();
    let peer = slot.claim_peer(5, 1).0;
    let steady = || peer.steady.load(Ordering::Relaxed);
    let send = |kinds: &[u64]| {
        kinds.iter().map(|&kind| (peer.note(kind, [1, 2, 3]), steady()).1).collect::<Vec<_>>()
    };
    assert_eq!(send(&[16, 16, 16, 16, 16, 16]), [0, 0, 0, 16, 16, 16]);
    assert_eq!(send(&[8, 16, 16, 16, 16]), [0, 0, 0, 0, 16], "as long as one of the last four is another");
    (0..PEERS as i32 / 2)
        .for_each(|rank| assert_eq!(slot.claim_peer(5, rank).0.rank.load(Ordering::Relaxed), rank));
    assert!((0..32).all(|rank| std::ptr::eq(slot.known_peer(5, rank).unwrap(), slot.claim_peer(5, rank).0)));
    assert!(slot.known_peer(5, 99).is_none());
}

#[test]
fn messages_are_counted_by_rank_and_totals_stay() {
    let slot = slot();
    for rank in 0..3 * PEERS as i32 {
        let (peer, was_taken) = slot.claim_peer(5, rank);
        assert_eq!(was_taken, rank >= PEERS as i32);
        peer.sent.fetch_add(1, Ordering::Relaxed);
    }
    assert!(std::ptr::eq(slot.claim_peer(5, 191).0, slot.claim_peer(5, 191).0) && MESSAGES > 1);
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
    // A cleaner removes it, and ranks that come later find it.
    flock(&third, FlockOperation::LockShared).unwrap();
    fs::remove_file(&job).unwrap();
    let fourth = open_file(&job, bytes).unwrap();
    let id = |file: &File| file.metadata().unwrap().ino();
    assert_eq!(
        (id(&fourth) == id(&third), job.exists()),
        (cfg!(target_os = "linux"), !cfg!(target_os = "linux"))
    );
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

#[test]
fn boards_of_dead_jobs_are_removed_but_the_newest_ones() {
    let directory = std::env::temp_dir().join(format!("mpi4jax-sweep-{}", std::process::id()));
    folder::make_one(&directory).unwrap();
    let old = |name: &str, seconds: u64| {
        let file = File::create(directory.join(name)).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)).unwrap();
        file
    };
    let lives = old("lives", 0);
    flock(&lives, FlockOperation::LockShared).unwrap();
    (1..5).for_each(|age| drop(old(&format!("dead since {age}"), age)));
    File::create(directory.join("young")).unwrap();
    let left = || {
        let entries = fs::read_dir(&directory).unwrap().map(|it| it.unwrap().file_name());
        let mut names: Vec<_> = entries.map(|it| it.into_string().unwrap()).collect();
        names.sort();
        names
    };
    sweep(&directory);
    assert_eq!(left(), ["dead since 3", "dead since 4", "lives", "young"]);
    // In a directory that is open to others, the files may be links.
    fs::set_permissions(&directory, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    drop(old("dead since 5", 5));
    sweep(&directory);
    assert_eq!(left().len(), 5);
    fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn what_one_rank_does_and_doubts_about_a_communicator_are_said_once() {
    // SAFETY: all-zero is a value of a header, whose fields are atomics.
    let header: &Header = Box::leak(unsafe { Box::<Header>::new_zeroed().assume_init() });
    let board = Board { header, slots: &[], rank: 0, place: 0, file: None };
    let first = |comms: std::ops::Range<u64>| comms.filter(|comm| board.is_first_doubt(*comm)).count();
    let most = DOUBTS as u64;
    assert_eq!([first(1..4), first(1..4), first(3..6)], [3, 0, 2]);
    assert_eq!([first(1..most + 4), first(1..most + 4)], [DOUBTS - 5, 0], "no more than {DOUBTS} in all");
    let states = || [Once::Differs, Once::Doubt].map(|what| board.has_been_done(what));
    assert_eq!(states(), [false; 2]);
    assert_eq!([board.is_first_to(Once::Doubt), board.is_first_to(Once::Doubt)], [true, false]);
    assert_eq!(states(), [false, true]);
}
