//! How a job is ended.

use std::time::Duration;

use crate::mpilib;
use crate::record::timeline;
use crate::system::launcher::Launcher;

/// The job's exit status where an operation hangs. Not 124, which is timeout(1)'s, nor what shells and signals use.
pub const HUNG: i32 = 97;

/// Ends the job with this status unless the process has ended by itself after so many seconds. `ending` tells the others.
pub fn abort_after(seconds: f64, code: i32, ending: fn()) {
    timeline::flush();
    ending();
    std::thread::spawn(move || {
        std::thread::sleep(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX));
        end_job(code, ending);
    });
}

/// Ends the job. `ending` tells the others, and removes what the job would leave.
pub fn end_job(code: i32, ending: fn()) -> ! {
    // Whatever state MPI is in: launchers end a job of which a process dies.
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(5));
        // SAFETY: ends the process.
        unsafe { libc::_exit(code) };
    });
    let_launcher_read();
    timeline::flush();
    ending();
    mpilib::abort(code);
    // SAFETY: ends the process.
    unsafe { libc::_exit(code) }
}

/// Ends this process, whose launcher has ended before it.
pub fn follow(launcher: &Launcher, words: impl FnOnce(&str), ending: fn()) -> ! {
    timeline::flush();
    words(&format!("{} has ended, and so does this rank", launcher.name()));
    ending();
    // SAFETY: ends the process.
    unsafe { libc::_exit(HUNG) }
}

/// Launchers lose lines that are written just before the end.
pub fn let_launcher_read() {
    std::thread::sleep(Duration::from_millis(200));
}
