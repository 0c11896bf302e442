"""A missing `pvary`, found in the jaxpr of a backward pass.

The result of allreduce, allgather and bcast is one global value, with one cotangent. The adjoint of
these operations is local: it takes that cotangent, and gives this rank's own share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from .._jax import compat, lines
from .._jax.functions import HOLDS, inner_jaxprs, opened
from .._op.operation import Operation, op_of
from .._op.primitive import split

Source = tuple[Any, str, str]  # a communicator, an operation on it, and its line
# The operations that a value depends on, if it is this rank's own share.
Sources = frozenset[Source]
_NONE: Sources = frozenset()
# The lines of each `pvary` that sums cotangents which no adjoint has made: in a compiled backward
# pass, they do not come from a loss that is summed over ranks.
lines_of_whole_cotangents: set[str] = set()


class _Found(NamedTuple):
    """What a walk over a backward pass finds.

    Attributes:
        lacking: lines of allreduces that lack a `pvary`, each with a later operation and its line.
        sums: by `id(eqn)`, the line of an equation that sums cotangents, and whether an adjoint has
            made them. A loop is walked through several times.
    """

    lacking: dict[tuple[str, str, str], None]
    sums: dict[int, tuple[str, bool]]


def warn_of_missing_pvary(closed: ClosedJaxpr) -> None:
    """Warn about allreduces whose cotangents come from the cotangents of later collectives without
    a sum.

    An example is ``allreduce(sin(allreduce(x)))``: each rank has its share, and the cotangent
    should be the sum of all shares. Were it right, the cotangent of each rank would be the sum of
    all of them: zero.
    """
    found = _Found({}, {})
    _sources_of_results(closed.jaxpr, [_NONE] * len(closed.jaxpr.invars), found)
    lines_of_whole_cotangents.update(line for line, is_share in found.sums.values() if not is_share)
    for line, later, later_line in found.lacking:
        at = f" ({later_line})" if later_line else ""
        compat.warn(
            f"{line + ': ' if line else ''}the gradient of this allreduce has only this rank's "
            f"contribution to a later {later}{at}, not the sum over ranks; pass the result of "
            "this allreduce through mpi4jax.pvary"
        )


def _is_of_backward_pass(op: Operation, eqn: JaxprEqn) -> bool:
    """Whether an adjoint belongs to a transposed operation, and not to a `pvary`, for example. Such
    an adjoint has a token other than the one that is threaded to differentiate a function."""
    how = eqn.params["how"]
    return bool(split(op, how, eqn.invars)[2]) and not how.threaded


def _sources_of_results(jaxpr: Any, sources: Sequence[Sources], found: _Found) -> list[Sources]:
    """Return the adjoints from which the results of a function come without a sum over ranks."""
    env = dict(zip(jaxpr.invars, sources, strict=True))

    def of(v: Any) -> Sources:
        return _NONE if isinstance(v, Literal) else env.get(v, _NONE)

    for eqn in jaxpr.eqns:
        ins, op = [of(v) for v in eqn.invars], op_of(eqn)
        if op is None:
            env.update(zip(eqn.outvars, _sources_through(eqn, ins, found), strict=True))
        elif op.is_uniform and op.adjoint:
            comm, line = op.comm, lines.eqn_line(eqn)
            if comm.size > 1 and _is_of_backward_pass(op, eqn):
                n = op.count_results(eqn.params["how"])
                if op.name == "allreduce":
                    given = frozenset().union(*ins[:n])
                    found.lacking.update(
                        {(line, name, at): None for c, name, at in given if c is comm}
                    )
                env.update(dict.fromkeys(eqn.outvars[:n], frozenset({(comm, op.name, line)})))
        elif op.is_uniform and eqn.params["how"].derived:
            n = op.count_results(eqn.params["how"])
            line, is_share = found.sums.get(id(eqn), (lines.eqn_line(eqn), False))
            found.sums[id(eqn)] = line, is_share or any(ins[:n])
    return [of(v) for v in jaxpr.outvars]


def _sources_through(eqn: JaxprEqn, ins: list[Sources], found: _Found) -> list[Sources]:
    """Return the same for the results of an equation that is not an operation."""
    inside = [opened(inner) for _, inner in inner_jaxprs(eqn.params)]
    nothing = [_NONE] * len(eqn.outvars)
    if not inside:
        return [frozenset().union(*ins)] * len(eqn.outvars)
    holds = HOLDS.get(eqn.primitive)
    if holds is None:  # it is not known which arguments its operands become
        for inner in inside:
            _sources_of_results(inner, [_NONE] * len(inner.invars), found)
        return nothing
    inside = [opened(inner) for inner in holds.functions(eqn.params)]
    constants, carry = holds.loop(eqn.params) if holds.loop else (0, 0)
    first = len(ins) - len(inside[0].invars) + constants
    while True:  # a loop is repeated until its carry has no new sources
        outs = nothing
        for inner in inside:
            given = ins[len(ins) - len(inner.invars) :]
            results = _sources_of_results(inner, given, found)
            outs = [a | b for a, b in zip(outs, results, strict=True)]
        new = [a | b for a, b in zip(ins[first : first + carry], outs, strict=False)]
        if new == ins[first : first + carry]:
            return outs
        ins = [*ins[:first], *new, *ins[first + carry :]]
