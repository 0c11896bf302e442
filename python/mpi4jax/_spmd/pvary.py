"""What each rank uses in its own way: the identity, whose transpose is a sum over ranks.

It is no op: where nothing is differentiated, there is nothing to keep. `shard_map` inserts it at
constants, too, in functions that do not communicate otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from mpi4py import MPI

from .._op.comm import as_reduction
from .._op.manual import of_all_ranks
from .._op.packing import bind_trees
from .._op.spec import SPECS

pvary_p = Primitive("mpi4jax_pvary")
pvary_p.multiple_results = True


def pvary(comm: Any, xs: Sequence[Any]) -> list[Any]:
    return pvary_p.bind(*xs, comm=comm) if xs else []


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, comm: Any) -> tuple[Any, Any]:
    linear = iter(pvary(comm, [t for t in tangents if type(t) is not ad.Zero]))
    out = [t if type(t) is ad.Zero else next(linear) for t in tangents]
    return pvary(comm, primals), out


@of_all_ranks
def _transpose(cotangents: Sequence[Any], *xs: Any, comm: Any) -> list[Any]:
    given = [c for c in cotangents if type(c) is not ad.Zero]
    p = {"comm": comm, "reduction": as_reduction("allreduce", MPI.SUM), "adjoint": False}
    sums = iter(bind_trees(SPECS["allreduce"], (given,), p) if given else ())
    return [c if type(c) is ad.Zero else next(sums) for c in cotangents]


pvary_p.def_abstract_eval(lambda *xs, comm: xs)
pvary_p.def_impl(lambda *xs, comm: list(xs))
mlir.register_lowering(pvary_p, lambda ctx, *xs, comm: list(xs))
batching.primitive_batchers[pvary_p] = lambda xs, dims, *, comm: (pvary(comm, xs), dims)
ad.primitive_jvps[pvary_p] = _jvp
ad.primitive_transposes[pvary_p] = _transpose
