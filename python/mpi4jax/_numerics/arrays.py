"""Arguments that are arrays, and the axes of a mesh in specs."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

T = TypeVar("T")  # a pytree, in functions that return one of its type


def as_array(x: Any) -> jax.Array:
    """Return an array of JAX. NumPy arrays are copied, so that the caller may refill them."""
    return x if isinstance(x, jax.Array) else jnp.array(x)


def names_of(spec: PartitionSpec) -> list[str]:
    """Return the mesh axes that a `PartitionSpec` names."""
    return jax.tree.leaves(tuple(spec))
