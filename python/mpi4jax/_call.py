"""Calls of ops: in a function that is traced, and eager ones.

An eager op is compiled once for all communicators of a size, peers, tags, statuses and callers:
they are in an operand, an int32 vector that the call reads (`Operand::Call` in
`src/ops/call.rs`). On GPUs, where the host cannot read it, it is compiled once for each.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from . import _compat, _native
from ._comm import Status, registered
from ._flush import started_here
from ._misuse import warn_of_used_token
from ._packing import bind_trees, pack_arguments, with_templates
from ._primitive import PRIMITIVES, bind, split
from ._spec import OFFSET, PEERS, SPECS, Params, Spec
from ._tokens import (
    NO_TOKEN,
    ZERO_TOKEN,
    Instead,
    check_token,
    create_token,
    note_call,
    token_operand,
)

# Handed to compiled code as they are; anything else may be a pytree.
_ARRAYS = {_compat.ArrayImpl, np.ndarray, float, int, complex, bool, np.float32, np.float64}

_clean = _compat.trace_state_clean


def run(name: str, args: tuple[Any, ...], token: Any, p: Params, counts: Any = None) -> Any:
    """Run an op; its result, with the new token unless the caller is of `notoken`."""
    spec = SPECS[name]
    want = token is not NO_TOKEN
    if want:
        if type(token) is Instead:
            return token.run(spec, args if counts is None else (*args, counts), p)
        note_call(name, token)
        check_token(name, token)
    given = () if counts is None else (counts,)
    if _clean():
        return _eager(spec, (*args, *given), p, want)
    operand = token_operand(token)
    if operand:
        warn_of_used_token(name, token)
    numbers = [*given, *traced_peers(p)]
    y, new = bind_trees(spec, args, {**spec.defaults, **p}, operand, numbers)
    if not want:
        return y
    if not new:
        new = [token if token is not None else create_token()]
    return (y, new[0]) if spec.returns else new[0]


def traced_peers(p: Params) -> list[Any]:
    """The operand for the peers that are traced, if there are any."""
    traced = [name for name in PEERS if isinstance(p.get(name), jax.core.Tracer)]
    if not traced:
        return []
    numbers = jnp.stack([p[name] + OFFSET if name in traced else 0 for name in PEERS])
    p.update(dict.fromkeys(traced), operand="given")
    return [numbers]


def take_peers(p: Params, numbers: list[Any]) -> None:
    """Put the peers of an operand like that, whose values are known, among the parameters."""
    for known in numbers:
        for name, number in zip(PEERS, np.asarray(known), strict=True):
            if name in p and (number != 0 or p[name] is None):
                p[name] = int(number) - OFFSET


# ---- Eager calls

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_NOT_THE_USERS = (_HERE, os.path.dirname(os.path.abspath(jax.__file__)) + os.sep)
_is_the_users: dict[str, bool] = {}

Site = tuple[CodeType | None, int]


def caller(frames: int) -> Site:
    """The user's code and its instruction, so many frames up at least."""
    frame: Any = sys._getframe(frames)
    while frame is not None:
        code = frame.f_code
        theirs = _is_the_users.get(code.co_filename)
        if theirs is None:
            theirs = not code.co_filename.startswith(_NOT_THE_USERS)
            _is_the_users[code.co_filename] = theirs
        if theirs:
            return code, frame.f_lasti
        frame = frame.f_back
    return None, 0


@functools.cache
def _number_of_line(file: str, line: int) -> int:
    """The number of a line for the native module."""
    return _native.add_line(f"{os.path.basename(file)}:{line}")


def _number(site: Site) -> int:
    code, instruction = site
    if code is None:
        return 0
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end)
    return _number_of_line(code.co_filename, next(lines, None) or 0)


@functools.cache
def _reads_operands() -> bool:
    """Whether all arrays are in the memory of the host."""
    return _compat.platforms() == {"cpu"} and not _native.is_gpu_on_cpu()


_ANY_STATUS = Status(None)


def generalize(p: Params, site: Site) -> np.ndarray:
    """Take what may change from call to call out of the parameters; the operand that has it."""
    comm, status = p["comm"], p.get("status")
    peers = [p.get(name, -1) for name in PEERS]
    p["comm"], p["operand"] = comm.any, "call"
    if "recvtag" in p:
        # The result is the template if there is no sender.
        p["source"] = MPI.PROC_NULL if p["source"] == MPI.PROC_NULL else None
        p["recvtag"] = None
        p["status"] = status and _ANY_STATUS
    if "sendtag" in p:
        p["dest"] = p["sendtag"] = None
    address = np.array([0 if status is None else status.address], np.uint64).view(np.int32)
    return np.array([*peers, comm.number, _number(site), *address], np.int32)


PROGRAMS: dict[Any, Callable[..., Any]] = {}


def program_of(kind: Callable[..., Any], spec: Spec, want: bool, p: Params, cache: Any) -> Any:
    """The compiled function of an op with these parameters."""
    key = (kind, spec, want, *p.items())
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
    return jax.jit(call)


def _of_trees(spec: Spec, want_token: bool, p: Params) -> Callable[..., Any]:
    """The same for pytrees and for whatever else JAX takes as an array."""
    token, n = [ZERO_TOKEN] if want_token else [], 1 if spec.arrays is None else spec.arrays

    def call(*args: Any) -> list[Any]:
        y, _ = bind_trees(spec, args[:n], p, [], args[n:])
        return ([y] if spec.returns else []) + token

    call.__name__ = spec.name
    return jax.jit(call)


# ---- The first call

# Threads that call one program with operands of types that are new to it wait in JAX until the
# first of these calls has *ended*. That call may wait for another rank, which waits for one of the
# other threads, on another communicator. So the first call does nothing (`Operand::NOTHING` in
# `src/call.rs`).
_called: set[Any] = set()
_NOTHING = np.full(8, -1, np.int32)


def _type(x: Any) -> Any:
    if isinstance(x, _compat.ArrayImpl):
        return x.aval
    return (x.shape, x.dtype) if isinstance(x, (np.ndarray, np.generic)) else type(x)


def _types(args: Any) -> tuple[Any, ...]:
    leaves, tree = jax.tree.flatten(args)
    return (tree, *map(_type, leaves))


def call_once(program: Any, args: Sequence[Any], operand: Any, after: Sequence[Any] = ()) -> None:
    """Call a program for nothing, unless it has been called with arguments of these types."""
    if not _compat.caches_are_kept():
        _called.clear()
        for comm in registered():
            comm.cache.clear()
        _compat.keep_caches()
    key = (program, type(operand), _types((args, after)))
    if key not in _called:
        nothing = _NOTHING
        if isinstance(operand, jax.Array):
            with jax.transfer_guard("allow"):
                nothing = jax.device_put(nothing)
        with jax.debug_nans(False), jax.debug_infs(False):  # nobody has written its result
            program(*args, nothing, *after)
        _called.add(key)


def run_program(program: Any, args: Sequence[Any], operand: Any, after: Sequence[Any] = ()) -> Any:
    """Call a program, whose first call this never is."""
    call_once(program, args, operand, after)
    return program(*args, operand, *after)


_REMEMBERED = 1024  # calls, for each communicator


def _prepared(
    kind: Callable[..., Any],
    spec: Spec,
    want: bool,
    args: Sequence[Any],
    p: Params,
    key: Any,
    site: Site,
) -> tuple[Any, ...]:
    """The compiled function for an eager call, and its operands after the arrays."""
    comm, status, p = p["comm"], p.get("status"), dict(p)
    if not _reads_operands():
        return program_of(kind, spec, want, p, comm.cache), (), None
    operand: Any = generalize(p, site)
    program = program_of(kind, spec, want, p, PROGRAMS)
    if status is None:  # else it is another one each time
        with jax.transfer_guard("allow"):
            operand = jax.device_put(operand)
    call_once(program, args, operand)
    if status is None:
        if len(comm.cache) > _REMEMBERED:
            comm.cache.clear()
        comm.cache[key] = program, (operand,), site[0]  # whose id is in the key: it must live
    return program, (operand,), None


def _eager(spec: Spec, args: tuple[Any, ...], p: Params, want: bool) -> Any:
    started_here()
    comm, site = p["comm"], caller(4)
    kind = _of_trees if spec.has_blocks or spec.has_counts else _of_arrays
    types = []
    for x in args:
        if type(x) is _compat.ArrayImpl:
            types.append(x.aval)
            continue
        if type(x) not in _ARRAYS:
            kind = _of_trees
            if type(x) is jax.ShapeDtypeStruct:
                args = tuple(with_templates(x) for x in args)
        types.append(_types(x))
    status = p.get("status")
    key = (kind, spec, want, id(site[0]), site[1], *types, *p.values())
    try:
        found = comm.cache.get(key) if _compat.caches_are_kept() else None
        program, operands, _ = found or _prepared(kind, spec, want, args, p, key, site)
        out = program(*args, *operands)
    except TypeError:
        # Says which argument is no array, if that is why.
        pack_arguments(spec, args[: spec.arrays], p)
        if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args)):
            raise
        return _eager(spec, tuple(with_templates(x) for x in args), p, want)
    if status is not None:
        jax.block_until_ready(out)
    if not spec.returns:
        return out[0] if want else None
    return (out[0], out[1]) if want else out[0]


def run_params(spec: Spec, *args: Any, **p: Any) -> Any:
    """Run a primitive outside of any function that is traced."""
    if jax.config.jax_disable_jit:  # then the program below would come here again
        return _compat.eval_primitive(PRIMITIVES[spec.name])(*args, **p)
    if not _reads_operands():
        return program_of(_of_arrays, spec, False, p, p["comm"].cache)(*args)
    status = p.get("status")
    arrays, numbers, token = split(spec, p, args)
    counts = numbers if spec.has_counts else []
    if not counts:
        take_peers(p, numbers)
    operand = generalize(p, caller(3))
    program = program_of(_of_arrays, spec, False, p, PROGRAMS)
    out = run_program(program, [*arrays, *counts], operand, token)
    return out if status is None else jax.block_until_ready(out)
