"""barrier: wait for all ranks."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from .._call import run
from .._comm import as_comm
from .._definition import define

define("barrier", self_test=lambda t: (t.ops.barrier, None))


def barrier(*, comm: MPI.Intracomm | None = None, token: Any = None) -> Any:
    """Wait for all ranks (MPI_Barrier; MPI-4.1, section 6.3).

    Args:
        comm: communicator; by default a clone of ``COMM_WORLD``.
        token: token from another op, or None.

    Returns:
        jax.Array: the new token.

    Raises:
        TypeError: a wrong type of ``comm`` or ``token``.

    Derivative:
        The transpose is a barrier.

    Example:
        >>> import mpi4jax
        >>> token = mpi4jax.barrier()
    """
    return run("barrier", (), token, {"comm": as_comm("barrier", comm)})
