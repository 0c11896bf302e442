//! The board: one file in shared memory for each job on a host, in which each rank has a [`Slot`] of a fixed size.
//!
//! A rank writes its own slot alone, with plain stores, and reads those of the others. What a rank has written stays readable
//! when its process has been killed, and when the file has been unlinked. A rank without a board has a slot of its own in private
//! memory: everything works but what ranks learn of each other.

pub mod ranks;
pub mod slot;

use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::ptr::{null_mut, slice_from_raw_parts};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock};
use rustix::mm::{MapFlags, ProtFlags, mmap};

pub use self::slot::{Cell, Entry, Life, Peer, Raw, Slot, mix};
use crate::system::folder::Folder;
use crate::system::{process, signal};

/// What ranks of one board have in common.
#[repr(C, align(4096))]
pub struct Header {
    /// Of this layout of the board.
    magic: AtomicU64,
    size: AtomicU32,
    /// How the default communicator is made: 0: not decided yet; see `watch::default`.
    pub default: AtomicU32,
    /// How often the life of a rank has changed.
    pub lives: AtomicU32,
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

const MAGIC: u64 = 0x6d70_6934_6a61_7831 ^ ((size_of::<Slot>() as u64) << 32);
/// How many boards of killed jobs are kept.
const KEPT: usize = 2;

pub struct Board {
    header: &'static Header,
    slots: &'static [Slot],
    pub rank: usize,
    /// Its file, whose lock says that a process of the job lives. None: private memory.
    file: Option<(Folder, String, File)>,
}

static BOARD: AtomicPtr<Board> = AtomicPtr::new(null_mut());

/// The board of this process.
#[inline]
pub fn board() -> &'static Board {
    // SAFETY: what is stored there is never freed.
    unsafe { BOARD.load(Ordering::Acquire).as_ref() }.unwrap_or_else(private)
}

/// The slot of this rank.
#[inline]
pub fn own() -> &'static Slot {
    let board = board();
    &board.slots[if board.file.is_some() { board.rank } else { 0 }]
}

#[cold]
fn private() -> &'static Board {
    static PRIVATE: OnceLock<Board> = OnceLock::new();
    PRIVATE.get_or_init(|| {
        let layout = Layout::new::<Memory<1>>();
        // SAFETY: all-zero is a value of the struct, which has a size, and is never freed.
        let memory = unsafe {
            let memory = alloc_zeroed(layout);
            if memory.is_null() {
                handle_alloc_error(layout);
            }
            &*memory.cast::<Memory<1>>()
        };
        Board { header: &memory.header, slots: &memory.slots, rank: 0, file: None }
    })
}

#[repr(C)]
struct Memory<const N: usize> {
    header: Header,
    slots: [Slot; N],
}

/// Where boards lie: for this user alone.
pub fn place() -> PathBuf {
    let base = if cfg!(target_os = "linux") { "/dev/shm".into() } else { std::env::temp_dir() };
    base.join(format!("mpi4jax-{}", rustix::process::geteuid().as_raw()))
}

/// Opens the board of a job on this host, and takes the slot of a rank. An error says why there is none.
pub fn open(name: &str, rank: i32, size: i32) -> io::Result<()> {
    // Boards of another layout have other names.
    let folder = Folder::make_one(&place())?;
    let bytes = size_of::<Header>() + size as usize * size_of::<Slot>();
    let file = open_file(&folder, name, bytes)?;
    let memory = map(&file, bytes)?;
    // SAFETY: mapped above, with all bytes allocated; all-zero is a value of these structs, whose fields are atomics.
    let (header, slots) = unsafe {
        let slots = slice_from_raw_parts(memory.add(size_of::<Header>()).cast::<Slot>(), size as usize);
        (&*memory.cast::<Header>(), &*slots)
    };
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
    let board = Board { header, slots, rank: rank as usize, file: Some((folder, name.into(), file)) };
    BOARD.store(Box::into_raw(Box::new(board)), Ordering::Release);
    Ok(())
}

/// The file of a board, which is made, or made anew where an earlier job of the same name has left one. It is locked.
fn open_file(folder: &Folder, name: &str, bytes: usize) -> io::Result<File> {
    loop {
        let file = folder.file(name)?;
        // Where no process of its job lives, it is an earlier job's, unless it is as young as this process.
        let is_free = flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok();
        if !is_free {
            flock(&file, FlockOperation::LockShared)?;
        }
        let found = file.metadata()?;
        if !folder.has(name, &file) {
            continue;
        }
        if is_free && found.len() > 0 && found.modified().is_ok_and(|time| time < process::started()) {
            folder.remove(name);
            continue;
        }
        if found.len() < bytes as u64 {
            // A full file system is an error here, and no signal later.
            fallocate(&file, FallocateFlags::empty(), 0, bytes as u64)
                .inspect_err(|_| folder.remove(name))?;
        }
        return Ok(file);
    }
}

fn map(file: &File, bytes: usize) -> io::Result<*mut u8> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, which is never taken away.
    Ok(unsafe { mmap(null_mut(), bytes, protection, MapFlags::SHARED, file, 0)? }.cast())
}

impl Board {
    pub fn header(&self) -> &'static Header {
        self.header
    }

    pub fn slots(&self) -> &'static [Slot] {
        self.slots
    }

    /// Whether other ranks see it.
    pub fn is_shared(&self) -> bool {
        self.file.is_some()
    }

    pub fn path(&self) -> Option<PathBuf> {
        self.file.as_ref().map(|(folder, name, _)| folder.path.join(name))
    }

    /// The slot of another rank of this host that has come.
    #[inline]
    pub fn slot(&self, rank: i32) -> Option<&'static Slot> {
        let slot = self.slots.get(rank as usize)?;
        (self.file.is_some() && slot.pid.load(Ordering::Relaxed) != 0).then_some(slot)
    }

    /// The ranks that have come, and their slots.
    pub fn here(&self) -> impl Iterator<Item = (i32, &'static Slot)> {
        let first = if self.file.is_some() { 0 } else { self.rank as i32 };
        (first..).zip(self.slots).filter(|(_, slot)| slot.pid.load(Ordering::Acquire) != 0)
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
        if let Some((folder, name, _)) = &self.file {
            folder.remove(name);
        }
    }

    /// The bytes of the board, as they are now.
    pub fn bytes(&self) -> Vec<u8> {
        self.path().and_then(|path| fs::read(path).ok()).unwrap_or_default()
    }
}

/// The slots of the board in a file, of a job that may have ended: of a copy in private memory.
pub fn read(path: &Path) -> io::Result<&'static [Slot]> {
    let wrong = |words: &str| io::Error::new(io::ErrorKind::InvalidData, words.to_owned());
    let found = fs::read(path)?;
    let header = size_of::<Header>();
    let count = found.len().saturating_sub(header) / size_of::<Slot>();
    if count == 0 {
        return Err(wrong("it is no board"));
    }
    let memory = Vec::leak(
        std::iter::repeat_with(|| [0u8; 4096]).map(Page).take(found.len().div_ceil(4096)).collect(),
    );
    let start = memory.as_mut_ptr().cast::<u8>();
    // SAFETY: as many bytes as pages have been made for, which are aligned as the structs are.
    unsafe {
        start.copy_from_nonoverlapping(found.as_ptr(), found.len());
        let header = &*start.cast::<Header>();
        if header.magic.load(Ordering::Relaxed) != MAGIC
            || header.size.load(Ordering::Relaxed) as usize != count
        {
            return Err(wrong("it is no board, or one of another build of mpi4jax"));
        }
        Ok(&*slice_from_raw_parts(start.add(size_of::<Header>()).cast(), count))
    }
}

#[repr(C, align(4096))]
struct Page([u8; 4096]);

/// Removes boards of jobs of which no process lives, but the newest ones.
pub fn sweep() {
    let Ok(folder) = Folder::make_one(&place()) else { return };
    let mut dead: Vec<(SystemTime, String)> = fs::read_dir(&folder.path)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let file = folder.file(&name).ok()?;
            flock(&file, FlockOperation::NonBlockingLockExclusive).ok()?;
            Some((file.metadata().ok()?.modified().ok()?, name))
        })
        .filter(|(time, _)| time.elapsed().is_ok_and(|age| age > Duration::from_secs(60)))
        .collect();
    dead.sort();
    let few = dead.len().saturating_sub(KEPT);
    dead[..few].iter().for_each(|(_, name)| folder.remove(name));
}

#[cfg(test)]
mod tests;
