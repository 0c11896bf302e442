"""shard_map: a function of JAX's collectives, over the ranks of a communicator."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

from .._check.whole_arrays import look
from .._jax import blocks, compat, named_axes, rewriting
from .._op import manual
from .boundary import assert_replicated, boundary_of, note_blocks, note_order
from .collectives import LOCAL, MANY, Collectives, names_of
from .mesh import Mesh, current

Args = ParamSpec("Args")
Result = TypeVar("Result")

# What works with several devices in each process.
_APART = (
    "call one after the other, not one inside of the other, and each in a function of its own if "
    "it is jitted"
)

_state = threading.local()  # .mesh: that of the function which is being traced


@overload
def shard_map(
    f: Callable[Args, Result],
    /,
    *,
    mesh: Mesh | None = None,
    in_specs: Any,
    out_specs: Any,
    axis_names: Any = frozenset(),
    check_vma: bool = True,
) -> Callable[Args, Result]: ...


@overload
def shard_map(
    f: None = None,
    /,
    *,
    mesh: Mesh | None = None,
    in_specs: Any,
    out_specs: Any,
    axis_names: Any = frozenset(),
    check_vma: bool = True,
) -> Callable[[Callable[Args, Result]], Callable[Args, Result]]: ...


def shard_map(
    f: Callable[..., Any] | None = None,
    /,
    *positional: Any,
    mesh: Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    axis_names: Any = frozenset(),
    check_vma: bool = True,
    **others: Any,
) -> Any:
    """Run a function written for `jax.shard_map` on the ranks of a communicator.

    ``f`` uses the collectives of `jax.lax` (`psum`, `all_gather`, `ppermute`, ...) over the axes of
    ``mesh``, and operations of mpi4jax. JAX traces it with all its checks: it infers which values
    vary over an axis, and refuses an ``out_specs`` that promises more than it can infer.

    In contrast to `jax.shard_map`, arguments and results are this rank's *blocks*, and there are no
    global arrays. Blocks have the same shape on all ranks. Operations without this requirement are
    :func:`mpi4jax.notoken.allgatherv`, :func:`mpi4jax.notoken.alltoallv` and their kind.

    Args:
        f: function of arrays or pytrees; if None, a decorator is returned.
        mesh: :class:`mpi4jax.Mesh`; by default that of the innermost ``with mesh:``.
        in_specs: a `PartitionSpec` for each argument, or a pytree of them that is a prefix of the
            arguments. Named axes shard the array; an array that is not sharded is equal on all
            ranks.
        out_specs: likewise for the results.
        axis_names: as in `jax.shard_map`, the axes that ``f`` uses and that shard arrays; by
            default all. Along the other axes all ranks compute the same values, except inside a
            nested `shard_map` over those axes.
        check_vma: whether JAX checks which values vary over which axes. Without it, derivatives of
            replicated values are as those of `jax.shard_map` without it.

    Returns:
        Callable: takes and returns blocks, under `jit` or not, and any transformation.

    Raises:
        TypeError: if ``mesh`` is not a :class:`mpi4jax.Mesh`.
        NotImplementedError: if a collective has no counterpart. The error names it and its line.
        ValueError, TypeError: as for `jax.shard_map`.

    Example:
        >>> import jax, jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = mpi4jax.Mesh()
        >>> mean = lambda x: jax.lax.pmean(jnp.mean(x), "i")
        >>> float(mpi4jax.shard_map(mean, mesh=mesh, in_specs=P("i"), out_specs=P())(jnp.ones(3)))
        1.0

    See also: :func:`pvary`.
    """
    _check_spelling(positional, others, in_specs)
    how = {
        "in_specs": in_specs,
        "out_specs": out_specs,
        "check_vma": check_vma,
        **({"axis_names": frozenset(axis_names)} if axis_names else {}),
    }
    if f is None:
        return functools.partial(shard_map, mesh=mesh, **how)
    mesh = current() if mesh is None else mesh
    if not isinstance(mesh, Mesh):
        raise TypeError(
            "shard_map: argument 'mesh' must be a mpi4jax.Mesh, whose axes are made of ranks, got "
            f"{type(mesh).__name__}; pass mesh=..., or call it in a 'with mesh:'"
        )
    if not callable(f):
        raise TypeError(f"shard_map: argument 'f' must be a function, got {type(f).__name__}")

    @functools.wraps(f)
    def mapped(*args: Any) -> Any:
        outer = getattr(_state, "mesh", None)
        if outer is None:
            if axes := named_axes.manual_axes():
                raise NotImplementedError(
                    f"mpi4jax.shard_map over {mesh} inside of a jax.shard_map over the devices "
                    f"{axes}: {_APART}"
                )
            return _evaluate(f, mesh, how, args)
        if outer != mesh:
            raise ValueError(
                "shard_map: argument 'mesh' must be that of the shard_map around this one, "
                f"{outer}, got {mesh}; make one mesh with all axes, and name those of each "
                "shard_map in 'axis_names'"
            )
        return jax.shard_map(f, **how)(*args)  # inside of another, over other axes

    return mapped


def _check_spelling(positional: Any, others: dict[str, Any], ins: Any) -> None:
    """Raise a TypeError that has the current spelling of what is written as in older versions."""
    if positional:
        raise TypeError(
            f"shard_map: expected one positional argument, the function; got {1 + len(positional)}."
            " Write shard_map(f, mesh=mesh, in_specs=..., out_specs=...)"
        )
    for name in others:
        now = {
            "check_rep": f"check_vma={others[name]!r}",
            "auto": "axis_names=... with the axes of the mesh that are not in 'auto'",
        }.get(name)
        expected = f"write {now}" if now else "expected those of jax.shard_map"
        raise TypeError(f"shard_map: unexpected argument {name!r}; {expected}")
    if ins is None:
        raise _no_spec()


def _no_spec() -> TypeError:
    return TypeError(
        "shard_map: argument 'in_specs' must be a PartitionSpec, or a pytree of them, got None for "
        "an array: the type of an array of one rank does not say how the global array is sharded. "
        "Write P('i') for blocks along the axis 'i', and P() for equal arrays"
    )


def _evaluate(f: Callable[..., Any], mesh: Mesh, how: dict[str, Any], args: Any) -> Any:
    """Trace ``f`` as `jax.shard_map` does, for global arrays, and evaluate it on blocks."""
    axes = frozenset(how.get("axis_names", mesh.axis_names))
    specs, whole = _whole_arrays(mesh, how["in_specs"], args)
    name = getattr(f, "__name__", "shard_map")
    text = boundary_of(name, args, specs)
    world = _world(mesh, axes, how["check_vma"], text)
    values = jax.tree.leaves(args)
    assert_same = functools.partial(assert_replicated, mesh, axes, f"shard_map of {name!r}")
    assert_same("arguments", args, specs)
    evaluation = None if blocks.is_staged() else world.evaluation()
    if evaluation is not None:
        pairs = zip(values, specs, strict=True)
        values = [world.collectives.enter(x, spec) for x, spec in pairs]

    def traced(*typed: Any) -> Any:
        before, _state.mesh = getattr(_state, "mesh", None), mesh
        try:
            with (
                manual.inside(world.of_ops),
                named_axes.refuse_devices(_APART),
                named_axes.name_axes(mesh.axis_names),
            ):
                return f(*typed) if evaluation is None else evaluation.run(f, typed, values)
        finally:
            _state.mesh = before

    functools.update_wrapper(traced, f)
    closed, tree = named_axes.trace_shard_map(traced, whole, mesh=mesh._abstract, **how)
    eqn = next(e for e in closed.jaxpr.eqns if e.primitive is named_axes.shard_map_p)
    out_specs = eqn.params["out_specs"]
    note_blocks(mesh, name, text, args, specs)
    if evaluation is None:
        note_order(mesh, name, text, args, eqn.params["jaxpr"])
        assert_same("constants", closed.consts, [PartitionSpec()] * len(closed.consts))
        outs = world.staged(name, closed, values)
    else:
        outs = world.left(out_specs, evaluation.results)
        look()
    found = jax.tree.unflatten(tree, outs)
    assert_same("results", found, out_specs)
    return found


class _World:
    """What rewrites functions for some axes of a mesh."""

    def __init__(self, mesh: Mesh, axes: frozenset[str], check_vma: bool, boundary: str):
        self.collectives = Collectives(mesh, axes, check_vma, boundary)
        self.of_ops = _axes_of_ops(mesh, axes, check_vma)
        self.rewriter = rewriting.Rewriter(
            mesh._abstract,
            self.collectives.table(),
            _refuse,
            check_vma,
            functools.partial(manual.inside, self.of_ops),
            MANY,
            LOCAL,
            axes,
        )
        self.rewriter.collectives["shard_map"] = functools.partial(
            _nested, self.rewriter, self.collectives
        )

    def evaluation(self) -> blocks.Evaluation:
        """Return what evaluates a function equation by equation."""

        def step(eqn: Any, ins: list[Any]) -> Sequence[Any]:
            with manual.inside(None):
                return self.rewriter.bound(eqn, ins)

        coordinates = self.collectives.mesh.coordinates
        where = ", ".join(f"{name!r}: {index}" for name, index in coordinates.items())
        return blocks.Evaluation(step, self.rewriter.check_vma, f"At {{{where}}}")

    def staged(self, name: str, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        """Return the results of what JAX has traced, rewritten."""

        def step(eqn: Any, ins: list[Any]) -> list[Any]:
            if eqn.primitive is not named_axes.shard_map_p:
                return compat.bind_with(eqn.primitive, eqn.params, ins)
            in_specs = eqn.params["in_specs"]
            ins = [self.collectives.enter(x, s) for x, s in zip(ins, in_specs, strict=True)]
            body = self.rewriter.function(ClosedJaxpr(eqn.params["jaxpr"], ()))
            return self.left(eqn.params["out_specs"], rewriting.call(body, name, ins))

        return compat.evaluate(closed.jaxpr, closed.consts, args, step)

    def left(self, specs: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        """Return results of the function, as they leave it."""
        return [self.collectives.leave(y, s) for y, s in zip(results, specs, strict=True)]


def _world(mesh: Mesh, axes: frozenset[str], check_vma: bool, boundary: str) -> _World:
    """Return one for equal functions: what it has rewritten is compiled once."""
    worlds = vars(mesh).setdefault("_worlds", {})
    found = worlds.get((axes, check_vma, boundary))
    if found is None:
        if len(worlds) > 256:
            worlds.clear()
        found = worlds[axes, check_vma, boundary] = _World(mesh, axes, check_vma, boundary)
    return found


def _axes_of_ops(mesh: Mesh, axes: frozenset[str], check_vma: bool) -> manual.Axes:
    """Return the mesh as operations of this package need it."""
    if not check_vma:  # nothing is followed, and everything is each rank's own
        return manual.Axes(lambda comm: None, frozenset(), frozenset())

    def of(comm: Any) -> frozenset[str] | None:
        found = mesh.axes_of(comm)
        return None if found is None or found - axes else found

    return manual.Axes(of, axes, frozenset(name for name in axes if mesh.shape[name] == 1))


def _nested(
    rewriter: rewriting.Rewriter,
    collectives: Collectives,
    p: dict[str, Any],
    ins: list[Any],
    types: Sequence[Any],
) -> list[Any]:
    """Evaluate a nested `shard_map`.

    Each rank takes its block of operands that are whole along its axes, and results are gathered.
    """

    def cut(x: Any, spec: Any) -> Any:
        for axis, entry in enumerate(spec):
            names = names_of(entry)
            if names:
                n = int(np.prod([collectives.mesh.shape[name] for name in names]))
                length = x.shape[axis] // n
                start = collectives.mesh.index_along(names) * length
                x = jax.lax.slice_in_dim(
                    collectives.vary(x, names), start, start + length, axis=axis
                )
        return x

    def joined(y: Any, spec: Any) -> Any:
        for axis, entry in enumerate(spec):
            names = names_of(entry)
            if names:
                how = {"axis_name": names, "all_gather_dimension": axis, "tiled": True}
                (y,) = collectives.all_gather_invariant(how, [y])
        return y

    ins = [cut(x, s) for x, s in zip(ins, p["in_specs"], strict=True)]
    # Its own axes; up to JAX 0.8 under the other name.
    axes = frozenset(p.get("newly_manual_axes", p.get("manual_axes", ())))
    outs = rewriter.within(axes).run(p["jaxpr"], (), ins)
    return [joined(y, s) for y, s in zip(outs, p["out_specs"], strict=True)]


def _whole_arrays(mesh: Mesh, specs: Any, args: Any) -> tuple[list[Any], Any]:
    """Return the specs of the leaves, and the types of the global arrays whose blocks these are."""

    def whole(x: Any, spec: Any) -> Any:
        aval = jax.typeof(x)
        shape = list(aval.shape)
        for axis, entry in enumerate(spec or ()):
            for name in names_of(entry):
                if axis < len(shape):
                    shape[axis] *= mesh.shape.get(name, 1)
        return jax.ShapeDtypeStruct(tuple(shape), aval.dtype, weak_type=aval.weak_type)

    def is_spec(s: Any) -> bool:
        return s is None or isinstance(s, PartitionSpec)

    if isinstance(specs, list):
        specs = tuple(specs)
    leaves: list[tuple[Any, Any]] = []

    def add(spec: Any, part: Any) -> None:
        xs = jax.tree.leaves(part)
        if spec is None and xs:
            raise _no_spec()
        leaves.extend((spec, x) for x in xs)

    try:
        jax.tree.map(add, specs, args, is_leaf=is_spec)
    except ValueError:  # the trees do not match, and JAX says where
        return [None] * len(jax.tree.leaves(args)), jax.tree.map(lambda x: whole(x, None), args)
    types = [whole(x, spec) for spec, x in leaves]
    return [spec for spec, _ in leaves], jax.tree.unflatten(jax.tree.structure(args), types)


def _refuse(name: str, line: str) -> NotImplementedError:
    at = f"{line}: " if line else ""
    return NotImplementedError(
        f"{at}mpi4jax.shard_map: {name!r} over axes of ranks has no counterpart in MPI here; use "
        "psum, pmax, pmin, all_gather, psum_scatter, all_to_all, ppermute, ragged_all_to_all, or "
        "an operation of mpi4jax.notoken"
    )
