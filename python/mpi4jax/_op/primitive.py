"""The JAX primitives of the operations: types of operands and results, and batching.

Every primitive has one ordered effect, so JAX keeps each op, once, in program order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from mpi4py import MPI

from .._jax import compat, traces
from .comm import as_reduction
from .manual import current_spmd, needs_pvary, result_type, varying_operands
from .operation import How, Operation, Reducing, made
from .table import DTYPES

TOKEN = ShapedArray((), np.dtype(np.float32))
_ENVELOPE = ShapedArray((3,), np.dtype(np.int32))


def envelope(op: Operation, how: How) -> list[ShapedArray]:
    """Return the type of the envelope of a received message, or of the counts of received rows."""
    if not how.env_out:
        return []
    return [ShapedArray((op.comm.size,), np.dtype(np.int32)) if op.row.is_ragged else _ENVELOPE]


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


def split(op: Operation, how: How, args: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Split operands into (arrays, counts and numbers, token). There may be no token."""
    n = sum(op.arity(how))
    m = n + op.row.is_ragged + (how.operand is not None)
    return list(args[:n]), list(args[n:m]), list(args[m:])


# ---- Abstract evaluation


def split_payload(op: Operation, x: Any, size: int) -> tuple[int, ...]:
    """Return the shape of one of the ``size`` blocks or rows of ``x``."""
    if x.shape[:1] == (size,):
        return tuple(x.shape[1:])
    if op.has_any_size:
        said = "its first leaf" if op.row.is_ragged else "the counts add up to"
        raise ValueError(
            f"{op.name}: argument 'x' must have as many rows along its first axis as {said}; "
            f"expected shape ({size}, ...), got {x.shape}"
        )
    raise ValueError(
        f"{op.name}: argument 'x' must have one block for each rank along its first axis; expected "
        f"shape ({size}, ...), got {x.shape}. "
        # These are the words of mpi4jax 0.9, because tests of existing programs match them.
        f"{op.name.capitalize()} input must have shape (nproc, ...)"
    )


def result_avals(op: Operation, how: How, avals: Sequence[Any]) -> list[ShapedArray]:
    """Return the types of the results that are arrays, from the types of the operands."""
    if not op.returns:
        return []
    length, result_length = op.first_lengths()
    # The results vary over the axes that any of the operands varies over.
    all_of_them = [compat.array_type((), avals)] if len(avals) > 1 else []
    out = []
    for x in avals[-op.arity(how)[-1] :]:  # of sendrecv: the templates of what is received
        payload = tuple(x.shape) if length is None else split_payload(op, x, length)
        shape = payload if result_length is None else (result_length, *payload)
        out.append(result_type(op, compat.array_type(shape, [*all_of_them, x])))
    return out


_KINDS = {"bool": "boolean", "int": "integer", "uint": "integer", "complex": "complex"}


def _kind_of(dtype: str) -> str:
    return _KINDS.get(re.sub(r"\d.*", "", dtype), "floating-point")


def check_dtype(op: Operation, aval: ShapedArray) -> None:
    """Raise an error if an array of this dtype cannot be communicated, or reduced."""
    name = str(aval.dtype)
    dtype = DTYPES.get(name)
    if dtype is None:
        raise TypeError(
            f"{op.name}: dtype {name} cannot be communicated; expected one of {', '.join(DTYPES)}"
        )
    if not isinstance(op, Reducing) or op.reduction.user:
        return
    reduction = op.reduction
    blocks, _ = op.lead()
    if reduction.name in ("MAXLOC", "MINLOC") and aval.shape[blocks:][-1:] != (2,):
        raise ValueError(
            f"{op.name}: reduction {reduction.name} reduces pairs (value, index) along the last "
            f"axis{' of a block' * blocks}; expected shape (..., 2), got {aval.shape}"
        )
    if dtype.has_reduction(reduction.name):
        return
    advice = ""
    if name == "bool" or reduction.name == "MEAN":
        advice = f"; use x.astype({'float' if reduction.name == 'MEAN' else 'int'})"
    kinds = (_kind_of(d) for d, row in DTYPES.items() if row.has_reduction(reduction.name))
    *first, last = dict.fromkeys(kinds)
    allowed = f"{', '.join(first)} or {last}"
    article = "an" if allowed.startswith("i") else "a"
    raise TypeError(
        f"{op.name}: reduction {reduction.name} is not defined for dtype {name}; "
        f"expected {article} {allowed} dtype{advice}"
    )


def abstract_eval(*args: Any, op: Operation, how: How) -> tuple[list[Any], set[Any]]:
    """Return the types of all results, and the effect."""
    arrays, _, token = split(op, how, args)
    for x in arrays:
        check_dtype(op, x)
    out = result_avals(op, how, arrays)
    for x in envelope(op, how):
        out.append(result_type(op, compat.array_type(x.shape, [*arrays, x])))
    return [*out, *(TOKEN for _ in token)], {effect}


# ---- Binding and batching

PRIMITIVES: dict[str, Primitive] = {}  # of the ops, by name

# How the operands of each communicating primitive are split (`split`), including the primitives of
# `_requests`.
OPERANDS: dict[
    Primitive,
    Callable[[Operation, How, Sequence[Any]], tuple[list[Any], list[Any], list[Any]]],
] = {}


def bind(op: Operation, how: How, *args: Any) -> list[Any]:
    """Bind the primitive of an operation, whose rules `_call/definition.py` lists."""
    arrays, numbers, token = split(op, how, args)
    if spmd := current_spmd():
        how = how._replace(spmd=spmd)
    operands = varying_operands(op, arrays)
    return list(PRIMITIVES[op.name].bind(*operands, *numbers, *token, op=op, how=how))


def sum_over_ranks(name: str, comm: Any, *, adjoint: bool = False) -> Operation:
    """Return an allreduce SUM, or its transpose, for the function of this name."""
    return made("allreduce", comm, reduction=as_reduction(name, MPI.SUM), adjoint=adjoint)


def pvary_results(op: Operation, ys: Sequence[Any]) -> Sequence[Any]:
    """Return results of one dtype of the user's operation, which each rank uses in its own way."""
    if not needs_pvary(op) or not all(map(has_derivative, ys)):
        return ys
    return bind(sum_over_ranks("pvary", op.comm, adjoint=True), How(arity=(len(ys),)), *ys)


def first_of_batch(x: Any, dim: int | None) -> Any:
    """Return the first token or handle of a batch, or the only one if it is not batched."""
    return x if dim is None else jnp.sum(jnp.moveaxis(x, dim, 0)[:1], axis=0)


def common_numbers(numbers: Any, axis: int, ask_same: bool = False) -> Any:
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
    axis_data: Any, args: Sequence[Any], dims: Sequence[Any], *, op: Operation, how: How
) -> tuple[list[Any], list[int | None]]:
    """Batch all arrays, even unbatched ones, because they may be batched on another rank.

    Not in `jax.jacfwd`, nor with the token of `_diff/ad.py`, which is batched on all
    ranks or none, nor where the operands are.
    """
    if is_unbatched(axis_data, dims, how):
        out = bind(op, how, *args)
        return out, [None] * len(out)
    operands, after = batched_operands(op, how, axis_data.size, args, dims)
    out = bind(op, how, *operands)
    *_, token = split(op, how, dims)
    return batched_results(axis_data.size, out, op.count_results(how), after, token)


def batched_results(
    size: int, out: list[Any], count: int, axis: int | None, token: Sequence[int | None]
) -> tuple[list[Any], list[int | None]]:
    """Return results, and the batch axis of each.

    Args:
        size: size of the batch.
        out: the results; the last one is a token if a token was given.
        count: how many of them have the batch axis ``axis``.
        token: the batch axis of the token that was given, if there is one. If this token is
            batched, the returned one is, too.
    """
    axes = [axis] * count + [None] * (len(out) - count)
    if token and token[0] is not None:
        out, axes[-1] = [*out[:-1], jnp.broadcast_to(out[-1], (size,))], 0
    return out, axes


def is_unbatched(axis_data: Any, dims: Sequence[Any], how: How) -> bool:
    """Return whether an operation is batched on no rank."""
    threaded = how.threaded or how.spmd or traces.batches_tangents(axis_data)
    return bool(threaded) and all(d is None for d in dims)


def batched_operands(
    op: Operation, how: How, size: int, args: Sequence[Any], dims: Sequence[Any]
) -> tuple[list[Any], int]:
    """Return the operands of an operation on a batch, and the batch axis of the result."""
    arrays, numbers, token = split(op, how, list(zip(args, dims, strict=True)))
    if how.operand == "traced" and numbers[0][1] is not None:
        raise NotImplementedError(
            f"{op.name}: a source, destination or tag is batched by vmap, and one message "
            "carries the whole batch; expected one value for all elements of the batch "
            "(in_axes=None, or a value computed outside the vmap)"
        )
    # The batch axis goes after the axis of blocks or rows, if there is one.
    before, after = op.lead()

    def to_payload(x: Any, d: int | None) -> Any:
        """Move the batch axis to the front of the payload of one rank, or insert it there."""
        if d is None:
            x = compat.as_value(x)
            x, d = jnp.broadcast_to(x, (size, *x.shape)), 0
        return jnp.moveaxis(x, d, before)

    xs = [to_payload(x, d) for x, d in arrays]
    ask_same = op.row.is_ragged and bool(how.env_out)
    numbers = [x if d is None else common_numbers(x, d, ask_same) for x, d in numbers]
    one = [first_of_batch(x, d) for x, d in token]
    return [*xs, *numbers, *one], after
