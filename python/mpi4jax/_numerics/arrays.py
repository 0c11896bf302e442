"""Arguments that are arrays, and the axes of a mesh in specs."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

T = TypeVar("T")  # a pytree, in functions that return one of its type


def as_array(op: str, name: str, x: Any) -> jax.Array:
    """Return an argument, or a leaf of it, as an array of JAX.

    NumPy arrays are copied, so that the caller may refill them.

    Raises:
        TypeError: if it is not an array or a number.
    """
    if isinstance(x, jax.Array):
        return x
    try:
        return jnp.array(x)
    except (TypeError, ValueError):
        raise TypeError(
            f"{op}: argument '{name}' must be an array, a number, or a pytree of those, got "
            f"{type(x).__name__}: {x!r}"
        ) from None


def names_of(spec: PartitionSpec) -> list[str]:
    """Return the mesh axes that a `PartitionSpec` names."""
    return jax.tree.leaves(tuple(spec))
