"""What a program does with what a call returns, as its bytecode says: an item, or nothing."""

from __future__ import annotations

import dis
import itertools
from types import FrameType

_SILENT = {"CACHE", "EXTENDED_ARG", "NOP"}


def _after_call(frame: FrameType) -> list[dis.Instruction]:
    """The two instructions behind the call that a frame is in."""
    found = (
        instruction
        for instruction in dis.get_instructions(frame.f_code)
        if instruction.offset > frame.f_lasti and instruction.opname not in _SILENT
    )
    return list(itertools.islice(found, 2))


def takes_nothing(frame: FrameType) -> bool:
    """Whether what the call returns is dropped: it is a statement of its own."""
    return [i.opname for i in _after_call(frame)][:1] == ["POP_TOP"]


def takes_an_item(frame: FrameType) -> bool:
    """Whether an item of what the call returns is taken by a number, as in ``f(x)[0]``."""
    match _after_call(frame):
        case [number, item]:
            is_item = (
                item.opname == "BINARY_SUBSCR" or item.argrepr == "[]"
            )  # until 3.13; from 3.14
            return is_item and type(number.argval) is int and number.opname.startswith("LOAD_")
    return False
