"""allgatherv: the rows of all ranks, on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpi4py import MPI

from .._call.definition import define
from .._op import rows as _rows
from .._op.comm import as_comm
from .._op.operation import How, T, WithParts, call
from .._op.plan import Plan, Result


@dataclass(frozen=True)
class Allgatherv(WithParts, name="allgatherv"):
    is_uniform = True

    def plan(self, how: How) -> Plan:
        if self.adjoint:
            own = [part[1:] for part in self.recv_parts if part[0] == self.comm.rank]
            start, rows = own[0] if own else (0, 0)
            return Plan(None, Result.OPERAND, select=lambda c: c[start : start + rows])
        return Plan("allgatherv")


@define(Allgatherv)
def allgatherv(x: T, counts: Sequence[int], *, comm: MPI.Intracomm | None = None) -> T:
    """Gather the rows of all ranks on all ranks (MPI_Allgatherv; MPI-4.1, section 6.7).

    Args:
        x: array of shape ``(counts[r], *S)``, of any dtype; or a pytree of such arrays.
        counts: number of rows of each rank, the same on all ranks: static integers.
        comm: communicator of ``n`` ranks; by default a duplicate of ``COMM_WORLD``.

    Returns:
        jax.Array, or pytree: array of shape ``(sum(counts), *S)`` and the dtype of ``x``, the rows
        in the order of the ranks.

    Raises:
        TypeError: if ``counts`` or ``comm`` has the wrong type, or the dtype is not supported.
        ValueError: if ``counts`` does not have one entry per rank, or ``x`` does not have
            ``counts[r]`` rows.

    Derivative:
        The cotangent of ``x`` is this rank's rows of the result's cotangent. The result is one
        global value, so all ranks have the same cotangent. Under ``vmap`` the batch axis is axis 1
        of operand and result.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> comm = mpi4jax.default_comm()
        >>> counts = [rank + 1 for rank in range(comm.size)]
        >>> y = mpi4jax.allgatherv(jnp.ones((comm.rank + 1, 3)), counts)
        >>> y.shape == (sum(counts), 3)
        True

    See also: :func:`allgather`, :func:`gatherv`.
    """
    c = as_comm("allgatherv", comm)
    row_counts = _rows.counts_of("allgatherv", "counts", counts, c)
    own = row_counts[c.rank]
    op = Allgatherv(
        c,
        rows=(own, sum(row_counts)),
        send_parts=tuple((rank, 0, own) for rank in range(c.size) if own),
        recv_parts=_rows.side_by_side(row_counts),
    )
    return call(op, x)
