//! The threads of this process, and in which library each began: glibc keeps the function in the thread's descriptor, which lies
//! at the upper end of its stack. Where in the descriptor that is, a thread of our own shows.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;
use std::time::Duration;

use super::os::of_thread;
use super::thread::Thread;

/// What glibc remembers of a thread, in bytes from its descriptor on, whose address is its `pthread_t`.
#[derive(Clone, Copy, Debug)]
struct Layout {
    number: usize,
    /// Its first function; the argument follows.
    function: usize,
}

/// How much of a descriptor is looked at, and of a stack above what its thread uses.
const DESCRIPTOR: usize = 4096;
const STACK: usize = 1 << 20;
const WORD: usize = size_of::<usize>();

/// Reads memory of this process; less where it ends. What is not there any more is no fault.
fn read(address: usize, length: usize) -> Vec<u8> {
    static MEMORY: OnceLock<Option<File>> = OnceLock::new();
    let mut bytes = vec![0; length];
    let file = MEMORY.get_or_init(|| File::open("/proc/self/mem").ok()).as_ref();
    let count = file.and_then(|file| file.read_at(&mut bytes, address as u64).ok()).unwrap_or(0);
    bytes.truncate(count);
    bytes
}

fn word(bytes: &[u8], at: usize) -> Option<usize> {
    Some(usize::from_ne_bytes(bytes.get(at..at + WORD)?.try_into().ok()?))
}

fn number(bytes: &[u8], at: usize) -> Option<i32> {
    Some(i32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

extern "C" fn find_layout(found: *mut libc::c_void) -> *mut libc::c_void {
    // SAFETY: plain calls.
    let (descriptor, own) = unsafe { (libc::pthread_self() as usize, libc::gettid()) };
    let bytes = read(descriptor, DESCRIPTOR);
    let pair = (find_layout as *const () as usize, found as usize);
    let places = || (0..bytes.len()).step_by(4);
    let is_start = |&at: &usize| word(&bytes, at).zip(word(&bytes, at + WORD)) == Some(pair);
    let number = places().find(|&at| number(&bytes, at) == Some(own));
    let function = places().find(is_start);
    // SAFETY: `layout` waits for this thread.
    unsafe { *found.cast() = number.zip(function).map(|(number, function)| Layout { number, function }) };
    std::ptr::null_mut()
}

/// Where things are in a descriptor; None: this is not glibc, or one of another kind.
fn layout() -> Option<Layout> {
    static LAYOUT: OnceLock<Option<Layout>> = OnceLock::new();
    *LAYOUT.get_or_init(|| {
        let mut found: Option<Layout> = None;
        // SAFETY: the thread has ended before `found` goes out of scope.
        unsafe {
            let mut thread = std::mem::zeroed();
            let found = (&raw mut found).cast();
            if libc::pthread_create(&mut thread, std::ptr::null(), find_layout, found) == 0 {
                libc::pthread_join(thread, std::ptr::null_mut());
            }
        }
        found
    })
}

/// The number of a thread that lives, by its `pthread_t`.
pub fn number_of(descriptor: u64) -> Option<i32> {
    number(&read(descriptor as usize + layout()?.number, 4), 0)
}

/// The files in memory, by the addresses at which they begin and end.
struct Files(Vec<(usize, usize, String)>);

impl Files {
    fn new() -> Self {
        let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let line = |line: &str| {
            let (range, rest) = line.split_once(' ')?;
            let (first, end) = range.split_once('-')?;
            let address = |text| usize::from_str_radix(text, 16).ok();
            let file = &rest[rest.find('/')?..];
            Some((address(first)?, address(end)?, file.trim_end_matches(" (deleted)").to_owned()))
        };
        Self(maps.lines().filter_map(line).collect())
    }

    fn of(&self, address: usize) -> Option<&str> {
        let place = self.0.partition_point(|(_, end, _)| *end <= address);
        let (first, _, file) = self.0.get(place)?;
        (*first <= address).then_some(file)
    }

    /// The file in which a thread began whose first function and argument these are.
    fn of_thread(&self, (function, argument): (usize, usize)) -> Option<String> {
        let file = self.of(function)?;
        if !file.contains("/libstdc++.so") {
            return Some(file.to_owned());
        }
        // `std::thread` gives its function an object, whose class is in the library that has started the thread.
        let class = word(&read(argument, WORD), 0)?;
        self.of(class).map(str::to_owned)
    }
}

/// The first function of a thread and its argument, from above what it uses of its stack.
fn start_of(thread: i32, used: usize, layout: Layout) -> Option<(usize, usize)> {
    let stack = read(used & !0xf, STACK);
    let is_it = |&at: &usize| {
        let describes_itself =
            !cfg!(target_arch = "x86_64") || word(&stack, at + 2 * WORD) == Some((used & !0xf) + at);
        number(&stack, at + layout.number) == Some(thread) && describes_itself
    };
    let at = (0..stack.len()).step_by(16).find(is_it)?;
    word(&stack, at + layout.function).zip(word(&stack, at + layout.function + WORD))
}

/// The system call that a thread is in, and what it uses of its stack. None: it runs.
fn call(thread: i32) -> Option<(i64, usize)> {
    let text = of_thread(thread, "syscall")?;
    let words: Vec<&str> = text.split_whitespace().collect();
    let stack = words.get(words.len().checked_sub(2)?)?;
    Some((words[0].parse().ok()?, usize::from_str_radix(stack.strip_prefix("0x")?, 16).ok()?))
}

fn is_sleep((call, _): &(i64, usize)) -> bool {
    SLEEPS.contains(call) || OLD.contains(call)
}

/// The file whose code waits for a futex, if it has called the system by libc's `syscall`, as XLA's locks do: where the function returns
/// to is then the first thing on the stack. On other processors it is in a register.
pub fn calling_file(thread: i32) -> Option<String> {
    let text = of_thread(thread, "syscall").filter(|_| cfg!(target_arch = "x86_64"))?;
    text.split(' ').next().filter(|call| call.parse() == Ok(libc::SYS_futex))?;
    let mut words = text.split_whitespace().rev();
    let mut address = || usize::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok();
    let (at, stack) = (address()?, address()?);
    // How long the function is, in bytes, at most.
    const LENGTH: usize = 40;
    at.checked_sub(libc::syscall as *const () as usize).filter(|&inside| inside < LENGTH)?;
    Files::new().of(word(&read(stack, WORD), 0)?).map(str::to_owned)
}

/// The threads of this process but these; None: they cannot be examined. One that has ended meanwhile is none.
pub fn threads(besides: &[i32]) -> Option<Vec<Thread>> {
    let layout = layout().filter(|_| of_thread(std::process::id() as i32, "syscall").is_some())?;
    let mut files = None;
    let all = fs::read_dir("/proc/self/task").ok()?.flatten();
    let numbers = all.filter_map(|thread| thread.file_name().to_str()?.parse().ok());
    let others = numbers.filter(|thread| !besides.contains(thread));
    Some(others.filter_map(|thread| of(thread, layout, &mut files)).collect())
}

fn of(thread: i32, layout: Layout, files: &mut Option<Files>) -> Option<Thread> {
    let name = of_thread(thread, "comm")?.trim_end().to_owned();
    let mut now = call(thread);
    // What runs once may have just been asked.
    for _ in 0..2 {
        if !now.as_ref().is_some_and(is_sleep) {
            std::thread::sleep(Duration::from_millis(5));
            now = call(thread).or(now);
        }
    }
    let start = now.and_then(|(_, stack)| start_of(thread, stack, layout));
    let file = start.and_then(|start| files.get_or_insert_with(Files::new).of_thread(start));
    let signals = of_thread(thread, "status")?;
    let blocked = signals.lines().find_map(|line| line.strip_prefix("SigBlk:")).map(str::trim);
    // All but SIGKILL, SIGSTOP, and those that glibc keeps for itself.
    let blocks_signals = blocked == Some("fffffffe7ffbfeff");
    Some(Thread { number: thread, name, sleeps: now.as_ref().is_some_and(is_sleep), blocks_signals, file })
}

#[cfg(target_arch = "x86_64")]
const OLD: [i64; 3] = [libc::SYS_epoll_wait, libc::SYS_poll, libc::SYS_select];
#[cfg(not(target_arch = "x86_64"))]
const OLD: [i64; 0] = [];
/// Calls in which a thread waits for something that comes.
const SLEEPS: [i64; 6] = [
    libc::SYS_futex,
    libc::SYS_epoll_pwait,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
];

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_thread_is_found_with_the_file_that_it_began_in() {
        let (send, receive) = mpsc::channel();
        let (done, wait) = mpsc::channel::<()>();
        let sleeper = std::thread::Builder::new().name("a-sleeper".into()).spawn(move || {
            // SAFETY: takes nothing.
            send.send(unsafe { (libc::gettid(), libc::pthread_self() as u64) }).unwrap();
            let _ = wait.recv();
        });
        let (number, descriptor) = receive.recv().unwrap();
        assert_eq!(number_of(descriptor), Some(number));
        let own = std::env::current_exe().unwrap();
        let found = || threads(&[]).unwrap().into_iter().find(|thread| thread.number == number).unwrap();
        while !found().sleeps {}
        let thread = found();
        assert_eq!((&*thread.name, thread.file.as_deref()), ("a-sleeper", own.to_str()));
        assert!(!thread.blocks_signals);
        assert_eq!(calling_file(number).as_deref(), own.to_str().filter(|_| cfg!(target_arch = "x86_64")));
        assert!(threads(&[number]).unwrap().iter().all(|thread| thread.number != number));
        drop(done);
        sleeper.unwrap().join().unwrap();
    }
}
