"""Functions that are lowered, rewritten for one rank.

The equations of the function of a `shard_map` over ranks take its place, with other collectives and
without a mesh. JAX has differentiated and batched them before. Equations are replaced one by one,
because binding each again takes as long as JAX's own trace.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
from jax._src import effects, mesh as mesh_lib, source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, primitives
from jax.sharding import AbstractMesh, NamedSharding

from . import combining, compat, lines, traces
from .functions import equations, inner_jaxprs, opened, with_functions
from .named_axes import axes_of, is_plain, plain, shard_map_p, value_of

# (parameters, operands, and their types inside of the mesh) -> results
Collective = Callable[..., Sequence[Any]]

# Sums over ranks. In a branch that only some ranks take, they belong to gradients.
SUMS = ("psum", "psum_invariant", "unreduced_psum")
# Calls whose rules JAX has applied before; and the parameters with the functions that they call.
_CALLS = {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
    "eval_jaxpr": "call_jaxpr",  # from JAX 0.12 on
    "linear_call": "callee",
}
_CONSTRAINTS = ("sharding_constraint", "reshard")  # along axes that ranks have whole

# The equation of a jitted function of two operands and three results.
_JIT = jax.make_jaxpr(jax.jit(lambda x, y: (x + y, x - y, x * y)))(0.0, 0.0).eqns[-1].params


def _jit_params(jaxpr: ClosedJaxpr, name: str) -> dict[str, Any]:
    """Return the parameters of such an equation, as for a function that was jitted without
    options."""
    counts = {2: len(jaxpr.in_avals), 3: len(jaxpr.out_avals)}

    def of_all(value: Any) -> Any:
        if isinstance(value, tuple) and len(value) in counts:
            return value[:1] * counts[len(value)]
        return value

    return {**{key: of_all(value) for key, value in _JIT.items()}, "jaxpr": jaxpr, "name": name}


def call(jaxpr: ClosedJaxpr, name: str, args: Sequence[Any]) -> list[Any]:
    """Return the results of a jitted function that has been traced already."""
    if jax.config.jax_disable_jit:
        return _evaluated(jaxpr.jaxpr, jaxpr.consts, args)
    return compat.bind_with(primitives.jit_p, _jit_params(jaxpr, name), args)


def _evaluated(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    return compat.evaluate(
        jaxpr, consts, args, lambda eqn, ins: compat.bind_with(eqn.primitive, eqn.params, ins)
    )


class _Flat(NamedTuple):
    """The equations of a function, in which the equations of the functions that it calls stand in
    the places of the calls.

    Attributes:
        eqns: the equations.
        outvars: the results.
        consts: values of more constants.
        rewriters: what rewrites an equation, by its id, or the variables of its results.
        types: types of an equation's operands inside of the mesh, by its id; and of a variable.
    """

    eqns: list[Any]
    outvars: list[Any]
    consts: dict[Any, Any]
    rewriters: dict[Any, Rewriter]
    types: dict[Any, Any]

    def of(self, eqn: Any) -> tuple[Rewriter, list[Any]]:
        """Return what rewrites an equation, and the types of its operands."""
        by = self.rewriters.get(id(eqn))
        if by is not None:
            return by, self.types[id(eqn)]
        by = self.rewriters[eqn.outvars[0]]  # of several that became one
        known = (None if isinstance(v, Literal) else (by, v) for v in eqn.invars)
        return by, [self.types.get(k, v.aval) for k, v in zip(known, eqn.invars, strict=True)]


class Rewriter:
    """A rewriter of functions that were traced in a `shard_map`.

    Args:
        mesh: the mesh that it was traced for.
        collectives: what evaluates an equation instead, by the name of its primitive.
        refuse: makes the error of a primitive over axes of the mesh that is not among those, from
            its name and the user's line.
        check_vma: as it was for the `shard_map`.
        many: the names of those that take many operands, which are combined.
        local: the names of those that no other rank waits for.
    """

    def __init__(
        self,
        mesh: AbstractMesh,
        collectives: dict[str, Collective],
        refuse: Callable[..., Any],
        check_vma: bool,
        many: Collection[str] = (),
        local: frozenset[str] = frozenset(),
    ):
        self.mesh, self.collectives, self.refuse = mesh, collectives, refuse
        self.check_vma, self.many, self.local = check_vma, many, local
        self._axes = frozenset(mesh.axis_names)
        # A function that needs nothing is None here: it would keep itself.
        self._functions: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._equations: dict[Any, ClosedJaxpr] = {}  # what equations of collectives become
        self._contexts: dict[Any, Any] = {}
        self._diverged: frozenset[str] = frozenset()  # in a branch that some ranks along these take
        self._of_axes: dict[frozenset[str], Rewriter] = {}
        self._types: dict[Any, Any] = {}
        self._sums = collectives

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Return the results of a rewritten function."""
        new, more = self.rewritten(jaxpr)
        return _evaluated(new, [*more, *consts], args)

    def function(self, jaxpr: Any) -> Any:
        """Return the rewritten function, open or closed; one new object for each old one."""
        if jaxpr not in self._functions:
            new = self._function(jaxpr)
            self._functions[jaxpr] = None if new is jaxpr else new
        known = self._functions[jaxpr]
        return jaxpr if known is None else known

    def _function(self, jaxpr: Any) -> Any:
        if not self._concerns(opened(jaxpr)):
            return jaxpr
        new, consts = self.rewritten(opened(jaxpr))
        if isinstance(jaxpr, ClosedJaxpr):
            return ClosedJaxpr(new, [*consts, *jaxpr.consts])
        if consts:
            raise NotImplementedError("mpi4jax.shard_map: constants in a nested function")
        return new

    def _concerns(self, jaxpr: Jaxpr) -> bool:
        """Return whether anything in a function has a type of the mesh, or depends on it."""
        if not all(is_plain(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars)):
            return True
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in self.collectives or not all(
                is_plain(v.aval) for v in eqn.outvars
            ):
                return True
            for _, inner in inner_jaxprs(eqn.params):
                if self._concerns(opened(inner)):
                    return True
        return False

    def _called(self, eqn: Any) -> tuple[Any, Rewriter] | None:
        """Return the function whose equations take the place of one, and what rewrites them."""
        name = eqn.primitive.name
        if name in self.collectives or name not in _CALLS:
            return None
        return eqn.params[_CALLS[name]], self

    def _flat(self, jaxpr: Jaxpr) -> _Flat:
        env: dict[Any, Any] = {}
        flat = _Flat([], [], {}, {}, {})

        def read(v: Any) -> Any:
            return v if isinstance(v, Literal) else env.get(v, v)

        def add(eqn: Any, by: Rewriter, is_inside: bool, scope: Any = None) -> None:
            ins, called = [read(v) for v in eqn.invars], by._called(eqn)
            if called is None:
                outs = [type(v)(v.aval) for v in eqn.outvars] if is_inside else eqn.outvars
                types = [v.aval for v in eqn.invars]
                pairs = zip(ins, types, strict=True)
                flat.types.update(((by, v), t) for v, t in pairs if not isinstance(v, Literal))
                env.update(zip(eqn.outvars, outs, strict=True))
                line = eqn.source_info
                if scope is not None:
                    line = line.replace(name_stack=scope + line.name_stack)
                flat.eqns.append(eqn.replace(invars=ins, outvars=outs, source_info=line))
                flat.types[id(flat.eqns[-1])] = types
                flat.rewriters.update(dict.fromkeys((id(flat.eqns[-1]), *outs), by))
                return
            function, by = called
            inner = opened(function)
            for v, value in zip(inner.constvars, getattr(function, "consts", ()), strict=True):
                env[v] = new = Var(v.aval)
                flat.consts[new] = value
            env.update(zip(inner.invars, ins, strict=True))
            if eqn.primitive is shard_map_p:  # what calls it is told from what is inside
                scope = eqn.source_info.name_stack + source_info_util.new_name_stack("shard_map")
            for each in inner.eqns:
                add(each, by, True, scope)
            env.update(zip(eqn.outvars, map(read, inner.outvars), strict=True))

        for eqn in jaxpr.eqns:
            add(eqn, self, False)
        flat.outvars.extend(map(read, jaxpr.outvars))
        return flat

    def rewritten(self, jaxpr: Jaxpr) -> tuple[Jaxpr, list[Any]]:
        """Return the function, and constants that it has in front of its own."""
        flat = self._flat(jaxpr)
        if any(isinstance(e, effects.JaxprInputEffect) for q in flat.eqns for e in q.effects):
            return self._bound_again(jaxpr, flat)
        env: dict[Any, Any] = {}
        consts: dict[Any, Any] = {}
        eqns: list[Any] = []
        is_high = False

        def variable(v: Any, by: Rewriter = self) -> Any:
            aval = by._type(v.aval)
            env[v] = new = v if aval is v.aval else type(v)(aval)
            return new

        def kind_of(eqn: Any) -> Any:
            by, _ = flat.of(eqn)
            kind = by._kind(eqn)
            return kind and (by, kind)

        old, same_as = combining.combined(
            flat.eqns, kind_of, lambda eqn: flat.of(eqn)[0]._communicates(eqn)
        )

        def read(v: Any) -> Any:
            return self._literal(v) if isinstance(v, Literal) else env[same_as.get(v, v)]

        def insert(made: ClosedJaxpr, ins: Sequence[Any], line: Any, ctx: Any) -> list[Any]:
            """Insert the equations of a function; return its results."""
            inner = made.jaxpr
            local = dict(zip(inner.invars, ins, strict=True))
            for v, value in zip(inner.constvars, made.consts, strict=True):
                local[v] = new = Var(v.aval)
                consts[new] = value
            for eqn in inner.eqns:
                outs = [type(v)(v.aval) for v in eqn.outvars]
                operands = [v if isinstance(v, Literal) else local[v] for v in eqn.invars]
                local.update(zip(eqn.outvars, outs, strict=True))
                eqns.append(eqn.replace(invars=operands, outvars=outs, source_info=line, ctx=ctx))
            return [v if isinstance(v, Literal) else local[v] for v in inner.outvars]

        invars = [variable(v) for v in jaxpr.invars]
        constvars = [variable(v) for v in jaxpr.constvars]
        for v, value in flat.consts.items():
            consts[variable(v, _plain_types)] = value
        for eqn in old:
            by, types = flat.of(eqn)
            ins, ctx = [read(v) for v in eqn.invars], by._context(eqn.ctx)
            same = by._same(eqn)
            if same is None:
                made = by._made(eqn, ins, types)
                is_high |= made.jaxpr.is_high
                outs = insert(made, ins, eqn.source_info, ctx)
                env.update(zip(eqn.outvars, outs, strict=True))
            else:
                outs = [variable(v, by) for v in eqn.outvars]
                eqns.append(eqn.replace(invars=ins, outvars=outs, ctx=ctx, **same))
                is_high |= any(opened(f).is_high for _, f in inner_jaxprs(eqns[-1].params))
        new = jaxpr.replace(
            constvars=[*consts, *constvars],
            invars=invars,
            outvars=[read(v) for v in flat.outvars],
            eqns=eqns,
            effects=frozenset().union(*(eqn.effects for eqn in eqns)),
            is_high=is_high,
        )
        return new, list(consts.values())

    def _bound_again(self, jaxpr: Jaxpr, flat: _Flat) -> tuple[Jaxpr, list[Any]]:
        """Return the same, of a function whose effects name variables, which are mutable arrays."""

        def run(*args: Any) -> list[Any]:
            env = dict(zip(variables, args, strict=True))

            def read(v: Any) -> Any:
                return value_of(v) if isinstance(v, Literal) else env[v]

            for eqn in flat.eqns:
                (by, types), line = flat.of(eqn), eqn.source_info.traceback
                with source_info_util.user_context(line), by._context(eqn.ctx).manager:
                    outs = by.bound(eqn, [read(v) for v in eqn.invars], types)
                env.update(zip(eqn.outvars, outs, strict=True))
            return [read(v) for v in flat.outvars]

        variables, k = [*flat.consts, *jaxpr.constvars, *jaxpr.invars], len(jaxpr.constvars)
        k += len(flat.consts)
        new = traces.trace_python(run, [plain(v.aval) for v in variables])
        invars, info = new.jaxpr.invars, jaxpr.debug_info
        constvars = [*new.jaxpr.constvars, *invars[:k]]
        new_jaxpr = new.jaxpr.replace(constvars=constvars, invars=invars[k:], debug_info=info)
        return new_jaxpr, [*new.consts, *flat.consts.values()]

    def _type(self, aval: Any) -> Any:
        known = self._types.get(aval)
        if known is None:
            known = self._types[aval] = aval if is_plain(aval) else plain(aval)
        return known

    def _literal(self, v: Literal) -> Literal:
        return v if is_plain(v.aval) else Literal(value_of(v), plain(v.aval))

    def _context(self, ctx: Any) -> Any:
        """Return the context of an equation, without the mesh."""
        known = self._contexts.get(ctx)
        if known is None:
            with ctx.manager, mesh_lib.use_abstract_mesh(mesh_lib.empty_abstract_mesh):
                traced = traces.trace_python(lambda x: [jax.lax.neg(x)], [0.0])
            known = self._contexts[ctx] = traced.eqns[0].ctx
        return known

    def _same(self, eqn: Any) -> dict[str, Any] | None:
        """Return the changes of an equation that stays, or None if others replace it."""
        primitive, params = eqn.primitive, eqn.params
        if primitive.name in self.collectives or primitive.name in _CONSTRAINTS:
            return None
        if primitive is primitives.jit_p:
            inner = self.function(params["jaxpr"])
            return {"params": _jit_params(inner, params["name"]), "effects": inner.effects}
        if any(inner_jaxprs(params)):
            return None
        self._check(eqn)
        if any(isinstance(value, NamedSharding) for value in params.values()):
            return {"params": _without_shardings(params)}
        return {}

    def _kind(self, eqn: Any) -> Any:
        """Return what equations of collectives have alike that are combined, or None."""
        dtypes = {v.aval.dtype for v in eqn.invars} if eqn.primitive.name in self.many else ()
        if len(dtypes) != 1:
            return None
        # The axes of a reduction have no order. Ranks may take them from a set, in any order.
        params = ((k, frozenset(v) if k == "axes" else v) for k, v in eqn.params.items())
        return eqn.primitive, *dtypes, *params

    def _communicates(self, eqn: Any) -> bool:
        name = eqn.primitive.name
        if name in self.collectives:
            return name not in self.local
        return any(
            self._communicates(e) for _, f in inner_jaxprs(eqn.params) for e in opened(f).eqns
        )

    def _predicate_varies(self, eqn: Any) -> frozenset[str]:
        """Return the axes along which ranks may take other branches, or other turns."""
        if eqn.primitive is primitives.cond_p:
            aval = eqn.invars[0].aval
        elif eqn.primitive is primitives.while_p:
            aval = eqn.params["cond_jaxpr"].out_avals[0]
        else:
            return frozenset()
        sizes = self.mesh.shape
        axes = frozenset(a for a in compat.varying_axes(aval) if sizes.get(a, 1) > 1)
        functions = (opened(f) for _, f in inner_jaxprs(eqn.params)) if axes else ()
        is_of_gradient = _replicated(eqn, axes)
        for e in itertools.chain.from_iterable(map(equations, functions)):
            over = sorted(axes.intersection(axes_of(e.params)))
            is_moved = is_of_gradient and e.primitive.name in SUMS
            if over and not is_moved and self._communicates(e):
                name = eqn.primitive.name
                raise ValueError(
                    f"{lines.eqn_line(eqn)}: mpi4jax.shard_map: the predicate of this {name} "
                    f"varies over {over}, and the {e.primitive.name} inside, at "
                    f"{lines.eqn_line(e)}, runs over the same ranks, and some of them may not "
                    f"call it; make the predicate equal on them, for example by lax.pmax("
                    f"predicate, {over[0]!r}), or move the collective out of the {name}; if the "
                    "collective is the sum of a gradient, pass the replicated value that the "
                    f"{name} uses through jax.lax.pcast(..., {over[0]!r}, to='varying') before"
                )
        return axes

    def _diverging(self, axes: frozenset[str]) -> Rewriter:
        """The same for functions that some ranks along these axes call, without sums over them."""
        if axes not in self._of_axes:
            self._of_axes[axes] = new = copy.copy(self)
            new._diverged = self._diverged | axes
            new.collectives = {**self.collectives, **dict.fromkeys(SUMS, new._sum)}
            new._sums = self.collectives
            new._functions, new._equations, new._of_axes = weakref.WeakKeyDictionary(), {}, {}
        return self._of_axes[axes]

    def _sum(self, p: dict[str, Any], xs: list[Any], types: Sequence[Any] = ()) -> Sequence[Any]:
        rest = tuple(name for name in p["axes"] if name not in self._diverged)
        return self._sums["psum"]({**p, "axes": rest}, xs, types) if rest else xs

    def _check(self, eqn: Any) -> None:
        if not self._axes.isdisjoint(axes_of(eqn.params)):
            raise self.refuse(eqn.primitive.name, lines.eqn_line(eqn))

    def _made(self, eqn: Any, ins: Sequence[Any], types: Sequence[Any]) -> ClosedJaxpr:
        """Return the equations that replace one, as a function."""
        given = [v.aval for v in ins]
        key: Any = None
        if eqn.primitive.name in self.collectives:
            varying = map(compat.varying_axes, types)
            key = eqn.primitive, *given, *varying, *eqn.params.items()
            if key in self._equations:
                return self._equations[key]
        with source_info_util.user_context(eqn.source_info.traceback):
            made = traces.trace_python(lambda *ins: self.bound(eqn, list(ins), types), given)
        if key is not None:
            self._equations[key] = made
        return made

    def bound(self, eqn: Any, ins: list[Any], types: Sequence[Any] | None = None) -> Sequence[Any]:
        """Return the results of an equation inside, on values outside."""
        primitive, params = eqn.primitive, eqn.params
        types = [v.aval for v in eqn.invars] if types is None else types
        collective = self.collectives.get(primitive.name)
        if collective is not None:
            return collective(params, ins, types)
        if primitive.name in _CONSTRAINTS:
            return ins
        if called := self._called(eqn):
            function, by = called
            return by.run(opened(function), getattr(function, "consts", ()), ins)
        if primitive is primitives.jit_p:
            return call(self.function(params["jaxpr"]), params["name"], ins)
        self._check(eqn)
        of = SimpleNamespace(**_parts(eqn), invars=[SimpleNamespace(aval=t) for t in types])
        over = self._predicate_varies(of)
        rewriter = self._diverging(over) if _replicated(eqn, over) else self
        changed = with_functions(_without_shardings(params), rewriter.function)
        outs = compat.bind_with(primitive, changed, ins)
        if rewriter is not self:
            outs = [
                self._summed(y, over - compat.varying_axes(v.aval), v.aval)
                for y, v in zip(outs, eqn.outvars, strict=True)
            ]
        return outs

    def _summed(self, y: Any, axes: frozenset[str], aval: Any) -> Any:
        """Return the sum of a gradient's contributions of the ranks that have taken a branch."""
        over = tuple(sorted(axes))
        how = {"axes": over, "axis_index_groups": None}
        return self.collectives["psum"](how, [y], [aval])[0] if over else y


def _parts(eqn: Any) -> dict[str, Any]:
    names = ("primitive", "params", "outvars", "source_info")
    return {name: getattr(eqn, name) for name in names}


def _replicated(eqn: Any, axes: frozenset[str]) -> bool:
    """Return whether a result of a branch does not vary over axes that its predicate varies over:
    it is a gradient, to which the ranks that do not take the branch contribute nothing."""
    return any(axes - compat.varying_axes(v.aval) for v in eqn.outvars)


def _without_shardings(params: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, NamedSharding) else v for k, v in params.items()}


_plain_types = Rewriter(mesh_lib.empty_abstract_mesh, {}, NotImplementedError, True)
