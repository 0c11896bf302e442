"""Several leaves as one array, and back, as XLA does it.

A message has ``lead`` axes in common with its leaves (of blocks or rows), and then one axis of all
their other elements, leaf after leaf.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray


def message_type(leaves: Sequence[Any], lead: int) -> Any:
    """Return the type of the message of leaves of these types; of a single leaf, its own."""
    if len(leaves) == 1:
        return leaves[0]
    size = sum(math.prod(x.shape[lead:]) for x in leaves)
    return ShapedArray((*leaves[0].shape[:lead], size), leaves[0].dtype)


def joined(leaves: Sequence[Any], lead: int) -> Any:
    """Return the message of leaves of one dtype."""
    flat = [x.reshape(*x.shape[:lead], math.prod(x.shape[lead:])) for x in leaves]
    return jnp.concatenate(flat, axis=lead)


def parted(message: Any, leaves: Sequence[Any], lead: int) -> list[Any]:
    """Return the leaves of a message, which are like these, or like these types."""
    ends = np.cumsum([math.prod(x.shape[lead:]) for x in leaves])[:-1]
    pieces = jnp.split(message, ends, axis=lead)
    return [piece.reshape(x.shape) for piece, x in zip(pieces, leaves, strict=True)]
