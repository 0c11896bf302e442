//! The Python module: registers and converts, nothing else.

mod stack;

#[pyo3::pymodule]
mod _native {
    use std::ffi::c_void;
    use std::os::fd::IntoRawFd;

    use pyo3::exceptions::{PyRuntimeError, PyValueError};
    use pyo3::prelude::*;
    use pyo3::types::{PyCapsule, PyDict};
    use serde_json::{Value, json};

    use super::stack;
    use crate::comm::{self, Comm};
    use crate::device::{self, Platform};
    use crate::error::{Cause, Error};
    use crate::ops::{self, Dtype, Op, PACKED};
    use crate::record::{events, recorder, timeline};
    use crate::system::os;
    use crate::{dynlib, finalize, transport, watch, xla};

    type TargetRow<'py> = (&'static str, Bound<'py, PyDict>, &'static str);

    impl From<Error> for PyErr {
        fn from(error: Error) -> Self {
            match error.cause {
                Cause::Setting { .. } => PyValueError::new_err(error.to_string()),
                _ => PyRuntimeError::new_err(error.to_string()),
            }
        }
    }

    // Functions of the core that Python calls as they are; each says by which name.
    #[pymodule_export]
    use crate::comm::is_calling;
    #[pymodule_export]
    use crate::comm::without_python;
    #[pymodule_export]
    use crate::device::{is_on_cpu, is_rocm, set_device};
    #[pymodule_export]
    use crate::mpilib::{info, set_tag_limit};
    #[pymodule_export]
    use crate::ops::{add_line, name_line};
    #[pymodule_export]
    use crate::record::events::{is_debug, set_debug};
    #[pymodule_export]
    use crate::system::os::space;
    #[pymodule_export]
    use crate::transport::{choice, set_count_limit};
    #[pymodule_export]
    use crate::watch::share_default;
    #[pymodule_export]
    use crate::watch::{
        abort_after, abort_after_interrupt, build, enter_limit, leave_limit, set_check, settings_difference,
        start, take_signals, thread_communicates,
    };
    #[pymodule_export]
    use crate::xla::statuses::remove;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        events::init().map_err(Error::from)?;
        // As Python writes it.
        module.add("__version__", env!("CARGO_PKG_VERSION").replace("-rc.", "rc"))
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
    fn targets(py: Python<'_>) -> PyResult<Vec<TargetRow<'_>>> {
        let row = |target: xla::Target| {
            let bundle = PyDict::new(py);
            bundle.set_item("instantiate", capsule(py, target.instantiate)?)?;
            bundle.set_item("execute", capsule(py, target.execute)?)?;
            Ok((target.name, bundle, target.platform))
        };
        xla::targets().into_iter().map(row).collect()
    }

    /// Whether XLA packs ghost cells into messages, for arrays on a GPU or on the CPU.
    #[pyfunction]
    fn takes_packed(on_gpu: bool) -> bool {
        transport::takes_packed(if on_gpu { Platform::Gpu } else { Platform::Cpu })
    }

    /// Parent, name and start of a process, the start in units of the system's, or None.
    #[pyfunction]
    fn process(pid: i32) -> Option<(i32, String, u64)> {
        os::info(pid).map(|info| (info.parent, info.name, info.start))
    }

    /// The UUID of each GPU that this process sees. The instances of a GPU in MIG mode have its UUID.
    #[pyfunction]
    fn gpu_uuids(py: Python<'_>) -> Vec<String> {
        let hexadecimal = |uuid: [u8; 16]| uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        py.detach(|| device::uuids().into_iter().map(hexadecimal).collect())
    }

    /// The rows of all operations, in JSON. Extents describe the data that is sent and received.
    #[pyfunction]
    fn ops_table() -> String {
        let extents = |extents: ops::Extents| json!([extents.send, extents.recv]);
        let row = |row: &ops::Row| {
            json!({
                "name": row.name,
                "mpi": row.mpi_name,
                "has_reduction": row.has_reduction,
                "has_mean": row.has_mean,
                "has_root": row.has_root,
                "has_peer": row.has_peer,
                "has_blocks": row.has_blocks,
                "has_parts": row.has_parts,
                "is_ragged": row.is_ragged,
                "private": row.private,
                "at_root": extents(row.at_root),
                "elsewhere": extents(row.elsewhere),
                "started": row.started.as_ref().map(|started| started.mpi_name),
            })
        };
        Op::TABLE.iter().map(row).collect::<Value>().to_string()
    }

    /// All data types, in JSON: the reductions that they have, the type that they have to be converted to for an operation,
    /// and the type that they are reduced as.
    #[pyfunction]
    fn dtypes_table() -> String {
        let row = |name, dtype: Dtype, carrier: Option<Dtype>| {
            let reduced = dtype.wider().unwrap_or(dtype);
            json!({
                "name": name,
                "has_arithmetic": reduced.has_arithmetic(),
                "is_ordered": reduced.is_ordered(),
                "has_bits": dtype.has_bits(),
                "carrier": carrier.map(Dtype::name),
                "reduced_as": dtype.wider().map(Dtype::name),
            })
        };
        let whole = Dtype::ALL.iter().map(|&dtype| row(dtype.name(), dtype, None));
        let packed = PACKED.iter().map(|packed| row(packed.name, packed.carrier, Some(packed.carrier)));
        whole.chain(packed).collect::<Value>().to_string()
    }

    #[pyfunction]
    fn register_comm(py: Python<'_>, key: &str, handle: usize, rank: i32, size: i32) -> PyResult<i32> {
        // SAFETY: mpi4py gives handles of live communicators, and it has initialized MPI.
        let comm = unsafe { Comm::of_mpi(key, handle, rank, size) }.map_err(Error::from)?;
        let comm = comm::register(comm);
        py.detach(|| transport::attach(&comm))?;
        Ok(comm.number)
    }

    /// Makes `key` name a reduction of the user's, whose handle mpi4py keeps at this address.
    #[pyfunction]
    fn register_reduction(key: &str, handle: usize, address: usize) {
        // SAFETY: Python keeps mpi4py's object, which has the null handle once the `MPI_Op` has been freed.
        unsafe { ops::register_reduction(key, handle, address) };
    }

    /// Programs may write a status to the address of one of mpi4py's.
    #[pyfunction]
    fn add_status(address: usize) {
        // SAFETY: Python keeps a status until it has removed it, and a program its statuses.
        unsafe { xla::statuses::add(address) };
    }

    /// MPI frees a communicator: so is all that was made from it.
    #[pyfunction]
    fn free_comm(py: Python<'_>, key: &str) {
        let Ok(comm) = comm::lookup(key) else { return };
        watch::enter_on(&comm, transport::freeing(key));
        py.detach(|| comm::free(key));
        watch::leave();
    }

    /// A call of this package that is made of mpi4py's calls begins: reports name it where this rank waits in it.
    #[pyfunction]
    fn watch_enter(key: &str, words: String) -> PyResult<()> {
        watch::enter_on(&*comm::lookup(key).map_err(Error::from)?, words);
        Ok(())
    }

    /// It has ended.
    #[pyfunction]
    fn watch_leave() {
        watch::leave();
    }

    /// Chooses transports from the environment; libraries are looked for in `directories` first. With some transports this
    /// is collective. Name and reason of what was chosen for arrays on the CPU, and on a GPU.
    #[pyfunction]
    fn select_transports(
        py: Python<'_>,
        directories: Vec<std::path::PathBuf>,
    ) -> PyResult<[(&'static str, &'static str); 2]> {
        dynlib::add_directories(directories);
        Ok(py.detach(transport::select)?)
    }

    /// Python is asked first when `MPI_Finalize` begins, if it has not ended itself by then.
    #[pyfunction]
    fn at_finalize(function: Py<PyAny>) -> PyResult<()> {
        let ask = move || {
            Python::try_attach(|py| {
                if let Err(error) = function.call0(py) {
                    error.write_unraisable(py, None);
                }
            });
        };
        Ok(finalize::first_at_finalize(Box::new(ask)).map_err(Error::from)?)
    }

    /// Ends what transports do besides calls.
    #[pyfunction]
    fn stop_transports(py: Python<'_>) {
        py.detach(transport::stop);
    }

    /// (setting that chose, why what was chosen for the CPU and for a GPU cannot be used after all,
    /// [(platform, name, why it cannot be used)]).
    #[pyfunction]
    fn transport_report(py: Python<'_>) -> PyResult<transport::Overview> {
        Ok(py.detach(transport::overview)?)
    }

    #[pyfunction]
    fn has_gpu_support() -> bool {
        device::support().is_ok()
    }

    /// Waits until the operations that are running now, in any thread, have ended.
    #[pyfunction]
    fn wait(py: Python<'_>) {
        py.detach(recorder::wait);
    }

    /// The last operations of this process, in words, the oldest first.
    #[pyfunction]
    fn operations() -> Vec<String> {
        recorder::records(crate::board::own()).iter().map(ToString::to_string).collect()
    }

    /// A socket for a thread of Python's, which calls [`watch_answer`] each time that there is something to read.
    #[pyfunction]
    fn watch_questions() -> PyResult<i32> {
        Ok(watch::questions()?.into_raw_fd())
    }

    /// Tells where Python's main thread is, and the exception that it handles; `sys` and `gc` are Python's modules.
    #[pyfunction]
    fn watch_answer(sys: &Bound<'_, PyAny>, gc: &Bound<'_, PyAny>, main: u64) {
        watch::answer(|| stack::look(sys, gc, main));
    }

    /// The handle of the default communicator, which all ranks make; None: it is `MPI_COMM_WORLD`.
    #[pyfunction]
    fn make_default(py: Python<'_>) -> PyResult<Option<usize>> {
        Ok(py.detach(watch::make_default).map_err(Error::from)?)
    }

    /// What the board of a job has, in JSON.
    #[pyfunction]
    fn read_board(path: std::path::PathBuf) -> PyResult<String> {
        Ok(watch::read_board(&path)?)
    }

    /// Where boards of this user lie.
    #[pyfunction]
    fn board_place() -> std::path::PathBuf {
        crate::board::place()
    }

    /// Writes a timeline of all operations to a file.
    #[pyfunction]
    fn trace_to(path: std::path::PathBuf, rank: i32) -> PyResult<()> {
        Ok(timeline::start(&path, rank)?)
    }
}
