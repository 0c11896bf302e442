//! A communicator: one object that owns all there is about it.
//!
//! What is made from a communicator, such as a transport's own communicator, is attached to it, and dropped with it: when MPI
//! frees it, or at the beginning of `MPI_Finalize`. This layer knows no more of an attachment than its `Drop`.

mod agreement;
mod calling;
mod freeing;
mod group;
mod guard;
pub mod origin;
mod registry;
mod words;

use std::any::{Any, TypeId};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

use mpi::ffi::{self, MPI_Comm, MPI_Status};

pub use self::agreement::{Agreement, Comparison};
pub use self::calling::{Calling, is_calling};
pub use self::freeing::without_python;
pub use self::group::Group;
pub use self::guard::CommGuard;
pub use self::registry::{free, live, lookup, numbered, register};
pub use self::words::{CommId, CommWords};
pub use crate::board::slot::hash;
use crate::board::{Cell, Entry};
use crate::error::Cause;
use crate::finalize;
use crate::mpilib::{self, check, handle};
use crate::output;
use crate::sync::lock;

/// What has been made from a communicator, of one type.
#[derive(Default)]
struct Attachment {
    /// Locked while a thread makes it, which may wait for other ranks.
    making: Mutex<()>,
    /// Locked for moments only.
    made: Mutex<Option<Arc<dyn Any + Send + Sync>>>,
}

impl Attachment {
    fn made(&self) -> MutexGuard<'_, Option<Arc<dyn Any + Send + Sync>>> {
        lock(&self.made)
    }

    fn find<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        self.made().clone()?.downcast().ok()
    }
}

// SAFETY: all-zero is a value of a cell, whose fields are atomics.
static UNREGISTERED: Cell = unsafe { std::mem::zeroed() };

/// The name of the communicator of operations that are given none, which Python makes.
const DEFAULT: &str = "mpi4jax.default";

/// Whether a communicator of this class is the one of operations that are given none.
pub fn is_default(class: u64) -> bool {
    class == hash(DEFAULT)
}

/// One list for all communicators that have the same members.
fn shared(world: Vec<i32>) -> Arc<[i32]> {
    static LISTS: Mutex<Vec<Weak<[i32]>>> = Mutex::new(Vec::new());
    let mut lists = lock(&LISTS);
    lists.retain(|list| list.strong_count() > 0);
    if let Some(list) = lists.iter().filter_map(Weak::upgrade).find(|list| **list == *world) {
        return list;
    }
    let list: Arc<[i32]> = world.into();
    lists.push(Arc::downgrade(&list));
    list
}

/// A communicator. Compiled programs hold it, also after it has been freed.
pub struct Comm {
    pub key: Box<str>,
    /// Its number among all of this process, for operands. None is used twice.
    pub number: i32,
    /// MPI's handle: a pointer or a 32-bit integer, whichever the library uses.
    handle: usize,
    pub rank: i32,
    pub size: i32,
    /// By rank: the rank in `MPI_COMM_WORLD`. Communicators of the same members share it.
    pub world: Arc<[i32]>,
    /// What its ranks know it by; see [`register`].
    pub id: u64,
    /// Its place in the order in which communicators are detached when MPI ends, which is the same on all ranks, also if a rank does
    /// not know the origin of a communicator that another rank knows.
    order: u64,
    /// A hash of what all members are sure to agree on: the list of members, and whether this is
    /// one of the two communicators that exist only once. It is not unique; `origin` distinguishes
    /// communicators of one class. Names are not included, because they are local to a rank.
    pub class: u64,
    /// Distinguishes the communicator from others of its class; see [`origin`].
    pub origin: u64,
    /// How many of this id there have been in this process, as far as it remembers.
    pub generation: u32,
    /// The collectives that this rank has begun, on the board if there is a place. [`register`] sets it.
    cell: &'static Cell,
    /// How often this rank had duplicated `MPI_COMM_WORLD` when it registered the communicator.
    copies: u64,
    /// What ranks of one board know it by; see `words.rs`.
    shared_id: u64,
    message_key: u64,
    /// The next and the previous rank on the same board: the rank in `MPI_COMM_WORLD` plus one.
    pub near: [AtomicI32; 2],
    words: Entry,
    freed: AtomicBool,
    /// MPI destroys it when nothing that MPI counts uses it any more; see [`CommGuard`].
    is_counted: bool,
    /// What the first operation said that failed on this rank.
    failure: OnceLock<Box<str>>,
    attached: Mutex<Vec<(TypeId, Arc<Attachment>)>>,
}

impl std::fmt::Debug for Comm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, rank {} of {}", self.key, self.rank, self.size)
    }
}

impl Comm {
    /// One of all ranks of a job, without a communicator of MPI's: for tests of what calls no MPI.
    pub fn new(key: &str, rank: i32, size: i32) -> Self {
        // SAFETY: a constant of the MPI shim.
        let null = mpilib::handle_value(unsafe { ffi::RSMPI_COMM_NULL });
        let comm = Self::with_ranks(key, null, (rank, size), shared((0..size).collect()));
        Self { cell: Box::leak(Box::default()), ..comm }
    }

    /// Whether the program has named it; else it has a number, which each rank gives for itself.
    pub fn has_own_name(&self) -> bool {
        !self.key.contains('#')
    }

    /// The handle of a communicator which was live when this was made, or `MPI_COMM_NULL`.
    #[inline]
    pub fn handle(&self) -> MPI_Comm {
        // SAFETY: of `of_mpi` or `new`.
        unsafe { handle(self.handle) }
    }

    fn with_ranks(key: &str, handle: usize, (rank, size): (i32, i32), world: Arc<[i32]>) -> Self {
        static COUNT: AtomicI32 = AtomicI32::new(0);
        Self {
            key: key.into(),
            number: COUNT.fetch_add(1, Ordering::Relaxed),
            handle,
            rank,
            size,
            world,
            id: 0,
            order: 0,
            class: 0,
            origin: origin::UNKNOWN,
            generation: 1,
            cell: &UNREGISTERED,
            copies: 0,
            shared_id: 0,
            message_key: 0,
            near: Default::default(),
            words: Entry::default(),
            freed: AtomicBool::new(false),
            is_counted: false,
            failure: OnceLock::new(),
            attached: Mutex::default(),
        }
        .named(key)
    }

    /// What MPI knows of a communicator. If its errors would abort the job without a message of
    /// mpi4jax, they become error codes; an error handler that its owner chose is left alone.
    /// Local.
    ///
    /// # Safety
    /// `handle` belongs to a live communicator, and MPI is initialized.
    pub unsafe fn of_mpi(key: &str, raw: usize, rank: i32, size: i32) -> Result<Self, Cause> {
        let ranks: Vec<i32> = (0..size).collect();
        let mut world = ranks.clone();
        let mut name = [0u8; 1024];
        // SAFETY: promised by the caller; groups are freed; a name has at most MPI_MAX_OBJECT_NAME bytes, which is 64
        // to 256.
        unsafe {
            let comm: MPI_Comm = handle(raw);
            let mut current = MaybeUninit::uninit();
            check("MPI_Comm_get_errhandler", ffi::MPI_Comm_get_errhandler(comm, current.as_mut_ptr()))?;
            let mut current = current.assume_init();
            let fatal = current == ffi::RSMPI_ERRORS_ARE_FATAL;
            check("MPI_Errhandler_free", ffi::MPI_Errhandler_free(&mut current))?;
            if fatal {
                returns_errors(comm)?;
            }
            let mut length = 0;
            let code = ffi::MPI_Comm_get_name(comm, name.as_mut_ptr().cast(), &mut length);
            check("MPI_Comm_get_name", code)?;
            let (mut ours, mut all) = (MaybeUninit::uninit(), MaybeUninit::uninit());
            check("MPI_Comm_group", ffi::MPI_Comm_group(comm, ours.as_mut_ptr()))?;
            check("MPI_Comm_group", ffi::MPI_Comm_group(ffi::RSMPI_COMM_WORLD, all.as_mut_ptr()))?;
            let (mut ours, mut all) = (ours.assume_init(), all.assume_init());
            ffi::MPI_Group_translate_ranks(ours, size, ranks.as_ptr(), all, world.as_mut_ptr());
            ffi::MPI_Group_free(&mut ours);
            ffi::MPI_Group_free(&mut all);
        }
        let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
        let name = String::from_utf8_lossy(name);
        let mut comm = Self::with_ranks(key, raw, (rank, size), shared(world)).named(&name);
        // SAFETY: constants of the MPI shim.
        let [of_all, of_one] =
            unsafe { [ffi::RSMPI_COMM_WORLD, ffi::RSMPI_COMM_SELF] }.map(mpilib::handle_value);
        if raw == of_all {
            (comm.class, comm.origin) = (hash("MPI_COMM_WORLD"), origin::ONLY_ONE);
        } else if key == DEFAULT && name == DEFAULT {
            (comm.class, comm.origin) = (hash(DEFAULT), origin::ONLY_ONE);
        } else if raw != of_one {
            // SAFETY: promised by the caller.
            comm.origin = unsafe { origin::of(handle(raw)) };
            // The program may free it.
            comm.is_counted = mpilib::may_free_late();
        }
        if raw != of_all && raw != of_one {
            // SAFETY: promised by the caller.
            unsafe { freeing::notice(handle(raw), comm.number)? };
        }
        Ok(comm)
    }

    /// With an id from what its ranks agree on without asking.
    fn named(mut self, name: &str) -> Self {
        (self.id, self.class) = (hash((name, &self.world)), hash(&self.world));
        self.order = self.id;
        self
    }

    /// Whether it is the one of operations that are given none.
    pub fn is_default(&self) -> bool {
        is_default(self.class)
    }

    pub fn is_freed(&self) -> bool {
        self.freed.load(Ordering::Relaxed)
    }

    /// An operation has failed on this rank, without its part in the communication: from now on the ranks are
    /// out of step.
    #[cold]
    pub fn fail(&self, words: &str) {
        let _ = self.failure.set(words.into());
    }

    #[inline]
    pub fn failure(&self) -> Option<&str> {
        self.failure.get().map(AsRef::as_ref)
    }

    /// The rank in `MPI_COMM_WORLD` of a rank of this communicator.
    pub fn world_rank(&self, rank: i32) -> Option<i32> {
        self.world.get(usize::try_from(rank).ok()?).copied()
    }

    fn attachments(&self) -> MutexGuard<'_, Vec<(TypeId, Arc<Attachment>)>> {
        lock(&self.attached)
    }

    /// Looks at what has been attached of this type, which is not dropped meanwhile, and never by who looks at it. `look` waits for
    /// no other rank: who frees the communicator waits for it.
    pub fn look_at<T: Any, R>(&self, look: impl FnOnce(&T) -> R) -> Option<R> {
        let attachments = self.attachments();
        let (_, attachment) = attachments.iter().find(|(kind, _)| *kind == TypeId::of::<T>())?;
        let attachment = attachment.clone();
        drop(attachments);
        attachment.made().as_ref().and_then(|made| made.downcast_ref()).map(look)
    }

    /// What has been attached of this type, else what `make` makes, which may be collective.
    pub fn attach<T: Any + Send + Sync, E>(&self, make: impl FnOnce() -> Result<T, E>) -> Result<Arc<T>, E> {
        let kind = TypeId::of::<T>();
        let mut attachments = self.attachments();
        let place = attachments.iter().position(|(other, _)| *other == kind).unwrap_or_else(|| {
            attachments.push((kind, Arc::default()));
            attachments.len() - 1
        });
        let attachment = attachments[place].1.clone();
        // Not under this lock: `make` waits for other ranks, and the watchdog looks at attachments.
        drop(attachments);
        if let Some(found) = attachment.find() {
            return Ok(found);
        }
        // If two threads made it, and only one of another rank's, one of the two would wait forever.
        let _making = lock(&attachment.making);
        if let Some(found) = attachment.find() {
            return Ok(found);
        }
        let _calling = Calling::new();
        let made = Arc::new(make()?);
        let mut attached = attachment.made();
        // Where it is freed from now on, this is found.
        if !self.is_freed() {
            *attached = Some(made.clone());
        }
        Ok(made)
    }

    /// Drops what was made from it, the last one first. All ranks have attached in the same order.
    fn detach(&self) {
        let _calling = Calling::new();
        let attachments = std::mem::take(&mut *self.attachments());
        for (_, attachment) in attachments.iter().rev() {
            // What is being made now is not attached, because the communicator is freed.
            let made = attachment.made().take();
            drop(made);
        }
    }

    /// Source and tag of a message that has arrived and was not received.
    pub fn unreceived(&self) -> Option<(i32, i32)> {
        if self.is_freed() || !mpilib::is_running() {
            return None;
        }
        let mut status = MaybeUninit::<MPI_Status>::zeroed();
        let mut found = 0;
        // SAFETY: a registered communicator, which is not freed, between MPI_Init and MPI_Finalize; the status
        // is written where a message is found.
        unsafe {
            let (source, tag) = (ffi::RSMPI_ANY_SOURCE, ffi::RSMPI_ANY_TAG);
            // MPI may need a few calls to take in what has arrived.
            for _ in 0..10 {
                let code = ffi::MPI_Iprobe(source, tag, self.handle(), &mut found, status.as_mut_ptr());
                if code != 0 || found != 0 {
                    break;
                }
            }
            let status = status.assume_init();
            (found != 0).then_some((status.MPI_SOURCE, status.MPI_TAG))
        }
    }

    /// Prints a fatal error and aborts the job, because the other ranks wait for this one.
    #[cold]
    pub fn abort(&self, code: i32, why: &str) -> ! {
        let code = if code == 0 { 1 } else { code };
        output::print(&format!("r{} | {why}\n", self.rank));
        // SAFETY: the handle is a registered communicator's.
        unsafe { ffi::MPI_Abort(self.handle(), code) };
        std::process::abort()
    }

    /// Another communicator of the same ranks, in the order of `key`. Collective.
    ///
    /// Not a duplicate: that would have the attributes of its owner's libraries too.
    pub fn split(&self, key: i32) -> Result<OwnedComm, Cause> {
        let mut new = MaybeUninit::<MPI_Comm>::uninit();
        // SAFETY: the handle was registered as a communicator's; what is made belongs to the result.
        unsafe {
            check("MPI_Comm_split", ffi::MPI_Comm_split(self.handle(), 0, key, new.as_mut_ptr()))?;
            let made = OwnedComm(mpilib::handle_value(new.assume_init()));
            returns_errors(made.handle())?;
            Ok(made)
        }
    }
}

/// # Safety
/// `comm` is live.
unsafe fn returns_errors(comm: MPI_Comm) -> Result<(), Cause> {
    // SAFETY: promised by the caller.
    check("MPI_Comm_set_errhandler", unsafe { ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN) })
}

/// A communicator of ours. Freed when it is dropped, which is collective; the end of MPI frees it too.
#[derive(Debug)]
pub struct OwnedComm(usize);

impl OwnedComm {
    pub fn handle(&self) -> MPI_Comm {
        // SAFETY: from `handle_value`.
        unsafe { handle(self.0) }
    }
}

impl Drop for OwnedComm {
    fn drop(&mut self) {
        if mpilib::is_running() && !finalize::is_ending() {
            // SAFETY: made by `split`, and in no other place.
            unsafe { ffi::MPI_Comm_free(&mut self.handle()) };
        }
    }
}
