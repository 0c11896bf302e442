"""The twelve operations without tokens.

Each function is the one of the same name in :mod:`mpi4jax`, takes no token and returns its
result alone (``None`` for ``send`` and ``barrier``). Order is the same: program order.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ._ops import NO_TOKEN, OPS, pvary

__all__ = [op.__name__ for op in OPS] + ["pvary"]


def _without_token(op: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(op)
    def call(*args: Any, **kwargs: Any) -> Any:
        return op(*args, token=NO_TOKEN, **kwargs)

    summary = (op.__doc__ or "").split("\n", 1)[0]
    call.__doc__ = (
        f"{summary}\n\n    Like :func:`mpi4jax.{op.__name__}`, without tokens: returns the result "
        "alone.\n    "
    )
    call.__module__ = __name__
    signature = inspect.signature(op)
    call.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[p for name, p in signature.parameters.items() if name != "token"]
    )
    return call


for _op in OPS:
    globals()[_op.__name__] = _without_token(_op)
del _op
