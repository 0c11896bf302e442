"""Loading of the native module, after the MPI library that it was built for.

The native module has no path to an MPI library of its own: it uses the one that mpi4py has loaded.
"""

from __future__ import annotations


def load() -> None:
    """Import ``mpi4jax._native`` or say why that cannot be.

    Raises:
        ImportError: the MPI at run time is not the one that mpi4jax was built for, was finalized,
            or does not allow calls from XLA's threads.
        ValueError: the environment chooses a transport that does not exist, or two of them.
        RuntimeError: the transport that it chooses cannot be started.
    """
    from mpi4py import MPI  # loads the MPI library and, by default, initializes it

    try:
        from . import _build_info
    except ImportError:
        built_for, version = "", ""
    else:
        built_for, version = _build_info.vendor, _build_info.version
    vendor, number = MPI.get_vendor()
    running = f"{vendor} {'.'.join(map(str, number))}"
    cure = (
        "Reinstall mpi4jax with that MPI's mpicc on PATH (or named by MPICC), or choose the MPI "
        "that mpi4py loads with the environment variable MPI4PY_LIBMPI."
    )
    # Handles of different MPIs have different sizes and meanings: stop before anything is called.
    if built_for and vendor != built_for:
        raise ImportError(
            f"mpi4jax was built for {built_for} {version}, but mpi4py uses {running}. {cure}"
        )
    try:
        from . import _native
    except ImportError as error:
        raise ImportError(
            f"mpi4jax's native module, built for {built_for or 'an unknown MPI'} {version}, cannot "
            f"be loaded beside {running}: {error}. {cure}"
        ) from error

    if MPI.Is_finalized() or not MPI.Is_initialized():
        state = "was finalized" if MPI.Is_finalized() else "is not initialized"
        raise ImportError(
            f"mpi4jax needs a running MPI, but MPI {state}; import mpi4jax after MPI.Init()"
        )
    level = MPI.Query_thread()
    if level < MPI.THREAD_SERIALIZED:
        raise ImportError(
            "mpi4jax calls MPI from XLA's threads, but MPI was initialized with thread level "
            f"{'SINGLE' if level == MPI.THREAD_SINGLE else 'FUNNELED'}; expected at least "
            "MPI_THREAD_SERIALIZED (mpi4py's default is MPI_THREAD_MULTIPLE: see mpi4py.rc)"
        )

    from . import _compat, _transport, _watch

    _transport.select()
    _watch.set_check()
    _compat.register_targets(_native.targets(), _native.types())
