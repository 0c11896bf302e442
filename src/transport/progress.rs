//! A thread that lets MPI go on with what was started, while the program computes.
//!
//! MPI moves data when it is called: without somebody who calls it, a large message that was started waits for the wait. The
//! thread sleeps while nothing is under way, and while another thread waits in MPI, which does the same.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::requests::Request;
use crate::comm::Calling;
use crate::error::Cause;
use crate::mpilib;

pub const PROGRESS: &str = "MPI4JAX_PROGRESS";

/// How long it sleeps between two looks at what is under way.
const PAUSE: Duration = Duration::from_micros(50);

#[derive(Default)]
struct Shared {
    under_way: Vec<Arc<Request>>,
    thread: Option<JoinHandle<()>>,
    ended: bool,
}

static SHARED: Mutex<Shared> = Mutex::new(Shared { under_way: Vec::new(), thread: None, ended: false });
static CHANGED: Condvar = Condvar::new();
static WAITING: AtomicUsize = AtomicUsize::new(0);

fn shared() -> MutexGuard<'static, Shared> {
    SHARED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// While there is one, its thread waits in MPI.
pub struct Pause(());

impl Pause {
    pub fn new() -> Self {
        WAITING.fetch_add(1, Ordering::Relaxed);
        Self(())
    }
}

impl Drop for Pause {
    fn drop(&mut self) {
        WAITING.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What the environment asks for; `None` where it says nothing.
fn parse(setting: &str) -> Result<Option<bool>, String> {
    match setting.to_ascii_lowercase().as_str() {
        "" => Ok(None),
        "1" | "true" | "on" | "yes" => Ok(Some(true)),
        "0" | "false" | "off" | "no" => Ok(Some(false)),
        _ => Err(format!("{PROGRESS}={setting} is not understood: it takes 1 and 0")),
    }
}

fn is_wanted() -> Result<bool, String> {
    let setting = std::env::var(PROGRESS).unwrap_or_default();
    let may = mpilib::any_thread_may_call();
    match parse(&setting)? {
        Some(true) if !may => Err(format!(
            "{PROGRESS}={setting}, but MPI was not initialised for calls from any thread \
             (MPI_THREAD_MULTIPLE): set mpi4py.rc.thread_level, or leave {PROGRESS} out"
        )),
        wanted => Ok(wanted.unwrap_or(may)),
    }
}

/// Starts the thread, where there is to be one.
pub fn prepare() -> Result<(), Cause> {
    static WANTED: OnceLock<Result<bool, String>> = OnceLock::new();
    let wanted = WANTED.get_or_init(|| {
        let wanted = is_wanted()?;
        if wanted {
            mpilib::at_finalize(stop).map_err(|cause| cause.to_string())?;
            let thread = std::thread::Builder::new().name("mpi4jax-progress".into()).spawn(run);
            shared().thread = Some(thread.map_err(|error| format!("{PROGRESS}: {error}"))?);
        }
        Ok(wanted)
    });
    wanted.as_ref().map(|_| ()).map_err(|message| Cause::Setting { message: message.clone() })
}

/// Something has been started.
pub fn follow(request: Arc<Request>) {
    let mut shared = shared();
    if shared.thread.is_some() && !shared.ended {
        shared.under_way.push(request);
        CHANGED.notify_one();
    }
}

/// `MPI_Finalize` begins.
fn stop() {
    let thread = {
        let mut shared = shared();
        shared.ended = true;
        shared.under_way.clear();
        CHANGED.notify_one();
        shared.thread.take()
    };
    if let Some(thread) = thread {
        let _ = thread.join();
    }
}

fn run() {
    let mut shared = shared();
    loop {
        while shared.under_way.is_empty() && !shared.ended {
            shared = CHANGED.wait(shared).unwrap_or_else(PoisonError::into_inner);
        }
        if shared.ended {
            return;
        }
        let under_way = shared.under_way.clone();
        drop(shared);
        let mut ended = Vec::new();
        if WAITING.load(Ordering::Relaxed) == 0 {
            let _calling = Calling::new();
            ended.extend(under_way.iter().filter(|request| request.test()).map(Arc::as_ptr));
        }
        drop(under_way);
        std::thread::sleep(PAUSE);
        shared = self::shared();
        shared.under_way.retain(|request| !ended.contains(&Arc::as_ptr(request)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_setting_is_a_word() {
        assert_eq!([parse(""), parse("on"), parse("0")], [Ok(None), Ok(Some(true)), Ok(Some(false))]);
        assert!(parse("2").unwrap_err().contains(PROGRESS));
    }
}
