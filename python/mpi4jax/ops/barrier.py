"""barrier: wait for all ranks."""

from __future__ import annotations

from mpi4py import MPI

from .._call.definition import define
from .._op.comm import as_comm
from .._op.spec import call


@define()
def barrier(*, comm: MPI.Intracomm | None = None) -> None:
    """Wait for all ranks (MPI_Barrier; MPI-4.1, section 6.3).

    Args:
        comm: communicator; by default a duplicate of ``COMM_WORLD``.

    Returns:
        None.

    Raises:
        TypeError: if ``comm`` has a wrong type.

    Derivative:
        The transpose is a barrier.

    Example:
        >>> import mpi4jax.notoken as mpi4jax
        >>> mpi4jax.barrier()
    """
    return call("barrier", (), {"comm": as_comm("barrier", comm)})
