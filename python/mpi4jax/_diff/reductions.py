"""The derivatives of reductions other than SUM: PROD, MAX and MIN."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from mpi4py import MPI

from .._jax import compat
from .._op.comm import as_reduction
from .._op.leaves import joined, parted
from .._op.primitive import bind, result_avals
from .._op.rows import side_by_side
from .._op.spec import SPECS, Params, Spec, first_axes

# Its operand. What XLA fuses into two kernels it computes twice, and the compiler may round it
# differently in each, where a multiplication and an addition become one instruction. Then a value
# differs from itself, as an operation has got it. The result of a call is never computed again.
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


class ReductionTangent:
    """What the tangent of an operation depends on.

    Operand ``x``, its tangent ``t``, and result ``y`` of the reduction ``name``.

    Every op here takes the token, of the values or of the tangents, and gives it back: an op on
    tangents without it would not be part of the linear function on a rank whose tangent is zero.
    """

    def __init__(self, p: Params, x: Any, t: Any, y: Any, token: list[Any], tangents: list[Any]):
        self.p, self.x, self.t, self.y = p, x, t, y
        self.name, self.comm = p["reduction"].name, p["comm"]
        self.token, self.token_tangent = token, tangents

    def _bind(self, name: str, v: Any, token: list[Any], reduction: Any = None, **more: Any) -> Any:
        """Bind an operation with these parameters, with SUM unless a reduction is given."""
        reduction = reduction or as_reduction(name, MPI.SUM)
        p = {**self.p, "reduction": reduction, "adjoint": False, **more}
        names = SPECS[name].params | {"threaded", "spmd"}
        y, *token[:] = bind(SPECS[name], v, *token, **{k: v for k, v in p.items() if k in names})
        return y

    def _gather(self, v: Any, token: list[Any]) -> Any:
        # Of an allgather, whose result is one global value, the transpose would be local; what is
        # made of these differs between ranks.
        copies = jnp.broadcast_to(v, (self.comm.size, *v.shape))
        return self._bind("alltoall", copies, token)

    def reduce_tangent(self, name: str, v: Any) -> Any:
        """Return the sum of the tangents."""
        return self._bind(name, v, self.token_tangent)

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
        if "rows" not in self.p:
            return self._bind("alltoall", v, token)
        rows, own = self.p["rows"]
        ranks = self.comm.size
        receives = side_by_side((own,) * ranks)
        y = self._bind("alltoallv", v, token, rows=(rows, own * ranks), receives=receives)
        return y.reshape(ranks, own, *v.shape[1:])

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
        return self._bind("allreduce", self.x, self.token, self.p["reduction"])

    def share_of_extremum(self, extremum: Any) -> Any:
        """Return this rank's share of the extremum: ties share it equally."""
        attained = (as_sent_p.bind(self.x) == extremum).astype(self.x.dtype)
        return attained / self._bind("allreduce", attained, self.token)


def derivative_of_reduction(
    spec: Spec,
    xs: Sequence[Any],
    ts: Sequence[Any],
    token: list[Any],
    token_tangent: list[Any],
    p: Params,
) -> tuple[list[Any], list[Any]]:
    """Results and tangents of an op that reduces, with a reduction other than SUM and MEAN."""
    name = p["reduction"].name
    if name not in ("PROD", "MAX", "MIN"):
        raise NotImplementedError(
            f"{spec.name}: reduction {name} has no derivative; "
            "expected one of SUM, PROD, MAX, MIN (or use jax.lax.stop_gradient on the input)"
        )
    if spec.derivative is None:
        raise NotImplementedError(f"{spec.name}: reduction {name} has no derivative; expected SUM")
    before, after = (int(length is not None) for length in first_axes(spec, p))
    types = result_avals(spec, p, [jax.typeof(x) for x in xs])
    x, t = (v[0] if len(v) == 1 else joined(v, before) for v in (xs, ts))
    p = {k: v for k, v in p.items() if k != "arity"}
    y, *token = bind(spec, x, *token, **p)
    r = ReductionTangent(p, x, t, y, token, token_tangent)
    ty = spec.derivative(r)
    ys, tys = ([v] if len(xs) == 1 else parted(v, types, after) for v in (y, ty))
    return [*ys, *r.token], [*tys, *r.token_tangent]
