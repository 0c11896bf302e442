"""JAX's own runtime for several processes, started for a job of MPI (`MPI4JAX_JAX_DISTRIBUTED=1`).

`jax.process_index`, `jax.device_count` and `jax.experimental.multihost_utils` then see the job.
"""

from __future__ import annotations

import inspect
import platform
import socket
from typing import Any

import jax
from mpi4py import MPI

from . import settings

# JAX ends a job if a process sends no heartbeat for 100 s, or ends 300 s later than another one.
# MPI notices a process that has died, and a rank may be stopped or write its results for longer.
_PATIENCE = {"heartbeat_timeout_seconds": 86400, "shutdown_timeout_seconds": 86400}


def start() -> None:
    """Start it if the environment says so, the program has not, and there are several ranks.

    Collective on COMM_WORLD.

    The address of rank 0 is not left to JAX's method `mpi4py`: its port is a hash, which two jobs
    on a host share if they have the same `PYTHONHASHSEED`, and the name of a host may not have an
    address. Local devices stay those that `_setup/gpus.py` has chosen.
    """
    comm = MPI.COMM_WORLD
    if not settings.switch("MPI4JAX_JAX_DISTRIBUTED") or comm.size == 1:
        return  # one process sees its whole job without
    if jax.distributed.is_initialized():
        return
    hosts = comm.allgather(platform.node())
    with socket.socket() as probe:
        probe.bind(("", 0))  # a free port
        port = probe.getsockname()[1]
    host = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
    accepted = inspect.signature(jax.distributed.initialize).parameters
    patience: dict[str, Any] = {name: n for name, n in _PATIENCE.items() if name in accepted}
    jax.distributed.initialize(
        comm.bcast(f"{host}:{port}"),
        num_processes=comm.size,
        process_id=comm.rank,
        cluster_detection_method="deactivate",  # which would choose the local devices again
        **patience,
    )
