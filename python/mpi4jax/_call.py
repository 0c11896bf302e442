"""Calls of ops: in a function that is traced, and eager ones.

An eager op is compiled once for all communicators of a size, peers, tags, statuses and callers:
they are in an operand, an int32 vector that the call reads (`Operand::Call` in
`src/ops/call.rs`). On GPUs, where the host cannot read it, it is compiled once for each.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from . import _compat, _native
from ._comm import Status
from ._misuse import warn_of_used_token
from ._packing import bind_trees, pack_arguments, with_templates
from ._primitive import bind, split
from ._scope import scoped
from ._spec import OFFSET, PEERS, SPECS, Params, Spec
from ._tokens import NO_TOKEN, ZERO_TOKEN, check_token, create_token, token_operand

# Handed to compiled code as they are; anything else may be a pytree.
_ARRAYS = {_compat.ArrayImpl, np.ndarray, float, int, complex, bool, np.float32, np.float64}

_clean = _compat.trace_state_clean


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
    numbers = _traced_peers(p)
    y, new = bind_trees(spec, args, {**spec.defaults, **p}, operand, numbers)
    if not want:
        return y
    if not new:
        new = [token if token is not None else create_token()]
    return (y, new[0]) if spec.returns else new[0]


def _traced_peers(p: Params) -> list[Any]:
    """The operand for the peers that are traced, if there are any."""
    traced = [name for name in PEERS if isinstance(p.get(name), jax.core.Tracer)]
    if not traced:
        return []
    numbers = jnp.stack([p[name] + OFFSET if name in traced else 0 for name in PEERS])
    p.update(dict.fromkeys(traced), operand="given")
    return [numbers]


# ---- Eager calls

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_NOT_THE_USERS = (_HERE, os.path.dirname(os.path.abspath(jax.__file__)) + os.sep)
_lines: dict[tuple[str, int], int] = {}


def _caller() -> int:
    """The number of the user's line."""
    frame: Any = sys._getframe(4)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    if frame is None:
        return 0
    place = frame.f_code.co_filename, frame.f_lineno
    number = _lines.get(place)
    if number is None:
        number = _native.add_line(f"{os.path.basename(place[0])}:{place[1]}")
        _lines[place] = number
    return number


@functools.cache
def _reads_operands() -> bool:
    """Whether all arrays are in the memory of the host."""
    return _compat.platforms() == {"cpu"} and not _native.is_gpu_on_cpu()


_ANY_STATUS = Status(None)
_REMEMBERED = 1024  # operands of a communicator


def _generalize(p: Params, line: int) -> Any:
    """Take what may change from call to call out of the parameters; the operand that has it."""
    comm, status, get = p["comm"], p.get("status"), p.get
    source = get("source", -1)
    place = (source, get("recvtag", -1), get("dest", -1), get("sendtag", -1), comm.number, line)
    p["comm"], p["operand"] = comm.any, "call"
    if "recvtag" in p:
        # The result is the template if there is no sender.
        p["source"] = source if source == MPI.PROC_NULL else None
        p["recvtag"] = None
        p["status"] = status and _ANY_STATUS
    if "sendtag" in p:
        p["dest"] = p["sendtag"] = None
    if status is not None:
        address = np.array([status.address], np.uint64).view(np.int32)
        return np.array([*place, *address], np.int32)
    operand = comm.cache.get(place)
    if operand is None:
        if len(comm.cache) > _REMEMBERED:
            comm.cache.clear()
        with jax.transfer_guard("allow"):
            operand = jax.device_put(np.array([*place, 0, 0], np.int32))
        comm.cache[place] = operand
    return operand


_programs: dict[Any, Callable[..., Any]] = {}


def _program(
    kind: Callable[..., Any], spec: Spec, want: bool, p: Params, names: Any, cache: Any
) -> Any:
    """The compiled function of an op with these parameters. ``names``: which they are."""
    key = (kind, spec, want, names, *p.values())
    found = cache.get(key)
    if found is None:
        found = cache[key] = kind(spec, want, {**spec.defaults, **p, "eager": True})
    return found


def _of_arrays(spec: Spec, want_token: bool, p: Params) -> Callable[..., Any]:
    """The function of one op on arrays.

    With ``want_token`` it returns a token as well, which is ready when the op has ended.
    """
    token = [ZERO_TOKEN] if want_token else []

    def call(*args: Any) -> list[Any]:
        return [*bind(spec, *args, **p), *token]

    call.__name__ = spec.name
    return jax.jit(scoped(call))


def _of_trees(spec: Spec, want_token: bool, p: Params) -> Callable[..., Any]:
    """The same for pytrees and for whatever else JAX takes as an array."""
    token, n = [ZERO_TOKEN] if want_token else [], 1 if spec.arrays is None else spec.arrays

    def call(*args: Any) -> list[Any]:
        y, _ = bind_trees(spec, args[:n], p, [], args[n:])
        return ([y] if spec.returns else []) + token

    call.__name__ = spec.name
    return jax.jit(scoped(call))


def _eager(spec: Spec, args: tuple[Any, ...], p: Params, want_token: bool) -> Any:
    comm, status = p["comm"], p.get("status")
    kind = _of_arrays if spec.arrays is not None else _of_trees
    for x in args:
        if type(x) not in _ARRAYS:
            kind = _of_trees
            if type(x) is jax.ShapeDtypeStruct:
                args = tuple(with_templates(x) for x in args)
    numbers, cache = [], comm.cache
    if _reads_operands():
        numbers, cache = [_generalize(p, _caller())], _programs
    try:
        out = _program(kind, spec, want_token, p, None, cache)(*args, *numbers)
    except TypeError:
        pack_arguments(spec, args, p)  # says which argument is no array, if that is why
        leaves = jax.tree.leaves(args)
        if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            raise
        args = tuple(with_templates(x) for x in args)
        out = _program(_of_trees, spec, want_token, p, None, cache)(*args, *numbers)
    if status is not None:
        jax.block_until_ready(out)
    if spec.returns and want_token:
        return out[0], out[1]
    return out[0] if out else None


def run_params(spec: Spec, *args: Any, **p: Any) -> Any:
    """Run a primitive outside of any function that is traced."""
    comm, names, status = p["comm"], tuple(p), p.get("status")
    if not _reads_operands():
        return _program(_of_arrays, spec, False, p, names, comm.cache)(*args)
    arrays, numbers, token = split(spec, p, args)
    for known in numbers:
        for name, number in zip(PEERS, np.asarray(known), strict=True):
            if name in p and (number != 0 or p[name] is None):
                p[name] = int(number) - OFFSET
    operand = _generalize(p, _caller())
    out = _program(_of_arrays, spec, False, p, names, _programs)(*arrays, operand, *token)
    return out if status is None else jax.block_until_ready(out)
