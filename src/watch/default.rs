//! The default communicator, which is made when a rank first needs it, of all ranks of the job.
//!
//! Where all ranks are on one host, they need not be at the same place of the program: a rank asks for it on the board, and the
//! others take part in a thread, whatever they do meanwhile. `MPI_Comm_create_group` matches by a tag, so it is in no order with what
//! the program does on `MPI_COMM_WORLD`. A rank that has come to its end stays until it is known whether it is needed. On several
//! hosts all ranks make it together.

use std::ffi::CString;
use std::mem::MaybeUninit;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use mpi::ffi::{self, MPI_Comm, MPI_Group};

use super::settings::{self, Watchdog, watchdog};
use super::{link, waits};
use crate::board::{Life, board};
use crate::comm::hash;
use crate::error::Cause;
use crate::finalize::are_others_deleted_last;
use crate::mpilib::{any_thread_may_call, check, create_group, handle_value, is_running};
use crate::sync::lock;

const NAME: &str = "mpi4jax.default";
/// How it is made: of all ranks, or not at all: `MPI_COMM_WORLD` takes its place.
const CLONE: u32 = 1;
const WORLD: u32 = 2;
/// No other library uses this tag for what it makes of groups.
const TAG: i32 = 0x6d70;
/// Ranks that import the package when they start, as most do, have come so long after each other at most.
const COMING: Duration = Duration::from_secs(5);
/// How often a rank lets MPI go on while it waits, at most and at least.
const PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(250)];

/// The handle, once it is made.
static MADE: Mutex<Option<usize>> = Mutex::new(None);
static IS_MADE: AtomicBool = AtomicBool::new(false);

/// Whether the ranks need not be at the same place of the program.
fn is_apart(watchdog: &Watchdog) -> bool {
    board().is_shared() && watchdog.settings.on_one_host
}

/// The handle of the default communicator. None: it is `MPI_COMM_WORLD`.
pub fn make() -> Result<Option<usize>, Cause> {
    let Some(watchdog) = watchdog().filter(|watchdog| watchdog.settings.size > 1) else {
        return join(false).map(Some);
    };
    waits::enter("the creation of the default communicator (by all ranks)");
    let made = if is_apart(watchdog) { make_apart(watchdog) } else { make_together(watchdog) };
    waits::leave();
    made
}

fn make_together(watchdog: &Watchdog) -> Result<Option<usize>, Cause> {
    let settings = &watchdog.settings;
    // SAFETY: MPI is running, and all ranks do this.
    let world = handle_value(unsafe { ffi::RSMPI_COMM_WORLD });
    // A number shared by exactly those ranks that see one board.
    let place = board().path().map(|path| (path, crate::system::host()));
    let alone = place.is_none().then_some(settings.rank);
    // SAFETY: as above.
    unsafe { link::open(world, hash((place, alone)), (settings.rank, settings.size))? };
    settings::compare_all(settings)?;
    join(true).map(Some)
}

fn make_apart(watchdog: &Watchdog) -> Result<Option<usize>, Cause> {
    let default = &board().header().default;
    if default.compare_exchange(0, CLONE, Ordering::AcqRel, Ordering::Acquire) == Err(WORLD) {
        return Ok(None);
    }
    if !IS_MADE.load(Ordering::Acquire) {
        board().ring_all();
        let mut pause = PAUSES[0];
        while !have_all_come(watchdog) {
            std::thread::sleep(pause);
            pause = (2 * pause).min(PAUSES[1] / 10);
        }
        if let Some(message) = settings::difference_among(0..watchdog.settings.size) {
            return Err(Cause::Setting { message });
        }
    }
    join(false).map(Some)
}

fn have_all_come(watchdog: &Watchdog) -> bool {
    board().here().count() == watchdog.settings.size as usize
}

/// Takes part in the making. Of all ranks `together`, in the order of what the program does, or each when it can.
fn join(together: bool) -> Result<usize, Cause> {
    let mut made = lock(&MADE);
    if let Some(made) = *made {
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
    *made = Some(new);
    IS_MADE.store(true, Ordering::Release);
    Ok(new)
}

/// Another rank may need it: takes part in a thread, unless this rank has.
pub fn serve(watchdog: &'static Watchdog) {
    static SERVES: AtomicBool = AtomicBool::new(false);
    let is_wanted =
        board().header().default.load(Ordering::Acquire) == CLONE && !IS_MADE.load(Ordering::Acquire);
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

/// `MPI_Finalize` begins: waits until no rank is left that might need it, or takes part. A rank whose delete functions may still
/// communicate does not wait, because another rank may wait for what those do.
pub fn finish(watchdog: &Watchdog) {
    if watchdog.settings.size == 1 || !is_running() || !is_apart(watchdog) {
        return;
    }
    let header = board().header();
    let give_up = || header.default.compare_exchange(0, WORLD, Ordering::AcqRel, Ordering::Acquire);
    let is_over = |(_, slot): (i32, &crate::board::Slot)| {
        let (pid, start) = (slot.pid.load(Ordering::Relaxed), slot.start.load(Ordering::Relaxed));
        slot.life() >= Life::Finalizing || crate::system::process::state(pid as i32, start).is_none()
    };
    let (mut pause, mut seen, mut looks) = (PAUSES[0], u32::MAX, 0);
    while header.default.load(Ordering::Acquire) == 0 {
        let lives = header.lives.load(Ordering::Acquire);
        // Ranks that die change nothing there.
        if lives != seen || looks % 40 == 0 {
            seen = lives;
            let may_come = !have_all_come(watchdog) && watchdog.started.elapsed() < COMING;
            if are_others_deleted_last() || (!may_come && board().here().all(is_over)) {
                let _ = give_up();
            }
        }
        looks += 1;
        let_mpi_go_on();
        std::thread::sleep(pause);
        pause = (2 * pause).min(PAUSES[1]);
    }
    if header.default.load(Ordering::Acquire) == CLONE && !IS_MADE.load(Ordering::Acquire) {
        pause = PAUSES[0];
        while !have_all_come(watchdog) {
            let_mpi_go_on();
            std::thread::sleep(pause);
            pause = (2 * pause).min(PAUSES[1]);
        }
        let _ = join(false);
    }
}

/// Others may wait for MPI to go on in this process.
fn let_mpi_go_on() {
    let (mut found, mut status) = (0, MaybeUninit::zeroed());
    // SAFETY: between MPI_Init and MPI_Finalize.
    unsafe {
        let (source, tag) = (ffi::RSMPI_ANY_SOURCE, ffi::RSMPI_ANY_TAG);
        ffi::MPI_Iprobe(source, tag, ffi::RSMPI_COMM_SELF, &mut found, status.as_mut_ptr());
    }
}
