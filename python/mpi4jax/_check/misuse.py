"""Results and requests of compiled functions that nothing uses."""

from __future__ import annotations

from typing import Any

from jax.extend.core import ClosedJaxpr

from .._jax import compat
from .._op.primitive import start_p, wait_p
from .._op.spec import SPECS, op_of


def check_uses(jaxpr: ClosedJaxpr) -> None:
    """Warn of ops at the top of a function whose results nothing uses, and refuse requests there
    that nothing waits for and nothing returns, or that are waited for twice.

    Raises:
        ValueError: there is such a request; names the line.
    """
    eqns = jaxpr.jaxpr.eqns
    used = {id(v) for eqn in eqns for v in eqn.invars} | {id(v) for v in jaxpr.jaxpr.outvars}
    waited: set[int] = set()
    for eqn in eqns:
        name = op_of(eqn)
        if (name is None and eqn.primitive not in (start_p, wait_p)) or _is_derived(eqn):
            continue
        where = compat.eqn_line(eqn)
        where = f"{where}: " if where else ""
        is_used = not eqn.outvars or id(eqn.outvars[0]) in used
        if name is not None and not is_used and SPECS[name].only_for_its_result(eqn.params):
            compat.warn(
                f"{where}the result of {name} is not used: {name} returns a new array and leaves "
                "its argument unchanged"
            )
        if eqn.primitive is start_p and not is_used:
            raise ValueError(
                f"{where}the request of i{eqn.params['of']} is never "
                "waited for; call mpi4jax.wait(request), or return the request"
            )
        if eqn.primitive is wait_p:
            if id(eqn.invars[0]) in waited:
                raise ValueError(
                    f"{where}wait: this request of i{eqn.params['of']} has been waited for before; "
                    "wait for each request once"
                )
            waited.add(id(eqn.invars[0]))


def _is_derived(eqn: Any) -> bool:
    """Whether an equation is of a derivative, which discards results of its own."""
    stack = str(eqn.source_info.name_stack)
    return "jvp" in stack or "transpose" in stack
