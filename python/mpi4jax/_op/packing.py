"""Pytrees of arrays as messages: the leaves of one dtype are one array."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .._jax import compat
from .arguments import from_end
from .primitive import bind, split_payload
from .spec import SPECS, Params, Spec, first_axes, is_template


def _is_key(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.extended))


def check_template(op: str, argument: str, tree: Any) -> None:
    """Refuse a shape as what describes a received array: it would be a pytree of integers.

    Raises:
        TypeError: it is a tuple or list of Python integers.
    """
    if type(tree) in (tuple, list) and tree and all(type(n) is int for n in tree):
        raise TypeError(
            f"{op}: argument '{argument}' must be a template, an array or a pytree of arrays, got "
            f"{tree!r}, which is a pytree of integers; if it is a shape, expected "
            f"jnp.zeros({tuple(tree)}) or jax.ShapeDtypeStruct({tuple(tree)}, dtype)"
        )


def zeros_like(like: Any) -> jax.Array:
    """Zeros, as an operand that is not read."""
    if not _is_key(like):
        return jnp.zeros(like.shape, like.dtype)
    impls = []

    def data_of(key: Any) -> Any:
        impls.append(jax.random.key_impl(key))
        return jax.random.key_data(key)

    data = jax.eval_shape(data_of, like)
    return jax.random.wrap_key_data(jnp.zeros(data.shape, data.dtype), impl=impls[0])


def _as_array(op: str, argument: str, leaf: Any, template: bool) -> jax.Array:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        if template:
            return zeros_like(leaf)
        raise TypeError(
            f"{op}: argument '{argument}' must be an array, a number, or a pytree of those, got "
            f"{leaf}; a ShapeDtypeStruct can only describe an array that is received"
        )
    try:
        return jnp.asarray(leaf)
    except (TypeError, ValueError):
        kind = f"dtype {leaf.dtype}" if hasattr(leaf, "dtype") else type(leaf).__name__
        raise TypeError(
            f"{op}: argument '{argument}' must be an array, a number, or a pytree of those, "
            f"got {kind}: {leaf!r}"
        ) from None


def pack_arguments(spec: Spec, trees: Sequence[Any], p: Params) -> list[Packed]:
    """The arguments of an op that are arrays.

    Raises:
        TypeError: one is none, or only the description of one, where values are needed.
    """
    names = ("sendbuf", "recvbuf") if spec.arrays == 2 else ("x",)
    return [
        Packed(spec.name, name, tree, is_template(spec, p, i))
        for i, (name, tree) in enumerate(zip(names, trees, strict=True))
    ]


def _groups(dtypes: Sequence[Any]) -> dict[Any, list[int]]:
    """Positions of the leaves of each dtype; in the same order on every rank.

    Gradients of integers (float0) carry no data, and are in none.
    """
    groups: dict[Any, list[int]] = {}
    for i, dtype in enumerate(dtypes):
        if dtype != jax.dtypes.float0:
            groups.setdefault(dtype, []).append(i)
    return dict(sorted(groups.items(), key=lambda item: str(item[0])))


@dataclass(frozen=True)
class Form:
    """A tree of arrays without its arrays.

    Attributes:
        tree: its structure.
        impls: of each leaf that is an array of PRNG keys, their kind; of others None.
        shapes: of the leaves.
        data: shapes and dtypes of what is communicated of the leaves: of keys, their data.
        shardings: how the leaves were cut, where their types say so.
    """

    tree: Any
    impls: tuple[Any, ...]
    shapes: tuple[tuple[int, ...], ...]
    data: tuple[tuple[tuple[int, ...], Any], ...]
    shardings: tuple[Any, ...]

    @functools.cached_property
    def groups(self) -> dict[Any, list[int]]:
        return _groups([dtype for _, dtype in self.data])

    def unpack(self, results: dict[Any, Any], before: int | None, after: int | None) -> Any:
        """The tree of results, from the result of each dtype's message."""
        payloads = [shape[int(before is not None) :] for shape, _ in self.data]
        shapes = [s if after is None else (after, *s) for s in payloads]
        out: list[Any] = [
            np.zeros(s, dtype) if dtype == jax.dtypes.float0 else None
            for s, (_, dtype) in zip(shapes, self.data, strict=True)
        ]
        for dtype, indices in self.groups.items():
            y = results[dtype]
            if len(indices) == 1:
                out[indices[0]] = y
                continue
            ends = np.cumsum([int(np.prod(payloads[i])) for i in indices])[:-1]
            for i, part in zip(indices, jnp.split(y, ends, axis=-1), strict=True):
                out[i] = part.reshape(shapes[i])
        return self.rebuild(out)

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """The tree of these leaves."""
        out = [
            y if impl is None else jax.random.wrap_key_data(y, impl=impl)
            for y, impl in zip(leaves, self.impls, strict=True)
        ]
        for i, (shape, sharding) in enumerate(zip(self.shapes, self.shardings, strict=True)):
            if sharding is not None and out[i].shape == shape:
                out[i] = jax.sharding.reshard(out[i], sharding)
        return jax.tree.unflatten(self.tree, out)


class Packed:
    """The leaves of a tree, as one array per dtype."""

    def __init__(self, op: str, argument: str, tree: Any, template: bool):
        leaves, structure = jax.tree.flatten(tree)
        leaves = [_as_array(op, argument, leaf, template) for leaf in leaves]
        shardings = tuple(compat.explicit_sharding(x) for x in leaves)
        leaves = [
            x if s is None else jax.sharding.reshard(x, NamedSharding(s.mesh, PartitionSpec()))
            for x, s in zip(leaves, shardings, strict=True)
        ]
        impls = tuple(jax.random.key_impl(x) if _is_key(x) else None for x in leaves)
        shapes = tuple(x.shape for x in leaves)
        self.leaves = [jax.random.key_data(x) if _is_key(x) else x for x in leaves]
        data = tuple((x.shape, x.dtype) for x in self.leaves)
        self.form = Form(structure, impls, shapes, data, shardings)

    @property
    def groups(self) -> dict[Any, list[int]]:
        return self.form.groups

    def pack(self, dtype: Any, length: int | None, spec: Spec) -> jax.Array:
        """The message of one dtype: a leaf as it is, or all leaves side by side, in each of so many
        blocks or rows."""
        xs = [self.leaves[i] for i in self.groups[dtype]]
        if len(xs) == 1:
            return xs[0]
        if length is None:
            return jnp.concatenate([x.ravel() for x in xs])
        sizes = [math.prod(split_payload(spec, x, length)) for x in xs]
        flat = [x.reshape(length, size) for x, size in zip(xs, sizes, strict=True)]
        return jnp.concatenate(flat, axis=1)


def check_no_keys(spec: Spec, p: Params, packed: Packed) -> None:
    """Raise a TypeError if PRNG keys are to be reduced."""
    reduction = p.get("reduction")
    if reduction is not None and any(impl is not None for impl in packed.form.impls):
        raise TypeError(
            f"{spec.name}: reduction {reduction.name} is not defined for PRNG keys; "
            "expected numbers (bcast, scatter and messages take keys)"
        )


def bind_trees(spec: Spec, trees: Sequence[Any], p: Params, numbers: Sequence[Any] = ()) -> Any:
    """Bind the primitive once per dtype, with the same numbers. Of an op with counts, the result is
    a pair: the counts of what has come, too. An op that returns nothing has None."""
    if not trees:
        bind(spec, *numbers, **p)
        return None
    if spec.arrays is None:
        return _bind_blocks(spec, trees, p, numbers)
    before, after = first_axes(spec, p)
    packed = pack_arguments(spec, trees, p)
    check_no_keys(spec, p, packed[0])
    results: dict[Any, Any] = {}
    learnt: Any = None
    dtypes = packed[0].groups
    if len(packed) == 2:
        dtypes = _groups([x.dtype for side in packed for x in side.leaves])
    if spec.is_ragged and not dtypes:  # no rows go anywhere, and ranks tell each other their counts
        row = SPECS["alltoall"]
        q = {k: v for k, v in p.items() if k in row.params | {"operand", "eager"}}
        (learnt,) = bind(row, *numbers, **row.defaults, **q)
    for dtype in dtypes:
        row, q, sides = spec, p, packed
        if len(packed) == 2 and not all(dtype in side.groups for side in packed):
            # The two trees of a sendrecv differ in this dtype: it only goes, or only comes.
            sends = dtype in packed[0].groups
            row, sides = SPECS["send" if sends else "recv"], [packed[0 if sends else 1]]
            q = {k: v for k, v in p.items() if k in row.params | {"operand", "eager"}}
        xs = [side.pack(dtype, before, spec) for side in sides]
        out = bind(row, *xs, *numbers, **q)
        if q.get("env_out"):
            # What follows need not ask for it.
            learnt, p = out[1], {**p, "env_out": False}
            numbers = [jnp.concatenate([numbers[0], learnt]), *numbers[1:]]
        if row.returns:
            results[dtype] = out[0]
    y = packed[-1].form.unpack(results, before, after) if spec.returns else None
    return (y, learnt) if spec.is_ragged else y


def exchanged_axes(op: str, form: Form, leaf: int, p: Params) -> tuple[int, ...]:
    """The exchanged axes of what is communicated of a leaf, counted from its end."""
    inside = len(form.data[leaf][0]) - len(form.shapes[leaf])  # of one element: a key's data
    counted = from_end(op, p["axes"], p["widths"], form.shapes[leaf])
    return tuple(axis + inside for axis in counted)


def _bind_blocks(spec: Spec, trees: Sequence[Any], p: Params, numbers: Sequence[Any]) -> Any:
    """Bind an op on several arrays once per dtype."""
    (packed,) = pack_arguments(spec, trees, p)
    out: list[Any] = list(packed.leaves)
    for indices in packed.groups.values():
        xs = [packed.leaves[i] for i in indices]
        axes = tuple(exchanged_axes(spec.name, packed.form, i, p) for i in indices)
        ys = bind(spec, *xs, *numbers, **{**p, "axes": axes})
        for i, y in zip(indices, ys, strict=True):
            out[i] = y
    return packed.form.rebuild(out)
