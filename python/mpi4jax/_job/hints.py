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


# Words of an exception about a tuple where there should be an array.
_OF_TUPLES = r"\btuple\b|\(expected \d+, got 2\)|inhomogeneous shape|Output was \("


def hint(value: BaseException | None, trace: TracebackType | None) -> str | None:
    """Return the line that explains an exception, if there is one."""
    if not re.search(_OF_TUPLES, str(value)):
        return None
    if not any(_takes_tokens(frame) for frame, _ in traceback.walk_tb(trace)):
        return None
    return (
        "functions of a plain `import mpi4jax` return (result, token); with "
        "`import mpi4jax.notoken as mpi4jax` they return the result"
    )
