//! Where Python's main thread is, and which exception it handles.

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};

use crate::watch::Frame;

/// How many frames are read.
const FRAMES: usize = 100;
/// How many characters of an exception are told.
const LONGEST: usize = 300;

/// The frames of the main thread, the innermost first, and its exception. `sys` and `gc` are Python's modules.
///
/// No instruction of Python's is done meanwhile, so no other thread runs. Else that thread might leave what this one holds,
/// such as a frame, and objects that belong to that thread would be deleted in this one. `intern!` and what uses it, such as
/// `PyType::name`, let other threads run when they are first called.
pub fn look(sys: &Bound<'_, PyAny>, gc: &Bound<'_, PyAny>, main: u64) -> (Vec<Frame>, String) {
    let mut found = Vec::new();
    // SAFETY: the lock is held. Nor is anything collected here that another thread has left.
    let collects = unsafe { pyo3::ffi::PyGC_Disable() } != 0;
    // What has been found so far is better than nothing.
    let _ = frames(sys, main, &mut found);
    let exception = exception(sys, gc, main).unwrap_or_default();
    if collects {
        // SAFETY: as above.
        unsafe { pyo3::ffi::PyGC_Enable() };
    }
    (found, exception)
}

fn frames(sys: &Bound<'_, PyAny>, main: u64, found: &mut Vec<Frame>) -> PyResult<()> {
    let all = sys.getattr("_current_frames")?.call0()?;
    let Some(mut frame) = all.cast::<PyDict>()?.get_item(main)? else { return Ok(()) };
    while !frame.is_none() && found.len() < FRAMES {
        let code = frame.getattr("f_code")?;
        let text =
            |name: &str| -> PyResult<String> { Ok(code.getattr(name)?.str()?.to_string_lossy().into()) };
        found.push(Frame {
            file: text("co_filename")?,
            line: frame.getattr("f_lineno")?.extract().unwrap_or(0),
            function: text("co_name")?,
        });
        frame = frame.getattr("f_back")?;
    }
    Ok(())
}

/// The exception that the main thread is handling, or what a future of its has swallowed.
fn exception(sys: &Bound<'_, PyAny>, gc: &Bound<'_, PyAny>, main: u64) -> PyResult<String> {
    let all = sys.getattr("_current_exceptions")?.call0()?;
    if let Some(mut handled) = all.cast::<PyDict>()?.get_item(main)? {
        // Before Python 3.12: its type, it, and where it was raised.
        if let Ok(parts) = handled.cast::<PyTuple>() {
            handled = parts.get_item(1)?;
        }
        if !handled.is_none() {
            return words(&handled);
        }
    }
    // A job that waits for a result looks no more at the exception of its task.
    let modules = sys.getattr("modules")?;
    let Some(futures) = modules.cast::<PyDict>()?.get_item("concurrent.futures._base")? else {
        return Ok(String::new());
    };
    let future = futures.getattr("Future")?;
    let objects = gc.getattr("get_objects")?.call0()?;
    for object in objects.cast::<PyList>()?.iter() {
        if object.get_type().is(&future) {
            let error = object.getattr("_exception")?;
            if !error.is_none() {
                return Ok(format!("{} (in a future)", words(&error)?));
            }
        }
    }
    Ok(String::new())
}

/// An exception in words; without its text where instructions of Python's would make that.
fn words(exception: &Bound<'_, PyAny>) -> PyResult<String> {
    let py = exception.py();
    let class = exception.get_type();
    let of_c = py.get_type::<pyo3::exceptions::PyBaseException>().getattr("__str__")?.get_type();
    let is_plain = |value: &Bound<'_, PyAny>| {
        value.is_none()
            || value.is_exact_instance_of::<PyString>()
            || value.is_exact_instance_of::<PyInt>()
            || value.is_exact_instance_of::<PyFloat>()
            || value.is_exact_instance_of::<PyBool>()
    };
    let mut words: String = class.getattr("__name__")?.extract()?;
    let args = exception.getattr("args")?;
    let args = args.cast::<PyTuple>()?;
    let mut parts: Vec<_> = args.iter().collect();
    if exception.is_instance_of::<pyo3::exceptions::PyOSError>() {
        // Of any type that stands for a path.
        parts.push(exception.getattr("filename")?);
        parts.push(exception.getattr("filename2")?);
    }
    if parts.iter().all(is_plain) {
        if class.getattr("__str__")?.get_type().is(&of_c) {
            words = format!("{words}: {}", exception.str()?.to_string_lossy());
        } else if let Ok(text) = args.get_item(0).and_then(|first| Ok(first.cast_into::<PyString>()?)) {
            words = format!("{words}: {}", text.to_string_lossy());
        }
    }
    Ok(words.chars().take(LONGEST).collect())
}
