"""The choice of the GPU on which each rank computes."""

from __future__ import annotations

import logging
import math
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from mpi4py import MPI

from .. import _native
from .._jax import compat

_log = logging.getLogger("mpi4jax")

_PLATFORM = "rocm" if _native.is_rocm() else "cuda"
# JAX's option for the devices to use.
_VISIBLE = f"jax_{_PLATFORM}_visible_devices"

# Launchers' variables for the local rank of a process on its node.
LOCAL_RANKS = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "FLUX_TASK_LOCAL_ID",
    "SLURM_LOCALID",
)


def choose() -> None:
    """Let JAX compute on the visible GPU of this rank's local rank, modulo their number.

    Nothing is chosen if only one GPU is visible, or if the user or JAX has chosen one:
    ``jax_cuda_visible_devices`` (``jax_rocm_visible_devices`` with GPUs of AMD) is set, or JAX has
    started its platforms. ``CUDA_VISIBLE_DEVICES`` does not count as a choice: Slurm shows the same
    GPUs to all ranks of a node.
    """
    if not _may_compute_on_gpus():
        return
    numbers = [os.environ[name] for name in LOCAL_RANKS if name in os.environ]
    if numbers and compat.visible_gpus(_VISIBLE) == "all" and not compat.has_started():
        rank, devices = int(numbers[0]), len(_native.gpu_uuids())
        if devices > 1:
            number = str(rank % devices)
            jax.config.update(_VISIBLE, number)
            shared = ", which ranks share" if rank >= devices else ""
            _log.info("local rank %d computes on GPU %s of %d%s", rank, number, devices, shared)
    announce()


def _may_compute_on_gpus() -> bool:
    """Return whether there is a GPU, and JAX may use it. Without one, no library is loaded."""
    if _native.is_gpu_on_cpu():
        return True
    platforms = str(jax.config.jax_platforms or _PLATFORM).split(",")
    is_there = _native.is_rocm() or Path("/dev/nvidiactl").exists()
    return is_there and not {_PLATFORM, "gpu"}.isdisjoint(platforms)


def _number() -> int | None:
    """Return the number of JAX's GPU among the visible ones, or None if there is no GPU."""
    if not _may_compute_on_gpus():
        return None
    if not compat.has_started() or _native.is_gpu_on_cpu():
        # JAX takes the first one that it may use.
        visible = compat.visible_gpus(_VISIBLE)
        return 0 if visible == "all" else int(visible.split(",")[0])
    return jax.local_devices()[0].local_hardware_id if jax.default_backend() == "gpu" else None


def announce() -> None:
    """Pass the GPU that JAX computes on to the native module."""
    if (number := _number()) is not None:
        _native.set_device(number)


@dataclass(frozen=True)
class Gpu:
    """The GPU of a rank: its number among the visible GPUs, and the UUIDs of all of them."""

    number: int
    visible: tuple[str, ...]

    @property
    def uuid(self) -> str:
        return self.visible[self.number]

    def __str__(self) -> str:
        return f"GPU {self.number} of {len(self.visible)}, UUID {self.uuid[:8]}..."


def own() -> Gpu | None:
    """Return the GPU that this rank computes on, or will compute on once JAX starts."""
    number, visible = _number(), tuple(_native.gpu_uuids())
    return Gpu(number, visible) if number is not None and number < len(visible) else None


def sharing(comm: MPI.Comm) -> str | None:
    """Return advice, on the lowest rank concerned, if ranks of this node share a GPU while another
    GPU is idle. Collective.
    """
    gpu = own()
    # For a reduction of Python objects, mpi4py would duplicate the communicator.
    has_gpu = np.array([gpu is not None])
    comm.Allreduce(MPI.IN_PLACE, has_gpu, MPI.LOR)
    if not has_gpu[0]:
        return None
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    of_ranks = [(rank, it) for rank, it in node.allgather((comm.rank, gpu)) if it is not None]
    node.Free()
    used = [it.uuid for _, it in of_ranks]
    idle = {uuid for _, it in of_ranks for uuid in it.visible} - {*used}
    together = [rank for rank, it in of_ranks if used.count(it.uuid) > 1]
    if not idle or not together or together[0] != comm.rank:
        return None
    return (
        f"ranks {', '.join(map(str, together))} on {platform.node()} share GPUs, while {len(idle)} "
        "of the GPUs that they see are idle; start the ranks so that the launcher sets one of "
        f"{', '.join(LOCAL_RANKS)}, or choose a GPU on each rank before it imports mpi4jax: "
        f"jax.config.update({_VISIBLE!r}, '0'), or '1', and so on"
    )


def memory_to_change(ranks: int, transport: str) -> str | None:
    """Return advice if the ranks of a GPU, and NCCL, need more memory than they get.

    JAX's documentation, "GPU memory allocation": a process allocates 75 % of a GPU's memory with
    the first operation there, unless the environment says otherwise.

    Args:
        ranks: number of ranks that compute on the GPU.
        transport: name of the transport of arrays on GPUs.
    """
    get = os.environ.get
    on_demand = get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in ("false", "0")
    if on_demand or get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() == "platform":
        return None
    names = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
    fraction = next((float(value) for value in map(get, names) if value), 0.75)
    # NCCL allocates buffers of its own, as CUDA's contexts do.
    room = 0.9 if ranks > 1 or transport == "nccl" else 1.0
    if ranks * fraction <= room + 1e-9:
        return None
    who = (
        "a rank on a GPU of its own"
        if ranks == 1
        else f"{ranks} ranks compute on one GPU, and each"
    )
    most = math.floor(100 * room / ranks + 1e-9) / 100
    return (
        f"{who} allocates {fraction:.0%} of its memory, beside the buffers of CUDA and NCCL: set "
        f"XLA_CLIENT_MEM_FRACTION={most:g}, or XLA_PYTHON_CLIENT_PREALLOCATE=false"
    )


def warn_of_sharing(comm: MPI.Comm) -> None:
    """Log what :func:`sharing` returns. Collective."""
    if (words := sharing(comm)) is not None:
        _log.warning("%s", words)
