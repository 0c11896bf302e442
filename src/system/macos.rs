//! Processes on macOS.

use std::ffi::{CStr, c_int};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime};

use super::process::{Info, ProcessState};

/// `PROC_FLAG_TRACED` of sys/proc_info.h.
const TRACED: u32 = 2;

/// What the system says of a process of this user's.
fn bsd_info(pid: i32) -> Option<libc::proc_bsdinfo> {
    // The call also finds zombies.
    const WITH_ZOMBIES: u64 = 1;
    let size = size_of::<libc::proc_bsdinfo>() as c_int;
    // SAFETY: all-zero is a valid value of these integers; the call writes no more bytes than it is
    // told.
    unsafe {
        let mut info = std::mem::zeroed::<libc::proc_bsdinfo>();
        let into = (&raw mut info).cast();
        (libc::proc_pidinfo(pid, libc::PROC_PIDTBSDINFO, WITH_ZOMBIES, into, size) == size).then_some(info)
    }
}

/// macOS has no path to a file that was removed.
pub fn removed(_: &Path) -> Option<PathBuf> {
    None
}

/// What the system knows of a process.
pub fn info(pid: i32) -> Option<Info> {
    let info = bsd_info(pid)?;
    let state = match info.pbi_status {
        libc::SZOMB => ProcessState::Ended,
        libc::SSTOP => ProcessState::Stopped,
        _ => ProcessState::Runs,
    };
    // `pbi_name` holds names of up to 31 bytes, `pbi_comm` of up to 15.
    let name = info.pbi_name.iter().take_while(|&&byte| byte != 0).map(|&byte| byte as u8).collect();
    Some(Info {
        name: String::from_utf8(name).unwrap_or_default(),
        parent: info.pbi_ppid as i32,
        state,
        start: info.pbi_start_tvsec * 1_000_000 + info.pbi_start_tvusec,
    })
}

/// Within what numbers of processes are unique: this start of the machine; empty where that is not known.
#[cfg_attr(feature = "python", pyo3::pyfunction(name = "process_space"))]
pub fn space() -> String {
    let mut text = [0u8; 64];
    let mut size = text.len();
    let name = c"kern.bootsessionuuid".as_ptr();
    // SAFETY: a name that ends, and as many bytes of ours as the call is told.
    let code =
        unsafe { libc::sysctlbyname(name, text.as_mut_ptr().cast(), &mut size, std::ptr::null_mut(), 0) };
    let text = CStr::from_bytes_until_nul(&text).ok().filter(|_| code == 0);
    text.map(|text| text.to_string_lossy().into()).unwrap_or_default()
}

/// The time of a start, which the system gives in microseconds since 1970.
pub fn time_of(start: u64) -> Option<SystemTime> {
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_micros(start))
}

/// Whether a debugger is attached to a process.
pub fn is_traced(pid: i32) -> bool {
    bsd_info(pid).is_some_and(|info| info.pbi_flags & TRACED != 0)
}

/// The threads of this process, with their processor time: not known here.
pub fn threads() -> Vec<(i32, String, f64)> {
    Vec::new()
}

/// Waits at most `seconds` until a number is changed.
pub fn wait(number: &AtomicU32, seen: u32, seconds: f64) {
    let begin = Instant::now();
    while number.load(Ordering::Acquire) == seen && begin.elapsed().as_secs_f64() < seconds {
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Who waits looks by itself.
pub fn wake(_number: &AtomicU32) {}
