//! Where Python's threads are.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::record::recorder::this_thread;

/// How many frames are written of the main thread, and of any other.
const FRAMES: [usize; 2] = [100, 20];
const BYTES: usize = 60_000;

/// The threads but this one, and their frames, the innermost first; the main thread before the others. `frames` is
/// `sys._current_frames`.
///
/// No instruction of Python's is done meanwhile, so no other thread runs. Else that thread might leave a frame which
/// this one holds, and objects that belong to that thread would be deleted in this one.
pub fn text(frames: &Bound<'_, PyAny>, main: u64) -> String {
    let mut text = String::new();
    // SAFETY: the lock is held. Nor is anything collected here that another thread has left.
    let collects = unsafe { pyo3::ffi::PyGC_Disable() } != 0;
    if write(frames, main, &mut text).is_err() {
        // What has been found so far is better than nothing, but it is not all.
        text += "Thread 0\n";
    }
    if collects {
        // SAFETY: as above.
        unsafe { pyo3::ffi::PyGC_Enable() };
    }
    text
}

fn write(frames: &Bound<'_, PyAny>, main: u64, text: &mut String) -> PyResult<()> {
    let all = frames.call0()?;
    let all = all.cast::<PyDict>()?;
    let mut threads = Vec::new();
    for (number, frame) in all.iter() {
        threads.push((number.extract::<u64>()?, frame));
    }
    threads.retain(|(number, _)| *number != this_thread());
    threads.sort_by_key(|(number, _)| *number != main);
    // All numbers, even if there is no room for all frames: who is there matters more than where.
    let mut room = BYTES.saturating_sub(32 * threads.len());
    for (number, frame) in threads {
        let most = FRAMES[usize::from(number != main)];
        *text += &format!("Thread {number}\n");
        thread(frame, most, &mut room, text)?;
    }
    Ok(())
}

fn thread(mut frame: Bound<'_, PyAny>, most: usize, room: &mut usize, text: &mut String) -> PyResult<()> {
    let py = frame.py();
    for _ in 0..most {
        if frame.is_none() {
            break;
        }
        let code = frame.getattr(intern!(py, "f_code"))?;
        let file = code.getattr(intern!(py, "co_filename"))?;
        let (file, name) = (file.str()?, code.getattr(intern!(py, "co_name"))?.str()?);
        let line = frame.getattr(intern!(py, "f_lineno"))?.extract::<u32>().unwrap_or(0);
        let (file, name) = (file.to_string_lossy(), name.to_string_lossy());
        let line = format!("  File \"{file}\", line {line} in {name}\n");
        if line.len() > *room {
            break;
        }
        *room -= line.len();
        *text += &line;
        frame = frame.getattr(intern!(py, "f_back"))?;
    }
    Ok(())
}
