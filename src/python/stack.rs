//! Where Python's main thread is.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::watch::Frame;

/// How many frames are read.
const FRAMES: usize = 100;

/// The frames of the main thread, the innermost first. `frames` is `sys._current_frames`.
///
/// No instruction of Python's is done meanwhile, so no other thread runs. Else that thread might leave a frame which
/// this one holds, and objects that belong to that thread would be deleted in this one.
pub fn frames(frames: &Bound<'_, PyAny>, main: u64) -> Vec<Frame> {
    let mut found = Vec::new();
    // SAFETY: the lock is held. Nor is anything collected here that another thread has left.
    let collects = unsafe { pyo3::ffi::PyGC_Disable() } != 0;
    // What has been found so far is better than nothing.
    let _ = read(frames, main, &mut found);
    if collects {
        // SAFETY: as above.
        unsafe { pyo3::ffi::PyGC_Enable() };
    }
    found
}

fn read(frames: &Bound<'_, PyAny>, main: u64, found: &mut Vec<Frame>) -> PyResult<()> {
    let all = frames.call0()?;
    let Some(mut frame) = all.cast::<PyDict>()?.get_item(main)? else { return Ok(()) };
    let py = frame.py();
    while !frame.is_none() && found.len() < FRAMES {
        let code = frame.getattr(intern!(py, "f_code"))?;
        let text = |name| -> PyResult<String> { Ok(code.getattr(name)?.str()?.to_string_lossy().into()) };
        found.push(Frame {
            file: text(intern!(py, "co_filename"))?,
            line: frame.getattr(intern!(py, "f_lineno"))?.extract().unwrap_or(0),
            function: text(intern!(py, "co_name"))?,
        });
        frame = frame.getattr(intern!(py, "f_back"))?;
    }
    Ok(())
}
