"""Calls of ops: in a function that is traced, and eager ones, which are compiled once."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from mpi4py import MPI

from . import _compat
from ._comm import Status
from ._flush import started_here
from ._misuse import warn_of_used_token
from ._packing import bind_trees, pack_arguments
from ._primitive import bind
from ._spec import SPECS, Params, Spec
from ._tokens import NO_TOKEN, ZERO_TOKEN, check_token, create_token, token_operand

# Handed to compiled code as they are; anything else may be a pytree.
_ARRAYS = {_compat.ArrayImpl, np.ndarray, float, int, complex, bool, np.float32, np.float64}

_clean = _compat.trace_state_clean
_scratch = threading.local()


def run(name: str, args: tuple[Any, ...], token: Any, p: Params) -> Any:
    """Run an op; its result, with the new token unless the caller is of `notoken`."""
    spec = SPECS[name]
    want = token is not NO_TOKEN
    if token is not None and want:
        check_token(name, token)
    if _clean():
        return _eager(spec, args, p, want)
    operand = token_operand(token)
    if operand:
        warn_of_used_token(name, token)
    y, new = bind_trees(spec, args, {**spec.defaults, **p}, operand)
    if not want:
        return y
    if not new:
        new = [token if token is not None else create_token()]
    return (y, new[0]) if spec.returns else new[0]


@functools.cache
def _compiled(
    name: str, params: tuple[tuple[str, Any], ...], want_token: bool = False
) -> Callable[..., Any]:
    """The compiled function of one op.

    With ``want_token`` it returns a token as well, which is ready when the op has ended.
    """
    spec = SPECS[name]
    p, token = {**spec.defaults, **dict(params)}, [ZERO_TOKEN] if want_token else []

    def call(*args: Any) -> list[Any]:
        return [*bind(spec, *args, **p), *token]

    call.__name__ = name
    return jax.jit(call)


@functools.cache
def _compiled_trees(
    name: str, params: tuple[tuple[str, Any], ...], want_token: bool
) -> Callable[..., Any]:
    """The same for pytrees and for whatever else JAX takes as an array."""
    spec = SPECS[name]
    p, token = {**spec.defaults, **dict(params)}, [ZERO_TOKEN] if want_token else []

    def call(*trees: Any) -> list[Any]:
        y, _ = bind_trees(spec, trees, p, [])
        return ([y] if spec.returns else []) + token

    call.__name__ = name
    return jax.jit(call)


def _eager(spec: Spec, args: tuple[Any, ...], p: Params, want_token: bool) -> Any:
    started_here()
    status: Status | None = p.get("status")
    if status is not None:
        # One status serves all eager calls: a new one for each would be compiled for each.
        if not hasattr(_scratch, "status"):
            _scratch.status = Status(MPI.Status())
        p["status"] = _scratch.status
    simple = spec.arrays is not None and all(type(x) in _ARRAYS for x in args)
    compile_ = _compiled if simple else _compiled_trees
    try:
        out = compile_(spec.name, tuple(p.items()), want_token)(*args)
    except TypeError:
        pack_arguments(spec, args)  # says which argument is no array, if that is why
        raise
    if status is not None:
        jax.block_until_ready(out)
        ctypes.memmove(status.address, p["status"].address, MPI._sizeof(MPI.Status))
    if spec.returns and want_token:
        return out[0], out[1]
    return out[0] if out else None
