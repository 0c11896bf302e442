"""Pytrees of arrays as messages: the leaves of one dtype are one message."""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef

from .._jax import compat
from .arguments import from_end
from .operation import (
    ASKED,
    PLAIN,
    How,
    OfBlocks,
    Operation,
    Ragged,
    Reducing,
    SendingAndReceiving,
)
from .primitive import bind, check_dtype, pvary_results, result_avals


def _is_key(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.extended))


def check_template(op: str, argument: str, tree: Any) -> None:
    """Raise an error for a shape in place of a template, because it is a pytree of integers."""
    if type(tree) in (tuple, list) and tree and all(type(n) is int for n in tree):
        raise TypeError(
            f"{op}: argument '{argument}' must be a template, an array or a pytree of arrays, got "
            f"{tree!r}, which is a pytree of integers; if it is a shape, expected "
            f"jnp.zeros({tuple(tree)}) or jax.ShapeDtypeStruct({tuple(tree)}, dtype)"
        )


def zeros_like(like: Any) -> jax.Array:
    """Return zeros, as an operand that is not read."""
    if not _is_key(like):
        return jnp.zeros(like.shape, like.dtype)
    impls = []

    def data_of(key: Any) -> Any:
        impls.append(jax.random.key_impl(key))
        return jax.random.key_data(key)

    data = jax.eval_shape(data_of, like)
    return jax.random.wrap_key_data(jnp.zeros(data.shape, data.dtype), impl=impls[0])


def holds_numpy(leaves: Iterable[Any]) -> bool:
    """Return whether there is a NumPy array, which JAX may read after a call has returned."""
    for x in leaves:  # noqa: SIM110  (a generator costs each eager call a microsecond)
        if isinstance(x, np.ndarray):
            return True
    return False


def as_array(x: Any) -> jax.Array:
    """Return ``jnp.asarray(x)``, copied so that the caller may refill a NumPy array."""
    y = jnp.asarray(x)
    return jax.block_until_ready(y) if isinstance(x, np.ndarray) else y


def as_arrays(op: str, argument: str, tree: Any, template: bool = False) -> tuple[list[Any], Any]:
    """Return the leaves of a tree as arrays, and its structure.

    Raises:
        TypeError: if a leaf is not an array, or is only a description of one although values are
            needed.
    """
    leaves, structure = jax.tree.flatten(tree)
    try:
        return [_as_array(leaf, template) for leaf in leaves], structure
    except (TypeError, ValueError):
        _refuse(op, argument, tree, template)
        raise


def _as_array(leaf: Any, template: bool) -> jax.Array:
    if isinstance(leaf, jax.ShapeDtypeStruct) and template:
        return zeros_like(leaf)
    return as_array(leaf)


def _refuse(op: str, argument: str, tree: Any, template: bool) -> None:
    """Raise an error about the first leaf that is not an array."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        try:
            _as_array(leaf, template)
        except (TypeError, ValueError):
            where = f" at {jax.tree_util.keystr(path)}" if path else ""
            raise TypeError(
                f"{op}: argument '{argument}' must be an array, a number, or a pytree of those, "
                f"got {_described(leaf, where)}"
            ) from None


def _described(leaf: Any, where: str) -> str:
    """Return what a leaf is that is not an array, and what to do about it."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return f"{leaf}{where}; a ShapeDtypeStruct can only describe an array that is received"
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        advice = (
            "; communicate the leaves that are arrays, as for an Equinox module: "
            "arrays, static = eqx.partition(module, eqx.is_array)"
        )
        return f"{type(leaf).__name__}{where}: {leaf!r}{advice if where else ''}"
    if isinstance(dtype, np.dtype) and not dtype.isnative and dtype.kind in "biufc":
        return (
            f"dtype {dtype}{where}, whose byte order is not this machine's; expected "
            f"x.astype(np.{dtype.name})"
        )
    return f"dtype {dtype}{where}: {leaf!r}"


def pack_arguments(
    op: Operation, trees: Sequence[Any], leaves: Sequence[Any] | None = None
) -> list[TreeMessages]:
    """Return the messages of each argument of an operation that is an array or a pytree of arrays.

    Args:
        op: the operation.
        trees: these arguments.
        leaves: the names of their leaves, if lists of leaves stand for the pytrees.

    Raises:
        TypeError: if a leaf is not an array, or is only a description of one although values are
            needed.
    """
    names = ("sendbuf", "recvbuf") if op.arrays == 2 else ("x",)
    return [
        TreeMessages(op.name, name, tree, op.is_template(i), leaves[i] if leaves else None)
        for i, (name, tree) in enumerate(zip(names, trees, strict=True))
    ]


def _groups(dtypes: Sequence[Any]) -> dict[Any, list[int]]:
    """Return the positions of the leaves of each dtype, in the same order on every rank.

    Gradients of integers (float0) carry no data, and are in none.
    """
    groups: dict[Any, list[int]] = {}
    for i, dtype in enumerate(dtypes):
        if dtype != jax.dtypes.float0:
            groups.setdefault(dtype, []).append(i)
    return dict(sorted(groups.items(), key=lambda item: str(item[0])))


_names: dict[Any, tuple[str, ...]] = {}  # for structures that can be keys


def leaf_paths(tree: Any, structure: PyTreeDef) -> tuple[str, ...]:
    """Return the paths of the leaves of a tree."""
    try:
        return _names[structure]
    except KeyError:
        is_key = True
    except (TypeError, ValueError):  # some cannot be compared
        is_key = False
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = tuple(jax.tree_util.keystr(path) for path, _ in paths)
    if is_key:
        if len(_names) > 1024:
            _names.clear()
        _names[structure] = names
    return names


def words_of(names: Sequence[str], shapes: Sequence[Sequence[int]] | None, most: int = 100) -> str:
    """Return names and shapes of leaves for comparison between ranks, shortened if necessary.

    Axes of length 1 are left out: they change no order of elements.
    """
    parts = names
    if shapes is not None:
        sizes = (", ".join(str(n) for n in shape if n != 1) for shape in shapes)
        parts = [f"{name} ({size})".strip() for name, size in zip(names, sizes, strict=True)]
    text = ", ".join(parts)
    if len(text) <= most:
        return text
    return f"{text[: most - 20]}... ({len(names)} leaves, {zlib.crc32(text.encode()):08x})"


@dataclass(frozen=True)
class TreeType:
    """The types of the arrays in a tree, and its structure.

    Attributes:
        tree: its structure.
        impls: of each leaf that is an array of PRNG keys, their kind; of others None.
        shapes: of the leaves.
        data: shapes and dtypes of what is communicated of the leaves: of keys, their data.
        shardings: how the leaves were cut, where their types say so.
    """

    tree: PyTreeDef
    impls: tuple[Any, ...]
    shapes: tuple[tuple[int, ...], ...]
    data: tuple[tuple[tuple[int, ...], Any], ...]
    shardings: tuple[Any, ...]

    @functools.cached_property
    def groups(self) -> dict[Any, list[int]]:
        return _groups([dtype for _, dtype in self.data])

    def from_results(self, op: Operation, results: dict[Any, Sequence[Any]]) -> Any:
        """Return the tree of an operation's results, from its results for the leaves of each dtype.

        Gradients of integers (float0) were not sent; their results have the shape of the others.
        """
        _, length = op.first_lengths()
        first = () if length is None else (length,)
        out: list[Any] = [
            np.zeros((*first, *shape[op.lead()[0] :]), dtype)
            if dtype == jax.dtypes.float0
            else None
            for shape, dtype in self.data
        ]
        for dtype, indices in self.groups.items():
            for i, y in zip(indices, results[dtype], strict=True):
                out[i] = y
        return self.from_leaves(out)

    def from_leaves(self, leaves: Sequence[Any]) -> Any:
        """Return the tree of these leaves."""
        out = [
            y if impl is None else jax.random.wrap_key_data(y, impl=impl)
            for y, impl in zip(leaves, self.impls, strict=True)
        ]
        for i, (shape, sharding) in enumerate(zip(self.shapes, self.shardings, strict=True)):
            if sharding is not None and out[i].shape == shape:
                out[i] = jax.sharding.reshard(out[i], sharding)
        return jax.tree.unflatten(self.tree, out)


class TreeMessages:
    """The messages of a tree: one for each dtype, with all leaves of that dtype."""

    def __init__(
        self,
        op: str,
        argument: str,
        tree: Any,
        template: bool,
        names: tuple[str, ...] | None = None,
    ):
        leaves, structure = as_arrays(op, argument, tree, template)
        self.names = leaf_paths(tree, structure) if names is None else names
        shardings = tuple(compat.explicit_sharding(x) for x in leaves)
        leaves = [
            x if s is None else jax.sharding.reshard(x, NamedSharding(s.mesh, PartitionSpec()))
            for x, s in zip(leaves, shardings, strict=True)
        ]
        impls = tuple(jax.random.key_impl(x) if _is_key(x) else None for x in leaves)
        shapes = tuple(x.shape for x in leaves)
        self.leaves = [jax.random.key_data(x) if _is_key(x) else x for x in leaves]
        data = tuple((x.shape, x.dtype) for x in self.leaves)
        self.tree_type = TreeType(structure, impls, shapes, data, shardings)

    @property
    def groups(self) -> dict[Any, list[int]]:
        return self.tree_type.groups

    def description(self, dtype: Any, lead: int) -> str:
        """Return what the message of a dtype consists of, if it is a part of a tree."""
        if self.names == ("",):
            return ""
        which = self.groups.get(dtype, ())
        shapes = [self.leaves[i].shape[lead:] for i in which]
        return words_of([self.names[i] for i in which], shapes)

    def of_dtype(self, dtype: Any) -> list[jax.Array]:
        """Return the leaves of one dtype, which are one message."""
        return [self.leaves[i] for i in self.groups[dtype]]


# Types of pytrees that have leaves of indices, and what to do instead of reducing them.
_INDEXED = {
    ("jax", "JAXSparse"): "reduce x.todense(), or only x.data if all ranks have the same indices",
    ("jraph", "GraphsTuple"): "reduce its arrays of values, such as graph.globals",
}


def _indexed(structure: PyTreeDef) -> tuple[str, str] | None:
    """Return the name of the first such type in a tree, and what to do."""
    kind, _ = structure.node_data() or (type(None), None)
    for base in kind.__mro__:
        advice = _INDEXED.get((base.__module__.partition(".")[0], base.__name__))
        if advice is not None:
            return kind.__name__, advice
    return next(filter(None, map(_indexed, structure.children())), None)


_cached_indexed = functools.lru_cache(1024)(_indexed)


def check_summands(op: Operation, structure: PyTreeDef) -> None:
    """Raise a TypeError if leaves to reduce are indices."""
    if not isinstance(op, Reducing):
        return
    try:
        found = _cached_indexed(structure)
    except (TypeError, ValueError):  # parts of the structure cannot be compared
        found = _indexed(structure)
    if found is not None:
        raise TypeError(
            f"{op.name}: argument 'x' has a {found[0]}, whose leaves are indices and values: "
            f"they cannot be reduced element by element; {found[1]}"
        )


def check_reducible(op: Operation, messages: TreeMessages) -> None:
    """Raise a TypeError if PRNG keys or indices are to be reduced."""
    if isinstance(op, Reducing) and any(impl is not None for impl in messages.tree_type.impls):
        raise TypeError(
            f"{op.name}: reduction {op.reduction.name} is not defined for PRNG keys; "
            "expected numbers (bcast, scatter and messages take keys)"
        )
    check_summands(op, messages.tree_type.tree)


def bind_trees(
    op: Operation, trees: Sequence[Any], how: How = PLAIN, numbers: Sequence[Any] = ()
) -> Any:
    """Bind the primitive once per dtype, with the same numbers.

    For an operation with counts, the result is a pair with the received counts. For an operation
    without a result, it is None.
    """
    leaves, how = how.leaves, how if how.leaves is None else how._replace(leaves=None)
    if not trees:
        bind(op, how, *numbers)
        return None
    messages = pack_arguments(op, trees, leaves)
    if isinstance(op, OfBlocks):
        return _bind_blocks(op, how, messages[0], numbers)
    sent, received = messages[0], messages[-1]
    check_reducible(op, sent)
    results: dict[Any, Any] = {}
    envelope: Any = None
    asks_envelope = how.env_out == ASKED
    if asks_envelope and len(received.groups) != 1:
        raise TypeError(
            f"{op.name}: the template must have arrays of one dtype, which are one message; "
            f"got {[str(dtype) for dtype in received.groups]}"
        )
    dtypes = _groups([x.dtype for tree in messages for x in tree.leaves])
    if not dtypes and isinstance(op, Ragged):
        # No rows are sent, but the ranks still exchange their counts.
        (envelope,) = bind(op.of_counts(), _only_operand(how), *numbers)
    for dtype in dtypes:
        part, part_how, buffers = op, how, messages
        is_everywhere = all(dtype in tree.groups for tree in messages)
        if isinstance(op, SendingAndReceiving) and not is_everywhere:
            # Only one of the two trees of a sendrecv has this dtype, so a message is only sent, or
            # only received.
            if dtype in sent.groups:
                part, part_how, buffers = op.send(), _only_operand(how), [sent]
            else:
                part, buffers = op.recv(), [received]
                part_how = _only_operand(how)._replace(env_out=how.env_out)
        out = bind_message(bind, part, part_how, buffers, dtype, numbers)
        n = len(received.groups[dtype]) if part.returns else 0
        if asks_envelope and part.returns:
            envelope = out[n]
        elif part_how.env_out:
            # Later messages need no envelope.
            envelope, how = out[n], how._replace(env_out=False)
            numbers = [jnp.concatenate([numbers[0], envelope]), *numbers[1:]]
        if part.returns:
            results[dtype] = pvary_results(part, out[:n])
    y = received.tree_type.from_results(op, results) if op.returns else None
    return (y, envelope) if op.row.is_ragged or asks_envelope else y


def bind_message(
    binds: Callable[..., list[Any]],
    op: Operation,
    how: How,
    trees: Sequence[TreeMessages],
    dtype: Any,
    numbers: Sequence[Any],
) -> list[Any]:
    """Bind an operation, or its initiation, on the message of a dtype; errors name the leaf.

    Args:
        binds: function of the operation, of how it is called and of the operands.
        op, how: the operation, and how it is called, apart from `How.arity` and `How.tree`.
        trees: its arguments.
        dtype: the dtype.
        numbers: the operands that are not arrays.
    """
    leaves = [tree.of_dtype(dtype) for tree in trees]
    lead, _ = op.lead()
    sent, received = (tree.description(dtype, lead) for tree in (trees[0], trees[-1]))
    compared = sent if op.sends else "", received if op.returns else ""
    how = how._replace(arity=arity_of(leaves), tree=compared)
    try:
        return binds(op, how, *itertools.chain(*leaves), *numbers)
    except (TypeError, ValueError) as error:
        _name_leaf(op, how, trees, dtype, error)
        raise


def _name_leaf(
    op: Operation, how: How, trees: Sequence[TreeMessages], dtype: Any, error: Exception
) -> None:
    """Add to an error about an operand which leaf of a tree it is about."""
    how = how._replace(arity=())
    for tree in trees:
        for i in tree.groups[dtype] if tree.names != ("",) else ():
            try:
                check_dtype(op, tree.leaves[i])
                result_avals(op, how, [jax.typeof(tree.leaves[i])] * len(trees))
            except (TypeError, ValueError) as found:
                error.args = (f"{found}, at {tree.names[i]}",)
                return


def arity_of(arguments: Sequence[Sequence[Any]]) -> tuple[int, ...]:
    """Return `How.arity` of these leaves of each argument: nothing if each has one leaf."""
    arity = tuple(map(len, arguments))
    return () if set(arity) == {1} else arity


def _only_operand(how: How) -> How:
    """Return how an operation is called that carries what the given one cannot carry."""
    return How(operand=how.operand, eager=how.eager)


def exchanged_axes(op: OfBlocks, tree: TreeType, leaf: int) -> tuple[int, ...]:
    """Return the exchanged axes of the communicated part of a leaf, counted from its end."""
    inside = len(tree.data[leaf][0]) - len(tree.shapes[leaf])  # of one element: a key's data
    counted = from_end(op.name, op.axes, op.widths, tree.shapes[leaf])
    return tuple(axis + inside for axis in counted)


def _bind_blocks(op: OfBlocks, how: How, blocks: TreeMessages, numbers: Sequence[Any]) -> Any:
    """Bind an operation on several arrays once per dtype."""
    out: list[Any] = list(blocks.leaves)
    for indices in blocks.groups.values():
        xs = [blocks.leaves[i] for i in indices]
        axes = tuple(exchanged_axes(op, blocks.tree_type, i) for i in indices)
        if blocks.names != ("",):  # ranks may have blocks of other shapes
            how = how._replace(tree=(words_of([blocks.names[i] for i in indices], None), ""))
        ys = bind(replace(op, axes=(), leaf_axes=axes), how, *xs, *numbers)
        for i, y in zip(indices, ys, strict=True):
            out[i] = y
    return blocks.tree_type.from_leaves(out)
