"""Warnings about programs that do what they say, which is hardly what was meant."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from jax.extend.core import ClosedJaxpr

from . import _compat
from ._spec import SPECS, is_root


def _result_matters(name: str, params: dict[str, Any]) -> bool:
    """Whether an op is done for its result on this rank."""
    if name == "reduce":
        return is_root(params)
    return name in ("allreduce", "scan")


def warn_of_discarded(jaxpr: ClosedJaxpr) -> None:
    """Warn of ops at the top of a function whose results nothing uses.

    Derivatives discard results of their own: those are left out.
    """
    eqns = jaxpr.jaxpr.eqns
    used = {id(v) for eqn in eqns for v in eqn.invars} | {id(v) for v in jaxpr.jaxpr.outvars}
    for eqn in eqns:
        name = eqn.primitive.name.removeprefix("mpi4jax_")
        if name == eqn.primitive.name or name not in SPECS or not _result_matters(name, eqn.params):
            continue
        derived = "jvp" in str(eqn.source_info.name_stack)
        if id(eqn.outvars[0]) not in used and not derived:
            where = _compat.eqn_line(eqn)
            warnings.warn(
                f"{where + ': ' if where else ''}the result of {name} is not used; "
                "it is a new array, the argument is not changed",
                stacklevel=2,
            )


# Tokens that were given to an op, by id, while they live.
_given: dict[int, weakref.ref[Any]] = {}


def warn_of_used_token(op: str, token: Any) -> None:
    """Warn if another op has already taken this token.

    Only of ops of the token's own trace: the branches of a ``cond`` may each use it once, and
    functions may be traced again.
    """
    if not _compat.is_of_current_trace(token):
        return
    key = id(token)
    found = _given.get(key)
    if found is None or found() is not token:
        _given[key] = weakref.ref(token, lambda _: _given.pop(key, None))
        return
    warnings.warn(
        f"{op}: this token was already used by another op; pass on the token that the other op "
        "returned (the order is that of the program in any case)",
        stacklevel=4,
    )
