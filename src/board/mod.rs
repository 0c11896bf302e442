//! The board: one file in shared memory for each job on a host, in which each rank of the host has a [`Slot`] of a fixed size.
//!
//! Ranks claim their slots in the order in which they come, and the file grows by a slot each time: its size depends on the number
//! of ranks of this host, not on the size of `MPI_COMM_WORLD`. A hash table in the header says which slot a rank has.
//!
//! A rank writes its own slot alone, with plain stores, and reads the slots of the others. What a
//! rank has written stays readable when its process has been killed, and when the file has been
//! unlinked. A rank without a board has a slot of its own in private memory: everything works but
//! what ranks learn of each other.

pub mod cell;
pub mod ranks;
pub mod raw;
pub mod slot;
pub mod words;

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::{null_mut, slice_from_raw_parts};
use std::sync::atomic::{AtomicPtr, AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock};
use rustix::mm::{MapFlags, ProtFlags, mmap};

pub use self::cell::{Cell, mix};
pub use self::slot::{Life, Peer, Slot};
pub use self::words::Entry;
use crate::system::{folder, os, process, signal};

/// What ranks of one board have in common. The fields up to `default` have the same place in all builds.
#[repr(C, align(4096))]
pub struct Header {
    /// Identifies the version, and with it the layout of the board.
    magic: AtomicU64,
    /// The size of `MPI_COMM_WORLD`.
    size: AtomicU32,
    /// How many slots have been claimed: only these may be touched, because the file ends behind the last one.
    claimed: AtomicU32,
    /// How the default communicator is made: 0: not decided yet; [`TOGETHER`], or as `watch::default` says.
    pub default: AtomicU32,
    /// What one rank alone does, a bit each.
    once: AtomicU32,
    /// Communicators for which `may not match` was already reported.
    doubts: [AtomicU64; DOUBTS],
    /// The rank that looks for the others, plus one, and when it did so last, in milliseconds.
    pub leader: AtomicU64,
    /// When a line about a long wait was printed, in milliseconds.
    pub line_at: AtomicU64,
    /// The rank that the user has asked for a report, plus one, and when, in milliseconds.
    pub report_at: AtomicU64,
    /// A hash table with linear probing: the index of a slot in `slots` plus one; 0: the entry is free.
    places: [AtomicU16; PLACES],
}

/// What is done by one rank of a host alone.
#[derive(Clone, Copy)]
pub enum Once {
    /// A rank has reported why the job ends.
    Ending,
    Differs,
    Doubt,
    Builds,
    Refused,
    Terminated,
    Peers,
    Copies,
}

const MAGIC: u64 = {
    let (version, mut magic, mut i) = (env!("CARGO_PKG_VERSION").as_bytes(), 0x6d70_6934_6a61_7834, 0);
    while i < version.len() {
        magic = mix(magic, version[i] as u64);
        i += 1;
    }
    mix(magic, size_of::<Slot>() as u64)
};
/// A rank of this host cannot use the board, so the others cannot see there whether it has come.
pub const TOGETHER: u32 = 2;
/// For how many communicators a line is printed if their operations may not match.
const DOUBTS: usize = 8;
/// How many boards of killed jobs are kept.
const KEPT: usize = 2;
/// The largest number of ranks of a host that have slots.
const MOST: usize = 4096;
/// The number of entries of the hash table. At most half of them are used.
const PLACES: usize = 2 * MOST;

/// The entry of the hash table at which the search for a rank begins.
#[inline]
fn first_place(rank: u32) -> usize {
    const { assert!(PLACES.is_power_of_two()) };
    // Multiplying by 2^32 / golden ratio spreads consecutive ranks, and ranks at any stride.
    (rank.wrapping_mul(0x9e37_79b9) >> (32 - PLACES.trailing_zeros())) as usize
}

pub struct Board {
    header: &'static Header,
    slots: &'static [Slot],
    pub rank: usize,
    /// The index of this rank's slot in `slots`.
    place: usize,
    /// The file, whose lock says that a process of the job lives. `None`: the board is in private memory.
    file: Option<(PathBuf, File)>,
}

#[repr(C)]
struct Memory<const N: usize> {
    header: Header,
    slots: [Slot; N],
}

// SAFETY: all-zero is a value of these structs, whose fields are atomics.
static MEMORY: Memory<1> = unsafe { std::mem::zeroed() };
/// The board of a process that has opened none.
static ALONE: Board = alone(0);

const fn alone(rank: usize) -> Board {
    Board { header: &MEMORY.header, slots: &MEMORY.slots, rank, place: 0, file: None }
}

static BOARD: AtomicPtr<Board> = AtomicPtr::new(null_mut());

/// The board of this process.
#[inline]
pub fn board() -> &'static Board {
    // SAFETY: what is stored there is never freed.
    unsafe { BOARD.load(Ordering::Acquire).as_ref() }.unwrap_or(&ALONE)
}

/// The slot of this rank.
#[inline]
pub fn own() -> &'static Slot {
    let board = board();
    &board.slots[board.place]
}

/// Where boards lie: for this user alone.
pub fn place() -> PathBuf {
    let base = if cfg!(target_os = "linux") { "/dev/shm".into() } else { std::env::temp_dir() };
    base.join(format!("mpi4jax-{}", rustix::process::geteuid().as_raw()))
}

/// Opens the board of a job on this host, and takes the slot of a rank. If the board cannot be opened, the rank gets a slot in
/// private memory, and the error says why.
///
/// If all ranks are on this host, the memory of all slots is allocated at once: then either all ranks have a board, or none.
pub fn open(name: &str, rank: i32, size: i32, all_are_here: bool) -> io::Result<()> {
    let (board, result) = match shared(name, rank, size, all_are_here) {
        Ok(board) => (board, Ok(())),
        Err(error) => (alone(rank as usize), Err(error)),
    };
    board.slots[board.place].rank.store(rank as u32, Ordering::Relaxed);
    BOARD.store(Box::into_raw(Box::new(board)), Ordering::Release);
    result
}

fn shared(name: &str, rank: i32, size: i32, all_are_here: bool) -> io::Result<Board> {
    folder::make_one(&place())?;
    let path = place().join(name);
    let most = (size as usize).min(MOST);
    // macOS can allocate only together with setting the length, which must not shrink what another rank has claimed.
    let at_first = if all_are_here || !cfg!(target_os = "linux") { most } else { 1 };
    let file = open_file(&path, bytes_of(at_first))?;
    let (header, slots) = map(&file, MapFlags::SHARED, most)?;
    if header.magic.load(Ordering::Acquire) == 0 {
        header.size.store(size as u32, Ordering::Relaxed);
        header.magic.store(MAGIC, Ordering::Release);
    }
    flock(&file, FlockOperation::LockShared)?;
    if header.size.load(Ordering::Relaxed) != size as u32 {
        return Err(io::Error::other("a job of another size has made it"));
    }
    let place = match header.find(slots, rank) {
        _ if header.magic.load(Ordering::Relaxed) != MAGIC => {
            Err(refused("another build of mpi4jax has made it"))
        }
        Some(place) => Ok(place),
        None => header.claim(slots, rank, &file),
    };
    let place = place.inspect_err(|_| _ = header.default.fetch_max(TOGETHER, Ordering::AcqRel))?;
    let slot = &slots[place];
    let pid = slot.pid.load(Ordering::Acquire) as i32;
    if pid != 0
        && slot.life() != Life::Finished
        && process::state(pid, slot.start.load(Ordering::Relaxed)).is_some()
    {
        let name = process::name(pid);
        return Err(refused(&format!("{name} is rank {rank} of this job already")));
    }
    Ok(Board { header, slots, rank: rank as usize, place, file: Some((path, file)) })
}

/// The error of a rank that cannot use a board that other ranks may use.
fn refused(words: &str) -> io::Error {
    io::Error::new(io::ErrorKind::AlreadyExists, words)
}

impl Header {
    /// The index of a rank's slot, if the rank has claimed one.
    #[inline]
    fn find(&self, slots: &[Slot], rank: i32) -> Option<usize> {
        let start = first_place(rank as u32);
        for step in 0..PLACES {
            let place = usize::from(self.places[(start + step) % PLACES].load(Ordering::Acquire));
            let slot = slots.get(place.checked_sub(1)?)?;
            if slot.rank.load(Ordering::Relaxed) == rank as u32 {
                return Some(place - 1);
            }
        }
        None
    }

    /// Claims the next slot for a rank that has none; its index.
    fn claim(&self, slots: &[Slot], rank: i32, file: &File) -> io::Result<usize> {
        let mut place = self.claimed.load(Ordering::Acquire);
        while (place as usize) < slots.len() {
            // The memory is there before the slot is claimed, and others touch it.
            allocate(file, bytes_of(place as usize + 1))?;
            let next = self.claimed.compare_exchange(place, place + 1, Ordering::AcqRel, Ordering::Acquire);
            let Err(now) = next else {
                slots[place as usize].rank.store(rank as u32, Ordering::Release);
                self.enter(rank, place as u16 + 1);
                return Ok(place as usize);
            };
            place = now;
        }
        Err(io::Error::other(format!("it has slots for {} ranks of a host", slots.len())))
    }

    fn enter(&self, rank: i32, value: u16) {
        let start = first_place(rank as u32);
        let mut entries = (0..PLACES).map(|step| &self.places[(start + step) % PLACES]);
        entries.any(|it| it.compare_exchange(0, value, Ordering::AcqRel, Ordering::Relaxed).is_ok());
    }
}

/// Makes the file of a board this long, if it is shorter. On a full file system this returns an
/// error, instead of a signal (SIGBUS) at a later access.
fn allocate(file: &File, bytes: usize) -> io::Result<()> {
    if file.metadata()?.len() < bytes as u64 {
        fallocate(file, FallocateFlags::empty(), 0, bytes as u64)?;
    }
    Ok(())
}

/// The file of a board, which is made, or made anew where an earlier job of the same name has left one. It is locked. If a cleaner
/// has removed it, other ranks of the job still have it.
fn open_file(path: &Path, bytes: usize) -> io::Result<File> {
    let id = |found: fs::Metadata| (found.dev(), found.ino());
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    loop {
        let removed = if path.exists() { None } else { os::removed(path) };
        if let Some(file) = removed.and_then(|open| options.open(open).ok())
            && file.metadata()?.len() > 0
        {
            flock(&file, FlockOperation::LockShared)?;
            return Ok(file);
        }
        let file = options.clone().create(true).truncate(false).open(path)?;
        // A board that no living process has locked is an earlier job's, unless it is as young as this process.
        let is_free = flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok();
        if !is_free {
            flock(&file, FlockOperation::LockShared)?;
        }
        let found = file.metadata()?;
        // Another process may have removed it meanwhile.
        if fs::metadata(path).map(id).ok() != Some(id(file.metadata()?)) {
            continue;
        }
        if is_free && found.len() > 0 && found.modified().is_ok_and(|time| time < process::started()) {
            // Nobody may take it for a board that a cleaner has removed.
            file.set_len(0)?;
            let _ = fs::remove_file(path);
            continue;
        }
        allocate(&file, bytes).inspect_err(|_| drop(fs::remove_file(path)))?;
        return Ok(file);
    }
}

fn bytes_of(size: usize) -> usize {
    size_of::<Header>() + size * size_of::<Slot>()
}

/// The board in a file, with at most `size` slots. The file may end before the last of them.
fn map(file: &File, flags: MapFlags, size: usize) -> io::Result<(&'static Header, &'static [Slot])> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, which is never taken away; any bytes are a value of these structs, whose fields are atomics. Slots behind
    // the end of the file are touched by nobody: a rank makes the file longer before it claims one.
    unsafe {
        let memory = mmap(null_mut(), bytes_of(size), protection, flags, file, 0)?.cast::<u8>();
        let slots = slice_from_raw_parts(memory.add(size_of::<Header>()).cast(), size);
        Ok((&*memory.cast(), &*slots))
    }
}

impl Board {
    pub fn header(&self) -> &'static Header {
        self.header
    }

    /// Whether other ranks see it.
    pub fn is_shared(&self) -> bool {
        self.file.is_some()
    }

    pub fn path(&self) -> Option<PathBuf> {
        self.file.as_ref().map(|(path, _)| path.clone())
    }

    /// The slot of another rank of this host that has come.
    #[inline]
    pub fn slot(&self, rank: i32) -> Option<&'static Slot> {
        self.file.as_ref()?;
        let slot = &self.slots[self.header.find(self.slots, rank)?];
        (slot.pid.load(Ordering::Relaxed) != 0).then_some(slot)
    }

    /// The ranks of this host that have come, and their slots, in the order in which they came.
    pub fn here(&self) -> impl Iterator<Item = (i32, &'static Slot)> {
        let claimed = if self.is_shared() { self.header.claimed.load(Ordering::Acquire) as usize } else { 1 };
        here(&self.slots[..claimed])
    }

    /// Whether no rank of this host has done this before.
    pub fn is_first_to(&self, what: Once) -> bool {
        let bit = 1 << what as u32;
        self.header.once.fetch_or(bit, Ordering::AcqRel) & bit == 0
    }

    /// Whether no rank of this host has doubted the operations of a communicator before.
    pub fn is_first_doubt(&self, comm: u64) -> bool {
        for place in &self.header.doubts {
            match place.compare_exchange(0, comm, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return true,
                Err(found) if found == comm => return false,
                Err(_) => {}
            }
        }
        false
    }

    pub fn has_been_done(&self, what: Once) -> bool {
        self.header.once.load(Ordering::Acquire) & (1 << what as u32) != 0
    }

    /// Wakes the watchdogs of all ranks.
    pub fn ring_all(&self) {
        self.here().for_each(|(_, slot)| signal::ring(&slot.bell));
    }

    /// Removes the file: what is mapped stays.
    pub fn remove(&self) {
        if let Some((path, _)) = &self.file {
            let _ = fs::remove_file(path);
        }
    }

    /// The bytes of the board, as they are now.
    pub fn bytes(&self) -> Vec<u8> {
        let read = |(_, file): &(PathBuf, File)| {
            let mut bytes = vec![0; file.metadata().ok()?.len() as usize];
            file.read_exact_at(&mut bytes, 0).ok().map(|()| bytes)
        };
        self.file.as_ref().and_then(read).unwrap_or_default()
    }
}

/// The ranks that have come, and their slots.
pub fn here(slots: &'static [Slot]) -> impl Iterator<Item = (i32, &'static Slot)> {
    let came = slots.iter().filter(|slot| slot.pid.load(Ordering::Acquire) != 0);
    came.map(|slot| (slot.rank.load(Ordering::Relaxed) as i32, slot))
}

/// The size of `MPI_COMM_WORLD` and the slots of the board in a file, of a job that may have ended.
pub fn read(path: &Path) -> io::Result<(usize, &'static [Slot])> {
    let wrong = |words: &str| io::Error::new(io::ErrorKind::InvalidData, words.to_owned());
    let file = File::open(path)?;
    let bytes = file.metadata()?.len() as usize;
    let slots = bytes.saturating_sub(size_of::<Header>()) / size_of::<Slot>();
    if slots == 0 {
        return Err(wrong("it is no board"));
    }
    let (header, slots) = map(&file, MapFlags::PRIVATE, slots)?;
    if header.magic.load(Ordering::Relaxed) != MAGIC {
        return Err(wrong("it is no board, or one of another build of mpi4jax"));
    }
    Ok((header.size.load(Ordering::Relaxed) as usize, slots))
}

/// Removes the boards of jobs without a living process from a directory, except the newest ones. Files are removed
/// only from a directory that belongs to this user alone, because anything else in its place may be
/// a link to another directory.
pub fn sweep(directory: &Path) {
    if folder::make_one(directory).is_err() {
        return;
    }
    let mut dead: Vec<(SystemTime, PathBuf)> = fs::read_dir(directory)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let file = File::open(entry.path()).ok()?;
            flock(&file, FlockOperation::NonBlockingLockExclusive).ok()?;
            Some((file.metadata().ok()?.modified().ok()?, entry.path()))
        })
        .filter(|(time, _)| time.elapsed().is_ok_and(|age| age > Duration::from_secs(60)))
        .collect();
    dead.sort();
    let few = dead.len().saturating_sub(KEPT);
    dead[..few].iter().for_each(|(_, path)| drop(fs::remove_file(path)));
}

#[cfg(test)]
mod tests;
