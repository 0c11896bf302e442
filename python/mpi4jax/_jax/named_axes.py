"""`jax.shard_map` and its collectives as equations: what of JAX's internals they depend on.

JAX traces a function for one device of a mesh that has no devices (`AbstractMesh`), with all its
checks; :class:`Rewriter` evaluates what it has traced with other collectives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import config, core, mesh as mesh_lib, source_info_util
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, jaxpr_as_fun, primitives
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from . import compat, traces
from .functions import inner_jaxprs, opened, with_functions

shard_map_p = compat.shard_map_p

Collective = Callable[..., Sequence[Any]]  # (params, operands) -> results


def abstract_mesh(shapes: tuple[int, ...], names: tuple[str, ...]) -> AbstractMesh:
    """A mesh without devices. From 0.12, axes are explicit ones by default: then an array's type
    would have to say that it is cut."""
    return AbstractMesh(shapes, names, axis_types=(AxisType.Auto,) * len(names))


def trace_shard_map(f: Callable[..., Any], args: Any, **how: Any) -> tuple[ClosedJaxpr, Any]:
    """What `jax.shard_map` makes of a function on global arrays of these types, and the tree of
    its results. Of what is traced, the equation of the `shard_map` is one."""
    mapped = jax.shard_map(f, **how)
    closed, shapes = jax.make_jaxpr(mapped, return_shape=True)(*args)
    return closed, jax.tree.structure(shapes)


def axes_of(params: dict[str, Any]) -> tuple[Any, ...]:
    """The names of axes that an equation mentions, of a collective those that it runs over."""
    found = params.get("axes", params.get("axis_name", ()))
    found = found if isinstance(found, (tuple, list, frozenset, set)) else (found,)
    return tuple(name for name in found if isinstance(name, str))


def specs_of(params: dict[str, Any], side: str) -> Sequence[Any]:
    """How the operands (``in``) or results (``out``) of a `shard_map` equation are cut."""
    return params[f"{side}_specs"]


@contextlib.contextmanager
def inside(mesh: AbstractMesh, check_vma: bool) -> Iterator[None]:
    """Context: what is traced is inside of a `shard_map` over a mesh, as its rules are, which JAX
    traces when they are needed. Otherwise their collectives find no axis."""
    manual = mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Manual))
    with (
        core.extend_axis_env_nd(list(mesh.shape.items())),
        mesh_lib.use_abstract_mesh(manual),
        config._check_vma(check_vma),
    ):
        yield


def plain(aval: Any) -> Any:
    """The type of a value outside of every `shard_map`."""
    if type(aval) is not ShapedArray:
        return aval
    return ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _is_plain(aval: Any) -> bool:
    if type(aval) is not ShapedArray:
        return True
    return aval.sharding.mesh.empty and not compat.varying_axes(aval)


def value_of(literal: Literal) -> Any:
    """A number in a jaxpr, of no mesh."""
    if _is_plain(jax.typeof(literal.val)):
        return literal.val
    return literal.val.item() if literal.aval.weak_type else np.asarray(literal.val)


class Rewriter:
    """Evaluates what was traced inside a `shard_map`, with other collectives.

    Args:
        mesh: the mesh that it was traced for.
        collectives: what evaluates an equation instead, by the name of its primitive.
        refuse: makes the error of a primitive over axes of the mesh that is not among those, from
            its name and the user's line.
        check_vma: as it was for the `shard_map`.
        around: a context that it was traced in.
    """

    def __init__(
        self,
        mesh: AbstractMesh,
        collectives: dict[str, Collective],
        refuse: Callable[..., Any],
        check_vma: bool,
        around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ):
        self.mesh, self.collectives, self.refuse = mesh, collectives, refuse
        self.check_vma, self.around = check_vma, around
        self.done: dict[int, tuple[Any, Any]] = {}  # rewritten functions, once each, by id

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Context: as where the function was traced."""
        with inside(self.mesh, self.check_vma), self.around():
            yield

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """The results of a function. No equation has the context it was traced in: the mesh."""
        env: dict[Any, Any] = dict(
            zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True)
        )
        context = source_info_util.user_context
        for eqn in jaxpr.eqns:
            ins = [value_of(v) if isinstance(v, Literal) else env[v] for v in eqn.invars]
            with context(eqn.source_info.traceback):
                outs = self.equation(eqn, ins)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [value_of(v) if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]

    def equation(self, eqn: Any, ins: list[Any]) -> Sequence[Any]:
        primitive, params = eqn.primitive, eqn.params
        collective = self.collectives.get(primitive.name)
        if collective is not None:
            return collective(params, ins)
        if primitive in _RULES:
            return _RULES[primitive](self, params, ins)
        changed = with_functions(params, self.function)
        if isinstance(params.get("sharding"), NamedSharding):
            changed["sharding"] = None
        mine = set(axes_of(params)) & set(self.mesh.axis_names)
        if mine or "_prim" in params:
            raise self.refuse(primitive.name, compat.eqn_line(eqn))
        return compat.bind_with(primitive, changed, ins)

    def function(self, jaxpr: Any) -> Any:
        """The same function, on values of no mesh; the same object for the same argument."""
        known = self.done.get(id(jaxpr))
        if known is None:
            known = self.done[id(jaxpr)] = (jaxpr, self._function(jaxpr))
        return known[1]

    def _function(self, jaxpr: Any) -> Any:
        closed = jaxpr if isinstance(jaxpr, ClosedJaxpr) else None
        opened = closed.jaxpr if closed is not None else jaxpr
        if not self._concerns(opened):
            return jaxpr
        consts = closed.consts if closed is not None else ()
        variables = opened.invars if closed is not None else [*opened.constvars, *opened.invars]

        def run(*args: Any) -> list[Any]:
            if closed is not None:
                return self.run(opened, consts, args)
            k = len(opened.constvars)
            return self.run(opened, args[:k], args[k:])

        new = traces.trace_python(run, [plain(v.aval) for v in variables])
        if closed is not None:
            return new
        if new.consts:
            raise NotImplementedError("mpi4jax.shard_map: constants in a nested function")
        return new.jaxpr

    def _concerns(self, jaxpr: Jaxpr) -> bool:
        """Whether anything in a function has a type, or does something, of the mesh."""
        if not all(_is_plain(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars)):
            return True
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in self.collectives or not all(
                _is_plain(v.aval) for v in eqn.outvars
            ):
                return True
            for _, inner in inner_jaxprs(eqn.params):
                if self._concerns(opened(inner)):
                    return True
        return False

    def traced_inside(self, fun: Callable[..., Any], avals: Sequence[Any]) -> ClosedJaxpr:
        """What a function of JAX's, a rule of the user's, does inside the mesh."""
        with self.inside():
            return traces.trace_python(fun, avals)


def _jit(self: Rewriter, params: dict[str, Any], args: list[Any]) -> Sequence[Any]:
    jaxpr = params["jaxpr"]
    if params.get("inline"):
        return self.run(jaxpr.jaxpr, jaxpr.consts, args)
    key = -id(jaxpr)
    if key not in self.done:
        call = jaxpr_as_fun(self.function(jaxpr))

        def named(*args: Any) -> Any:
            return call(*args)

        named.__name__ = params["name"]
        self.done[key] = (jaxpr, jax.jit(named))
    return self.done[key][1](*args)


def _custom_jvp(self: Rewriter, params: dict[str, Any], args: list[Any]) -> Sequence[Any]:
    """The function, with its rule: what the rule makes is rewritten when it is needed."""
    n = params["num_consts"]
    consts, args = args[:n], args[n:]
    inner, thunk = params["call_jaxpr"], params["jvp_jaxpr_fun"]

    def run(*args: Any) -> list[Any]:
        return self.run(inner.jaxpr, inner.consts, [*consts, *args])

    fun = jax.custom_jvp(run)

    def rule(primals: Any, tangents: Any) -> Any:
        zeros = [getattr(t, "dtype", None) == jax.dtypes.float0 for t in tangents]
        with self.inside():
            jaxpr, closed_over, out_zeros = thunk.call_wrapped(*zeros)
        used = [t for t, zero in zip(tangents, zeros, strict=True) if not zero]
        out = self.run(jaxpr, closed_over, [*primals, *used])
        ys, given = out[: len(out_zeros)], iter(out[len(out_zeros) :])
        dys = [
            _zero_tangent(y) if zero else next(given) for y, zero in zip(ys, out_zeros, strict=True)
        ]
        return ys, dys

    fun.defjvp(rule)
    return fun(*args)


def _zero_tangent(x: Any) -> Any:
    aval = jax.typeof(x).to_tangent_aval()
    if aval.dtype == jax.dtypes.float0:
        return compat.float0_zeros(aval.shape)
    return jax.numpy.zeros(aval.shape, aval.dtype)


def _custom_vjp(self: Rewriter, params: dict[str, Any], args: list[Any]) -> Sequence[Any]:
    n = params["num_consts"]
    consts, args = args[:n], args[n:]
    inner, thunk, bwd = params["call_jaxpr"], params["fwd_jaxpr_thunk"], params["bwd"]
    in_avals = inner.in_avals[n:]
    out_avals = inner.out_avals
    residuals: list[Any] = []  # their types inside the mesh
    forwarded: list[Any] = []

    def run(*args: Any) -> list[Any]:
        return self.run(inner.jaxpr, inner.consts, [*consts, *args])

    fun = jax.custom_vjp(run)

    def forward(*args: Any) -> Any:
        with self.inside():
            jaxpr, closed_over = thunk.call_wrapped(*([True] * len(args)))
        trees = params["out_trees"]()
        forwarded[:] = (
            trees[2] if len(trees) > 2 else [None] * (len(jaxpr.outvars) - len(out_avals))
        )
        out = self.run(jaxpr, closed_over, list(args))
        m = len(out) - len(out_avals)
        residuals[:] = [v.aval for v in jaxpr.outvars[:m]]
        return out[m:], (out[:m], list(args))

    def backward(saved: Any, cotangents: Any) -> Any:
        res, primals = saved
        avals = list(residuals)
        if len(res) != len(forwarded):  # residuals that are arguments are not among the results
            rest, types = iter(res), iter(residuals)
            res = [next(rest) if at is None else primals[at - n] for at in forwarded]
            avals = [next(types) if at is None else in_avals[at - n] for at in forwarded]
        avals += map(_cotangent_type, out_avals)
        back = self.traced_inside(lambda *xs: list(_call(bwd, xs)), avals)
        out = iter(self.run(back.jaxpr, back.consts, [*res, *cotangents]))
        return tuple(
            next(out) if jax.numpy.issubdtype(aval.dtype, jax.numpy.inexact) else _skip(out, aval)
            for aval in in_avals
        )

    fun.defvjp(forward, backward)
    return fun(*args)


def _skip(out: Iterator[Any], aval: Any) -> Any:
    next(out)
    return compat.float0_zeros(aval.shape)


def _call(bwd: Any, xs: Sequence[Any]) -> list[Any]:
    outs = bwd.call_wrapped(*xs) if hasattr(bwd, "call_wrapped") else bwd(*xs)
    if len(outs) == 2 and isinstance(outs[0], (list, tuple)):  # from 0.12, with what was logged
        outs = outs[0]
    return [compat.instantiate(x) for x in outs]


def _cotangent_type(aval: Any) -> Any:
    return (
        aval.to_cotangent_aval() if hasattr(aval, "to_cotangent_aval") else aval.to_tangent_aval()
    )


def _sharding_constraint(self: Rewriter, params: dict[str, Any], args: list[Any]) -> Sequence[Any]:
    return args  # along axes that are not manual: there, each rank has the whole array


_RULES: dict[Primitive, Callable[..., Any]] = {
    primitives.sharding_constraint_p: _sharding_constraint,
    primitives.jit_p: _jit,
    primitives.custom_jvp_call_p: _custom_jvp,
    primitives.custom_vjp_call_p: _custom_vjp,
}
