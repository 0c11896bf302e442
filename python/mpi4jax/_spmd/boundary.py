"""What the ranks must pass alike to a `shard_map`: structure, shapes, dtypes and specs.

The words for it are a part of each collective of the function, which the ranks compare with the
collective: this needs no message of its own. With `MPI4JAX_CHECK=1`, ranks also compare the values
of arrays that are not sharded along all axes. A block that is the same array on all ranks is a
warning, and so is a whole array that is not.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, Var
from jax.sharding import PartitionSpec

from .._check import whole_arrays
from .._functions.assert_equal import assert_alike
from .._jax import named_axes
from .._jax.functions import equations
from .._job.watch import compares, compares_before
from .._op.packing import as_array
from .collectives import LOCAL, mentioned, names_in_words
from .mesh import Mesh

_MOST = 160  # characters of the order of collectives
# Characters of a function with its arguments. A rank keeps 12 KiB of such words for reports.
_LONGEST = 600
_SILENCE = "warnings.filterwarnings('ignore', message='shard_map: argument') silences this"
_SAME = (
    "{} is the same array on {ranks}, but its spec {spec} means that each rank passes its own "
    "block. If these are whole arrays, pass mpi4jax.sharding.cut(x, {spec}, mesh=mesh) instead, or "
    "use mpi4jax.sharding.global_shard_map, which takes whole arrays. If blocks are equal on "
    f"purpose, {_SILENCE}"
)
_DIFFERENT = (
    "{} is not the same array on {ranks}, but its spec {spec} means that these ranks pass the same "
    "array. If it should be the same, broadcast it before with mpi4jax.bcast. If each rank passes "
    f"its own block, name the axis in its spec. Otherwise, {_SILENCE}"
)


def boundary_of(name: str, args: Any, specs: Sequence[Any]) -> str:
    """Return a function with its arguments: ``step([0]['w']: float32[3] P(); [1]: float32[8]
    P('i'))``.

    Reports leave out the arguments that are equal on all ranks (`src/ops/forms.rs`). If the text
    is too long, arguments of the same type are one item, and the types that fewest arguments have
    come first: batches have other types than the many parameters of a model.
    """
    leaves = jax.tree_util.tree_flatten_with_path(args)[0]
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    types = [_short(x, spec) for (_, x), spec in zip(leaves, specs, strict=True)]
    text = "; ".join(f"{argument}: {kind}" for argument, kind in zip(names, types, strict=True))
    if len(text) > _LONGEST:
        whole, groups = text, dict[str, list[str]]()
        for argument, kind in zip(names, types, strict=True):
            groups.setdefault(kind, []).append(argument)
        text = "; ".join(
            f"{of[0]}{f' and {len(of) - 1} more' * (len(of) > 1)}: {kind}"
            for kind, of in sorted(groups.items(), key=lambda group: len(group[1]))
        )
        # The hash is of what the text leaves out.
        is_cut = len(text) > _LONGEST
        left_out = whole if is_cut else str([*groups.values()])
        text = f"{text[:_LONGEST]}{'...' * is_cut}; hash {zlib.crc32(left_out.encode()):08x}"
    return f"{name}({text})"


def _short(x: Any, spec: Any) -> str:
    if spec is None:
        return f"static {type(x).__name__}"
    aval = jax.typeof(x)
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}] {spec}"


def assert_replicated(
    mesh: Mesh, axes: frozenset[str], op: str, kind: str, tree: Any, specs: Sequence[Any]
) -> None:
    """With `MPI4JAX_CHECK=1`, compare arrays along the axes that do not shard them.

    Raises:
        AssertionError: if they differ. The error names the argument or result.
    """
    if not compares_before():
        return
    along: dict[tuple[str, ...], dict[str, Any]] = {}
    every = tuple(name for name in mesh.axis_names if name in axes and mesh.shape[name] > 1)
    for (path, x), spec in zip(jax.tree_util.tree_flatten_with_path(tree)[0], specs, strict=True):
        names = tuple(name for name in every if spec is not None and name not in mentioned(spec))
        # One axis after the other, if these are not all: there is a communicator of each.
        for over in (names,) if names == every else ((name,) for name in names):
            along.setdefault(over, {})[kind + jax.tree_util.keystr(path)] = as_array(x)
    for over, named in along.items():
        if over:
            words = f"{op}, arrays that are not sharded along {names_in_words(over)}"
            assert_alike(words, [*named], [*named.values()], mesh.comm(over))


def note_blocks(
    mesh: Mesh, axes: frozenset[str], name: str, text: str, args: Any, specs: Sequence[Any]
) -> None:
    """Compare arguments that should be blocks, and those that ranks should pass alike: now, or when
    a compiled function is first called."""
    if not compares():
        return
    noted = []
    for (path, x), spec in zip(jax.tree_util.tree_flatten_with_path(args)[0], specs, strict=True):
        if spec is None:
            continue
        argument, of = jax.tree_util.keystr(path), mentioned(spec)
        along = [axis for axis in of if mesh.shape[axis] > 1]
        others = [axis for axis in mesh.axis_names if axis in axes and axis not in of]
        for over, is_whole in ((along, False), (others, True)):
            ranks, key = mesh._ranks_of(over), argument + f" along {over}" * is_whole
            # Of blocks, the first of each axis stand for the others.
            is_skipped = len(ranks) == 1 or (ranks[0] > 0 and not is_whole)
            if is_skipped or whole_arrays.is_compared(mesh._hashes, text, key):
                continue
            words = (_DIFFERENT if is_whole else _SAME).format(
                f"shard_map: argument {argument} of {name!r}",
                ranks=f"all {len(ranks)} ranks along {names_in_words(over)}",
                spec=spec,
            )
            block = whole_arrays.Block(text, key, words, mesh._hashes, ranks, is_whole)
            noted.append((x, block))
    whole_arrays.note(noted)


def note_order(mesh: Mesh, text: str, jaxpr: Jaxpr, arguments: Sequence[Var]) -> None:
    """Compare the order of collectives over different axes, when a compiled function is called.

    What ranks compare at each collective finds only sums in different orders. The order is known
    where a function is traced as a whole, and ranks need not do that. Other differences are no
    mistake: only one order of the same collectives is compared with another.
    """
    order = [
        f"{eqn.primitive.name} over {sorted(named_axes.axes_of(eqn.params))}"
        for eqn in equations(jaxpr)
        if named_axes.axes_of(eqn.params) and eqn.primitive.name not in LOCAL
    ]
    if not compares() or len(set(order)) < 2 or len(mesh.axis_names) < 2:
        return
    name = text.partition("(")[0]
    words = (
        f"shard_map: the ranks run the collectives of {name!r} in different orders: on this rank "
        f"{', '.join(order)[:_MOST]}. The results are wrong if one of them uses the result of "
        "another one. Write the names of axes in a list: a loop over a set of names has another "
        "order in each process"
    )
    digest, ranks = ", ".join(order).encode(), tuple(range(mesh.size))
    block = whole_arrays.Block(
        f"order in {text}", str(sorted(order)), words, mesh._hashes, ranks, True, digest
    )
    # The first argument stands for the function that is compiled.
    whole_arrays.note([(x, block) for x in arguments[:1]])


def check_whole(
    mesh: Any, name: str, args: Any, op: str = "global_shard_map", use: str = "cuts them"
) -> list[whole_arrays.Block]:
    """Compare arguments that should be whole arrays, the same on all ranks: with
    `MPI4JAX_CHECK=1` at each call, otherwise by a hash when the function is first called.

    Args:
        mesh, name, args: the mesh, and a function with its arguments.
        op: function of `mpi4jax.sharding` that takes them.
        use: what it does with them.

    Returns:
        What is compared, for `look`.
    """
    whole = PartitionSpec()
    paths, _ = jax.tree_util.tree_flatten_with_path(args)
    specs = [whole] * len(paths)
    every = frozenset(mesh.axis_names)
    assert_replicated(mesh, every, f"{op} of {name!r}", "arguments", args, specs)
    if not compares() or mesh.size == 1:
        return []
    text, ranks = f"whole {boundary_of(name, args, specs)}", tuple(range(mesh.size))
    blocks = []
    for path, x in paths:
        argument = jax.tree_util.keystr(path)
        words = (
            f"sharding.{op}: argument {argument} of {name!r} is not the same array on all ranks, "
            f"but this function takes whole arrays, and {use}. If each rank passes its own block, "
            "call mpi4jax.shard_map, which takes blocks"
        )
        block = whole_arrays.Block(text, argument, words, mesh._hashes, ranks, is_whole=True)
        blocks.append((x, block))
    whole_arrays.note(blocks)
    return [block for _, block in blocks]
