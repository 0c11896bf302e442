"""JAX's own `shard_map` over a mesh of ranks.

The mesh is an `AbstractMesh` with a mark. Outside of the function, too, arrays have the types of
blocks. JAX differentiates, batches and stages the function by its own rules. `rewriting.py`
rewrites what is lowered, and `blocks.py` evaluates what is called outside of every traced function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import core, mesh as mesh_lib, shard_map as jax_shard_map
from jax._src.interpreters import pxla
from jax._src.lax.parallel import pbroadcast_p, pmax_p, pmin_p
from jax.extend import linear_util as lu
from jax.extend.core import ClosedJaxpr, Jaxpr, primitives
from jax.interpreters import ad, partial_eval as public_pe
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from . import blocks, compat
from .functions import equations, inner_jaxprs, opened, with_functions
from .named_axes import abstract_mesh, current_world, plain, shard_map_p, world_of
from .rewriting import Rewriter

# Up to JAX 0.7, a mesh without devices has no description of a device, which here is the mark.
_Device: Any = getattr(mesh_lib, "AbstractDevice", None)


class Mark(_Device or object):  # type: ignore[misc]
    """The mark of a mesh of ranks, with what its functions are rewritten by."""

    world: Any

    @staticmethod
    def of(world: Any) -> Mark:
        if _Device is None:
            mark = Mark()
        else:
            kind = f"ranks, {id(world)}"
            mark = Mark(device_kind=kind, num_cores=1, platform=jax.default_backend())
        object.__setattr__(mark, "world", world)
        return mark

    def _repr(self) -> str:
        return "ranks"


class _MarkedMesh(AbstractMesh):  # type: ignore[misc]
    """A mesh with a mark, up to JAX 0.7."""

    def __init__(self, sizes: Any, names: Any, axis_types: Any, mark: Mark):
        super().__init__(sizes, names, axis_types=axis_types)
        self.abstract_device = mark

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, _MarkedMesh)
            and self.abstract_device is other.abstract_device
            and AbstractMesh.__eq__(self, other)
        )

    __hash__ = AbstractMesh.__hash__

    def update_axis_types(self, name_to_type: Any) -> AbstractMesh:
        types = [name_to_type.get(name, old) for name, old in self._name_to_type.items()]
        return _MarkedMesh(self.axis_sizes, self.axis_names, tuple(types), self.abstract_device)


def mesh_of_ranks(sizes: tuple[int, ...], names: tuple[str, ...], world: Any) -> AbstractMesh:
    """Return a mesh for `jax.shard_map`, whose functions are rewritten by ``world.rewriter``."""
    types, mark = (AxisType.Auto,) * len(names), Mark.of(world)
    if _Device is None:
        return _MarkedMesh(sizes, names, types, mark)
    return AbstractMesh(sizes, names, types, abstract_device=mark)


def _is_outermost(mesh: Any) -> bool:
    return world_of(mesh) is not None and not mesh.manual_axes


# ---- Types: blocks on both sides


def _shard(original: Any, mesh: Any, axes: Any, check_vma: bool, spec: Any, aval: Any) -> Any:
    if not _is_outermost(mesh):
        return original(mesh, axes, check_vma, spec, aval)
    inner = mesh.update_axis_types(dict.fromkeys(axes, AxisType.Manual))
    aval = plain(aval)
    aval = aval.update(sharding=NamedSharding(inner, PartitionSpec(*[None] * aval.ndim)))
    named = frozenset(jax.tree.leaves(tuple(spec))) if check_vma else frozenset()
    return compat.varying_type(aval, add=named)


def _unshard(original: Any, mesh: Any, check_vma: bool, spec: Any, aval: Any) -> Any:
    return plain(aval) if _is_outermost(mesh) else original(mesh, check_vma, spec, aval)


def _check_specs(original: Any, f: Any, mesh: Any, *rest: Any) -> None:
    """Blocks need not be divisible once more."""
    if _is_outermost(mesh):
        mesh = abstract_mesh((1,) * len(mesh.axis_names), mesh.axis_names)
    original(f, mesh, *rest)


def _of_residuals(original: Any, mesh: Any, axes: Any) -> Any:
    """Leave the axes of an enclosing `shard_map` out of the spec of a residual. JAX 0.7 does not,
    and refuses the gradient of a nested `shard_map`."""
    around = mesh_lib.get_abstract_mesh().manual_axes if world_of(mesh) is not None else ()
    return original(mesh, frozenset(axes).difference(around))


# ---- Calls outside of every traced function


def _evaluate(original: Any, trace: Any, prim: Any, fun: Any, args: Any, **params: Any) -> Any:
    world = world_of(params["mesh"])
    if world is None:
        return original(trace, prim, fun, args, **params)
    evaluation = blocks.Evaluation(world.rewriter.bound, params["check_vma"], world.where)
    found: list[Any] = []

    def evaluated(*typed: Any) -> Any:
        return evaluation.run(getattr(fun, "call_wrapped", fun), typed, args)

    def staged(*args: Any) -> list[Any]:
        if isinstance(fun, lu.WrappedFun):  # up to JAX 0.8
            new = lu.wrap_init(evaluated, debug_info=fun.debug_info)
            found.append(prim.bind(new, *args, **params))
        else:
            found.append(prim.bind(*args, subfuns=(evaluated,), **params))
        return list(found[-1])

    jax.make_jaxpr(staged)(*args)
    outs = evaluation.results
    return found[-1].update(outs) if hasattr(found[-1], "update") else outs


# ---- What is lowered


class _Outside(Rewriter):
    """A rewriter of functions around a `shard_map` over ranks. All else in them stays."""

    def __init__(self) -> None:
        super().__init__(mesh_lib.empty_abstract_mesh, {}, NotImplementedError, True)

    def _concerns(self, jaxpr: Jaxpr) -> bool:
        return any(
            _is_of_ranks(eqn)
            or any(self._concerns(opened(inner)) for _, inner in inner_jaxprs(eqn.params))
            for eqn in jaxpr.eqns
        )

    def _called(self, eqn: Any) -> tuple[Any, Rewriter] | None:
        if _is_of_ranks(eqn):
            return eqn.params["jaxpr"], world_of(eqn.params["mesh"]).rewriter
        called = super()._called(eqn)
        return called if called and self._concerns(opened(called[0])) else None

    def _type(self, aval: Any) -> Any:
        return aval

    def _context(self, ctx: Any) -> Any:
        return ctx

    def _same(self, eqn: Any) -> dict[str, Any] | None:
        if not any(self._concerns(opened(inner)) for _, inner in inner_jaxprs(eqn.params)):
            return {}
        if eqn.primitive is primitives.jit_p:
            params = with_functions(eqn.params, self.function)
            return {"params": params, "effects": params["jaxpr"].effects}
        return None

    def _predicate_varies(self, eqn: Any) -> frozenset[str]:
        return frozenset()

    def bound(self, eqn: Any, ins: list[Any], types: Sequence[Any] | None = None) -> Sequence[Any]:
        if self._same(eqn) == {}:
            return compat.bind_with(eqn.primitive, eqn.params, ins)
        return super().bound(eqn, ins, types)


def _is_of_ranks(eqn: Any) -> bool:
    return eqn.primitive is shard_map_p and world_of(eqn.params["mesh"]) is not None


_outside = _Outside()


def lowered(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return what is lowered in the place of a function.

    Operations have effects, and JAX's collectives have none. Those whose results nothing uses, such
    as the value of a loss whose gradient is returned, are dropped before.
    """
    if not _outside._concerns(closed.jaxpr):
        return closed
    for eqn in filter(_is_of_ranks, equations(closed.jaxpr)):
        world_of(eqn.params["mesh"]).lowers(eqn.params["jaxpr"], closed.jaxpr.invars)
    used = [True] * len(closed.jaxpr.outvars)
    jaxpr = public_pe.dce_jaxpr(closed.jaxpr, used, instantiate=True)[0]
    return _outside.function(ClosedJaxpr(jaxpr, closed.consts))  # type: ignore[no-any-return]


def _lower(original: Any, closed_jaxpr: Any, *args: Any, **how: Any) -> Any:
    return original(lowered(closed_jaxpr), *args, **how)


# ---- Derivatives that JAX has not got


def _extremum_jvp(primitive: Any, primals: Any, tangents: Any, **p: Any) -> Any:
    """Where several ranks have the extremum, their tangents have the same weight."""
    if current_world() is None:
        raise NotImplementedError(f"Differentiation rule for '{primitive.name}' not implemented")
    how = {"axis_name": p["axes"], "axis_index_groups": p["axis_index_groups"]}

    def tangent(x: Any, y: Any, t: Any) -> Any:
        if type(t) is ad.Zero:
            return ad.Zero.from_primal_value(y)
        attained = (x == y).astype(t.dtype)
        return jax.lax.psum(attained * t, **how) / jax.lax.psum(attained, **how)

    found = primitive.bind(*primals, **p)
    ys = found if primitive.multiple_results else [found]  # JAX 0.7 has several
    outs = [tangent(*of_one) for of_one in zip(primals, ys, tangents, strict=True)]
    return (found, outs) if primitive.multiple_results else (found, outs[0])


def _pbroadcast_transpose(t: Any, x: Any, *, source: Any, axis_name: Any) -> Any:
    """JAX's rule has the sum of an array where it expects a number."""
    total = jax.lax.psum(t, axis_name)
    return [jax.numpy.where(jax.lax.axis_index(axis_name) == source, total, 0 * total)]


def _pvary(bind: Callable[..., Any], *xs: Any, axes: Any, **how: Any) -> Any:
    """Cast what does not vary yet: JAX makes constants of a `custom_linear_solve` vary where it
    binds the solve, and again in its functions, which it has traced before."""
    left = [[a for a in axes if a not in compat.varying_axes(jax.typeof(x))] for x in xs]
    if current_world() is None or all(len(rest) == len(axes) for rest in left):
        return bind(*xs, axes=axes, **how)
    pairs = zip(xs, left, strict=True)
    outs = [bind(x, axes=tuple(rest), **how) if rest else x for x, rest in pairs]
    if not core.pvary_p.multiple_results:
        return outs[0]
    return [y[0] if isinstance(y, list) else y for y in outs]  # JAX 0.7


@functools.cache
def install() -> None:
    """Teach JAX the marks. This is done when the first mesh of ranks is used."""
    for table, by in ((core.shard_aval_handlers, _shard), (core.unshard_aval_handlers, _unshard)):
        table[core.ShapedArray] = functools.partial(by, table[core.ShapedArray])
    compat.wrap(jax_shard_map, "_check_specs_vs_args", _check_specs)
    compat.wrap(core.EvalTrace, "process_shard_map", _evaluate)
    compat.wrap(pxla, "lower_sharding_computation", _lower)
    if _Device is None:
        compat.wrap(jax_shard_map, "order_wrt_mesh", _of_residuals)
    compat.wrap(core.pvary_p, "bind", _pvary)
    for primitive in (pmax_p, pmin_p):
        ad.primitive_jvps[primitive] = functools.partial(_extremum_jvp, primitive)
    ad.primitive_transposes[pbroadcast_p] = _pbroadcast_transpose
