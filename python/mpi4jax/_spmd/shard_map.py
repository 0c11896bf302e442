"""shard_map: a function of JAX's collectives, over the ranks of a communicator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import jax
from jax.sharding import PartitionSpec

from .._check.whole_arrays import look
from .._jax import blocks, named_axes, ranks, rewriting
from .._job.watch import compares_before
from .._op import manual
from .boundary import assert_replicated, boundary_of, note_blocks, note_order
from .collectives import LOCAL, MANY, Collectives, mentioned
from .mesh import Mesh, current, mesh_at_definition, mesh_of_ranks

Args = ParamSpec("Args")
Result = TypeVar("Result")

# What works with several devices in each process.
_APART = (
    "call one after the other, not one inside of the other, and each in a function of its own if "
    "it is jitted"
)


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
        mesh: :class:`mpi4jax.Mesh`; by default the mesh of the innermost ``with mesh:`` or of
            `jax.set_mesh` when the function is called (in JAX 0.7, when it is defined).
        in_specs: a `PartitionSpec` for each argument, or a pytree of them that is a prefix of the
            arguments. Named axes shard the array; an array that is not sharded is equal on all
            ranks.
        out_specs: likewise for the results.
        axis_names: as in `jax.shard_map`, the axes that ``f`` uses and that shard arrays; by
            default all. Along the other axes all ranks compute the same values, except inside a
            nested `shard_map` over those axes.
        check_vma: whether JAX checks which values vary over which axes. Without it, derivatives of
            replicated values are the same as in `jax.shard_map` without it.

    Returns:
        Callable: takes and returns blocks, under `jit` or not, and any transformation. On a rank
        that ``mesh`` leaves out, it returns None in place of each of ``out_specs``.

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
    mesh = mesh_at_definition(mesh)
    if not callable(f):
        raise TypeError(f"shard_map: argument 'f' must be a function, got {type(f).__name__}")

    @functools.wraps(f)
    def mapped(*args: Any) -> Any:
        outer = named_axes.current_world()
        if outer is None:
            if axes := named_axes.manual_axes():
                raise NotImplementedError(
                    f"mpi4jax.shard_map over {mesh or current()} inside of a jax.shard_map over "
                    f"the devices {axes}: {_APART}"
                )
            over = mesh_of_ranks(mesh)
            if devices := named_axes.mesh_of_devices():
                raise ValueError(
                    f"mpi4jax.shard_map over {over}, while jax.set_mesh has set a mesh of devices, "
                    f"{devices}; make it with mpi4jax.sharding.make_mesh, or call the function "
                    "outside of the 'with jax.set_mesh(...)' of the devices"
                )
            if not over.coordinates:  # the mesh leaves this rank out
                return jax.tree.map(lambda _: None, out_specs, is_leaf=_is_spec)
            return _call(f, over, how, args)
        if mesh is not None and outer.mesh != mesh:
            raise ValueError(
                "shard_map: argument 'mesh' must be the mesh of the shard_map around this one, "
                f"{outer.mesh}, got {mesh}; make one mesh with all axes, and name the axes of each "
                "shard_map in 'axis_names'"
            )
        return jax.shard_map(f, **how)(*args)  # inside of another, over other axes

    return mapped


def _check_spelling(positional: Any, others: dict[str, Any], ins: Any) -> None:
    """Raise a TypeError that has the current spelling of what is written as in older versions."""
    if positional:
        raise TypeError(
            f"shard_map: expected one positional argument, the function; got {1 + len(positional)}."
            " Pass the others by name: mesh=..., in_specs=..., out_specs=..."
        )
    for name in others:
        now = {
            "check_rep": f"check_vma={others[name]!r}",
            "auto": "axis_names=... with the axes of the mesh that are not in 'auto'",
        }.get(name)
        expected = f"write {now}" if now else "expected the arguments of jax.shard_map"
        raise TypeError(f"shard_map: unexpected argument {name!r}; {expected}")
    if ins is None:
        raise _no_spec()


def _no_spec() -> TypeError:
    return TypeError(
        "shard_map: argument 'in_specs' must be a PartitionSpec, or a pytree of them, got None for "
        "an array: the type of an array of one rank does not say how the global array is sharded. "
        "Write P('i') for blocks along the axis 'i', and P() for equal arrays"
    )


def _call(f: Callable[..., Any], mesh: Mesh, how: dict[str, Any], args: Any) -> Any:
    """Call ``f`` by `jax.shard_map` over a mesh of ranks."""
    axes = frozenset(how.get("axis_names", mesh.axis_names))
    specs = _specs_of_leaves(how["in_specs"], args)
    for x, spec in zip(jax.tree.leaves(args), specs, strict=True):
        if spec is None and getattr(x, "shape", None):  # other objects are static
            raise _no_spec()
        unknown = [axis for axis in mentioned(spec or ()) if axis not in mesh.shape]
        if unknown:
            raise ValueError(
                f"shard_map: argument 'in_specs' has the axes {unknown}; the mesh has the axes "
                f"{mesh.axis_names}"
            )
    name = getattr(f, "__name__", "shard_map")
    text = boundary_of(name, args, specs)
    world = _world(mesh, axes, how["check_vma"], text)
    assert_same = functools.partial(assert_replicated, mesh, axes, f"shard_map of {name!r}")
    assert_same("arguments", args, specs)
    note_blocks(mesh, axes, name, text, args, specs)

    @functools.wraps(f)
    def traced(*args: Any) -> Any:
        with named_axes.refuse_devices(_APART), named_axes.name_axes(mesh.axis_names):
            return f(*args)

    mapped = jax.shard_map(traced, mesh=world.abstract, **how)
    is_staged = blocks.is_staged()
    if is_staged and compares_before():
        constants = _constants(mapped, args)
        assert_same("constants", constants, [PartitionSpec()] * len(constants))
    found = mapped(*args)
    if not is_staged:
        look()
    assert_same("results", found, _specs_of_leaves(how["out_specs"], found))
    return found


def _constants(mapped: Callable[..., Any], args: Any) -> list[Any]:
    """Return the arrays that a mapped function uses beside its arguments, by a trace of it alone.

    A trace alone fails if the function uses `jax.lax.axis_index` of a `jax.vmap` around the call,
    whose values the trace does not see. The call itself raises any other error.
    """
    try:
        return list(jax.make_jaxpr(mapped)(*args).consts)
    except Exception:
        return []


class _World:
    """What `jax.shard_map` over some axes of a mesh becomes, for functions with equal arguments.

    Attributes:
        mesh: the mesh of ranks.
        abstract: JAX's mesh, with a mark.
        axes: the mesh as operations of this package need it.
        rewriter: what rewrites the functions.
        where: words for this rank's place.
    """

    def __init__(self, mesh: Mesh, axes: frozenset[str], check_vma: bool, boundary: str):
        ranks.install()
        self.mesh, self.boundary, self.axes = mesh, boundary, _axes_of_ops(mesh, axes, check_vma)
        self.abstract = ranks.mesh_of_ranks(mesh.axis_sizes, mesh.axis_names, self)
        collectives = Collectives(mesh, axes, check_vma, boundary)
        table = collectives.table()
        self.rewriter = rewriting.Rewriter(self.abstract, table, _refuse, check_vma, MANY, LOCAL)
        nested = functools.partial(collectives.nested, self.rewriter)
        self.rewriter.collectives["shard_map"] = nested
        where = ", ".join(f"{name!r}: {index}" for name, index in mesh.coordinates.items())
        self.where = f"At {{{where}}}"

    def lowers(self, jaxpr: Any, arguments: Any) -> None:
        """Note a function in one that is lowered for these arguments."""
        note_order(self.mesh, self.boundary, jaxpr, arguments)


def _world(mesh: Mesh, axes: frozenset[str], check_vma: bool, boundary: str) -> _World:
    """Return one for equal functions: what it has rewritten is compiled once."""
    worlds = vars(mesh).setdefault("_worlds", {})
    found = worlds.get((axes, check_vma, boundary))
    if found is None:
        if len(worlds) > 256:
            worlds.clear()
        found = worlds[axes, check_vma, boundary] = _World(mesh, axes, check_vma, boundary)
    return found  # type: ignore[no-any-return]


def _axes_of_ops(mesh: Mesh, axes: frozenset[str], check_vma: bool) -> manual.Axes:
    """Return the mesh as operations of this package need it."""
    if not check_vma:  # nothing is followed, and everything is each rank's own
        return manual.Axes(lambda comm: None, frozenset(), frozenset())

    def of(comm: Any) -> frozenset[str] | None:
        found = mesh.axes_of(comm)
        return None if found is None or found - axes else found

    return manual.Axes(of, axes, frozenset(name for name in axes if mesh.shape[name] == 1))


def _is_spec(spec: Any) -> bool:
    return spec is None or isinstance(spec, PartitionSpec)


def _specs_of_leaves(specs: Any, tree: Any) -> list[Any]:
    """Return the spec of each leaf; `P()` of each if the trees do not match, and JAX says where."""
    found: list[Any] = []

    def add(spec: Any, part: Any) -> None:
        found.extend([spec] * len(jax.tree.leaves(part)))

    try:
        jax.tree.map(add, specs, tree, is_leaf=_is_spec)
    except ValueError:
        return [PartitionSpec()] * len(jax.tree.leaves(tree))
    return found


def _refuse(name: str, line: str) -> NotImplementedError:
    at = f"{line}: " if line else ""
    return NotImplementedError(
        f"{at}mpi4jax.shard_map: {name!r} over axes of ranks has no counterpart in MPI here; use "
        "psum, pmax, pmin, all_gather, psum_scatter, all_to_all, ppermute, ragged_all_to_all, or "
        "an operation of mpi4jax.notoken"
    )
