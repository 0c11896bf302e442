"""pvary: the identity, whose transpose is a sum over ranks; and shared, whose transpose divides.

They are no operations: where nothing is differentiated, there is nothing to keep. `shard_map`
inserts `pvary` at constants, too, in functions that do not communicate otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .._op import manual
from .._op.packing import bind_trees
from .._op.primitive import sum_over_ranks

pvary_p = Primitive("mpi4jax_pvary")
pvary_p.multiple_results = True


def pvary(comm: Any, xs: Sequence[Any]) -> list[Any]:
    return _bind(comm, manual.boundary() or True, False, xs)


def shared(comm: Any, x: Any) -> Any:
    """Return a value that all ranks have, and whose cotangent they share."""
    return _bind(comm, manual.boundary() or True, True, [x])[0]


def _bind(comm: Any, spmd: bool | str, is_shared: bool, xs: Sequence[Any]) -> list[Any]:
    return pvary_p.bind(*xs, comm=comm, spmd=spmd, is_shared=is_shared) if xs else []


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **p: Any) -> tuple[Any, Any]:
    linear = iter(_bind(xs=[t for t in tangents if type(t) is not ad.Zero], **p))
    out = [t if type(t) is ad.Zero else next(linear) for t in tangents]
    return _bind(xs=primals, **p), out


def _transpose(
    cotangents: Sequence[Any], *xs: Any, comm: Any, spmd: bool | str, is_shared: bool
) -> list[Any]:
    given = [c for c in cotangents if type(c) is not ad.Zero]
    if is_shared:
        varied = iter(_bind(comm, spmd, False, given))
        return [c if type(c) is ad.Zero else next(varied) / comm.size for c in cotangents]
    allreduce = manual.of_all_ranks(bind_trees, spmd)
    sums = iter(allreduce(sum_over_ranks("allreduce", comm), (given,)) if given else ())
    return [c if type(c) is ad.Zero else next(sums) for c in cotangents]


pvary_p.def_abstract_eval(lambda *xs, **p: xs)
pvary_p.def_impl(lambda *xs, **p: list(xs))
mlir.register_lowering(pvary_p, lambda ctx, *xs, **p: list(xs))
batching.primitive_batchers[pvary_p] = lambda xs, dims, **p: (_bind(xs=xs, **p), dims)
ad.primitive_jvps[pvary_p] = _jvp
ad.primitive_transposes[pvary_p] = _transpose
