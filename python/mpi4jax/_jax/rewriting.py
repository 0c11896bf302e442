"""Functions that JAX has traced inside a `shard_map`, rewritten for one rank: with other
collectives, and without a mesh.

Equations are replaced one by one. To bind each again takes as long as JAX's own trace.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax._src import effects, mesh as mesh_lib, source_info_util
from jax.extend import linear_util as lu
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, primitives
from jax.sharding import AbstractMesh, NamedSharding

from . import combining, compat, traces
from .functions import HOLDS, equations, inner_jaxprs, opened, with_functions
from .named_axes import axes_of, inside, is_plain, plain, value_of
from .rules import RULES

# (parameters, operands, and their types inside of the mesh) -> results
Collective = Callable[..., Sequence[Any]]

# The equation of a jitted function of two operands and three results.
_JIT = jax.make_jaxpr(jax.jit(lambda x, y: (x + y, x - y, x * y)))(0.0, 0.0).eqns[-1].params


def _jit_params(jaxpr: ClosedJaxpr, name: str) -> dict[str, Any]:
    """Return the parameters of such an equation, as of a function that was jitted without
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


class Rewriter:
    """A rewriter of functions that were traced in a `shard_map`.

    Args:
        mesh: the mesh that it was traced for.
        collectives: what evaluates an equation instead, by the name of its primitive.
        many: the names of those that take many operands, which are combined; and whether they
            communicate.
        local: the names of those that no other rank waits for.
        refuse: makes the error of a primitive over axes of the mesh that is not among those, from
            its name and the user's line.
        check_vma: as it was for the `shard_map`.
        around: a context that it was traced in.
        manual: the axes of the `shard_map`; by default all.
    """

    def __init__(
        self,
        mesh: AbstractMesh,
        collectives: dict[str, Collective],
        refuse: Callable[..., Any],
        check_vma: bool,
        around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        many: Mapping[str, bool] = {},
        local: frozenset[str] = frozenset(),
        manual: frozenset[str] | None = None,
    ):
        self.mesh, self.collectives, self.refuse = mesh, collectives, refuse
        self.check_vma, self.around = check_vma, around
        self.many, self.local = many, local
        self._axes = frozenset(mesh.axis_names)
        self.manual = self._axes if manual is None else manual
        # A function that needs nothing is None here: it would keep itself.
        self._functions: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._equations: dict[Any, ClosedJaxpr] = {}  # what equations of collectives become
        self._contexts: dict[Any, Any] = {}
        self._vary = collectives["pvary"]
        self._diverged: frozenset[str] = frozenset()  # in a branch that some ranks along these take
        self._of_axes: dict[frozenset[str], Rewriter] = {}
        self._within: dict[frozenset[str], Rewriter] = {}  # by the axes of a nested `shard_map`
        self._types: dict[Any, Any] = {}

    @functools.cached_property
    def apart(self) -> Rewriter:
        """The same, which combines nothing: of functions that are linear in some of their operands,
        which JAX transposes equation by equation."""
        return self._changed(many={})

    def _changed(self, **changes: Any) -> Rewriter:
        """Return another rewriter, which has no function in common with this one."""
        new = copy.copy(self)
        vars(new).pop("apart", None)
        none: dict[str, Any] = {
            "_functions": weakref.WeakKeyDictionary(),
            "_equations": {},
            "_of_axes": {},
            "_within": {},
        }
        vars(new).update(none, **changes)
        return new

    def within(self, axes: frozenset[str]) -> Rewriter:
        """The same for the function of a nested `shard_map` over these axes."""
        if axes not in self._within:
            self._within[axes] = self._changed(manual=self.manual | axes)
        return self._within[axes]

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Context: as where the function was traced."""
        with inside(self.mesh, self.manual, self.check_vma), self.around():
            yield

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

    def rewritten(self, jaxpr: Jaxpr) -> tuple[Jaxpr, list[Any]]:
        """Return the function, and constants that it has in front of its own."""
        if any(isinstance(e, effects.JaxprInputEffect) for eqn in jaxpr.eqns for e in eqn.effects):
            return self._bound_again(jaxpr)
        env: dict[Any, Any] = {}
        consts: dict[Any, Any] = {}
        eqns: list[Any] = []
        is_high = False

        def variable(v: Any) -> Any:
            env[v] = new = type(v)(self._type(v.aval))
            return new

        old, same_as = combining.combined(jaxpr, self._kind, self._communicates)

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
        for eqn in old:
            ins, ctx = [read(v) for v in eqn.invars], self._context(eqn.ctx)
            same = self._same(eqn)
            if same is None:
                made = self._made(eqn, ins)
                is_high |= made.jaxpr.is_high
                outs = insert(made, ins, eqn.source_info, ctx)
                env.update(zip(eqn.outvars, outs, strict=True))
            else:
                outs = [variable(v) for v in eqn.outvars]
                eqns.append(eqn.replace(invars=ins, outvars=outs, ctx=ctx, **same))
                is_high |= any(opened(f).is_high for _, f in inner_jaxprs(same.get("params", {})))
        new = jaxpr.replace(
            constvars=[*consts, *constvars],
            invars=invars,
            outvars=[read(v) for v in jaxpr.outvars],
            eqns=eqns,
            effects=frozenset().union(*(eqn.effects for eqn in eqns)),
            is_high=is_high,
        )
        return new, list(consts.values())

    def _bound_again(self, jaxpr: Jaxpr) -> tuple[Jaxpr, list[Any]]:
        """Return the same, of a function whose effects name variables: those of mutable arrays."""
        eqns = [
            eqn.replace(
                invars=[self._literal(v) if isinstance(v, Literal) else v for v in eqn.invars],
                ctx=self._context(eqn.ctx),
            )
            for eqn in jaxpr.eqns
        ]
        before, k = jaxpr.replace(eqns=eqns), len(jaxpr.constvars)
        variables = [*jaxpr.constvars, *jaxpr.invars]
        new = traces.trace_python(
            lambda *args: compat.evaluate(before, args[:k], args[k:], self.bound),
            [plain(v.aval) for v in variables],
        )
        invars = new.jaxpr.invars
        constvars = [*new.jaxpr.constvars, *invars[:k]]
        info = jaxpr.debug_info
        new_jaxpr = new.jaxpr.replace(constvars=constvars, invars=invars[k:], debug_info=info)
        return new_jaxpr, list(new.consts)

    def _type(self, aval: Any) -> Any:
        known = self._types.get(aval)
        if known is None:
            known = self._types[aval] = plain(aval)
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
        if primitive.name in self.collectives or primitive.name in RULES:
            return None
        if primitive is primitives.jit_p:
            inner = self.function(params["jaxpr"])
            return {"params": _jit_params(inner, params["name"]), "effects": inner.effects}
        if primitive is primitives.custom_jvp_call_p:
            changed = self._custom_jvp(params)
            return {"params": changed, "effects": changed["call_jaxpr"].effects}
        if any(inner_jaxprs(params)):
            return None
        self._check(eqn)
        if any(isinstance(value, NamedSharding) for value in params.values()):
            return {"params": _without_shardings(params)}
        return {}

    def _custom_jvp(self, params: dict[str, Any]) -> dict[str, Any]:
        """Return the function and its rule, which is rewritten when it is needed."""
        rule = params["jvp_jaxpr_fun"]

        def traced(*zeros: bool) -> tuple[Jaxpr, list[Any], Any]:
            with self.inside():
                jaxpr, consts, out_zeros = rule.call_wrapped(*zeros)
            new, more = self.apart.rewritten(jaxpr)
            return new, [*more, *consts], out_zeros

        new_rule = lu.wrap_init(traced, debug_info=rule.debug_info)
        call_jaxpr = self.function(params["call_jaxpr"])
        return {**params, "call_jaxpr": call_jaxpr, "jvp_jaxpr_fun": new_rule}

    def _kind(self, eqn: Any) -> tuple[Any, bool] | None:
        """Return what equations of collectives have alike that are combined."""
        communicates = self.many.get(eqn.primitive.name)
        dtypes = {v.aval.dtype for v in eqn.invars} if communicates is not None else ()
        if communicates is None or len(dtypes) != 1:
            return None
        # The axes of a reduction have no order. Ranks may take them from a set, in any order.
        params = ((k, frozenset(v) if k == "axes" else v) for k, v in eqn.params.items())
        kind = eqn.primitive, *dtypes, *params
        try:
            hash(kind)
        except TypeError:
            return None
        return kind, communicates

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
        for e in itertools.chain.from_iterable(map(equations, functions)):
            over = sorted(axes.intersection(axes_of(e.params)))
            if over and self._communicates(e):
                name = eqn.primitive.name
                raise ValueError(
                    f"{compat.eqn_line(eqn)}: mpi4jax.shard_map: the predicate of this {name} "
                    f"varies over {over}, and the {e.primitive.name} inside, at "
                    f"{compat.eqn_line(e)}, runs over the same ranks, of which some may not call "
                    f"it; make the predicate equal on them, for example by lax.pmax(predicate, "
                    f"{over[0]!r}), or move the collective out of the {name}; if the "
                    "collective is the sum of a gradient, pass the replicated value that the "
                    f"{name} uses through jax.lax.pcast(..., {over[0]!r}, to='varying') before"
                )
        return axes

    def _diverging(self, axes: frozenset[str]) -> Rewriter:
        """The same for functions that some ranks along these axes call: their arguments vary over
        the axes, so that the sums of the reverse mode are outside."""
        if axes not in self._of_axes:
            new = self._changed(_diverged=self._diverged | axes)
            new.collectives = {**self.collectives, "pvary": new._pvary, "preduced": new._pvary}
            self._of_axes[axes] = new
        return self._of_axes[axes]

    def _pvary(self, p: dict[str, Any], xs: list[Any], types: Sequence[Any] = ()) -> Sequence[Any]:
        rest = tuple(name for name in axes_of(p) if name not in self._diverged)
        return self._vary({"axes": rest}, xs, types) if rest else xs

    def _varied(self, eqn: Any, ins: list[Any], axes: frozenset[str]) -> list[Any]:
        """Return the operands of an equation, varying over the axes, too."""
        rest = [axes - compat.varying_axes(v.aval) for v in eqn.invars]
        return [
            self.collectives["pvary"]({"axes": tuple(sorted(names))}, [x], ())[0] if names else x
            for x, names in zip(ins, rest, strict=True)
        ]

    def _check(self, eqn: Any) -> None:
        if not self._axes.isdisjoint(axes_of(eqn.params)):
            raise self.refuse(eqn.primitive.name, compat.eqn_line(eqn))

    def _made(self, eqn: Any, ins: Sequence[Any]) -> ClosedJaxpr:
        """Return the equations that replace one, as a function."""
        types = [v.aval for v in ins]
        key: Any = None
        if eqn.primitive.name in self.collectives:
            varying = (compat.varying_axes(v.aval) for v in eqn.invars)
            key = eqn.primitive, *types, *varying, *eqn.params.items()
            try:
                if key in self._equations:
                    return self._equations[key]
            except TypeError:  # a parameter that has no hash
                key = None
        with source_info_util.user_context(eqn.source_info.traceback):
            made = traces.trace_python(lambda *ins: self.bound(eqn, list(ins)), types)
        if key is not None:
            self._equations[key] = made
        return made

    def bound(self, eqn: Any, ins: list[Any]) -> Sequence[Any]:
        """Return the results of an equation inside, on values outside."""
        primitive, params = eqn.primitive, eqn.params
        collective = self.collectives.get(primitive.name)
        if collective is not None:
            return collective(params, ins, [v.aval for v in eqn.invars])
        if primitive.name in RULES:
            return RULES[primitive.name](self, eqn, ins)
        if primitive is primitives.jit_p:
            return call(self.function(params["jaxpr"]), params["name"], ins)
        if primitive is primitives.custom_jvp_call_p:
            return compat.bind_with(primitive, self._custom_jvp(params), ins)
        self._check(eqn)
        rewriter = self if primitive in HOLDS else self.apart
        if over := self._predicate_varies(eqn):
            rewriter, ins = self._diverging(over), self._varied(eqn, ins, over)
        if primitive.name == "custom_linear_solve":
            ins = self._solve_operands(eqn, ins)
        changed = with_functions(_without_shardings(params), rewriter.function)
        return compat.bind_with(primitive, changed, ins)

    def _solve_operands(self, eqn: Any, ins: list[Any]) -> list[Any]:
        """Return the operands of a linear solve with the types that its functions have.

        JAX makes replicated constants of its functions vary where it binds the solve, and again in
        the functions, which it has traced before. Their cotangents are then summed twice.
        """
        ins, k = list(ins), 0
        for f, n in zip(eqn.params["jaxprs"], eqn.params["const_lengths"], strict=True):
            for v, aval in zip(eqn.invars[k : k + n], f.in_avals if n else (), strict=False):
                axes = compat.varying_axes(v.aval) - compat.varying_axes(aval) - self._diverged
                if axes:
                    (ins[k],) = self.collectives["shared"]({"axes": tuple(sorted(axes))}, [ins[k]])
                k += 1
        return ins

    def traced_inside(self, fun: Callable[..., Any], avals: Sequence[Any]) -> ClosedJaxpr:
        """Return what a function of JAX, such as a user's rule, does inside of the mesh."""
        with self.inside():
            return traces.trace_python(fun, avals)

    def outside(self, fun: Callable[..., Any], types: Any) -> Callable[..., Any]:
        """Return such a function of pytrees, of these types inside, for values outside."""

        def run(*args: Any) -> Any:
            trees: list[Any] = []

            def flat(*xs: Any) -> list[Any]:
                leaves, tree = jax.tree.flatten(fun(*jax.tree.unflatten(of_args, xs)))
                trees.append(tree)
                return leaves

            leaves, of_args = jax.tree.flatten(args)
            made = self.traced_inside(flat, jax.tree.leaves(types))
            return jax.tree.unflatten(trees[-1], self.run(made.jaxpr, made.consts, leaves))

        return run


def _without_shardings(params: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, NamedSharding) else v for k, v in params.items()}
