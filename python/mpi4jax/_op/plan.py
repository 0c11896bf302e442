"""What an operation does on one rank: at once, or in two halves if it is nonblocking.

An op's row has a function from its parameters to its plan, and one to that of its adjoint.
`_compile/lowering.py` compiles a plan as a whole, `_requests/lowering.py` each half of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .spec import Params, Spec, is_root


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
        call: the op that is called, or None: nothing is communicated.
        result: what is returned.
        sends: whether the call gets the operand (of two operands, the first).
        attrs: attributes of the call that only this op has.
        select: what is taken of the operand before all else: a function that gives an array of the
            result's type. None: all of it.
    """

    call: str | None
    result: Result = Result.RECEIVED
    sends: bool = True
    attrs: Params = field(default_factory=dict)
    select: Callable[[Any], Any] | None = None

    @property
    def receives(self) -> bool:
        """Whether the call produces an array of the result's type."""
        return self.call is not None and self.result in _RECEIVING

    @property
    def keeps(self) -> bool:
        """Whether the operand is needed after the call."""
        return self.result in (Result.OPERAND, Result.SUM)


def plan_of(spec: Spec, p: Params) -> Plan:
    """Return the plan of an operation with these parameters, or of its adjoint."""
    make = spec.adjoint if p.get("adjoint") else spec.plan
    plan: Plan = Plan(spec.name) if make is None else make(p)
    return plan


def to_root(op: str) -> Callable[[Params], Plan]:
    """Return the result on the root, and the operand elsewhere."""
    return lambda p: Plan(op) if is_root(p) else Plan(op, Result.OPERAND)


def to_root_or_zeros(op: str) -> Callable[[Params], Plan]:
    """Return the result on the root, and zeros elsewhere: the adjoint of data from the root."""
    return lambda p: Plan(op) if is_root(p) else Plan(op, Result.ZEROS)


def from_root(op: str) -> Callable[[Params], Plan]:
    """Read the operand on the root only."""
    return lambda p: Plan(op, sends=is_root(p))


def from_root_added(op: str) -> Callable[[Params], Plan]:
    """Return the adjoint of data for the root: elsewhere, the result was the rank's own operand."""
    return lambda p: Plan(op) if is_root(p) else Plan(op, Result.SUM, sends=False)
