//! Where a thread of Python's is.

use pyo3::intern;
use pyo3::prelude::*;

const FRAMES: usize = 100;
const BYTES: usize = 60_000;

/// The frames of a thread, the innermost first, as Python's faulthandler writes them; `frames` is
/// `sys._current_frames`.
///
/// No instruction of Python's is done meanwhile, so no other thread runs. Else that thread might leave a frame which
/// this one holds, and objects that belong to that thread would be deleted in this one.
pub fn text(frames: &Bound<'_, PyAny>, thread: u64) -> String {
    let mut text = String::new();
    // SAFETY: the lock is held. Nor is anything collected here that another thread has left.
    let collects = unsafe { pyo3::ffi::PyGC_Disable() } != 0;
    let _ = write(frames, thread, &mut text); // what has been found so far is better than nothing
    if collects {
        // SAFETY: as above.
        unsafe { pyo3::ffi::PyGC_Enable() };
    }
    text
}

fn write(frames: &Bound<'_, PyAny>, thread: u64, text: &mut String) -> PyResult<()> {
    let py = frames.py();
    let mut frame = frames.call0()?.get_item(thread)?;
    for _ in 0..FRAMES {
        if frame.is_none() {
            break;
        }
        let code = frame.getattr(intern!(py, "f_code"))?;
        let file = code.getattr(intern!(py, "co_filename"))?;
        let (file, name) = (file.str()?, code.getattr(intern!(py, "co_name"))?.str()?);
        let line = frame.getattr(intern!(py, "f_lineno"))?.extract::<u32>().unwrap_or(0);
        let (file, name) = (file.to_string_lossy(), name.to_string_lossy());
        if text.len() + file.len() + name.len() > BYTES {
            break;
        }
        *text += &format!("  File \"{file}\", line {line} in {name}\n");
        frame = frame.getattr(intern!(py, "f_back"))?;
    }
    Ok(())
}
