"""Which ops may leave their result where their operand is.

A result that overwrites its operand saves an array, and a copy where XLA would copy the one into
the other's place: a donated argument, what a loop carries from one turn to the next. XLA copies
the operand first where something else needs it, so a wrong answer here costs time, never a value.
Hence the pass asks for it only where it sees that nothing else does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, primitives

from .._jax import compat
from .._op.primitive import effect
from .._op.spec import SPECS, op_of

# Primitives that call one function with all their operands, and the parameter that holds it.
CALLS = {
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "jit": "jaxpr",
    "remat2": "jaxpr",
}


def mark(closed: ClosedJaxpr, donated: Sequence[bool]) -> ClosedJaxpr:
    """Set the parameter ``in_place`` of each op whose operand nothing else uses.

    Args:
        closed: what is about to be lowered, and transformed no more.
        donated: for each argument, whether the caller gives it up.
    """
    return _Pass().closed(closed, donated)


class _Pass:
    """One pass over a program. A function that is called often stays one object, lowered once."""

    def __init__(self) -> None:
        self.marked: dict[tuple[int, tuple[bool, ...]], Any] = {}

    def closed(self, closed: ClosedJaxpr, ours: Sequence[bool]) -> ClosedJaxpr:
        key = id(closed), tuple(ours)
        if key not in self.marked:
            self.marked[key] = ClosedJaxpr(self.open(closed.jaxpr, ours), closed.consts)
        return self.marked[key]

    def open(self, jaxpr: Jaxpr, ours: Sequence[bool]) -> Jaxpr:
        """The same; ``ours`` says which arguments the function may overwrite."""
        uses = Counter(id(v) for eqn in jaxpr.eqns for v in eqn.invars)
        uses.update(id(v) for v in jaxpr.outvars)
        kept = {id(v) for v in jaxpr.constvars}
        kept.update(id(v) for v, free in zip(jaxpr.invars, ours, strict=True) if not free)

        def dead(v: Any) -> bool:
            # Used once: of two uses, XLA does not see that the one before ends in time.
            return not isinstance(v, Literal) and id(v) not in kept and uses[id(v)] == 1

        return jaxpr.replace(eqns=[self.eqn(e, [dead(v) for v in e.invars]) for e in jaxpr.eqns])

    def eqn(self, eqn: Any, dead: list[bool]) -> Any:
        if effect not in eqn.effects:
            return eqn
        name, p = eqn.primitive.name, eqn.params
        op = op_of(eqn)
        if op is not None:
            in_place = SPECS[op].overwrites(p) and dead[0]
            return eqn.replace(params={**p, "in_place": True}) if in_place else eqn
        if name == "cond":
            # What goes into a branch, XLA copies there.
            branches = [self.closed(b, [False] * len(b.in_avals)) for b in p["branches"]]
            return eqn.replace(params={**p, "branches": tuple(branches)})
        if name == "while":
            # The condition's function leaves what it is given to the body.
            free = [i >= p["body_nconsts"] for i in range(len(p["body_jaxpr"].in_avals))]
            return eqn.replace(params={**p, "body_jaxpr": self.closed(p["body_jaxpr"], free)})
        if eqn.primitive is primitives.scan_p:
            consts, _ = compat.scan_counts(p)
            free = [i >= consts for i in range(len(p["jaxpr"].in_avals))]
            return eqn.replace(params={**p, "jaxpr": self.closed(p["jaxpr"], free)})
        inner = p.get(CALLS.get(name, ""))
        if isinstance(inner, ClosedJaxpr):
            return eqn.replace(params={**p, CALLS[name]: self.closed(inner, dead)})
        if isinstance(inner, Jaxpr):
            return eqn.replace(params={**p, CALLS[name]: self.open(inner, dead)})
        return eqn
