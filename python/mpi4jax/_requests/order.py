"""Dependences that order computation beside pending operations, and that XLA cannot see
through, and that cost little.

``mpi4jax_behind`` gives its first operand once the second, a handle, is there. ``mpi4jax_ready``
gives zeros, the handle of nothing, once its operands are there. Both are linear, and each is the
transpose of the other: so what is ordered in a function is ordered the other way round in its
derivative.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .._jax import compat
from .._op.primitive import first_of_batch
from .primitives import HANDLE

behind_p = Primitive("mpi4jax_behind")
behind_p.def_impl(compat.eval_primitive(behind_p))
behind_p.def_abstract_eval(lambda x, handle: x)

ready_p = Primitive("mpi4jax_ready")
ready_p.def_impl(compat.eval_primitive(ready_p))
ready_p.def_abstract_eval(lambda *xs: compat.array_type(HANDLE.shape, [*xs, HANDLE]))


def _behind(x: Any, handle: Any) -> Any:
    # Numbers of a handle are never negative, but XLA cannot infer that and keeps the dependence.
    return jnp.where(handle[0] >= 0, x, jnp.zeros_like(x))


mlir.register_lowering(behind_p, mlir.lower_fun(_behind, multiple_results=False))
# The call has no side effect, so XLA removes it if its result is unused.
mlir.register_lowering(ready_p, jax.ffi.ffi_lowering("mpi4jax_ready", has_side_effect=False))


def _behind_batch(args: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, Any]:
    (x, handle), (dim, handle_dim) = args, dims
    return behind_p.bind(x, first_of_batch(handle, handle_dim)), dim


def _ready_batch(args: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, Any]:
    return ready_p.bind(*args), None


def _behind_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    out, (t, of_handle) = behind_p.bind(*primals), tangents
    if type(t) is ad.Zero or type(of_handle) is ad.Zero:
        return out, t
    return out, behind_p.bind(t, of_handle)


def _behind_transpose(c: Any, x: Any, handle: Any) -> list[Any]:
    if type(c) is ad.Zero:
        return [None, None]
    linear = ad.is_undefined_primal
    of_handle = None
    if linear(handle):
        of_handle = compat.vary_as(ready_p.bind(c), handle.aval)
    return [c if linear(x) else None, of_handle]


def _ready_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    out = ready_p.bind(*primals)
    ts = [t for t in tangents if type(t) is not ad.Zero]
    return out, ready_p.bind(*ts) if ts else compat.zero_tangent(out)


def _ready_transpose(c: Any, *xs: Any) -> list[Any]:
    if type(c) is ad.Zero:
        return [None for _ in xs]

    def zeros(x: Any) -> Any:
        return behind_p.bind(ad.instantiate_zeros(ad.Zero(x.aval)), c)

    return [zeros(x) if ad.is_undefined_primal(x) else None for x in xs]


batching.primitive_batchers[behind_p] = _behind_batch
batching.primitive_batchers[ready_p] = _ready_batch
ad.primitive_jvps[behind_p] = _behind_jvp
ad.primitive_jvps[ready_p] = _ready_jvp
ad.primitive_transposes[behind_p] = _behind_transpose
ad.primitive_transposes[ready_p] = _ready_transpose


def _data(x: Any) -> Any:
    """Return the numbers of an array: for PRNG keys, their data."""
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.extended) else x


def behind(x: Any, handles: Sequence[Any]) -> Any:
    """Return ``x``, once all of these handles exist."""
    handle = functools.reduce(jnp.add, handles)
    data = behind_p.bind(_data(x), handle)
    return (
        data
        if data.dtype == x.dtype
        else jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    )


def ready(xs: Sequence[Any]) -> Any:
    """Return zeros like a handle, once all of these arrays exist."""
    return ready_p.bind(*map(_data, xs))
