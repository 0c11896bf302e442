"""The two primitives of nonblocking operations: initiation and wait.

``mpi4jax_start`` takes what the op takes, and gives a *handle*: three float32, by which the native
module finds the operation (`src/transport/requests`). ``mpi4jax_wait`` takes the handle, and
gives what the op gives; the counts of an op that takes some are also an operand of the wait, whose
transpose needs them. Both have the operation and a `How` as parameters, like the operation's own
primitive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive

from .._op.operation import How, Operation
from .._op.primitive import OPERANDS, split

HANDLE = ShapedArray((3,), np.dtype(np.float32))

start_p = Primitive("mpi4jax_start")
wait_p = Primitive("mpi4jax_wait")
start_p.multiple_results = wait_p.multiple_results = True


def split_wait(
    op: Operation, how: How, args: Sequence[Any]
) -> tuple[list[Any], list[Any], list[Any]]:
    """Split operands into (handle, counts and numbers, token)."""
    n = 1 + op.row.is_ragged + (how.operand is not None)
    return list(args[:1]), list(args[1:n]), list(args[n:])


OPERANDS[start_p], OPERANDS[wait_p] = split, split_wait
