//! The core of mpi4jax; `python/mpi4jax` is its user.

pub mod error;
pub mod ops;
pub mod trace;
pub mod transport;
pub mod watch;
pub mod xla;

#[cfg(feature = "python")]
#[pyo3::pymodule]
mod _native {
    use std::ffi::c_void;

    use pyo3::exceptions::{PyRuntimeError, PyValueError};
    use pyo3::prelude::*;
    use pyo3::types::{PyCapsule, PyDict};

    use crate::error::{Cause, Error};
    use crate::ops::{self, Dtype, Op, PACKED};
    use crate::{trace, transport, watch, xla};

    impl From<Error> for PyErr {
        fn from(error: Error) -> Self {
            match error.cause {
                Cause::UnknownTransport { .. } => PyValueError::new_err(error.to_string()),
                _ => PyRuntimeError::new_err(error.to_string()),
            }
        }
    }

    #[pymodule_init]
    fn init(_module: &Bound<'_, PyModule>) -> PyResult<()> {
        trace::init();
        transport::selected()?;
        Ok(())
    }

    /// A capsule with no name, as `jax.ffi.pycapsule` makes them.
    fn capsule(py: Python<'_>, handler: xla::Handler) -> PyResult<Bound<'_, PyCapsule>> {
        // SAFETY: the pointer is to a function, which needs no destructor.
        unsafe {
            let capsule = pyo3::ffi::PyCapsule_New(handler as *mut c_void, std::ptr::null(), None);
            Ok(Bound::from_owned_ptr_or_err(py, capsule)?.cast_into()?)
        }
    }

    /// Name, handlers by stage, and platform of every custom-call target.
    #[pyfunction]
    fn targets(py: Python<'_>) -> PyResult<Vec<(&'static str, Bound<'_, PyDict>, &'static str)>> {
        let target = |row: &ops::Row| {
            let bundle = PyDict::new(py);
            bundle.set_item("instantiate", capsule(py, xla::instantiate)?)?;
            bundle.set_item("execute", capsule(py, xla::execute)?)?;
            Ok((row.target, bundle, "cpu"))
        };
        Op::TABLE.iter().map(target).collect()
    }

    /// FFI types that Python has to register: none, the handler registers its own.
    #[pyfunction]
    fn types(py: Python<'_>) -> Vec<(&'static str, Bound<'_, PyDict>, &'static str)> {
        let _ = py;
        Vec::new()
    }

    /// (name, MPI's name, has a reduction, has a root, has a peer) of every operation.
    #[pyfunction]
    fn ops_table() -> Vec<(&'static str, &'static str, bool, bool, bool)> {
        let row = |row: &ops::Row| (row.name, row.mpi_name, row.has_reduction, row.has_root, row.has_peer);
        Op::TABLE.iter().map(row).collect()
    }

    /// (name, XLA code, item size, can be moved, has SUM and PROD, has MAX and MIN, has bitwise reductions,
    /// has logical ones) of every data type.
    #[pyfunction]
    fn dtypes_table() -> Vec<(&'static str, i32, usize, bool, bool, bool, bool, bool)> {
        let row = |name, code, d: Dtype| {
            let (arithmetic, ordered) = (d.has_arithmetic(), d.is_ordered());
            (name, code, d.size(), true, arithmetic, ordered, d.has_bits(), d.is_logical())
        };
        let whole = Dtype::ALL.iter().map(|d| row(d.name(), d.xla_code(), *d));
        whole.chain(PACKED.iter().map(|p| row(p.name, p.xla_code, p.carrier))).collect()
    }

    /// (name, name of the type that carries it) of the data types that have to be converted for an
    /// operation.
    #[pyfunction]
    fn carriers() -> Vec<(&'static str, &'static str)> {
        PACKED.iter().map(|packed| (packed.name, packed.carrier.name())).collect()
    }

    #[pyfunction]
    fn register_comm(key: &str, handle: usize, rank: i32, size: i32) -> PyResult<()> {
        // SAFETY: mpi4py gives handles of live communicators, and it has initialised MPI.
        unsafe { transport::prepare_comm(handle)? };
        let comm = ops::register_comm(key, handle, rank, size);
        // SAFETY: as above.
        watch::join(comm, || unsafe { watch::world_ranks(handle, size) });
        Ok(())
    }

    #[pyfunction]
    fn free_comm(key: &str) {
        ops::free_comm(key);
    }

    #[pyfunction]
    fn register_reduction(key: &str, handle: usize) {
        ops::register_reduction(key, handle);
    }

    #[pyfunction]
    fn set_debug(enabled: bool) {
        trace::set_enabled(enabled);
    }

    #[pyfunction]
    fn get_debug() -> bool {
        trace::is_enabled()
    }

    #[pyfunction]
    fn mpi_info(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
        let info = transport::info()?;
        let dict = PyDict::new(py);
        dict.set_item("vendor", info.vendor)?;
        dict.set_item("version", info.version)?;
        dict.set_item("library_version", info.library_version)?;
        dict.set_item("thread_level", info.thread_level)?;
        dict.set_item("sizeof_comm", info.sizeof_comm)?;
        dict.set_item("sizeof_datatype", info.sizeof_datatype)?;
        dict.set_item("sizeof_op", info.sizeof_op)?;
        dict.set_item("sizeof_status", info.sizeof_status)?;
        Ok(dict)
    }

    #[pyfunction]
    fn has_cuda_support() -> bool {
        transport::has_cuda_support()
    }

    #[pyfunction]
    #[pyo3(signature = (limit))]
    fn set_count_limit(limit: Option<usize>) {
        transport::set_count_limit(limit);
    }

    /// Starts the watchdog. Returns whether `SIGUSR1` makes it report.
    #[pyfunction]
    fn watch_start(
        rank: i32,
        size: i32,
        directory: std::path::PathBuf,
        timeout: f64,
        abort: bool,
        stacks: i32,
    ) -> bool {
        watch::start(watch::Settings { rank, size, directory, timeout, abort, stacks })
    }

    /// This rank has done its last operation.
    #[pyfunction]
    fn watch_finish() {
        watch::finish();
    }

    /// This rank is about to wait for others in a call that is no operation.
    #[pyfunction]
    fn watch_enter(what: String) {
        watch::enter(what);
    }

    /// The call has ended.
    #[pyfunction]
    fn watch_leave() {
        watch::leave();
    }

    /// What all ranks are doing.
    #[pyfunction]
    fn watch_report(py: Python<'_>) -> Option<String> {
        py.detach(watch::report)
    }

    /// Ends the job unless this process has ended by itself after some seconds.
    #[pyfunction]
    fn abort_after(seconds: f64, code: i32) {
        watch::abort_after(seconds, code);
    }

    /// 0: nothing is checked, 1: operations, 2: operations and source lines. Holds for what is compiled later.
    #[pyfunction]
    fn set_check(level: u8) {
        watch::set_check(match level {
            0 => watch::CheckLevel::Off,
            1 => watch::CheckLevel::Operations,
            _ => watch::CheckLevel::Lines,
        });
    }

    /// Writes a timeline of all operations to a file.
    #[pyfunction]
    fn trace_to(path: std::path::PathBuf, rank: i32) -> PyResult<()> {
        Ok(watch::start_spans(&path, rank)?)
    }
}
