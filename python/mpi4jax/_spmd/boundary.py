"""What the ranks must pass alike to a `shard_map`: structure, shapes, dtypes and specs.

The words for it are a part of each collective of the function, which the ranks compare with the
collective: this needs no message of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import jax

_MOST = 160  # characters


def boundary_of(name: str, args: Any, specs: Sequence[Any]) -> str:
    """Return a function with its arguments: ``step([0]['w']: float32[3] P(), [1]: float32[8]
    P('i'))``."""
    leaves = jax.tree_util.tree_flatten_with_path(args)[0]
    words = [
        f"{jax.tree_util.keystr(path)}: {_short(x)} {spec}"
        for (path, x), spec in zip(leaves, specs, strict=True)
    ]
    text = ", ".join(words)
    if len(text) > _MOST:
        text = f"{text[:_MOST]}... ({len(leaves)} arrays, {zlib.crc32(text.encode()):08x})"
    return f"{name}({text})"


def _short(x: Any) -> str:
    aval = jax.typeof(x)
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
