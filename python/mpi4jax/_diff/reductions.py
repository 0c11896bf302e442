"""The derivatives of reductions other than SUM: PROD, MAX and MIN."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from mpi4py import MPI

from .._jax import compat
from .._op.comm import AnyComm, Comm, as_reduction
from .._op.leaves import joined, parted
from .._op.operation import How, Operation, Reducing, WithParts, made
from .._op.primitive import bind, result_avals, sum_over_ranks
from .._op.rows import side_by_side

# The identity, applied to the operand of a reduction. XLA may fuse the computation of a value into
# two kernels, and round it differently in each, if a multiplication and an addition become one
# instruction. A value would then differ from the value that was sent. XLA never computes the result
# of a call twice.
as_sent_p = Primitive("mpi4jax_as_sent")
as_sent_p.def_impl(lambda x: x)
as_sent_p.def_abstract_eval(lambda x: x)
batching.primitive_batchers[as_sent_p] = lambda args, dims: (as_sent_p.bind(*args), *dims)
# Operands of comparisons have no derivative.
ad.primitive_jvps[as_sent_p] = lambda primals, _: (
    as_sent_p.bind(*primals),
    compat.zero_tangent(*primals),
)
mlir.register_lowering(
    as_sent_p, jax.ffi.ffi_lowering("mpi4jax_after", operand_output_aliases={0: 0})
)


# Compiled, for the constants of JAX's own derivatives of it: eager ones are transfers.
@functools.partial(jax.jit, static_argnums=1)
def _product_of_others(factors: Any, rank: int) -> Any:
    return jnp.prod(factors.at[rank].set(1), axis=0)


@dataclass
class ReductionTangent:
    """What the tangent of an operation depends on.

    Every operation here takes the token, of the values or of the tangents, and gives it back: an
    operation on tangents without it would not be part of the linear function on a rank whose
    tangent is zero.

    Attributes:
        op: the operation.
        how: how all operations here are called.
        x, t, y: its operand, the tangent of the operand, and its result.
        token, token_tangent: the token of the values and of the tangents, if there is one.
    """

    op: Reducing
    how: How
    x: Any
    t: Any
    y: Any
    token: list[Any]
    token_tangent: list[Any]

    @property
    def name(self) -> str:
        """The name of the reduction."""
        return self.op.reduction.name

    @property
    def comm(self) -> Comm | AnyComm:
        return self.op.comm

    def _bind(self, op: Operation, v: Any, token: list[Any]) -> Any:
        """Bind an operation, called as the one that is differentiated."""
        y, *token[:] = bind(op, self.how, v, *token)
        return y

    def _gather(self, v: Any, token: list[Any]) -> Any:
        # The result of an allgather would be one global value, with a local transpose. Each rank
        # computes a different value from these copies, so an alltoall is used.
        copies = jnp.broadcast_to(v, (self.comm.size, *v.shape))
        return self._bind(made("alltoall", self.comm), copies, token)

    def reduce_tangent(self, v: Any) -> Any:
        """Return the sum of the tangents."""
        total = as_reduction(self.op.name, MPI.SUM)
        op = replace(self.op, reduction=total, adjoint=False)
        return self._bind(op, v, self.token_tangent)

    def over_first(self, ranks: int) -> Any:
        """Return the tangent of the reduction over the first ``ranks``; zeros for none."""
        xs, ts = self._gather(self.x, self.token), self._gather(self.t, self.token_tangent)
        return self._reduced(xs[:ranks], ts[:ranks]) if ranks else jnp.zeros_like(self.t)

    def of_own_block(self) -> Any:
        """Return the tangent of the reduction over all ranks' blocks for this rank."""
        xs = self._own_blocks(self.x, self.token)
        return self._reduced(xs, self._own_blocks(self.t, self.token_tangent))

    def _own_blocks(self, v: Any, token: list[Any]) -> Any:
        """Return all ranks' blocks for this rank, stacked."""
        if not isinstance(self.op, WithParts):
            return self._bind(made("alltoall", self.comm), v, token)
        rows, own = self.op.rows
        assert own is not None
        ranks = self.comm.size
        op = made(
            "alltoallv",
            self.comm,
            rows=(rows, own * ranks),
            send_parts=self.op.send_parts,
            recv_parts=side_by_side((own,) * ranks),
        )
        return self._bind(op, v, token).reshape(ranks, own, *v.shape[1:])

    def _reduced(self, xs: Any, ts: Any) -> Any:
        """Return the tangent of the reduction along the first axis; ties share it equally."""
        fold: Any = {"PROD": jnp.prod, "MAX": jnp.max, "MIN": jnp.min}[self.name]
        return jax.jvp(lambda v: fold(v, axis=0), (xs,), (ts,))[1]

    def product_of_others(self) -> Any:
        """Return the product of the other ranks' factors, without division, which is exact at
        zeros.
        """
        return _product_of_others(self._gather(self.x, self.token), self.comm.rank)

    def extremum(self) -> Any:
        """Return the largest or smallest value, on all ranks."""
        op = made("allreduce", self.comm, reduction=self.op.reduction)
        return self._bind(op, self.x, self.token)

    def share_of_extremum(self, extremum: Any) -> Any:
        """Return this rank's share of the extremum: ties share it equally."""
        attained = (as_sent_p.bind(self.x) == extremum).astype(self.x.dtype)
        return attained / self._bind(sum_over_ranks("allreduce", self.comm), attained, self.token)


def derivative_of_reduction(
    op: Reducing,
    how: How,
    xs: Sequence[Any],
    ts: Sequence[Any],
    token: list[Any],
    token_tangent: list[Any],
) -> tuple[list[Any], list[Any]]:
    """Return results and tangents of an operation with a reduction other than SUM and MEAN."""
    name = op.reduction.name
    if name not in ("PROD", "MAX", "MIN"):
        raise NotImplementedError(
            f"{op.name}: reduction {name} has no derivative; "
            "expected one of SUM, MEAN, PROD, MAX, MIN (or use jax.lax.stop_gradient on the input)"
        )
    if type(op).tangent is Operation.tangent:
        raise NotImplementedError(f"{op.name}: reduction {name} has no derivative; expected SUM")
    before, after = op.lead()
    types = result_avals(op, how, [jax.typeof(x) for x in xs])
    x, t = (v[0] if len(v) == 1 else joined(v, before) for v in (xs, ts))
    how = how._replace(arity=())
    y, *token = bind(op, how, x, *token)
    called = How(threaded=how.threaded, spmd=how.spmd)
    r = ReductionTangent(op, called, x, t, y, token, token_tangent)
    ty = op.tangent(r)
    ys, tys = ([v] if len(xs) == 1 else parted(v, types, after) for v in (y, ty))
    return [*ys, *r.token], [*tys, *r.token_tangent]
