"""How the arrays of a call travel: as arrays of what type, and how they are converted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from .._op.table import DTYPES
from .reductions import Converted


def carrier(dtype: Any, reduces: bool = False) -> np.dtype[Any]:
    """Return the dtype as which values are communicated, or communicated and reduced.

    XLA packs several values of a 4-bit type into a byte, where a rank's block may not begin: they
    travel as values of a wider type, which holds each of them exactly. The core has no arithmetic
    for floats of 8 bits: they are reduced as values of a wider type.
    """
    row = DTYPES[str(dtype)]
    wider = row.carrier or (row.reduced_as if reduces else None)
    return np.dtype(jnp.dtype(wider or dtype))


@dataclass(frozen=True)
class Wire:
    """How arrays of one dtype travel in a call.

    Attributes:
        program: their dtype in the program.
        carrier: the dtype that :func:`carrier` returns for it.
        converted: if NCCL lacks the reduction, the one that takes its place, and what it reduces.
    """

    program: np.dtype[Any]
    carrier: np.dtype[Any]
    converted: Converted | None = None

    @property
    def is_identity(self) -> bool:
        return self.converted is None and self.carrier == self.program

    def type_of(self, aval: ShapedArray) -> ShapedArray:
        """Return the type in the call of an array that has this type in the program."""
        dtype = self.converted.dtype if self.converted else self.carrier
        return aval if dtype == self.program else ShapedArray(aval.shape, dtype)

    def encode(self, x: Any) -> Any:
        """Return an array of the program as the call takes it."""
        carried = x.astype(self.carrier)
        return self.converted.to(carried) if self.converted else carried

    def decode(self, y: Any) -> Any:
        """Return a result of the call as an array of the program."""
        carried = self.converted.back(y) if self.converted else y
        return carried.astype(self.program)
