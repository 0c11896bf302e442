"""Advice in the report of an uncaught exception whose message does not show the mistake."""

from __future__ import annotations

import re
import sys
import traceback
from types import FrameType, TracebackType


def _takes_tokens(frame: FrameType) -> bool:
    """Return whether the code of a frame uses functions of a plain ``import mpi4jax``."""
    package, code = sys.modules["mpi4jax"], frame.f_code
    if not hasattr(package.allreduce, "__wrapped__"):  # MPI4JAX_NOTOKEN=1
        return False
    known = {**frame.f_globals, **frame.f_locals}
    used = [known.get(name) for name in (*code.co_names, *code.co_varnames, *code.co_freevars)]
    return any(
        x is package or (hasattr(x, "__wrapped__") and getattr(x, "__module__", "") == "mpi4jax")
        for x in used
    )


#: Pattern of the words of an exception, condition of a frame of its traceback, line to add.
_HINTS = [
    (
        r"\btuple\b|\(expected \d+, got 2\)|inhomogeneous shape|Output was \(",
        _takes_tokens,
        (
            "functions of a plain `import mpi4jax` return (result, token); with "
            "`import mpi4jax.notoken as mpi4jax` they return the result"
        ),
    )
]


def hint(value: BaseException | None, trace: TracebackType | None) -> str | None:
    """Return the line that explains an exception, if there is one."""
    for pattern, condition, line in _HINTS:
        if re.search(pattern, str(value)) and any(
            condition(f) for f, _ in traceback.walk_tb(trace)
        ):
            return line
    return None
