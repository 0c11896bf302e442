"""Whether backward passes treat replicated values as such: a missing `pvary`.

The result of allreduce, allgather and bcast is one global value, with one cotangent. The adjoint of
these operations is local: it takes that cotangent, and gives this rank's own share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, primitives
from mpi4py import MPI

from .._jax import compat
from .._job.watch import compares_before
from .._op.comm import as_reduction
from .._op.plan import Result, plan_of
from .._op.primitive import bind, split
from .._op.spec import SPECS, Params, Spec, op_of

# ---- By default: what a compiled function's text shows

Source = tuple[Any, str, str]  # a communicator, an operation on it, and its line
Sources = frozenset[Source]  # of a value that is this rank's own share
_NONE: Sources = frozenset()

# Equations whose operands end with those of the function inside.
_CALLS = (primitives.jit_p, primitives.closed_call_p, compat.remat_p, primitives.cond_p)


def warn_of_missing_pvary(closed: ClosedJaxpr) -> None:
    """Warn of allreduces whose cotangents are made of those of later collectives, without a sum.

    So is ``allreduce(sin(allreduce(x)))``: what each rank has is its share, and the cotangent ought
    to be the sum of all. Were it right, the cotangent of each rank would be the sum of all of them:
    zero.
    """
    found: dict[tuple[str, str, str], None] = {}
    _flow(closed.jaxpr, [_NONE] * len(closed.jaxpr.invars), found)
    for line, later, later_line in found:
        at = f" ({later_line})" if later_line else ""
        compat.warn(
            f"{line + ': ' if line else ''}the gradient of this allreduce has only this rank's "
            f"contribution to a later {later}{at}, not the sum over ranks; pass the result of "
            "this allreduce through mpi4jax.pvary"
        )


def _is_of_backward_pass(spec: Spec, eqn: Any) -> bool:
    """Whether an adjoint is of a transposed operation; not a `pvary`, say. It has a token, and not
    the one that a function is threaded with when it is differentiated."""
    return bool(split(spec, eqn.params, eqn.invars)[2]) and not eqn.params.get("threaded")


def _flow(jaxpr: Any, sources: Sequence[Sources], found: dict[Any, None]) -> list[Sources]:
    """Which adjoints the results of a function come from, without a sum over ranks between."""
    known = dict(zip(jaxpr.invars, sources, strict=True))

    def of(v: Any) -> Sources:
        return _NONE if isinstance(v, Literal) else known.get(v, _NONE)

    for eqn in jaxpr.eqns:
        ins, name = [of(v) for v in eqn.invars], op_of(eqn)
        if name is None:
            known.update(zip(eqn.outvars, _through(eqn, ins, found), strict=True))
        elif SPECS[name].is_uniform and eqn.params["adjoint"]:
            comm, line = eqn.params["comm"], compat.eqn_line(eqn)
            if comm.size > 1 and _is_of_backward_pass(SPECS[name], eqn):
                if name == "allreduce":
                    found.update({(line, *at): None for c, *at in ins[0] if c is comm})
                known[eqn.outvars[0]] = frozenset({(comm, name, line)})
    return [of(v) for v in jaxpr.outvars]


def _through(eqn: Any, ins: list[Sources], found: Any) -> list[Sources]:
    """The same of the results of an equation that is no operation."""
    inside = [getattr(inner, "jaxpr", inner) for _, inner in compat.inner_jaxprs(eqn.params)]
    nothing = [_NONE] * len(eqn.outvars)
    if not inside:
        return [frozenset().union(*ins)] * len(eqn.outvars)
    if eqn.primitive is primitives.while_p:
        inside, carry = [eqn.params["body_jaxpr"].jaxpr], len(eqn.outvars)
        first = len(ins) - carry
    elif eqn.primitive is primitives.scan_p:
        first, carry = compat.scan_counts(eqn.params)
    elif eqn.primitive in _CALLS:
        first = carry = 0
    else:  # whose operands go elsewhere
        for inner in inside:
            _flow(inner, [_NONE] * len(inner.invars), found)
        return nothing
    while True:  # once, unless something new is carried on
        outs = nothing
        for inner in inside:
            given = ins[len(ins) - len(inner.invars) :]
            results = _flow(inner, given, found)
            outs = [a | b for a, b in zip(outs, results, strict=True)]
        new = [a | b for a, b in zip(ins[first : first + carry], outs, strict=False)]
        if new == ins[first : first + carry]:
            return outs
        ins = [*ins[:first], *new, *ins[first + carry :]]


# ---- Where ranks are compared before they run: the cotangents themselves


def compare_cotangents(
    spec: Spec, cotangents: Sequence[Any], token: list[Any], p: Params
) -> list[Any]:
    """Warn, when it runs, if the ranks have different cotangents of a replicated value, and if that
    makes a difference to what the adjoint takes of them. Returns the token.
    """
    if not spec.is_uniform or p["adjoint"] or p["comm"].size == 1 or not compares_before():
        return token
    x = lax.stop_gradient(cotangents[0])
    parts = [x.real, x.imag] if jnp.iscomplexobj(x) else [x]
    values = jnp.concatenate([v.ravel().astype(jnp.float32) for v in parts])
    values = jnp.nan_to_num(values)
    # The adjoint of allgather takes this rank's block alone, that of bcast the root's cotangent. If
    # no other rank uses them, they are right as they are.
    matters = jnp.any(_not_taken(spec, x, p) != 0).astype(jnp.float32)
    sent = jnp.concatenate([values, -values, matters[None]])
    params = {"comm": p["comm"], "reduction": as_reduction(spec.name, MPI.MAX), "adjoint": False}
    most, *token = bind(SPECS["allreduce"], sent, *token, **params)
    high, low = most[: values.size], -most[values.size : -1]
    scale = jnp.maximum(jnp.abs(high), jnp.abs(low)).max(initial=0)
    rounding = max(1e-3, float(jnp.finfo(x.dtype).eps) ** 0.5)
    differs = (most[-1] > 0) & jnp.any(high - low > rounding * scale)
    _say_if(differs, spec.name, p["comm"].key, compat.current_line())
    return token


def _not_taken(spec: Spec, c: jax.Array, p: Params) -> Any:
    """What the adjoint on this rank leaves of a cotangent. An allreduce needs that of all ranks."""
    if spec.name == "allreduce":
        return jnp.ones(())
    plan = plan_of(spec, {**p, "adjoint": True})
    if plan.result is Result.ZEROS:
        return c
    if plan.select is None:
        return jnp.zeros(())
    return c - jax.linear_transpose(plan.select, c)(plan.select(c))[0]


def _say_if(differs: Any, name: str, comm: str, line: str) -> None:
    words = (
        f"{line + ': ' if line else ''}in a backward pass, the ranks of {comm} have different "
        f"cotangents of the result of this {name}. Unless this is intended, their gradients lack "
        "the contributions of other ranks: pass the result through mpi4jax.pvary before ranks use "
        "it differently"
    )

    def say(differs: Any) -> None:
        if differs:
            compat.warn(words)

    if compat.trace_state_clean():
        say(differs)
    else:
        jax.debug.callback(say, differs)
