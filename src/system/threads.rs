//! What the system says of the threads of this process. Where it is not Linux, nothing is known.

#[cfg(target_os = "linux")]
pub use self::linux::{is_idle, runs, sleeps_for_thread, threads};
#[cfg(not(target_os = "linux"))]
pub use self::unknown::{is_idle, runs, sleeps_for_thread, threads};

#[cfg(target_os = "linux")]
mod linux {
    use std::fs;
    use std::time::Duration;

    fn read(thread: i32, what: &str) -> Option<String> {
        fs::read_to_string(format!("/proc/self/task/{thread}/{what}")).ok()
    }

    pub fn threads() -> Vec<i32> {
        let entries = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
    }

    /// How often a thread has been given a processor.
    pub fn runs(thread: i32) -> Option<u64> {
        let status = read(thread, "status")?;
        let switches = status
            .lines()
            .filter_map(|line| line.split_once("_ctxt_switches:")?.1.trim().parse::<u64>().ok());
        Some(switches.sum())
    }

    /// The system call that a thread is in, and its fourth argument.
    fn call(thread: i32) -> Option<(i64, String)> {
        let text = read(thread, "syscall")?;
        let mut words = text.split(' ');
        Some((words.next()?.parse().ok()?, words.nth(3)?.to_owned()))
    }

    /// Whether it sleeps until another thread of this process wakes it, without a time-out.
    pub fn sleeps_for_thread(thread: i32) -> bool {
        call(thread).is_some_and(|(call, timeout)| call == libc::SYS_futex && timeout == "0x0")
    }

    /// Whether a thread, which is none of Python's, sleeps for something that comes.
    pub fn is_idle(thread: i32) -> bool {
        #[cfg(target_arch = "x86_64")]
        const OLD: [i64; 3] = [libc::SYS_epoll_wait, libc::SYS_poll, libc::SYS_select];
        #[cfg(not(target_arch = "x86_64"))]
        const OLD: [i64; 0] = [];
        const SLEEPS: [i64; 6] = [
            libc::SYS_futex,
            libc::SYS_epoll_pwait,
            libc::SYS_ppoll,
            libc::SYS_pselect6,
            libc::SYS_recvfrom,
            libc::SYS_recvmsg,
        ];
        // One that has ended meanwhile does nothing either. What runs once may have just been asked.
        (0..3).any(|_| {
            let name = read(thread, "comm");
            let is_ours = name.as_ref().is_none_or(|name| name.starts_with("mpi4jax-"));
            let sleeps =
                || call(thread).is_some_and(|(call, _)| SLEEPS.contains(&call) || OLD.contains(&call));
            is_ours || sleeps() || {
                std::thread::sleep(Duration::from_millis(5));
                false
            }
        })
    }
}

#[cfg(not(target_os = "linux"))]
mod unknown {
    pub fn threads() -> Vec<i32> {
        Vec::new()
    }

    pub fn runs(_: i32) -> Option<u64> {
        None
    }

    pub fn sleeps_for_thread(_: i32) -> bool {
        false
    }

    pub fn is_idle(_: i32) -> bool {
        false
    }
}
