//! Where Python's threads are.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::record::recorder::this_thread;
use crate::watch::{Frame, Thread};

/// How many frames are read of the main thread, and of any other.
const FRAMES: [usize; 2] = [100, 20];

/// The threads but this one, the main thread before the others. `frames` is `sys._current_frames`.
///
/// No instruction of Python's is done meanwhile, so no other thread runs. Else that thread might leave a frame which
/// this one holds, and objects that belong to that thread would be deleted in this one.
pub fn threads(frames: &Bound<'_, PyAny>, main: u64) -> Vec<Thread> {
    let mut threads = Vec::new();
    // SAFETY: the lock is held. Nor is anything collected here that another thread has left.
    let collects = unsafe { pyo3::ffi::PyGC_Disable() } != 0;
    if read(frames, main, &mut threads).is_err() {
        // What has been found so far is better than nothing, but it is not all.
        threads.push(Thread::default());
    }
    if collects {
        // SAFETY: as above.
        unsafe { pyo3::ffi::PyGC_Enable() };
    }
    threads
}

fn read(frames: &Bound<'_, PyAny>, main: u64, threads: &mut Vec<Thread>) -> PyResult<()> {
    let all = frames.call0()?;
    let mut others = Vec::new();
    for (number, frame) in all.cast::<PyDict>()?.iter() {
        others.push((number.extract::<u64>()?, frame));
    }
    let (own, _) = this_thread();
    others.retain(|(number, _)| *number != own);
    others.sort_by_key(|(number, _)| *number != main);
    // All numbers, even if the frames of one cannot be read: which threads there are matters more than where they are.
    threads.extend(others.iter().map(|(number, _)| Thread { number: *number, frames: Vec::new() }));
    for (thread, (number, mut frame)) in threads.iter_mut().zip(others) {
        let py = frame.py();
        while !frame.is_none() && thread.frames.len() < FRAMES[usize::from(number != main)] {
            let code = frame.getattr(intern!(py, "f_code"))?;
            let text = |name| -> PyResult<String> { Ok(code.getattr(name)?.str()?.to_string_lossy().into()) };
            thread.frames.push(Frame {
                file: text(intern!(py, "co_filename"))?,
                line: frame.getattr(intern!(py, "f_lineno"))?.extract().unwrap_or(0),
                function: text(intern!(py, "co_name"))?,
            });
            frame = frame.getattr(intern!(py, "f_back"))?;
        }
    }
    Ok(())
}
