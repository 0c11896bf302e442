"""What some versions of JAX and XLA do wrong, and this package works around.

Each workaround is in use with the versions that need it, and goes when the oldest supported version
is newer than these. `tests/unit/test_workarounds.py` fails if the JAX that is installed no longer
needs one that is in use.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

Version = tuple[int, ...]


class Workaround(NamedTuple):
    """A fault of JAX's or XLA's.

    Attributes:
        fault: what goes wrong without the workaround.
        first: the first supported version that has the fault.
        fixed: the first version that has it no more; None if none is known.
        report: where it was reported.
    """

    fault: str
    first: Version
    fixed: Version | None
    report: str = "not reported"


OLDEST: Version = (0, 7)  # that is supported

WORKAROUNDS = {
    "calls of a token alone": Workaround(
        "XLA aborts the process at a call whose only operand is a token (`token_calls.py`)",
        (0, 12),
        None,
    ),
    "fused slices": Workaround(
        "XLA aborts the process where a custom call on a GPU takes a token beside slices, which it "
        "fuses with the call (`Emitter._unfused` in `_compile/emit.py`)",
        (0, 11),
        None,
    ),
    "checkpoints without operands": Workaround(
        "JAX drops a `jax.checkpoint` that has an effect and neither operands nor used results "
        "(`compat.py`)",
        OLDEST,
        (0, 12),
    ),
    "complex residuals": Workaround(
        "JAX rounds what a `jax.checkpoint` stores to its precision, and fails at complex numbers "
        "(`compat.py`)",
        OLDEST,
        None,
        "the rounding follows https://github.com/jax-ml/jax/pull/22244",
    ),
    "operands of callbacks": Workaround(
        "in a `jax.checkpoint`, JAX forgets the operands of a callback, such as `jax.debug.print`, "
        "that a backward pass calls again but does not compute again (`traces.py`)",
        OLDEST,
        None,
    ),
    "effects of traces": Workaround(
        "a trace keeps its effects once its jaxpr is made, which JAX's own check for leaks reports "
        "(`traces.py`)",
        OLDEST,
        None,
    ),
    "batched conditions": Workaround(
        "in a batch of loops whose condition has effects, JAX changes elements whose own condition "
        "is false (`_batch_while` in `_diff/ad.py`)",
        OLDEST,
        None,
    ),
}


def is_needed(name: str) -> bool:
    """Return whether the JAX that is installed needs this workaround."""
    _, first, fixed, _ = WORKAROUNDS[name]
    version = jax.version.__version_info__
    return version >= first and (fixed is None or version < fixed)
