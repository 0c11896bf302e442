"""barrier: wait for all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from mpi4py import MPI

from .._call.definition import define
from .._op.comm import as_comm
from .._op.operation import Operation, call


@dataclass(frozen=True)
class Barrier(Operation, name="barrier"):
    def transposed(self) -> Operation:
        return self


@define(Barrier)
def barrier(*, comm: MPI.Intracomm | None = None) -> None:
    """Wait for all ranks (MPI_Barrier; MPI-4.1, section 6.3).

    Args:
        comm: communicator; by default a duplicate of ``COMM_WORLD``.

    Returns:
        None.

    Raises:
        TypeError: if ``comm`` has the wrong type.

    Derivative:
        The transpose is a barrier.

    Example:
        >>> import mpi4jax.notoken as mpi4jax
        >>> mpi4jax.barrier()
    """
    return call(Barrier(as_comm("barrier", comm)))
