"""Warnings about programs that do what they say, which is hardly what was meant."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from jax.extend.core import ClosedJaxpr
from mpi4py import MPI

from .._jax import compat
from .._job.bytecode import next_instruction
from .._op.primitive import start_p, wait_p
from .._op.spec import SPECS, Spec, is_root, op_of

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


def warn_of_dropped(spec: Spec, p: dict[str, Any], caller: FrameType, line: str) -> None:
    """Warn of an eager op that is a statement, though its result is what it is called for: `recv`
    into its argument, say. An op that another function calls is that function's concern."""
    if spec.has_peer:
        is_needed = spec.returns and p.get("status") is None and p["source"] != MPI.PROC_NULL
    elif spec.has_root and not is_root(p):
        is_needed = spec.elsewhere[1] != "none"
    else:
        is_needed = spec.only_for_its_result(p)
    frame: Any = sys._getframe(1)
    while frame.f_back is not caller:
        frame, inner = frame.f_back, frame
    called = inner if frame.f_code.co_name == "call" else frame  # that with a token calls the other
    is_direct = called.f_code.co_name == spec.name
    if is_needed and is_direct and next_instruction(caller) == "POP_TOP":
        compat.warn(f"{line}: {_DROPPED.format(op=spec.name)}")


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
