"""Requests that a compiled function does not wait for, or waits for twice."""

from __future__ import annotations

from jax.extend.core import ClosedJaxpr

from .._check.misuse import equations_of_program
from .._compile.scope import CHECKS
from .primitives import start_p, wait_p


def check_requests(closed: ClosedJaxpr) -> None:
    """Refuse requests at the top of a function that nothing waits for and nothing returns, or that
    are waited for twice.

    Raises:
        ValueError: there is such a request; names the line.
    """
    waited: set[int] = set()
    for eqn, where, is_used in equations_of_program(closed):
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


CHECKS.append(check_requests)
