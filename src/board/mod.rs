//! The board: one file in shared memory for each job on a host, in which each rank has a [`Slot`] of a fixed size.
//!
//! A rank writes its own slot alone, with plain stores, and reads those of the others. What a rank has written stays readable
//! when its process has been killed, and when the file has been unlinked. A rank without a board has a slot of its own in private
//! memory: everything works but what ranks learn of each other.

pub mod ranks;
pub mod slot;

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::{null_mut, slice_from_raw_parts};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock};
use rustix::mm::{MapFlags, ProtFlags, mmap};

pub use self::slot::{Cell, Entry, Life, Peer, Raw, Slot, mix};
use crate::system::{folder, process, signal};

/// What ranks of one board have in common.
#[repr(C, align(4096))]
pub struct Header {
    /// Identifies this layout of the board.
    magic: AtomicU64,
    size: AtomicU32,
    /// How the default communicator is made: 0: not decided yet; see `watch::default`.
    pub default: AtomicU32,
    /// What one rank alone does, a bit each.
    once: AtomicU32,
    /// The rank that looks for the others, plus one, and when it did so last, in milliseconds.
    pub leader: AtomicU64,
    /// When a line about a long wait was printed, in milliseconds.
    pub line_at: AtomicU64,
    /// The rank that the user has asked for a report, plus one, and when, in milliseconds.
    pub report_at: AtomicU64,
}

/// What is done by one rank of a host alone.
#[derive(Clone, Copy)]
pub enum Once {
    /// A rank has reported why the job ends.
    Ending,
    Differs,
    Doubt,
    Builds,
    Terminated,
}

const MAGIC: u64 = 0x6d70_6934_6a61_7832 ^ ((size_of::<Slot>() as u64) << 32);
/// How many boards of killed jobs are kept.
const KEPT: usize = 2;

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
pub fn open(name: &str, rank: i32, size: i32) -> io::Result<()> {
    let (board, result) = match shared(name, rank, size) {
        Ok(board) => (board, Ok(())),
        Err(error) => (alone(rank as usize), Err(error)),
    };
    BOARD.store(Box::into_raw(Box::new(board)), Ordering::Release);
    result
}

fn shared(name: &str, rank: i32, size: i32) -> io::Result<Board> {
    folder::make_one(&place())?;
    // Boards of another layout have other names.
    let path = place().join(name);
    let file = open_file(&path, bytes_of(size as usize))?;
    let (header, slots) = map(&file, MapFlags::SHARED, size as usize)?;
    if header.magic.load(Ordering::Acquire) == 0 {
        header.size.store(size as u32, Ordering::Relaxed);
        header.magic.store(MAGIC, Ordering::Release);
    }
    flock(&file, FlockOperation::LockShared)?;
    if (header.magic.load(Ordering::Relaxed), header.size.load(Ordering::Relaxed)) != (MAGIC, size as u32) {
        return Err(io::Error::other("another build of mpi4jax, or a job of another size, has made it"));
    }
    let slot = &slots[rank as usize];
    let pid = slot.pid.load(Ordering::Acquire) as i32;
    if pid != 0
        && slot.life() != Life::Finished
        && process::state(pid, slot.start.load(Ordering::Relaxed)).is_some()
    {
        let name = process::name(pid);
        return Err(io::Error::other(format!("{name} is rank {rank} of this job already")));
    }
    Ok(Board { header, slots, rank: rank as usize, place: rank as usize, file: Some((path, file)) })
}

/// The file of a board, which is made, or made anew where an earlier job of the same name has left one. It is locked.
fn open_file(path: &Path, bytes: usize) -> io::Result<File> {
    let id = |found: fs::Metadata| (found.dev(), found.ino());
    loop {
        let file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
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
            let _ = fs::remove_file(path);
            continue;
        }
        if found.len() < bytes as u64 {
            // A full file system is an error here, and no signal later.
            fallocate(&file, FallocateFlags::empty(), 0, bytes as u64)
                .inspect_err(|_| drop(fs::remove_file(path)))?;
        }
        return Ok(file);
    }
}

fn bytes_of(size: usize) -> usize {
    size_of::<Header>() + size * size_of::<Slot>()
}

/// The board in a file, which has room for `size` slots.
fn map(file: &File, flags: MapFlags, size: usize) -> io::Result<(&'static Header, &'static [Slot])> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, which is never taken away, of bytes that the file has; any bytes are a value of these structs, whose
    // fields are atomics.
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
        let slot = self.slots.get(rank as usize)?;
        (self.file.is_some() && slot.pid.load(Ordering::Relaxed) != 0).then_some(slot)
    }

    /// The ranks that have come, and their slots.
    pub fn here(&self) -> impl Iterator<Item = (i32, &'static Slot)> {
        ((self.rank - self.place) as i32..)
            .zip(self.slots)
            .filter(|(_, slot)| slot.pid.load(Ordering::Acquire) != 0)
    }

    /// Whether no rank of this host has done this before.
    pub fn is_first_to(&self, what: Once) -> bool {
        let bit = 1 << what as u32;
        self.header.once.fetch_or(bit, Ordering::AcqRel) & bit == 0
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
        self.path().and_then(|path| fs::read(path).ok()).unwrap_or_default()
    }
}

/// The slots of the board in a file, of a job that may have ended.
pub fn read(path: &Path) -> io::Result<&'static [Slot]> {
    let wrong = |words: &str| io::Error::new(io::ErrorKind::InvalidData, words.to_owned());
    let file = File::open(path)?;
    let bytes = file.metadata()?.len() as usize;
    let size = bytes.saturating_sub(size_of::<Header>()) / size_of::<Slot>();
    if size == 0 {
        return Err(wrong("it is no board"));
    }
    let (header, slots) = map(&file, MapFlags::PRIVATE, size)?;
    if (header.magic.load(Ordering::Relaxed), header.size.load(Ordering::Relaxed)) != (MAGIC, size as u32) {
        return Err(wrong("it is no board, or one of another build of mpi4jax"));
    }
    Ok(slots)
}

/// Removes boards of jobs of which no process lives, but the newest ones. Files are removed only from a directory that is this
/// user's alone: what is in its place may be a link to any other.
pub fn sweep() {
    if folder::make_one(&place()).is_err() {
        return;
    }
    let mut dead: Vec<(SystemTime, PathBuf)> = fs::read_dir(place())
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
