"""The choice of the library that carries the data."""

from __future__ import annotations

import atexit
import logging
import os
import site
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
from mpi4py import MPI

from .. import _native
from .._jax import compat

_log = logging.getLogger("mpi4jax")


def library_directories() -> list[str]:
    """Return where Python packages, and ROCm, keep libraries of GPUs, NCCL or RCCL, and UCX."""
    sites = [
        Path(jax.__file__).parent.parent,
        *map(Path, site.getsitepackages()),
        *map(Path, sys.path),
    ]
    found = [
        directory
        for folder in dict.fromkeys(sites)
        for pattern in ("nvidia/*/lib", "_rocm_sdk_*/lib", "libucx/lib")
        for directory in sorted(folder.glob(pattern))
    ]
    rocm = Path(os.environ.get("ROCM_PATH", "/opt/rocm"), "lib")
    return [str(directory) for directory in dict.fromkeys([*found, rocm])]


def asks_all_ranks() -> bool:
    """Return whether the choice of a transport is collective."""
    _, by_all = _native.transport_choice()
    return MPI.COMM_WORLD.size > 1 and by_all


def start() -> None:
    """Choose the transport from the environment, and register the operations with XLA; at import.

    Raises:
        ValueError: if the environment chooses an unknown transport, or two of them.
        RuntimeError: if the chosen transport cannot be started.
    """
    if compat.newer_than_tested and MPI.COMM_WORLD.rank == 0:
        _log.warning(
            "JAX %s is newer than any that mpi4jax %s was tested with (%s)",
            jax.__version__,
            _native.__version__,
            ".".join(map(str, compat.TESTED)),
        )
    (cpu, cpu_reason), (gpu, gpu_reason) = _native.select_transports(library_directories())
    # Registered before other exit handlers that communicate, and therefore run after them.
    atexit.register(_native.stop_transports)
    _log.info("transports: %s on CPU (%s), %s on GPU (%s)", cpu, cpu_reason, gpu, gpu_reason)
    for name, bundle, platform in _native.targets():
        jax.ffi.register_ffi_target(name, bundle, platform=platform)


def has_cuda_support() -> bool:
    """Return whether arrays on NVIDIA GPUs can be communicated.

    True if a CUDA driver with at least one device is found. Otherwise, :func:`transport_info` has
    the reason.
    """
    return not _native.is_rocm() and _native.has_gpu_support()


def has_hip_support() -> bool:
    """Return whether arrays on AMD GPUs can be communicated.

    True if a HIP runtime with at least one device is found. Otherwise, :func:`transport_info` has
    the reason.
    """
    return _native.is_rocm() and _native.has_gpu_support()


def has_sycl_support() -> bool:
    """Return whether there is a transport for SYCL: always False."""
    return False


@dataclass(frozen=True)
class TransportInfo:
    """A transport, and the reason for it.

    Attributes:
        requested: the setting of the environment, or ``""``.
        cpu: the transport of arrays on the CPU.
        cpu_reason: why it was chosen.
        cpu_error: why it cannot be used, None if it can.
        gpu: the transport of arrays on a GPU.
        gpu_reason: why it was chosen.
        gpu_error: why it cannot be used, None if it can.
        unavailable: why others cannot be used: by platform and name (``"cuda:nccl"``,
            ``"rocm:nccl"``).
    """

    requested: str
    cpu: str
    cpu_reason: str
    cpu_error: str | None
    gpu: str
    gpu_reason: str
    gpu_error: str | None
    unavailable: dict[str, str]

    def __str__(self) -> str:
        def line(where: str, name: str, reason: str, error: str | None) -> str:
            failed = f", which cannot be used: {error}" if error else ""
            return f"{where}: {name} ({reason}){failed}"

        return "\n".join(
            [
                line("CPU", self.cpu, self.cpu_reason, self.cpu_error),
                line("GPU", self.gpu, self.gpu_reason, self.gpu_error),
                *(f"not {name}: {reason}" for name, reason in self.unavailable.items()),
            ]
        )


def transport_info() -> TransportInfo:
    """Return the transport of this process, and the reason for it.

    This loads libraries that have not been needed so far, to find out whether they can be used.

    Returns:
        TransportInfo: what was chosen for arrays on the CPU and on a GPU.

    Example:
        >>> import mpi4jax.notoken as mpi4jax
        >>> mpi4jax.transport_info().cpu
        'mpi'
    """
    requested, (cpu_error, gpu_error), rows = _native.transport_report()
    cpu, gpu = _native.select_transports([])
    unavailable = {f"{platform}:{name}": why for platform, name, why in rows}
    return TransportInfo(requested, *cpu, cpu_error, *gpu, gpu_error, unavailable)
