//! Where Python's main thread is. A thread of Python's says it, which holds Python's lock meanwhile, so that no frame
//! changes under it. If C code keeps the lock, that thread cannot, and Python's [`faulthandler`] writes it.

use std::os::fd::RawFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use super::faulthandler;
use super::frames::{self, Frame};

/// The socket at whose other end a thread of Python's answers.
static ANSWERS: Mutex<Option<RawFd>> = Mutex::new(None);

/// For how long it is waited for, in steps: a process that is stopped and goes on has waited for one of them.
const STEPS: usize = 50;
const STEP_MILLISECONDS: libc::c_int = 10;

/// A thread of Python's reads numbers from the other end of this socket, which stays open, and answers with each number
/// and where the main thread is, as [`frames`] reads it.
pub fn use_answers(socket: RawFd) {
    *ANSWERS.lock().unwrap() = Some(socket);
}

/// Where the main thread is in Python.
pub fn python() -> Vec<Frame> {
    // One at a time: whoever waits may not take another's answer.
    let answers = ANSWERS.lock().unwrap();
    let Some(socket) = *answers else { return Vec::new() };
    // Not the faulthandler first: where Python runs, what it reads may be half of a frame. After half a second
    // without an answer, C code has the lock, and no frame changes, unless the thread has had no time.
    let text = ask(socket).or_else(faulthandler::stack).unwrap_or_default();
    frames::python_frames(&String::from_utf8_lossy(&text))
}

/// What the thread answers, if it gets Python's lock in time.
fn ask(socket: RawFd) -> Option<Vec<u8>> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed).to_ne_bytes();
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the buffer is ours. If the socket is full, older questions wait for the lock.
    unsafe { libc::send(socket, number.as_ptr().cast(), number.len(), flags) };
    let mut bytes = vec![0u8; 1 << 16];
    for _ in 0..STEPS {
        let mut poll = libc::pollfd { fd: socket, events: libc::POLLIN, revents: 0 };
        // SAFETY: a struct and a buffer of ours, of the length that is given.
        let length = unsafe {
            if libc::poll(&mut poll, 1, STEP_MILLISECONDS) <= 0 {
                continue;
            }
            libc::recv(socket, bytes.as_mut_ptr().cast(), bytes.len(), libc::MSG_DONTWAIT)
        };
        // Answers to older questions may come first.
        if let Some(text) = bytes[..usize::try_from(length).ok()?].strip_prefix(&number) {
            return Some(text.to_vec());
        }
    }
    None
}
