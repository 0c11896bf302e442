"""The JAX primitives of the operations: types of operands and results, and batching.

Every primitive has one ordered effect, so JAX keeps each op, once, in program order.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from mpi4py import MPI

from .. import _native
from .._jax import compat, traces
from .comm import as_reduction
from .manual import boundary, needs_pvary, result_type, varying_operands
from .spec import SPECS, Params, Spec, first_axes

TOKEN = ShapedArray((), np.dtype(np.float32))
_ENVELOPE = ShapedArray((3,), np.dtype(np.int32))


def envelope(spec: Spec, p: Params) -> list[ShapedArray]:
    """Return the type of the envelope of a received message, or of the counts of received rows."""
    if not p.get("env_out"):
        return []
    return [ShapedArray((p["comm"].size,), np.dtype(np.int32)) if spec.is_ragged else _ENVELOPE]


# The row of each dtype (`src/ops/dtypes.rs`), by its name.
DTYPES = {row["name"]: row for row in json.loads(_native.dtypes_table())}
for _row in DTYPES.values():
    _row["is_inexact"] = _row["has_arithmetic"] and not _row["has_bits"]


class MPIEffect(compat.Effect):
    """The one effect of all operations, which run in program order."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash("mpi4jax.MPIEffect")

    def __repr__(self) -> str:
        return "MPI"

    __str__ = __repr__


effect = MPIEffect()
compat.add_effect_type(MPIEffect)

# Why an operation has no token.
HIDDEN = (
    "inside a primitive that hides effects from JAX (for example lineax.linear_solve), where JAX "
    "may drop the operation; use a solver of mpi4jax.linalg, or jax.lax.custom_linear_solve"
)


def has_derivative(x: Any) -> bool:
    """Return whether a value, or a type, has a derivative."""
    dtype = x.dtype if hasattr(x, "dtype") else jnp.result_type(x)  # literals may be numbers
    return bool(jnp.issubdtype(dtype, np.inexact))


def split(spec: Spec, p: Params, args: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Split operands into (arrays, counts and numbers, token). There may be no token."""
    n = sum(spec.arity(p))
    m = n + spec.is_ragged + (p.get("operand") is not None)
    return list(args[:n]), list(args[n:m]), list(args[m:])


# ---- Abstract evaluation


def split_payload(spec: Spec, x: Any, size: int) -> tuple[int, ...]:
    """Return the shape of one of the ``size`` blocks or rows of ``x``."""
    op = spec.name
    if x.shape[:1] == (size,):
        return tuple(x.shape[1:])
    if spec.has_any_size:
        said = "its first leaf" if spec.is_ragged else "the counts add up to"
        raise ValueError(
            f"{op}: argument 'x' must have as many rows along its first axis as {said}; "
            f"expected shape ({size}, ...), got {x.shape}"
        )
    raise ValueError(
        f"{op}: argument 'x' must have one block for each rank along its first axis; expected "
        f"shape ({size}, ...), got {x.shape}. "
        # The words of mpi4jax 0.9, which tests of programs match.
        f"{op.capitalize()} input must have shape (nproc, ...)"
    )


def result_avals(spec: Spec, p: Params, avals: Sequence[Any]) -> list[ShapedArray]:
    if not spec.returns:
        return []
    before, after = (None, None) if spec.has_blocks else first_axes(spec, p)
    # They vary over the axes that any of the operands varies over.
    all_of_them = [compat.array_type((), avals)] if len(avals) > 1 else []
    out = []
    for x in avals[-spec.arity(p)[-1] :]:  # of sendrecv: the templates of what is received
        payload = tuple(x.shape) if before is None else split_payload(spec, x, before)
        shape = payload if after is None else (after, *payload)
        out.append(result_type(spec, p, compat.array_type(shape, [*all_of_them, x])))
    return out


# What the row of a dtype has to say for a reduction.
_NEEDS = {
    **dict.fromkeys(("SUM", "PROD"), "has_arithmetic"),
    "MEAN": "is_inexact",
    **dict.fromkeys(("MAX", "MIN", "MAXLOC", "MINLOC"), "is_ordered"),
    **dict.fromkeys(("BAND", "BOR", "BXOR", "LAND", "LOR", "LXOR"), "has_bits"),
}


def check_dtype(spec: Spec, p: Params, aval: Any) -> None:
    """Raise an error if an array of this dtype cannot be communicated, or reduced."""
    op, name, reduction = spec.name, str(aval.dtype), p.get("reduction")
    flags = DTYPES.get(name)
    if flags is None:
        raise TypeError(
            f"{op}: dtype {name} cannot be communicated; expected one of {', '.join(DTYPES)}"
        )
    if reduction is None or reduction.user:
        return
    blocks = first_axes(spec, p)[0] is not None  # the first axis is that of the ranks
    if reduction.name in ("MAXLOC", "MINLOC") and aval.shape[blocks:][-1:] != (2,):
        raise ValueError(
            f"{op}: reduction {reduction.name} reduces pairs (value, index) along the last "
            f"axis{' of a block' * blocks}; expected shape (..., 2), got {aval.shape}"
        )
    if flags[_NEEDS[reduction.name]]:
        return
    advice = ""
    if name == "bool" or reduction.name == "MEAN":
        advice = f"; use x.astype({'float' if reduction.name == 'MEAN' else 'int'})"
    allowed = [re.sub(r"\d.*", "", d) for d, f in DTYPES.items() if f[_NEEDS[reduction.name]]]
    raise TypeError(
        f"{op}: reduction {reduction.name} is not defined for dtype {name}; "
        f"expected a dtype of kind {', '.join(dict.fromkeys(allowed))}{advice}"
    )


def abstract_eval(spec: Spec, *args: Any, **p: Any) -> tuple[list[Any], set[Any]]:
    arrays, _, token = split(spec, p, args)
    for x in arrays:
        check_dtype(spec, p, x)
    out = result_avals(spec, p, arrays)
    for x in envelope(spec, p):
        out.append(result_type(spec, p, compat.array_type(x.shape, [*arrays, x])))
    return [*out, *(TOKEN for _ in token)], {effect}


# ---- Binding and batching

PRIMITIVES: dict[str, Primitive] = {}  # of the ops, by name

# All primitives that communicate: given parameters and operands, the operands as `split` has them.
# Those of `_requests` are there, too.
OPERANDS: dict[Primitive, Callable[[Params, Sequence[Any]], Sequence[list[Any]]]] = {}


def bind(spec: Spec, *args: Any, **p: Any) -> list[Any]:
    """Bind the primitive of an operation, whose rules `_call/definition.py` lists."""
    arrays, *others = split(spec, p, args)
    operands = [*varying_operands(spec, p, arrays), *itertools.chain(*others)]
    if boundary():
        p["spmd"] = boundary()
    return list(PRIMITIVES[spec.name].bind(*operands, **p))


def pvary_results(spec: Spec, p: Params, ys: Sequence[Any]) -> Sequence[Any]:
    """Results of one dtype, which each rank uses in its own way: of an op of the user's."""
    if not needs_pvary(spec, p) or not all(map(has_derivative, ys)):
        return ys
    sum_back = {"reduction": as_reduction("pvary", MPI.SUM), "adjoint": True}
    return bind(SPECS["allreduce"], *ys, comm=p["comm"], arity=(len(ys),), **sum_back)


def first_of_batch(x: Any, dim: int | None) -> Any:
    """Return the first token or handle of a batch, or the only one if it is not batched."""
    return x if dim is None else jnp.sum(jnp.moveaxis(x, dim, 0)[:1], axis=0)


def of_batch(numbers: Any, axis: int, ask_same: bool) -> Any:
    """Return the numbers that all elements of a batch have in common.

    Elements that did not take a branch of a `cond` have none. With ``ask_same``, -1 where they
    differ: they may all have been given the same ones (`vmap` of a `cond` does), which only their
    values show, when the op runs.
    """
    greatest = jnp.max(numbers, axis=axis, initial=0)
    if not ask_same:
        return greatest
    least = jnp.min(numbers, axis=axis, initial=np.iinfo(np.int32).max)
    return jnp.where(least < greatest, -1, greatest)


def batch(
    spec: Spec, axis_data: Any, args: Sequence[Any], dims: Sequence[Any], **p: Any
) -> tuple[Any, Any]:
    """Batch all arrays, even unbatched ones, because they may be batched on another rank.

    Not in `jax.jacfwd`, nor with the token of `_diff/ad.py`, which is batched on all
    ranks or none, nor where the operands are.
    """
    if is_unbatched(axis_data, dims, p):
        out = bind(spec, *args, **p)
        return out, [None] * len(out)
    operands, after = batched_operands(spec, axis_data.size, args, dims, p)
    out = bind(spec, *operands, **p)
    out_dims: list[int | None] = [None] * len(out)
    if spec.returns:
        results = spec.count_results(p)
        out_dims[:results] = [after] * results
    *_, token = split(spec, p, dims)
    if token and token[0] is not None:
        out[-1], out_dims[-1] = jnp.broadcast_to(out[-1], (axis_data.size,)), 0
    return out, out_dims


def is_unbatched(axis_data: Any, dims: Sequence[Any], p: Params) -> bool:
    """Return whether an operation is batched on no rank."""
    threaded = p.get("threaded") or p.get("spmd") or traces.batches_tangents(axis_data)
    return bool(threaded) and all(d is None for d in dims)


def batched_operands(
    spec: Spec, size: int, args: Sequence[Any], dims: Sequence[Any], p: Params
) -> tuple[list[Any], int]:
    """Return the operands of an operation on a batch, and the batch axis of the result."""
    arrays, numbers, token = split(spec, p, list(zip(args, dims, strict=True)))
    if p.get("operand") == "traced" and numbers[0][1] is not None:
        raise NotImplementedError(
            f"{spec.name}: a source, destination or tag is batched by vmap, and one message "
            "carries the whole batch; expected one value for all elements of the batch "
            "(in_axes=None, or a value computed outside the vmap)"
        )
    # The batch axis goes after the axis of blocks or rows, if there is one.
    before, after = (int(length is not None) for length in first_axes(spec, p))

    def to_payload(x: Any, d: int | None) -> Any:
        """Move the batch axis to the front of the payload of one rank, or insert it there."""
        if d is None:
            x = compat.as_value(x)
            x, d = jnp.broadcast_to(x, (size, *x.shape)), 0
        return jnp.moveaxis(x, d, before)

    xs = [to_payload(x, d) for x, d in arrays]
    ask_same = spec.is_ragged and p["env_out"]
    numbers = [x if d is None else of_batch(x, d, ask_same) for x, d in numbers]
    one = [first_of_batch(x, d) for x, d in token]
    return [*xs, *numbers, *one], after
