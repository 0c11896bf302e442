//! Source lines of the user, and the numbers and names that represent them in programs.
//!
//! An operand holds a number. A compiled program has a name, `solver.py:step#2`, the second line of
//! that function that was compiled here: with the line in it, it would be another program for JAX's
//! compilation cache as soon as a line is added above. Programs are lowered in the process that
//! runs them, also those that the cache has.

use std::collections::BTreeMap;
use std::sync::Mutex;

use crate::sync::lock;

static LINES: Mutex<Vec<Box<str>>> = Mutex::new(Vec::new());

/// Source lines, by function.
static NAMED: Mutex<BTreeMap<Box<str>, Vec<Box<str>>>> = Mutex::new(BTreeMap::new());

/// The number of a new line.
#[cfg_attr(feature = "python", pyo3::pyfunction(name = "add_line"))]
pub fn add(line: &str) -> i32 {
    let mut lines = lock(&LINES);
    lines.push(line.into());
    lines.len() as i32
}

/// The line of a number; nothing for 0 and for those that were never given out.
pub fn numbered(number: i32) -> Box<str> {
    let lines = lock(&LINES);
    let index = usize::try_from(number).ok().and_then(|number| number.checked_sub(1));
    index.and_then(|index| lines.get(index)).cloned().unwrap_or_default()
}

/// The name of a line of a function.
#[cfg_attr(feature = "python", pyo3::pyfunction(name = "name_line"))]
pub fn name(function: &str, line: &str) -> String {
    let mut named = lock(&NAMED);
    let lines = named.entry(function.into()).or_default();
    let index = lines.iter().position(|known| **known == *line).unwrap_or_else(|| {
        lines.push(line.into());
        lines.len() - 1
    });
    format!("{function}#{}", index + 1)
}

/// The line of a name; the function for a program that was not lowered in this process.
pub fn named(name: &str) -> Box<str> {
    let Some((function, number)) = name.rsplit_once('#') else { return name.into() };
    let named = lock(&NAMED);
    let index = number.parse().ok().and_then(|number: usize| number.checked_sub(1));
    let line = index.and_then(|index| named.get(function)?.get(index));
    line.map_or_else(|| function.into(), Clone::clone)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_names_that_stay() {
        let first = name("a.py:f", "a.py:3");
        let second = name("a.py:f", "a.py:5");
        assert_eq!((&*first, &*second), ("a.py:f#1", "a.py:f#2"));
        assert_eq!(name("a.py:f", "a.py:3"), first);
        assert_eq!(name("a.py:g", "a.py:7"), "a.py:g#1");
        assert_eq!((&*named(&first), &*named(&second)), ("a.py:3", "a.py:5"));
    }

    #[test]
    fn of_names_that_nobody_gave_the_function_is_left() {
        assert_eq!(&*named("b.py:<lambda>#1"), "b.py:<lambda>");
        assert_eq!(&*named("b.py:f#x"), "b.py:f");
        assert_eq!(&*named("b.py:12"), "b.py:12");
        assert_eq!(&*named(""), "");
    }
}
