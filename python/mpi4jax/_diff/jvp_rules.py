"""Rules of the user's for derivatives, ``jax.custom_jvp``, that communicate.

A rule computes values and tangents side by side. Reverse mode takes them apart: JAX runs at once
what depends on no tangent, and leaves the rest to the backward pass. A `recv` into zeros depends on
none here, although it may be the tangent of another rank that it receives.

What becomes of its result tells. The tangents that a rule returns are linear in those that it is
given, so what is added to a tangent is a tangent, and what multiplies one is not. Ops that give
tangents take a token that depends on those of the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Literal

from .._jax import compat, traces
from .._op.primitive import effect
from .ad import RULES
from .tracing import WANTS_CONCRETE, has_derivative, seed_p

Eqns = list[Any]


def _opened(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program, with the equations of jitted functions that communicate as its own."""

    def is_jitted(eqn: Any) -> bool:
        return eqn.primitive is compat.jit_p and effect in eqn.effects

    def step(eqn: Any, ins: list[Any]) -> Sequence[Any]:
        if not is_jitted(eqn):
            return compat.bind_eqn(eqn, ins)
        inner = eqn.params["jaxpr"]
        return compat.evaluate(inner.jaxpr, inner.consts, ins, step)

    def opened(*args: Any) -> list[Any]:
        return compat.evaluate(closed.jaxpr, closed.consts, args, step)

    if not any(map(is_jitted, closed.jaxpr.eqns)):
        return closed
    function = traces.function_of_jax(opened, closed.in_avals)
    return traces.trace_function(function, closed.in_avals)


def _ids(variables: Sequence[Any]) -> set[int]:
    return {id(v) for v in variables if not isinstance(v, Literal)}


def _depending(eqns: Eqns, on: set[int]) -> set[int]:
    """All variables that depend on these."""
    found = set(on)
    for eqn in eqns:
        if _ids(eqn.invars) & found:
            found |= _ids(eqn.outvars)
    return found


def _needed(eqns: Eqns, by: set[int]) -> set[int]:
    """All variables that these depend on."""
    found = set(by)
    for eqn in reversed(eqns):
        if _ids(eqn.outvars) & found:
            found |= _ids(eqn.invars)
    return found


def _is_linear(eqn: Any, places: Sequence[int]) -> bool:
    """Whether the results of an equation are linear in its operands at these places, jointly."""
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    some = [avals[i] for i in places]

    def tangents(xs: Any, ts: Any, others: Any) -> Any:
        def of_some(*xs: Any) -> Any:
            args = list(others)
            for i, x in zip(places, xs, strict=True):
                args[i] = x
            return compat.bind_eqn(eqn, args)

        out = jax.jvp(of_some, xs, ts)[1]
        return [t for t in out if t.dtype != jax.dtypes.float0]

    used = compat.used_arguments(jax.make_jaxpr(tangents)(some, some, avals))
    return not any(used[: len(some)])


class _Rule:
    """The program of a rule, and what each of its ops is about."""

    def __init__(self, closed: ClosedJaxpr, is_tangent: Sequence[bool], values: int):
        """``values`` is the number of results that come before the tangents."""
        self.closed, jaxpr = closed, closed.jaxpr
        self.eqns: Eqns = list(jaxpr.eqns)
        tangents = {id(v) for v, t in zip(jaxpr.invars, is_tangent, strict=True) if t}
        self.tangents = _depending(self.eqns, tangents)
        self.values = _ids(jaxpr.outvars[:values])
        self.results = _ids(jaxpr.outvars[values:])
        # Ops that JAX would run at once.
        self.early = [e for e in self.eqns if effect in e.effects and not self._is_tangent(e)]

    def _is_tangent(self, eqn: Any) -> bool:
        return bool(_ids(eqn.invars) & self.tangents)

    def that_give_tangents(self) -> list[Any]:
        """The equations, of those that JAX would run at once, that belong to the tangents."""
        received = _depending(self.eqns, set().union(*(_ids(e.outvars) for e in self.early)))
        linear, found = set(self.results), []
        for eqn in reversed(self.eqns):
            if not _ids(eqn.outvars) & linear:
                continue
            if any(eqn is e for e in self.early):
                found.append(eqn)
                continue
            places = [i for i, v in enumerate(eqn.invars) if self._may_be_one(v, received)]
            linear |= {id(eqn.invars[i]) for i in self._linear_places(eqn, places)}
        needed = _needed(self.eqns, self.values)
        for eqn in found:
            if _ids(eqn.outvars) & needed:
                raise _refusal(eqn, "is used as a value and as a tangent")
        return found

    def _may_be_one(self, v: Any, received: set[int]) -> bool:
        return id(v) in received | self.tangents and has_derivative(v.aval)

    def _linear_places(self, eqn: Any, places: list[int]) -> list[int]:
        """The operands of which a tangent that this equation gives is a linear function."""
        known = [i for i in places if id(eqn.invars[i]) in self.tangents]
        others = [i for i in places if i not in known]
        if not known and len(others) > 1 and not _is_linear(eqn, others):
            raise _refusal(eqn, "is a product of two received values, one of which is a tangent")
        if not known or not others or effect in eqn.effects:
            return known or others
        return known + [i for i in others if _is_linear(eqn, sorted([*known, i]))]

    def check_unused(self) -> None:
        """Refuse what is sent and may be the value or the tangent that another rank receives."""
        jaxpr = self.closed.jaxpr
        given = _depending(self.eqns, _ids(jaxpr.invars))
        used = _ids(jaxpr.outvars).union(*(_ids(e.invars) for e in self.eqns))
        for eqn in self.early:
            arrays = [v for v in eqn.invars if has_derivative(v.aval)]
            if arrays and not _ids(eqn.outvars) & used and not _ids(arrays) & given:
                raise _refusal(eqn, "communicates a constant, which may be a value or a tangent")


def _refusal(eqn: Any, why: str) -> NotImplementedError:
    line = compat.eqn_line(eqn)
    name = eqn.primitive.name.removeprefix("mpi4jax_")
    return NotImplementedError(
        f"mpi4jax: {f'{line}: ' if line else ''}{name!r} in the rule of a custom_jvp {why}; make "
        "its operand depend on what it is: add 0 * x, of a value or of a tangent x of the rule"
    )


def _evaluate(rule: _Rule, tied: list[Any], token: Any, args: Sequence[Any]) -> list[Any]:
    """The results of a rule, in which some equations depend on the token."""

    def step(eqn: Any, ins: list[Any]) -> Sequence[Any]:
        nonlocal token
        if not any(eqn is e for e in tied):
            return compat.bind_eqn(eqn, ins)
        if eqn.primitive not in RULES:
            raise _refusal(eqn, "communicates into a constant")
        token, outs = RULES[eqn.primitive](eqn.params, token, ins)
        return outs

    return compat.evaluate(rule.closed.jaxpr, rule.closed.consts, args, step)


# Of the users' functions, for which arguments they do not communicate.
_silent: WeakKeyDictionary[Any, set[Any]] = WeakKeyDictionary()


def _call(rule: Any, args: Sequence[Any]) -> list[Any]:
    """What the rule gives for ``args``: values, and a tangent for each."""
    count = len(args) // 2
    tangents = [x for x in args[count:] if isinstance(x, jax.core.Tracer) and has_derivative(x)]
    function = traces.alone(rule)
    silent = set() if function is None else _silent.setdefault(function, set())
    avals = tuple(x.aval if isinstance(x, SymbolicZero) else jax.typeof(x) for x in args)
    if not tangents or avals in silent:  # nothing is left for later
        return list(rule.call_wrapped(*args))
    places = [i for i, x in enumerate(args) if not isinstance(x, SymbolicZero)]
    arrays = [args[i] for i in places]
    zeros: dict[int, Any] = {}

    def run(*given: Any) -> list[Any]:
        full = list(args)
        for i, x in zip(places, given, strict=True):
            full[i] = x
        out = list(rule.call_wrapped(*full))
        zeros.update({i: y for i, y in enumerate(out) if isinstance(y, SymbolicZero)})
        return [y for i, y in enumerate(out) if i not in zeros]

    try:
        closed = traces.trace_function(traces.function_of_jax(run, arrays), arrays)
    except WANTS_CONCRETE:
        closed = None
    if closed is None or effect not in closed.effects:
        traces.let_call_again(rule)
        if closed is not None:
            silent.add(avals)
        return list(rule.call_wrapped(*args))
    results = len(closed.out_avals) + len(zeros)
    values = results // 2 - sum(i < results // 2 for i in zeros)
    program = _Rule(_opened(closed), [i >= count for i in places], values)
    program.check_unused()
    tied = program.that_give_tangents()
    token = seed_p.bind(*tangents) if tied else np.zeros((), np.float32)
    rest = iter(_evaluate(program, tied, token, arrays))
    return [zeros[i] if i in zeros else next(rest) for i in range(results)]


traces.on_jvp_rule(_call)
