"""allgatherv: the rows of all ranks, on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from .._call.call import run
from .._call.definition import define
from .._op import rows as _rows
from .._op.comm import as_comm
from .._op.plan import Plan, Result
from .._op.spec import Call, Params, T


def _adjoint(p: Params) -> Plan:
    start, rows = p["receives"][p["comm"].rank]
    return Plan(None, Result.OPERAND, select=lambda c: c[start : start + rows])


def _prepare(x: Any, counts: Sequence[int], comm: MPI.Intracomm | None) -> Call:
    c = as_comm("allgatherv", comm)
    row_counts = _rows.counts_of("allgatherv", "counts", counts, c)
    p = {
        "comm": c,
        "rows": (row_counts[c.rank], sum(row_counts)),
        "sends": ((0, row_counts[c.rank]),) * c.size,
        "receives": _rows.side_by_side(row_counts),
    }
    return Call("allgatherv", (x,), p)


@define(
    _prepare,
    adjoint=_adjoint,
    is_uniform=True,
)
def allgatherv(x: T, counts: Sequence[int], *, comm: MPI.Intracomm | None = None) -> T:
    """Gather the rows of all ranks on all ranks (MPI_Allgatherv; MPI-4.1, section 6.7).

    Args:
        x: array of shape ``(counts[r], *S)``, of any dtype; or a pytree of such arrays.
        counts: the rows of each rank, the same on all ranks: integers that are known when the
            function is traced.
        comm: communicator of ``n`` ranks; by default a clone of ``COMM_WORLD``.

    Returns:
        jax.Array, or pytree: array of shape ``(sum(counts), *S)`` and the dtype of ``x``, the rows
        in the order of the ranks.

    Raises:
        TypeError: a wrong type of ``counts``, ``comm`` or dtype.
        ValueError: ``counts`` are not ``n``; ``x`` has another number of rows than they say.

    Derivative:
        This rank's rows of the result's cotangent, which is that of one global value. Under
        ``vmap`` the batch axis is axis 1 of operand and result.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> comm = mpi4jax.default_comm()
        >>> counts = [rank + 1 for rank in range(comm.size)]
        >>> y = mpi4jax.allgatherv(jnp.ones((comm.rank + 1, 3)), counts)
        >>> y.shape == (sum(counts), 3)
        True

    See also: :func:`allgather`, :func:`gatherv`.
    """
    return run(_prepare(x, counts, comm))
