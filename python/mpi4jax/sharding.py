"""Global arrays and their blocks: which rank has what is said by a mesh and a `PartitionSpec`.

One :class:`NamedSharding` is what checkpoints, :func:`mpi4jax.redistribute`, :mod:`mpi4jax.fft`,
:func:`mpi4jax.notoken.scatter_blocks` and :func:`mpi4jax.notoken.gather_blocks` take.
:func:`global_shard_map` is called with global arrays, like `jax.shard_map`, whereas
:func:`mpi4jax.shard_map` is called with blocks. Programs for devices run if they import the names
of this module instead of JAX's. Here, a global array is one that each rank has whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ._numerics.arrays import T, as_array
from ._numerics.base import of_whole_arrays
from ._numerics.named_sharding import NamedSharding, as_sharding, is_sharding
from ._spmd.mesh import Mesh
from ._spmd.shard_map import shard_map as _shard_map
from ._spmd.whole import jit as jit

__all__ = [
    "Mesh",
    "NamedSharding",
    "PartitionSpec",
    "cut",
    "device_put",
    "global_shard_map",
    "jit",
    "join",
    "make_array_from_callback",
    "make_mesh",
    "with_sharding_constraint",
]

Args = ParamSpec("Args")
Result = TypeVar("Result")

make_mesh = Mesh

if not TYPE_CHECKING:  # to a type checker, a module with __getattr__ has every name

    def __getattr__(name):
        words = f"module {__name__!r} has no attribute {name!r}"
        if name == "shard_map":
            words += (
                "; use mpi4jax.shard_map, which takes this rank's blocks, or "
                "mpi4jax.sharding.global_shard_map, which takes global arrays"
            )
        raise AttributeError(words, name=name)


def _parts(
    op: str, tree: Any, shardings: Any, mesh: Mesh | None
) -> tuple[Any, list[tuple[NamedSharding, Any]]]:
    """Return the structure of shardings, and each with its part of the tree."""
    leaves, structure = jax.tree.flatten(shardings, is_leaf=is_sharding)
    parts = structure.flatten_up_to(tree)
    given = [as_sharding(op, sharding, mesh) for sharding in leaves]
    return structure, list(zip(given, parts, strict=True))


def _each(of: str, parts: list[tuple[NamedSharding, Any]], root: int | None) -> list[Any]:
    """Apply a method of each sharding to the arrays of its part of the tree."""
    return [jax.tree.map(lambda x, s=s: getattr(s, of)(x, root), part) for s, part in parts]


@overload
def cut(
    tree: T,
    shardings: Any,
    *,
    mesh: Mesh | None = None,
    root: int | None = None,
    pad: Literal[False] = False,
) -> T: ...


@overload
def cut(
    tree: T,
    shardings: Any,
    *,
    mesh: Mesh | None = None,
    root: int | None = None,
    pad: Literal[True],
) -> tuple[T, Any]: ...


def cut(
    tree: T,
    shardings: Any,
    *,
    mesh: Mesh | None = None,
    root: int | None = None,
    pad: bool = False,
) -> Any:
    """Take this rank's blocks of global arrays.

    Args:
        tree: a pytree of global arrays, the same on all ranks. With ``root``, only its values on
            ``root`` are used; the other ranks pass anything of the same shapes and dtypes, such as
            ``jax.ShapeDtypeStruct``.
        shardings: a `PartitionSpec` or :class:`NamedSharding`, or a pytree of them that is a prefix
            of ``tree``.
        mesh: :class:`mpi4jax.Mesh` of the `PartitionSpec`; by default the mesh of ``with mesh:``.
        root: rank of the mesh that has the arrays; by default all have them, and nothing is sent.
        pad: whether to repeat the last row of a block, along each axis that is sharded, until it
            has as many rows as the longest block, as a :func:`mpi4jax.shard_map` needs them. A
            block without rows becomes zeros.

    Returns:
        A pytree like ``tree``, of this rank's blocks. With ``pad=True``, a pair: this pytree, and
        a pytree like ``shardings`` of masks, which are boolean NumPy arrays, False for repeated
        rows. A mask has the shape of the blocks along the axes of its spec, so that a block and
        its mask have the same spec.

    Raises:
        TypeError: if an entry of ``shardings`` is neither a `PartitionSpec` nor a
            :class:`NamedSharding`, or if a `PartitionSpec` is given without a mesh.
        ValueError: if a spec does not fit its array; with ``pad=True`` also if arrays of one
            sharding have different lengths along its axes.

    Derivative:
        The transpose sums the cotangents of the blocks over all ranks; with ``root``, it is the
        transpose of :func:`scatterv`. Cotangents of repeated rows are added to the row that they
        repeat: a function that uses the mask has zeros there.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> from mpi4jax.sharding import PartitionSpec as P, cut, join
        >>> mesh = mpi4jax.Mesh()
        >>> x = jnp.arange(7.0)
        >>> rows = mpi4jax.sharding.NamedSharding(mesh, P("i"), x.shape)
        >>> bool((join(cut(x, rows), rows) == x).all())
        True
        >>> block, mask = cut(x, rows, pad=True)
        >>> block.shape == mask.shape == (-(-7 // mesh.size),)
        True

    See also: :func:`join`.
    """
    structure, parts = _parts("cut", tree, shardings, mesh)
    blocks = structure.unflatten(_each("cut_padded" if pad else "cut", parts, root))
    if not pad:
        return blocks
    return blocks, structure.unflatten([_mask(sharding, part) for sharding, part in parts])


def _mask(sharding: NamedSharding, part: Any) -> Any:
    shapes = {np.shape(x)[: len(sharding.spec)]: np.shape(x) for x in jax.tree.leaves(part)}
    if len(shapes) != 1:
        raise ValueError(
            f"cut: argument 'pad' needs arrays of equal lengths along the axes of {sharding.spec}, "
            f"got shapes {[*shapes.values()]}; pass a sharding for each array"
        )
    (shape,) = shapes.values()
    return sharding.mask(shape)


def join(
    tree: T,
    shardings: Any,
    *,
    mesh: Mesh | None = None,
    root: int | None = None,
    pad: bool = False,
) -> T:
    """Assemble global arrays from the blocks of all ranks.

    Args:
        tree: a pytree of this rank's blocks.
        shardings, mesh: as for :func:`cut`. A sharding needs a shape only where blocks are not all
            equal, or are padded.
        root: rank of the mesh that gets the arrays; by default all get them.
        pad: whether the blocks are padded, as ``cut(..., pad=True)`` does. Repeated rows are left
            out.

    Returns:
        A pytree of global arrays; on ranks other than ``root``, the blocks.

    Raises:
        TypeError: as for :func:`cut`.
        ValueError: if an array does not have the shape of this rank's block; with ``pad=True``
            also if a sharding has no shape.

    Derivative:
        The derivative of :func:`allgatherv`, whose result is replicated; with ``root``, of
        :func:`gatherv`. The transpose takes this rank's block. Repeated rows have zeros.

    See also: :func:`cut`, with an example.
    """
    structure, parts = _parts("join", tree, shardings, mesh)
    arrays = _each("join_padded" if pad else "join", parts, root)
    return structure.unflatten(arrays)  # type: ignore[no-any-return]


def make_array_from_callback(
    shape: Sequence[int],
    sharding: NamedSharding,
    data_callback: Callable[[tuple[slice, ...]], Any],
    *,
    dtype: Any = None,
) -> jax.Array:
    """Make this rank's block of a global array from a function of its slices.

    Args:
        shape: shape of the global array.
        sharding: :class:`NamedSharding`.
        data_callback: function of a slice of each axis, as `jax.make_array_from_callback` has it,
            which returns that part of the array.
        dtype: dtype of the block; by default the dtype that the function returns.

    Returns:
        jax.Array: this rank's block.

    Raises:
        ValueError: if the function returns an array of another shape.

    Example:
        >>> import numpy as np, mpi4jax.notoken as mpi4jax
        >>> from mpi4jax.sharding import NamedSharding, PartitionSpec as P
        >>> rows = NamedSharding(mpi4jax.Mesh(), P("i"))
        >>> n = 2 * rows.comm.size
        >>> read = lambda index: np.arange(n)[index]
        >>> mpi4jax.sharding.make_array_from_callback((n,), rows, read).shape
        (2,)
    """
    layout, rank = sharding.layout(shape), sharding.comm.rank
    block = jnp.asarray(data_callback(layout.block(rank)), dtype)
    if block.shape != layout.block_shape(rank):
        raise ValueError(
            f"make_array_from_callback: argument 'data_callback' returned an array of shape "
            f"{block.shape}; expected {layout.block_shape(rank)}, for {layout.block(rank)}"
        )
    return block


def device_put(x: T, device: Any = None) -> T:
    """Return ``x`` unchanged.

    In JAX, ``device_put`` distributes global arrays. Here every rank keeps them whole, and
    :func:`global_shard_map` takes each rank's blocks when it is called.

    Args:
        x: a pytree of arrays, the same on all ranks.
        device: a :class:`NamedSharding`, or in a ``with mesh:`` a `PartitionSpec`, which must fit
            the arrays; or a device of this rank; or a pytree of them.

    Raises:
        TypeError: if ``device`` is a `PartitionSpec`, and there is no mesh.
        ValueError: if a sharding does not fit its array.
    """

    def put(given: Any, part: Any) -> Any:
        if given is not None and not is_sharding(given):
            return jax.device_put(part, given)
        part = jax.tree.map(functools.partial(as_array, "device_put", "x"), part)
        if given is not None:
            sharding = as_sharding("device_put", given, None)
            jax.tree.map(lambda leaf: sharding.layout(leaf.shape), part)
        return part

    return jax.tree.map(put, device, x, is_leaf=is_sharding)  # type: ignore[no-any-return]


def with_sharding_constraint(x: T, shardings: Any) -> T:
    """Return ``x`` unchanged, like :func:`device_put`, also in a jitted function."""
    return device_put(x, shardings)


@overload
def global_shard_map(
    f: Callable[Args, Result],
    /,
    *positional: Any,
    mesh: Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    **how: Any,
) -> Callable[Args, Result]: ...


@overload
def global_shard_map(
    f: None = None,
    /,
    *,
    mesh: Mesh | None = None,
    in_specs: Any,
    out_specs: Any,
    **how: Any,
) -> Callable[[Callable[Args, Result]], Callable[Args, Result]]: ...


def global_shard_map(
    f: Callable[..., Any] | None = None,
    /,
    *positional: Any,
    mesh: Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    **how: Any,
) -> Any:
    """Run a function written for `jax.shard_map` on ranks, and call it with global arrays.

    Each rank passes its blocks of the arguments to :func:`mpi4jax.shard_map`, and joins the blocks
    of the results: each rank has all of the arguments and results. For arrays that do not fit a
    rank's memory, call :func:`mpi4jax.shard_map` with blocks.

    Args:
        f, mesh, in_specs, out_specs, how: as for :func:`mpi4jax.shard_map`.

    Returns:
        Callable: takes arrays that are the same on all ranks, and returns such arrays.

    Raises:
        ValueError: if a mesh axis does not partition an axis of an array into equal blocks; and as
            for :func:`mpi4jax.shard_map`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from mpi4jax.sharding import PartitionSpec as P, global_shard_map, make_mesh
        >>> mesh = make_mesh((-1,), ("i",))
        >>> f = global_shard_map(lambda x: x - jax.lax.pmean(x.mean(), "i"), mesh=mesh,
        ...                      in_specs=P("i"), out_specs=P("i"))
        >>> f(jnp.arange(2.0 * mesh.size)).shape == (2 * mesh.size,)
        True
    """
    if f is None:
        return functools.partial(
            global_shard_map, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **how
        )
    how |= {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}
    on_blocks: Any = _shard_map(f, *positional, **how)
    name = getattr(f, "__name__", "global_shard_map")
    # JAX refuses a list with an error about `in_specs`. The error of `jax.tree.map`, below, would
    # not name the argument.
    specs = tuple(in_specs) if isinstance(in_specs, list) else in_specs

    def block(mesh: Mesh, spec: Any, part: Any) -> Any:
        sharding = as_sharding("global_shard_map", spec, mesh)

        def of_leaf(x: Any) -> Any:
            layout = sharding.layout(jnp.shape(x))
            if any(n % layout.parts(axis) for axis, n in enumerate(layout.shape)):
                raise ValueError(
                    f"global_shard_map: an argument has shape {layout.shape}; expected axes that "
                    f"{spec} partitions into equal blocks on {mesh!r}. For other lengths, call "
                    "mpi4jax.shard_map with the blocks of mpi4jax.sharding.cut(..., pad=True)"
                )
            return sharding.cut(x)

        return jax.tree.map(of_leaf, part)

    mapped = of_whole_arrays(
        on_blocks,
        name,
        mesh,
        cut=lambda mesh, args: jax.tree.map(
            functools.partial(block, mesh), specs, args, is_leaf=is_sharding
        ),
        join=lambda mesh, results: join(results, out_specs, mesh=mesh),
    )
    return functools.wraps(f)(mapped)
