//! The state of a thread, as the operating system and glibc give it.

/// A thread, as far as the system and glibc say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Thread {
    pub number: i32,
    pub name: String,
    /// Whether it is blocked in a system call that waits for an event.
    pub sleeps: bool,
    /// Whether it blocks all signals.
    pub blocks_signals: bool,
    /// The file that its first function is in, or for C++'s own, the file that has given it the work.
    pub file: Option<String>,
}
