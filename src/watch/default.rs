//! The default communicator, which is made when a rank first needs it, of all ranks of the job.
//!
//! Where all ranks are on one host, they need not be at the same place of the program: a rank asks for it on the board, and the
//! others take part in a thread, whatever they do meanwhile. `MPI_Comm_create_group` matches by a tag, so it is in no order with what
//! the program does on `MPI_COMM_WORLD`. Once a rank has come to its end, `MPI_COMM_WORLD` takes its place. On several hosts, and if
//! a rank has no place on the board, all ranks make it together.

use std::ffi::CString;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use mpi::ffi::{self, MPI_Comm, MPI_Group};

use super::settings::{self, Watchdog, watchdog};
use super::{link, waits};
use crate::board::ranks::Ranks;
use crate::board::{Life, Once, TOGETHER, board};
use crate::comm::{Group, hash};
use crate::error::Cause;
use crate::mpilib::{any_thread_may_call, check, create_group, handle_value, is_running};
use crate::output::print;
use crate::sync::lock;

const NAME: &str = "mpi4jax.default";
/// How the default communicator is made: by ranks that need not be at one place of the program; [`TOGETHER`]; or not at all.
const CLONE: u32 = 1;
const WORLD: u32 = 3;
/// No other library uses this tag for what it makes of groups.
const TAG: i32 = 0x6d70;
/// The shortest and the longest interval at which a rank looks whether the others have come.
const PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(25)];

/// The handle, once it is made. Locked while a thread makes it.
static MADE: OnceLock<usize> = OnceLock::new();
static MAKING: Mutex<()> = Mutex::new(());

/// Whether the ranks need not be at the same place of the program.
fn is_apart(watchdog: &Watchdog) -> bool {
    let is_known = || board().header().default.load(Ordering::Acquire) != TOGETHER;
    board().is_shared() && watchdog.settings.on_one_host && is_known()
}

/// The handle of the default communicator. None: it is `MPI_COMM_WORLD`.
pub fn make() -> Result<Option<usize>, Cause> {
    let Some(watchdog) = watchdog().filter(|watchdog| watchdog.settings.size > 1) else {
        return join(false).map(Some);
    };
    let all = Ranks::all(watchdog.settings.size);
    waits::enter("the creation of the default communicator (by all ranks)".into(), all);
    let made = if is_apart(watchdog) { make_apart(watchdog) } else { make_together(watchdog) };
    waits::leave();
    made
}

fn make_together(watchdog: &Watchdog) -> Result<Option<usize>, Cause> {
    say_refused(watchdog);
    let settings = &watchdog.settings;
    // A number shared by exactly those ranks that see one board.
    let place = board().path().map(|path| (path, crate::system::host()));
    let alone = place.is_none().then_some(settings.rank);
    let own = [link::own_host(hash((place, alone))), settings::hash_of(settings)];
    // Not on `MPI_COMM_WORLD`: Open MPI sends messages in the first collective of a communicator, and the program's follow on this one.
    let default = join(true)?;
    let (hosts, hashes): (Vec<_>, Vec<_>) =
        Group::Handle(default).all_pairs(own)?.into_iter().map(|[host, hash]| (host, hash)).unzip();
    link::open(&hosts, settings.rank)?;
    if hashes.iter().any(|hash| *hash != own[1]) {
        settings::compare_all(settings)?;
    }
    Ok(Some(default))
}

fn make_apart(watchdog: &Watchdog) -> Result<Option<usize>, Cause> {
    let default = &board().header().default;
    if default.compare_exchange(0, CLONE, Ordering::AcqRel, Ordering::Acquire) == Err(WORLD) {
        // This rank's settings may ask all ranks to start a transport together, which a rank that has finished cannot do.
        return compare(watchdog).map(|()| None);
    }
    if MADE.get().is_none() {
        board().ring_all();
        let mut pause = PAUSES[0];
        while !have_all_come(watchdog) {
            if !is_apart(watchdog) {
                return make_together(watchdog);
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(PAUSES[1]);
        }
        compare(watchdog)?;
    }
    join(false).map(Some)
}

/// Fails if the settings of ranks of this host differ that must be the same on all ranks.
fn compare(watchdog: &Watchdog) -> Result<(), Cause> {
    let difference = settings::difference_among(0..watchdog.settings.size);
    difference.map_or(Ok(()), |message| Err(Cause::Setting { message }))
}

/// Says if a rank of this host cannot use this board. That rank says why.
fn say_refused(watchdog: &Watchdog) {
    let is_refused = board().is_shared() && board().header().default.load(Ordering::Acquire) == TOGETHER;
    if is_refused && board().is_first_to(Once::Refused) {
        print(&format!(
            "r{} | mpi4jax: a rank of this job cannot use the board of this rank, perhaps because it runs another build of mpi4jax; \
             the job runs, but these ranks do not know of each other: deadlocks and different operations are not reported\n",
            watchdog.settings.rank
        ));
    }
}

fn have_all_come(watchdog: &Watchdog) -> bool {
    board().here().count() == watchdog.settings.size as usize
}

/// Takes part in making the communicator: `together` with all ranks, in program order, or when this rank can.
fn join(together: bool) -> Result<usize, Cause> {
    let _making = lock(&MAKING);
    if let Some(&made) = MADE.get() {
        return Ok(made);
    }
    let mut new = MaybeUninit::<MPI_Comm>::uninit();
    // SAFETY: MPI is running, constants of the MPI shim; groups are freed; what is written is read after a success.
    let new = unsafe {
        let world = ffi::RSMPI_COMM_WORLD;
        if together {
            check("MPI_Comm_dup", ffi::MPI_Comm_dup(world, new.as_mut_ptr()))?;
        } else {
            let mut all = MaybeUninit::<MPI_Group>::uninit();
            check("MPI_Comm_group", ffi::MPI_Comm_group(world, all.as_mut_ptr()))?;
            let mut all = all.assume_init();
            let code = create_group(world, all, TAG, new.as_mut_ptr());
            ffi::MPI_Group_free(&mut all);
            check("MPI_Comm_create_group", code)?;
        }
        let new = new.assume_init();
        let name = CString::new(NAME).unwrap_or_default();
        check("MPI_Comm_set_name", ffi::MPI_Comm_set_name(new, name.as_ptr()))?;
        handle_value(new)
    };
    Ok(*MADE.get_or_init(|| new))
}

/// Takes part in a thread if another rank needs the communicator, unless this rank already has.
pub fn serve(watchdog: &'static Watchdog) {
    static SERVES: AtomicBool = AtomicBool::new(false);
    say_refused(watchdog);
    let is_wanted = board().header().default.load(Ordering::Acquire) == CLONE && MADE.get().is_none();
    if is_wanted
        && is_apart(watchdog)
        && any_thread_may_call()
        && crate::board::own().life() == Life::Runs
        && have_all_come(watchdog)
        && !SERVES.swap(true, Ordering::AcqRel)
    {
        let thread = std::thread::Builder::new().name("mpi4jax-default".into());
        let _ = thread.spawn(|| join(false));
    }
}

/// `MPI_Finalize` begins: takes part where a rank has asked for it. Ranks that ask later have `MPI_COMM_WORLD` in its place.
pub fn finish(watchdog: &Watchdog) {
    if watchdog.settings.size > 1 && is_running() && is_apart(watchdog) {
        let default = &board().header().default;
        let asked = default.compare_exchange(0, WORLD, Ordering::AcqRel, Ordering::Acquire);
        if asked == Err(CLONE) {
            let _ = join(false);
        }
    }
}
