//! Source lines of the user's, by number: an operand has room for a number.

use std::sync::{Mutex, PoisonError};

static LINES: Mutex<Vec<Box<str>>> = Mutex::new(Vec::new());

/// The number of a new line.
pub fn add(line: &str) -> i32 {
    let mut lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
    lines.push(line.into());
    lines.len() as i32
}

/// The line of a number; nothing for 0 and for those that were never given out.
pub fn numbered(number: i32) -> Box<str> {
    let lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
    let index = usize::try_from(number).ok().and_then(|number| number.checked_sub(1));
    index.and_then(|index| lines.get(index)).cloned().unwrap_or_default()
}
