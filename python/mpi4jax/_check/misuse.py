"""Mistakes that show at the top of a function which is about to be compiled."""

from __future__ import annotations

from jax.extend.core import ClosedJaxpr, JaxprEqn

from .._jax import compat, lines
from .._op.operation import op_of
from .._op.primitive import OPERANDS


def check_misuse(closed: ClosedJaxpr) -> None:
    """Warn of results of ops that nothing uses; refuse requests that nothing waits for and nothing
    returns, or that are waited for twice.

    These are the operations that the program calls, not the operations of a derivative, which
    discards results of its own. JAX has differentiated what is inside of a `shard_map` before.

    Raises:
        ValueError: if there is such a request. The error names the line.
    """
    eqns = closed.jaxpr.eqns
    used = {id(v) for eqn in eqns for v in eqn.invars} | {id(v) for v in closed.jaxpr.outvars}
    waited: set[int] = set()
    for eqn in eqns:
        stack = str(eqn.source_info.name_stack)
        is_called = not any(of in stack for of in ("jvp", "transpose", "shard_map"))
        if eqn.primitive in OPERANDS and is_called:
            is_used = not eqn.outvars or any(id(v) in used for v in eqn.outvars)
            _check(eqn, is_used, waited)


def _check(eqn: JaxprEqn, is_used: bool, waited: set[int]) -> None:
    line, op = lines.eqn_line(eqn), op_of(eqn)
    where = f"{line}: " if line else ""
    if op is not None and not is_used and op.only_for_its_result():
        compat.warn(
            f"{where}the result of {op.name} is not used: {op.name} returns a new array and leaves "
            "its argument unchanged"
        )
    if eqn.primitive.name == "mpi4jax_start" and not is_used:
        raise ValueError(
            f"{where}the request of i{eqn.params['op'].name} is never waited for; call "
            "mpi4jax.wait(request), or return the request"
        )
    if eqn.primitive.name == "mpi4jax_wait":
        if id(eqn.invars[0]) in waited:
            raise ValueError(
                f"{where}wait: this request of i{eqn.params['op'].name} has been waited for "
                "before; wait for each request once"
            )
        waited.add(id(eqn.invars[0]))
