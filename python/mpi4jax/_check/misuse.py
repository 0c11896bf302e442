"""Warnings about programs that do what they say, which is hardly what was meant."""

from __future__ import annotations

from typing import Any

from jax.extend.core import ClosedJaxpr

from .._jax import compat
from .._op.primitive import start_p, wait_p
from .._op.spec import SPECS, op_of

_DROPPED = (
    "the result of {op} is not used: {op} returns a new array and leaves its argument unchanged"
)


def warn_of_discarded(jaxpr: ClosedJaxpr) -> None:
    """Warn of ops at the top of a function whose results nothing uses.

    Derivatives discard results of their own: those are left out.
    """
    eqns = jaxpr.jaxpr.eqns
    used = {id(v) for eqn in eqns for v in eqn.invars} | {id(v) for v in jaxpr.jaxpr.outvars}
    for eqn in eqns:
        name = op_of(eqn)
        if name is None or not SPECS[name].only_for_its_result(eqn.params):
            continue
        if id(eqn.outvars[0]) not in used and not _is_derived(eqn):
            where = compat.eqn_line(eqn)
            compat.warn(f"{where + ': ' if where else ''}{_DROPPED.format(op=name)}")


def refuse_lost_requests(jaxpr: ClosedJaxpr) -> None:
    """Refuse a function that starts an op at its top, and neither waits for it nor returns its
    request: nothing can wait for it any more; or that waits for a request twice.

    Raises:
        ValueError: there is one; names the line.
    """
    eqns = jaxpr.jaxpr.eqns
    used = {id(v) for eqn in eqns for v in eqn.invars} | {id(v) for v in jaxpr.jaxpr.outvars}
    waited: set[int] = set()
    for eqn in eqns:
        if _is_derived(eqn):
            continue
        where = compat.eqn_line(eqn)
        where = f"{where}: " if where else ""
        if eqn.primitive is start_p and id(eqn.outvars[0]) not in used:
            raise ValueError(
                f"{where}the request of i{eqn.params['of']} is never "
                "waited for; call mpi4jax.wait(request), or return the request"
            )
        if eqn.primitive is wait_p and id(eqn.invars[0]) in waited:
            raise ValueError(
                f"{where}wait: this request of i{eqn.params['of']} has been waited for before; "
                "wait for each request once"
            )
        if eqn.primitive is wait_p:
            waited.add(id(eqn.invars[0]))


def _is_derived(eqn: Any) -> bool:
    """Whether an equation is of a derivative, which discards results of its own."""
    stack = str(eqn.source_info.name_stack)
    return "jvp" in stack or "transpose" in stack
