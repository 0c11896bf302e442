"""What an operation does on one rank: at once, or in two halves if it is nonblocking.

`Operation.plan` returns the plan of an operation or of its adjoint. `_compile/lowering.py` compiles
a plan as a whole, `_requests/lowering.py` each half of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Result(Enum):
    """What an operation returns, if it returns an array."""

    RECEIVED = "what was received"
    OPERAND = "the operand"
    SUM = "the sum of what was received and the operand"
    TEMPLATE = "what was received, or the operand if there is no sender"
    ZEROS = "zeros"


_RECEIVING = (Result.RECEIVED, Result.SUM, Result.TEMPLATE)


@dataclass(frozen=True)
class Plan:
    """What an operation does on this rank.

    Attributes:
        called: the op of the core that is called, or None: nothing is communicated.
        result: what is returned.
        sends: whether the call gets the operand (of two operands, the first).
        attrs: attributes of the call that only this op has.
        select: what is taken of the operand before all else: a function that gives an array of the
            result's type. None: all of it.
    """

    called: str | None
    result: Result = Result.RECEIVED
    sends: bool = True
    attrs: dict[str, Any] = field(default_factory=dict)
    select: Callable[[Any], Any] | None = None

    @property
    def receives(self) -> bool:
        """Whether the call produces an array of the result's type."""
        return self.called is not None and self.result in _RECEIVING

    @property
    def keeps(self) -> bool:
        """Whether the operand is needed after the call."""
        return self.result in (Result.OPERAND, Result.SUM)
