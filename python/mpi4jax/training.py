"""Parts of training loops on ranks, for functions in :func:`mpi4jax.shard_map`.

Optimizer states and gradients of sharded parameters, pipelines, and batches. Axis names refer to
the axes of a :class:`mpi4jax.Mesh`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from mpi4py import MPI

from ._numerics.arrays import T, names_of
from ._numerics.base import as_comm, vary_like
from ._numerics.batches import batches as batches
from ._spmd.mesh import Mesh

__all__ = [
    "Sampler",
    "batches",
    "clip_by_global_norm",
    "fsdp_specs",
    "global_norm",
    "gpipe",
    "one_forward_one_backward",
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


# ---- Pipelines


def _scan(tick: Callable[..., Any], carry: Any, ticks: int) -> Any:
    """Run a `lax.scan` whose first carry varies over the same axes as the later ones."""
    step = jnp.arange(ticks)
    leaves, tree = jax.tree.flatten(carry)
    for _ in range(2):  # the result of the first step may vary over more axes than the first carry
        types = jax.make_jaxpr(tick)(jax.tree.unflatten(tree, leaves), step[0]).out_avals
        leaves = [vary_like(x, to) for x, to in zip(leaves, types, strict=False)]
    carry = jax.tree.unflatten(tree, leaves)
    return lax.scan(tick, carry, step)


def _shift(x: Any, axis: str, by: int) -> Any:
    """Return the value of the previous stage (``by=1``) or of the next one (``by=-1``)."""
    n = lax.axis_size(axis)
    pairs = [(k, k + by) for k in range(n) if 0 <= k + by < n]
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, axis, pairs), x)


def _where(condition: Any, x: Any, y: Any) -> Any:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), x, y)


def _length(xs: Any) -> int:
    return int(jax.tree.leaves(xs)[0].shape[0])


def gpipe(layer: Callable[[Any, Any], Any], params: Any, xs: T, axis: str) -> T:
    """Send microbatches through a pipeline of layers, one on each rank along a mesh axis, as in
    GPipe.

    JAX differentiates it. With ``jax.checkpoint(layer)``, only the inputs of layers are kept.

    Args:
        layer: function of parameters and a microbatch, which returns an array of the microbatch's
            shape and dtype. If a rank has several layers, ``layer`` runs all of them, for example
            in a `lax.scan`.
        params: parameters of this rank's layer, in a :func:`mpi4jax.shard_map`.
        xs: pytree of arrays of shape ``(microbatches, ...)``; only the values on the first rank are
            used.
        axis: name of the mesh axis.

    Returns:
        The results, a pytree like ``xs``. Their values are the same on all ranks along the axis.

    Source:
        Huang et al., GPipe, 2019, https://arxiv.org/abs/1811.06965.

    See also: :func:`one_forward_one_backward`.
    """
    stage, stages, number = lax.axis_index(axis), lax.axis_size(axis), _length(xs)
    of = lambda t: jax.tree.map(lambda leaf: leaf[jnp.minimum(t, number - 1)], xs)  # noqa: E731

    def tick(received: Any, t: Any) -> Any:
        y = layer(params, _where(stage == 0, of(t), received))
        return _shift(y, axis, 1), y

    # While the pipeline fills, layers get a real input: some have no derivative at zero.
    _, ys = _scan(tick, of(0), number + stages - 1)
    last = jax.tree.map(lambda leaf: leaf[stages - 1 :], ys)
    zeros = jax.tree.map(jnp.zeros_like, last)
    return lax.psum(_where(stage == stages - 1, last, zeros), axis)  # type: ignore[no-any-return]


def one_forward_one_backward(
    layer: Callable[[Any, Any], Any],
    loss: Callable[[Any, Any], Any],
    params: T,
    xs: Any,
    targets: Any,
    axis: str,
) -> tuple[jax.Array, T]:
    """Compute a loss and its gradient in a pipeline that keeps few activations.

    Each step of the pipeline does one forward pass, and one backward pass of an earlier microbatch.
    A rank keeps the inputs of at most ``2 * stages - 1`` microbatches, and computes its layer again
    for the backward pass.

    Args:
        layer, params, xs, axis: as for :func:`gpipe`.
        loss: function of a result of the last layer and a target, which returns a scalar.
        targets: pytree of arrays of shape ``(microbatches, ...)``; only the values on the last rank
            are used.

    Returns:
        The mean of the loss over the microbatches, the same on all ranks along the axis, and its
        gradient with respect to this rank's ``params``.

    Source:
        PipeDream-Flush in Narayanan et al., 2021, https://arxiv.org/abs/2006.09503.
    """
    stage, stages, number = lax.axis_index(axis), lax.axis_size(axis), _length(xs)
    kept_inputs = 2 * stages - 1
    at = lambda tree, k: jax.tree.map(lambda leaf: leaf[k], tree)  # noqa: E731

    def tick(carry: Any, t: Any) -> Any:
        received, cotangent, kept, total, gradient = carry
        forward, back = t - stage, t - 2 * (stages - 1) + stage  # microbatches of this tick
        x = _where(stage == 0, at(xs, forward % number), received)
        kept = jax.tree.map(lambda old, new: old.at[forward % kept_inputs].set(new), kept, x)
        y, pull = jax.vjp(layer, params, at(kept, back % kept_inputs))
        value, of_loss = jax.value_and_grad(loss)(y, at(targets, back % number))
        of_params, of_x = pull(_where(stage == stages - 1, of_loss, cotangent))
        counts = (back >= 0) & (back < number)  # the pipeline is being filled or drained
        total = total + jnp.where(counts & (stage == stages - 1), value, 0)
        add = lambda sum_, new: sum_ + jnp.where(counts, new, 0)  # noqa: E731
        gradient = jax.tree.map(add, gradient, of_params)
        y = layer(params, x)
        return (_shift(y, axis, 1), _shift(of_x, axis, -1), kept, total, gradient), None

    first = at(xs, 0)
    repeat = lambda leaf: jnp.broadcast_to(leaf, (kept_inputs, *leaf.shape))  # noqa: E731
    zeros = lambda tree: jax.tree.map(jnp.zeros_like, tree)  # noqa: E731
    start = (first, zeros(first), jax.tree.map(repeat, first), jnp.zeros(()), zeros(params))
    (*_, total, gradient), _ = _scan(tick, start, number + 2 * stages - 2)
    return lax.psum(total, axis) / number, jax.tree.map(lambda g: g / number, gradient)


# ---- Samples


class Sampler:
    """Draw this rank's samples of each batch, in a random order that any number of ranks can
    resume.

    Iterating yields the indices of one epoch, batch by batch; samples that do not fill a batch are
    left out. ``state`` says which batch comes next. Save it in a checkpoint, and set it after
    loading.

    Args:
        samples: number of samples of the data set.
        batch_size: number of samples of a batch of all ranks.
        seed: seed of the random order.
        comm: communicator; by default a duplicate of ``COMM_WORLD``.

    Example:
        >>> import mpi4jax.notoken as mpi4jax
        >>> sampler = mpi4jax.training.Sampler(100, 4 * mpi4jax.default_comm().size)
        >>> [len(indices) for indices in sampler][:2], sampler.state
        ([4, 4], {'epoch': 1, 'batch': 0})
    """

    def __init__(
        self, samples: int, batch_size: int, *, seed: int = 0, comm: MPI.Intracomm | None = None
    ):
        if not 0 < batch_size <= samples:
            raise ValueError(
                f"Sampler: argument 'batch_size' must be from 1 to {samples}, the number of "
                f"samples, got {batch_size}"
            )
        self.samples, self.batch_size, self.seed = samples, batch_size, seed
        self._comm = as_comm("Sampler", comm).mpi
        #: The epoch and the number of the next batch in it.
        self.state = {"epoch": 0, "batch": 0}

    def __iter__(self) -> Iterator[np.ndarray[Any, Any]]:
        epoch = self.state["epoch"]
        order = np.random.default_rng((self.seed, epoch)).permutation(self.samples)
        for k in range(self.state["batch"], self.samples // self.batch_size):
            batch = order[k * self.batch_size : (k + 1) * self.batch_size]
            self.state = {"epoch": epoch, "batch": k + 1}
            yield np.array_split(batch, self._comm.Get_size())[self._comm.Get_rank()]
        self.state = {"epoch": epoch + 1, "batch": 0}
