"""Operations whose result may overwrite their operand.

A result that overwrites its operand saves an array, and a copy where XLA would copy the one into
the other's place: a donated argument, what a loop carries from one turn to the next. XLA copies
the operand first where something else needs it, so a mistake here costs time, and is never a wrong
value. The pass marks an op only if nothing else reads its operand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from .._jax.functions import HOLDS, opened, with_functions
from .._op.operation import op_of
from .._op.primitive import effect


def mark(closed: ClosedJaxpr, donated: Sequence[bool]) -> ClosedJaxpr:
    """Set `How.in_place` of each operation whose operand nothing else uses.

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
        """Return the same; ``ours`` says which arguments the function may overwrite."""
        uses = Counter(id(v) for eqn in jaxpr.eqns for v in eqn.invars)
        uses.update(id(v) for v in jaxpr.outvars)
        kept = {id(v) for v in jaxpr.constvars}
        kept.update(id(v) for v, free in zip(jaxpr.invars, ours, strict=True) if not free)

        def dead(v: Any) -> bool:
            # The operand must be used only once, because XLA does not know that an earlier use ends
            # before this one.
            return not isinstance(v, Literal) and id(v) not in kept and uses[id(v)] == 1

        return jaxpr.replace(eqns=[self.eqn(e, [dead(v) for v in e.invars]) for e in jaxpr.eqns])

    def eqn(self, eqn: JaxprEqn, dead: list[bool]) -> Any:
        if effect not in eqn.effects:
            return eqn
        p, op, holds = eqn.params, op_of(eqn), HOLDS.get(eqn.primitive)
        if op is not None:
            if not (op.overwrites() and dead[0]):
                return eqn
            return eqn.replace(params={**p, "how": p["how"]._replace(in_place=True)})
        if holds is None:
            return eqn

        def marked(function: Any) -> Any:
            ours = dead if holds.is_call else [False] * len(opened(function).invars)
            if holds.loop is not None:
                constants, _ = holds.loop(p)
                ours = [i >= constants for i in range(len(ours))]
            is_closed = isinstance(function, ClosedJaxpr)
            return self.closed(function, ours) if is_closed else self.open(function, ours)

        # Only the inner function under this key is searched, because XLA copies operands of
        # branches.
        new = with_functions({holds.key: p[holds.key]}, marked)
        return eqn.replace(params={**p, **new})
