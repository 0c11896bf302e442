"""Results of compiled functions that nothing uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr

from .._jax import compat
from .._op.primitive import OPERANDS
from .._op.spec import SPECS, op_of


def warn_of_unused_results(closed: ClosedJaxpr) -> None:
    """Warn of ops at the top of a function whose results nothing uses."""
    for eqn, where, is_used in equations_of_program(closed):
        name = op_of(eqn)
        if name is not None and not is_used and SPECS[name].only_for_its_result(eqn.params):
            compat.warn(
                f"{where}the result of {name} is not used: {name} returns a new array and leaves "
                "its argument unchanged"
            )


def equations_of_program(closed: ClosedJaxpr) -> Iterator[tuple[Any, str, bool]]:
    """The operations at the top of a function that the program calls, not those of a derivative,
    which discards results of its own. With the line for a message, and whether anything uses a
    result.
    """
    eqns = closed.jaxpr.eqns
    used = {id(v) for eqn in eqns for v in eqn.invars} | {id(v) for v in closed.jaxpr.outvars}
    for eqn in eqns:
        if eqn.primitive not in OPERANDS:
            continue
        stack = str(eqn.source_info.name_stack)
        if "jvp" not in stack and "transpose" not in stack:
            line = compat.eqn_line(eqn)
            is_used = not eqn.outvars or any(id(v) in used for v in eqn.outvars)
            yield eqn, f"{line}: " if line else "", is_used
