"""What a program does with what a call returns, as its bytecode says."""

from __future__ import annotations

import dis
from types import FrameType

_SILENT = {"CACHE", "EXTENDED_ARG", "NOP"}


def next_instruction(frame: FrameType) -> str:
    """The name of the instruction behind the call that a frame is in.

    POP_TOP where the result is dropped, UNPACK_SEQUENCE where it is assigned to several names.
    """
    names = (
        instruction.opname
        for instruction in dis.get_instructions(frame.f_code)
        if instruction.offset > frame.f_lasti and instruction.opname not in _SILENT
    )
    return next(names, "")
