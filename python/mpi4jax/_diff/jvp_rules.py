"""Rules of the user's for derivatives, ``jax.custom_jvp``, that communicate.

A rule computes values and tangents side by side. Reverse mode takes them apart: JAX runs at once
what depends on no tangent, and leaves the rest to the backward pass. So an op that depends on a
tangent is a tangent's, and one that depends on the primals alone is a value's. One that depends on
neither, say a `recv` into zeros, may be either: only the rank that sends knows. It is an error, but
where its result goes into values alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal, primitives

from .._jax import compat
from .._op.primitive import effect, has_derivative

PRIMAL, TANGENT = "primal", "tangent"
# What a variable depends on: those two, and equations of which it is not known what they are.
Sources = frozenset[Any]


def check_rule(jaxpr: Any, tangents: Sequence[bool], results: Sequence[bool]) -> None:
    """Check the program of a rule, of which these arguments and results are tangents.

    Raises:
        NotImplementedError: an operation in it may be a value's or a tangent's.
    """
    sources = [frozenset([TANGENT if t else PRIMAL]) for t in tangents]
    for result, is_tangent in zip(_follow(jaxpr, sources), results, strict=True):
        for eqn in result - {PRIMAL, TANGENT} if is_tangent else ():
            raise _ambiguous(eqn)


def _follow(jaxpr: Any, arguments: Sequence[Sources]) -> list[Sources]:
    """What the results of a jaxpr depend on."""
    env = dict(zip(map(id, jaxpr.invars), arguments, strict=True))

    def read(v: Any) -> Sources:
        return frozenset() if isinstance(v, Literal) else env.get(id(v), frozenset())

    for eqn in jaxpr.eqns:
        ins = [read(v) for v in eqn.invars]
        sources = frozenset().union(*ins)
        # What depends on values alone is run at once, as a whole.
        if effect in eqn.effects and (TANGENT in sources or PRIMAL not in sources):
            # A solve is linear in its right-hand side, and transposed as a whole.
            is_solve = eqn.primitive is primitives.linear_solve_p
            inside = [] if is_solve else [inner for _, inner in compat.inner_jaxprs(eqn.params)]
            for inner in inside:
                opened = getattr(inner, "jaxpr", inner)
                # The operands of an equation end with those of the functions in it.
                given = ins[len(ins) - len(opened.invars) :]
                sources = sources.union(*_follow(opened, given))
            unknown = TANGENT not in sources and any(has_derivative(v.aval) for v in eqn.invars)
            if not inside and unknown:
                if not eqn.outvars:
                    raise _ambiguous(eqn)
                sources |= {eqn}
        env.update((id(v), sources) for v in eqn.outvars)
    return [read(v) for v in jaxpr.outvars]


def _ambiguous(eqn: Any) -> NotImplementedError:
    line, name = compat.eqn_line(eqn), eqn.primitive.name.removeprefix("mpi4jax_")
    return NotImplementedError(
        f"mpi4jax: {f'{line}: ' if line else ''}{name!r} in the rule of a custom_jvp depends on no "
        "argument of the rule: it may communicate a primal or a tangent. Add 0 * x to its operand "
        "for a primal x of the rule, or 0 * t for a tangent t"
    )
