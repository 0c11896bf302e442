"""Parts of training loops on ranks: sharded parameters in :func:`mpi4jax.shard_map`, and batches.

Axis names refer to the axes of a :class:`mpi4jax.Mesh`.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from ._numerics.arrays import T, names_of
from ._numerics.batches import batches as batches
from ._spmd.mesh import Mesh

__all__ = [
    "batches",
    "clip_by_global_norm",
    "fsdp_specs",
    "global_norm",
    "specs_for",
    "unshard",
]

P = PartitionSpec


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


# ---- Specs of parameters and optimizer states


def fsdp_specs(
    params: Any, mesh: Mesh, axis: str, *, specs: Any = None, smallest: int = 1024
) -> Any:
    """Choose an axis of each parameter to shard along a mesh axis, as in fully sharded training.

    The chosen axis is the longest one that is not sharded yet and whose length is divisible by the
    size of the mesh axis. An array without such an axis, or with few elements, is not sharded. If
    no array at all is sharded along the mesh axis, a warning says so.

    Args:
        params: pytree of global arrays or `jax.ShapeDtypeStruct`.
        mesh: :class:`mpi4jax.Mesh`.
        axis: name of the mesh axis.
        specs: pytree of `PartitionSpec` like ``params``: the sharding along other axes of the mesh,
            as in tensor parallelism. By default, parameters are not sharded along other axes.
        smallest: minimum number of elements; arrays with fewer elements are not sharded.

    Returns:
        A pytree of `PartitionSpec` like ``params``.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> mesh = mpi4jax.Mesh(axis_names="data")
        >>> params = {"w": jnp.ones((3, 64 * mesh.size)), "b": jnp.ones(3)}
        >>> mpi4jax.training.fsdp_specs(params, mesh, "data", smallest=10)["w"]
        PartitionSpec(None, 'data')

    See also: :func:`unshard`.
    """

    def choose(leaf: Any, spec: PartitionSpec) -> PartitionSpec:
        entries = [*spec, *[None] * (len(leaf.shape) - len(spec))]
        fits = [
            k for k, n in enumerate(leaf.shape) if entries[k] is None and n % mesh.shape[axis] == 0
        ]
        if not fits or np.prod(leaf.shape) < smallest:
            return spec
        entries[max(fits, key=lambda k: leaf.shape[k])] = axis
        while entries[-1] is None:
            entries.pop()
        return P(*entries)

    specs = jax.tree.map(lambda leaf: P(), params) if specs is None else specs
    chosen = jax.tree.map(choose, params, specs)
    sharded = any(axis in names_of(s) for s in jax.tree.leaves(chosen, is_leaf=_is_spec))
    leaves = jax.tree.leaves(params)
    if leaves and mesh.shape[axis] > 1 and not sharded:
        warnings.warn(
            f"fsdp_specs: no array of argument 'params' is sharded along axis {axis!r} of size "
            f"{mesh.shape[axis]}, so that each rank keeps all of them. The largest array has "
            f"{max(int(np.prod(leaf.shape)) for leaf in leaves)} elements; expected at least "
            f"{smallest} (argument 'smallest'), and an axis that is not sharded yet and whose "
            f"length is divisible by {mesh.shape[axis]}.",
            stacklevel=2,
        )
    return chosen


def unshard(params: T, specs: Any, axis: str) -> T:
    """Gather parameters along a mesh axis. In reverse mode, gradients are reduced and scattered.

    Args:
        params: pytree of blocks, in a :func:`mpi4jax.shard_map`.
        specs: pytree of `PartitionSpec` like ``params``.
        axis: name of the mesh axis. Arrays that are not sharded along it stay as they are.
    """

    def gather(spec: PartitionSpec, leaf: Any) -> Any:
        for k, entry in enumerate(spec):
            if axis in jax.tree.leaves(entry):
                leaf = lax.all_gather(leaf, axis, axis=k, tiled=True)
        return leaf

    return jax.tree.map(gather, specs, params, is_leaf=_is_spec)  # type: ignore[no-any-return]


def specs_for(state: Any, specs: Any) -> Any:
    """Find the specs of the state of an optimizer, such as one of Optax.

    An array in the optimizer state gets the spec of the parameter whose path matches the end of its
    own path: ``state[0].mu["w"]`` gets the spec of ``params["w"]``. Scalars are not sharded.

    Args:
        state: pytree of arrays or `jax.ShapeDtypeStruct`: the result of ``optimizer.init(params)``,
            or of ``jax.eval_shape(optimizer.init, params)``.
        specs: pytree of `PartitionSpec` like the parameters.

    Returns:
        A pytree of `PartitionSpec` like ``state``.

    Raises:
        ValueError: if an array is not a scalar and its path does not match a parameter, or if it
            has fewer axes than the parameter's spec.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> from jax.sharding import PartitionSpec as P
        >>> state = {"count": jnp.zeros(()), "momentum": {"w": jnp.ones((4, 2))}}
        >>> mpi4jax.training.specs_for(state, {"w": P("data")})["momentum"]["w"]
        PartitionSpec('data',)
    """
    known = dict(jax.tree_util.tree_leaves_with_path(specs, is_leaf=_is_spec))

    def find(path: Any, leaf: Any) -> PartitionSpec:
        ndim = len(np.shape(leaf)) if not hasattr(leaf, "shape") else len(leaf.shape)
        if ndim == 0:
            return P()
        ends = (path[k:] for k in range(len(path) + 1))
        spec = next((known[end] for end in ends if end in known), None)
        if spec is None or len(spec) > ndim:
            raise ValueError(
                f"specs_for: array {jax.tree_util.keystr(path)} of argument 'state' has {ndim} "
                f"axes and {'no parameter of its name' if spec is None else f'the spec {spec}'}; "
                "expected an array in the place and of the shape of a parameter"
            )
        return spec

    return jax.tree_util.tree_map_with_path(find, state)


# ---- Gradients


def global_norm(tree: Any, specs: Any) -> jax.Array:
    """Compute the 2-norm of all elements of sharded arrays; each element counts once.

    Args:
        tree: pytree of blocks, in a :func:`mpi4jax.shard_map`: gradients, for example.
        specs: pytree of `PartitionSpec` like ``tree``, or a prefix of it.

    Returns:
        jax.Array: a scalar, the same on all ranks.
    """
    squares: dict[tuple[str, ...], Any] = {}

    def add(spec: PartitionSpec, part: Any) -> None:
        axes = tuple(sorted(names_of(spec)))
        for leaf in jax.tree.leaves(part):
            squares[axes] = squares.get(axes, 0.0) + jnp.sum(jnp.abs(leaf) ** 2)

    jax.tree.map(add, specs, tree, is_leaf=_is_spec)
    sums = [lax.psum(total, axes) if axes else total for axes, total in squares.items()]
    return jnp.sqrt(sum(sums, jnp.zeros(())))


def clip_by_global_norm(gradients: T, specs: Any, max_norm: float) -> T:
    """Scale gradients of sharded parameters so that their global norm is at most ``max_norm``.

    Inside a ``shard_map``, Optax's ``clip_by_global_norm`` computes the norm of the local block
    only; this function uses the norm over all ranks.

    Args:
        gradients, specs: as for :func:`global_norm`.
        max_norm: maximum norm.

    Returns:
        A pytree like ``gradients``.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> from jax.sharding import PartitionSpec as P
        >>> clip = mpi4jax.training.clip_by_global_norm
        >>> f = mpi4jax.shard_map(lambda g: clip(g, P("i"), 1.0), mesh=mpi4jax.Mesh(),
        ...                       in_specs=P("i"), out_specs=P("i"))
        >>> bool(abs(f(jnp.ones(4)) ** 2 * 4 * mpi4jax.default_comm().size - 1).max() < 1e-5)
        True
    """
    norm = global_norm(gradients, specs)
    scale = max_norm / jnp.maximum(norm, max_norm)
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)
