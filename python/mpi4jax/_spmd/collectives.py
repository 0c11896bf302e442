"""The collectives of `jax.lax`, implemented by operations of this package.

JAX has differentiated and batched them before:

    collective (JAX)         here             transpose (JAX)
    psum, pmean              allreduce SUM    pvary
    pmax, pmin               allreduce        of the ranks where it is attained (`_jax/ranks.py`)
    pvary, pcast             nothing          psum
    all_gather               allgather        psum_scatter
    all_gather_invariant     allgather        this rank's block
    psum_scatter             reduce_scatter   all_gather
    all_to_all               alltoall         all_to_all
    ppermute, pshuffle       permute          the reversed ppermute
    pbroadcast               bcast            psum, at the source
    ragged_all_to_all        ragged_alltoall  the same, back
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from mpi4py import MPI

from .. import ops
from .._jax import compat, named_axes
from .._jax.rewriting import SUMS, Rewriter
from .._op.comm import as_comm, as_reduction
from .._op.manual import of_all_ranks
from .._op.operation import PLAIN, made
from .._op.packing import bind_trees
from .._op.primitive import bind
from .mesh import Mesh

Params = dict[str, Any]
Collective = Callable[[Params, list[Any]], Sequence[Any]]


class Reduction(NamedTuple):
    """A reduction over ranks, and over axes of an array."""

    op: MPI.Op
    local: Callable[[Any, tuple[int, ...]], Any]


SUM = Reduction(MPI.SUM, lambda x, axes: x.sum(axes, dtype=x.dtype))
MAX = Reduction(MPI.MAX, lambda x, axes: x.max(axes))
MIN = Reduction(MPI.MIN, lambda x, axes: x.min(axes))


class Group:
    """The ranks that a collective runs on, in JAX's order.

    With `axis_index_groups` these are some of the communicator's: no communicator is made while a
    function is traced, which another rank may have traced before. What goes to them alone is an
    alltoallv.
    """

    def __init__(self, comm: MPI.Intracomm, order: Sequence[int], is_part: bool):
        self.comm, self.order, self.is_part = comm, list(order), is_part
        self.size = len(self.order)
        # Inverse permutations. `list.index` of each rank would take a time that grows as P^2.
        self._to_comm = sorted(range(self.size), key=self.order.__getitem__)
        self._from_comm = sorted(range(self.size), key=self._to_comm.__getitem__)

    def from_comm(self, x: Any) -> Any:
        """Reorder blocks from the order of the communicator's ranks to JAX's order."""
        return _take(x, self._from_comm)

    def to_comm(self, x: Any) -> Any:
        """Reorder blocks from JAX's order to the order of the communicator's ranks."""
        return _take(x, self._to_comm)

    def exchanged(self, blocks: Any) -> Any:
        """Send a block to each rank; return the blocks received from each."""
        blocks = self.to_comm(blocks)
        if self.is_part:
            members = set(self.order)
            counts = [int(r in members) for r in range(self.comm.size)]
            blocks = ops.alltoallv(blocks, counts, counts, comm=self.comm)
        else:
            blocks = ops.alltoall(blocks, comm=self.comm)
        return self.from_comm(blocks)

    def gathered(self, xs: list[Any]) -> list[Any]:
        """Gather the arrays of all ranks."""
        if self.is_part:
            return [self.exchanged(jnp.broadcast_to(x, (self.size, *x.shape))) for x in xs]
        return [self.from_comm(y) for y in ops.allgather(xs, comm=self.comm)]

    def scattered_sums(self, blocks: list[Any]) -> list[Any]:
        """Return the sums of all ranks' blocks for this one."""
        if self.is_part:
            return [SUM.local(self.exchanged(x), (0,)) for x in blocks]
        return list(ops.reduce_scatter([*map(self.to_comm, blocks)], MPI.SUM, comm=self.comm))

    def reduced(self, by: Reduction, xs: list[Any]) -> list[Any]:
        """Return sums or extrema."""
        if self.is_part:
            return [by.local(y, (0,)) for y in self.gathered(xs)]
        return self._allreduce(xs, by.op) if self.size > 1 else xs

    def _allreduce(self, xs: list[Any], op: MPI.Op) -> list[Any]:
        """Reduce with one collective for each dtype."""
        reduction = as_reduction("allreduce", op)
        allreduce = made("allreduce", as_comm("allreduce", self.comm), reduction=reduction)
        if len(xs) == 1:  # of hundreds of collectives, packing would be most of the tracing
            return bind(allreduce, PLAIN, *xs)
        return list(bind_trees(allreduce, (xs,)))


def _take(x: Any, order: Sequence[int]) -> Any:
    if list(order) == sorted(order):
        return x
    # No array of indices: the function of a `jax.checkpoint` cannot have constants.
    return jax.lax.concatenate([jax.lax.slice_in_dim(x, k, k + 1) for k in order], 0)


def _split(x: Any, axis: int, n: int) -> Any:
    """Split an axis into blocks, one for each rank along a new first axis."""
    x = x.reshape(*x.shape[:axis], n, x.shape[axis] // n, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _join(x: Any, axis: int) -> Any:
    """Concatenate the blocks of the first axis along another axis."""
    x = jnp.moveaxis(x, 0, axis)
    shape = x.shape
    return x.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


# `pcast`, by its names in all versions. It changes types alone.
CASTS = (
    *("pvary", "preduced", "pcast"),
    *(f"{cast}{p}" for cast in ("reduced_vary_cast", "vary_unreduced_cast") for p in ("", "_p")),
)
EXTREMA = ("pmax", "pmin", "unreduced_pmax", "unreduced_pmin")
GATHERS = ("all_gather", "all_gather_invariant", "all_gather_reduced")
SCATTERS = ("reduce_scatter", "unreduced_reduce_scatter")

# Those that take many operands, which then are one message.
MANY = frozenset({*SUMS, *EXTREMA, *GATHERS, *SCATTERS, "ppermute"})
LOCAL = frozenset({"axis_index", *CASTS})


class Collectives:
    """The evaluation of collectives over the axes of a mesh."""

    def __init__(self, mesh: Mesh, axes: frozenset[str], check_vma: bool, boundary: str):
        self.mesh, self.axes, self.check_vma, self.boundary = mesh, axes, check_vma, boundary
        self._groups: dict[Any, Group] = {}
        self._table: dict[str, Any] = {}

    def table(self) -> dict[str, Callable[..., Sequence[Any]]]:
        """Return the table, by the names of JAX's primitives."""
        found: Params = {
            **dict.fromkeys(SUMS, functools.partial(self.reduced, SUM)),
            **{n: functools.partial(self.reduced, MAX if "max" in n else MIN) for n in EXTREMA},
            **dict.fromkeys(GATHERS, self.all_gather),
            **dict.fromkeys(SCATTERS, self.reduce_scatter),
            **dict.fromkeys(CASTS, lambda p, xs: xs),
            "pbroadcast": self.pbroadcast,
            "pbroadcast_dynamic": self.pbroadcast_dynamic,
            "all_to_all": self.all_to_all,
            "ppermute": self.ppermute,
            "ragged_all_to_all": self.ragged_all_to_all,
            "axis_index": self.axis_index,
        }
        # An asynchronous collective is the collective itself, complete where it starts.
        others = ("all_gather", "all_gather_reduced", "all_to_all", "ppermute", "pbroadcast")
        for name in (*SUMS, *SCATTERS, *others):
            found |= {f"{name}_start": found[name], f"{name}_done": lambda p, xs: xs}
        self._table = {name: functools.partial(self._alike, f) for name, f in found.items()}
        return self._table

    def _alike(
        self, f: Collective, p: Params, xs: list[Any], types: Sequence[Any] = ()
    ) -> Sequence[Any]:
        """Evaluate a collective with the words that ranks compare: the function around it, and the
        other axes over which its operands vary, if their types are given."""
        return of_all_ranks(f, self.boundary + self._others(p, types))(p, xs)

    def _others(self, p: Params, types: Sequence[Any]) -> str:
        """Return in words over which other axes operands vary.

        These differ between ranks that run collectives in different orders: what has been summed
        over 'b' on one rank alone does not vary over 'b' there.
        """
        over = named_axes.axes_of(p)
        others = [a for a, n in self.mesh.shape.items() if n > 1 and a not in over]
        if not (over and others and types and self.check_vma):
            return ""
        varying = [compat.varying_axes(aval) for aval in types]
        found = {tuple(name for name in others if name in axes) for axes in varying}
        words = [
            f"varies over {names_in_words(axes)}"
            if axes
            else f"is replicated over {names_in_words(others)}"
            for axes in sorted(found)
        ]
        return f", with an operand that {' and one that '.join(words)}"

    def group(self, p: Params) -> Group:
        axes, groups = named_axes.axes_of(p), p.get("axis_index_groups")
        found = self._groups.get((axes, groups))
        if found is None:
            order = self.mesh.ranks_in_order(axes)
            if groups is not None:
                mine = self.mesh.index_along(axes)
                order = [order[k] for k in next(group for group in groups if mine in group)]
            found = Group(self.mesh.comm(axes), order, groups is not None)
            self._groups[axes, groups] = found
        return found

    def reduced(self, by: Reduction, p: Params, xs: list[Any]) -> list[Any]:
        of_array = tuple(axis for axis in p["axes"] if isinstance(axis, int))  # axes of a `vmap`
        if of_array:
            xs = [by.local(x, of_array) for x in xs]
        return self.group(p).reduced(by, xs) if named_axes.axes_of(p) else xs

    def pbroadcast(self, p: Params, xs: list[Any]) -> list[Any]:
        group = self.group(p)
        root = group.order[p["source"]]
        return [ops.bcast(x, root, comm=group.comm) for x in xs]

    def pbroadcast_dynamic(self, p: Params, xs: list[Any]) -> list[Any]:
        x, source = xs
        (index,) = self.axis_index(p, [])
        x = jnp.where(index == source, x, jnp.zeros_like(x))
        return self.group(p).reduced(SUM, [x])

    def all_gather(self, p: Params, xs: list[Any]) -> list[Any]:
        return [self._placed(p, y) for y in self.group(p).gathered(xs)]

    def _placed(self, p: Params, y: Any) -> Any:
        axis = p["all_gather_dimension"]
        return _join(y, axis) if p["tiled"] else jnp.moveaxis(y, 0, axis)

    def reduce_scatter(self, p: Params, xs: list[Any]) -> list[Any]:
        group, axis = self.group(p), p["scatter_dimension"]

        def blocks(x: Any) -> Any:
            return _split(x, axis, group.size) if p["tiled"] else jnp.moveaxis(x, axis, 0)

        return group.scattered_sums([blocks(x) for x in xs])

    def all_to_all(self, p: Params, xs: list[Any]) -> list[Any]:
        # If not tiled, JAX has inserted an axis of length one along which the blocks are joined.
        group, split, concat = self.group(p), p["split_axis"], p["concat_axis"]
        return [_join(group.exchanged(_split(x, split, group.size)), concat) for x in xs]

    def ppermute(self, p: Params, xs: list[Any]) -> list[Any]:
        # Numbered in mesh order for any order of names, as JAX does where it does not refuse it.
        return list(ops.permute(tuple(xs), p["perm"], comm=self.group(p).comm))

    def axis_index(self, p: Params, xs: list[Any]) -> list[Any]:
        axes = named_axes.axes_of(p)
        return [jnp.asarray(self.mesh.index_along(axes), jnp.int32)]

    def ragged_all_to_all(self, p: Params, xs: list[Any]) -> list[Any]:
        group = self.group(p)
        if group.is_part:
            raise NotImplementedError(
                "mpi4jax.shard_map: 'ragged_all_to_all' with axis_index_groups"
            )
        x, output = xs[:2]
        in_offsets, send_sizes, out_offsets = map(group.to_comm, xs[2:5])
        at = ops.alltoall(out_offsets.astype(jnp.int32), comm=group.comm)
        places, _ = _rows(in_offsets, send_sizes, x.shape[0])
        rows, capacity = jnp.take(x, places, axis=0, mode="clip"), output.shape[0]
        sizes = send_sizes.astype(jnp.int32)
        got, counts = ops.ragged_alltoall(rows, sizes, capacity, comm=group.comm)
        places, there = _rows(at, counts, capacity)
        places = jnp.where(there, places, capacity)  # nowhere
        return [output.at[places].set(got, mode="drop")]

    def nested(
        self, rewriter: Rewriter, p: Params, ins: list[Any], types: Sequence[Any] = ()
    ) -> list[Any]:
        """Evaluate a nested `shard_map`.

        Each rank takes its block of operands that are whole along its axes, and results are
        gathered.
        """

        def cut(x: Any, spec: Any) -> Any:
            for axis, entry in enumerate(spec):
                names = tuple(jax.tree.leaves(entry))
                if names:
                    n = math.prod(self.mesh.shape[name] for name in names)
                    length = x.shape[axis] // n
                    start = self.mesh.index_along(names) * length
                    x = jax.lax.slice_in_dim(x, start, start + length, axis=axis)
            return x

        def joined(y: Any, spec: Any) -> Any:
            for axis, entry in enumerate(spec):
                names = tuple(jax.tree.leaves(entry))
                if names:
                    how = {"axis_name": names, "all_gather_dimension": axis, "tiled": True}
                    (y,) = gather(how, [y])
            return y

        gather = self._table["all_gather"]
        ins = [cut(x, s) for x, s in zip(ins, p["in_specs"], strict=True)]
        outs = rewriter.run(p["jaxpr"], (), ins)
        return [joined(y, s) for y, s in zip(outs, p["out_specs"], strict=True)]


def mentioned(spec: Any) -> list[str]:
    """Return the axes of a `PartitionSpec`."""
    return jax.tree.leaves(tuple(spec))


def names_in_words(axes: Sequence[str]) -> str:
    return ", ".join(map(repr, axes))


def _rows(offsets: Any, sizes: Any, capacity: int) -> tuple[Any, Any]:
    """Return where each of ``capacity`` rows of consecutive pieces is, and whether it belongs to
    one.
    """
    ends = jnp.cumsum(sizes)
    row = jnp.arange(capacity, dtype=ends.dtype)
    # Not jnp.searchsorted: from JAX 0.12 on, it cannot be lowered any more where this is traced.
    ended = jnp.zeros(capacity + 1, ends.dtype).at[ends].add(1, mode="drop")
    piece = jnp.cumsum(ended)[:capacity].clip(0, len(sizes) - 1)
    return offsets[piece] + row - (ends[piece] - sizes[piece]), row < ends[-1]
