"""Lines of the user, and the functions of this package that they call."""

from __future__ import annotations

import os
from types import CodeType
from typing import Any

from jax._src import source_info_util
from jax.extend.core import JaxprEqn
from jax.interpreters import mlir

from .compat import NOT_THE_USERS

_PACKAGE = NOT_THE_USERS[0]
# Of the other packages, the functions are the operations themselves, or called by no user.
_FUNCTIONS = ("_functions", "_numerics")


def function_of(code: CodeType) -> str:
    """Return ``rfftn`` if the code is of a function of this package that is made of operations, or
    ``""``."""
    place, _, file = code.co_filename.removeprefix(_PACKAGE).partition(os.sep)
    if code.co_filename.startswith(_PACKAGE) and (not file or place in _FUNCTIONS):
        name = code.co_qualname.partition(".<locals>")[0]
        return "" if any(part.startswith(("_", "<")) for part in name.split(".")) else name
    return ""


def called(function: str, line: str) -> str:
    """Return ``rfftn at solver.py:97``: what a line of the user calls."""
    return f"{function} at {line}" if function else line


def user_place(ctx: mlir.LoweringRuleContext) -> tuple[str, str]:
    """Return ``file.py:function``, and ``file.py:81`` with what this line calls, or ``""``.

    JAX does not know who calls the function of a loop, so there is no line for a loop of this
    package, such as an iteration of a solver.
    """
    frame = _frame(ctx.traceback)
    if not frame:
        return "", ""
    function, (codes, _) = "", ctx.traceback.raw_frames()  # from the innermost frame
    for code in codes:
        if not code.co_filename.startswith(NOT_THE_USERS):
            break
        function = function_of(code) or function
    place = f"{os.path.basename(frame.file_name)}:{frame.function_name}"
    return place, called(function, _line(ctx.traceback))


def eqn_line(eqn: JaxprEqn) -> str:
    """Return ``file.py:81`` of the user's call of an equation, or ``""``."""
    return _line(eqn.source_info.traceback)


def current_line() -> str:
    """Return the line of the equation that is being evaluated, for instance transposed."""
    return _line(source_info_util.current().traceback)


def _frame(traceback: Any) -> Any:
    return next(iter(source_info_util.user_frames(traceback)), None)


def _line(traceback: Any) -> str:
    frame = _frame(traceback)
    return f"{os.path.basename(frame.file_name)}:{frame.start_line}" if frame else ""
