"""Eager calls: outside of any function that is traced.

An eager op is compiled once for all communicators of a size, peers, tags, statuses and callers:
they are in an operand, an int32 vector that the call reads (`Operand::Call` in
`src/ops/call.rs`). On GPUs, where the host cannot read it, it is compiled once for each.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import jax
import numpy as np
from mpi4py import MPI

from . import _comm, _compat, _native
from ._comm import Comm, Status, known_comm, known_reduction, registered
from ._flush import started_here
from ._packing import bind_trees, pack_arguments, with_templates
from ._primitive import PRIMITIVES, bind, split
from ._spec import OFFSET, PEERS, SPECS, Params, Spec
from ._tokens import NO_TOKEN, ZERO_TOKEN

clean = _compat.trace_state_clean

# Handed to compiled code as they are; anything else may be a pytree.
_ARRAYS = {_compat.ArrayImpl, np.ndarray, float, int, complex, bool, np.float32, np.float64}

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_NOT_THE_USERS = (_HERE, os.path.dirname(os.path.abspath(jax.__file__)) + os.sep)
_is_the_users: dict[str, bool] = {}

Site = tuple[Any, int]  # the code may be None


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


def operand_of(p: Params) -> jax.Array:
    """The operand of an eager call, of which ``p`` keeps what does not change from call to call."""
    numbers = generalize(p, caller(2))
    with jax.transfer_guard("allow"):
        return jax.device_put(numbers)


PROGRAMS: dict[Any, Callable[..., Any]] = {}


def program_of(kind: Callable[..., Any], spec: Spec, want: bool, p: Params, cache: Any) -> Any:
    """The compiled function of an op with these parameters."""
    key = (kind, spec, want, *p.items())
    found = cache.get(key)
    if found is None:
        found = cache[key] = kind(spec, want, {**spec.defaults, **p, "eager": True})
    return found


def _of_arrays(spec: Spec, want: bool, p: Params) -> Callable[..., Any]:
    """The function of one op on arrays.

    With ``want`` it returns a token as well, which is ready when the op has ended.
    """

    def call(*args: Any) -> Any:
        return _returned(spec, want, *bind(spec, *args, **p))

    call.__name__ = spec.name
    return jax.jit(call)


def _of_trees(spec: Spec, want: bool, p: Params) -> Callable[..., Any]:
    """The same for pytrees and for whatever else JAX takes as an array."""
    n = 1 if spec.arrays is None else spec.arrays

    def call(*args: Any) -> Any:
        return _returned(spec, want, bind_trees(spec, args[:n], p, [], args[n:])[0])

    call.__name__ = spec.name
    return jax.jit(call)


def _returned(spec: Spec, want: bool, *y: Any) -> Any:
    if not spec.returns:
        return ZERO_TOKEN if want else None
    return (y[0], ZERO_TOKEN) if want else y[0]


def _of_primitive(spec: Spec, _: bool, p: Params) -> Callable[..., Any]:
    def call(*args: Any) -> list[Any]:
        return bind(spec, *args, **p)

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


# ---- Calls that were made before

_REMEMBERED = 1024  # calls, for each communicator


class First:
    """Passed as token: the call is remembered by this key, if its operands are just ``args``."""

    def __init__(self, token: Any, key: tuple[Any, ...], code: CodeType | None, args: Any):
        self.token, self.key, self.code, self.args = token, key, code, args


class _Unknown(Exception):
    """An argument that no key can stand for."""


def _static(x: Any) -> Any:
    """What stands for an argument that is no operand, in keys."""
    kind = type(x)
    if x is None or kind is int or x is NO_TOKEN:
        return x
    found: Any = known_reduction(x)
    if found is None and isinstance(x, MPI.Intracomm):
        found = known_comm(x)
    elif kind in (tuple, list):
        return (kind, *map(_static, x))
    elif kind is bool:
        return kind, x
    elif isinstance(x, np.generic):
        return kind, x.item()
    elif kind is np.ndarray and x.dtype != object:
        return x.dtype, x.shape, x.tobytes()
    if found is None:
        raise _Unknown
    return found


def remembering(name: str, function: Callable[..., Any], want: bool = True) -> Callable[..., Any]:
    """The function of an op, which makes eager calls again as it has made them before.

    Without ``want`` it takes no token and returns none.
    """
    spec = SPECS[name]
    n = 1 if spec.arrays is None else spec.arrays
    fixed: dict[str, Any] = {} if want else {"token": NO_TOKEN}
    mine = (name, want)

    # Names of this function's own, which are found sooner: all of it is done in each call.
    array, constants, is_the_users = _compat.ArrayImpl, _comm.constants, _is_the_users
    caches_are_kept, frame_of, has_counts = _compat.caches_are_kept, sys._getframe, spec.has_counts

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if has_counts or not clean() or not caches_are_kept():
            return function(*args, **kwargs, **fixed)
        started_here()
        frame = frame_of(1)
        code, instruction = frame.f_code, frame.f_lasti
        if not is_the_users.get(code.co_filename):
            code, instruction = caller(2)
        comm, arrays = _comm.default, args[:n]
        key = [mine, id(code), instruction]
        try:
            for x in arrays:
                key.append(x.aval if type(x) is array else _types(x))
            for x in args[n:]:
                known = constants.get(id(x))
                if known is None:
                    known = _static(x)
                    if type(known) is Comm:
                        comm = known
                key.append(known)
            for argument, x in kwargs.items():
                known = constants.get(id(x))
                if known is None:
                    known = x.aval if type(x) is array and argument == "token" else _static(x)
                    if type(known) is Comm:
                        comm = known
                key += argument, known
            found = comm.calls.get(tuple(key)) if comm else None
        except _Unknown:
            return function(*args, **kwargs, **fixed)
        if found is None:
            token = NO_TOKEN if fixed else kwargs.pop("token", None)
            first = First(token, tuple(key), code, arrays)
            return function(*args, **kwargs, token=first)
        program, operand, _ = found
        return program(*arrays) if operand is None else program(*arrays, operand)

    return call


# ---- Calls


def run(spec: Spec, args: tuple[Any, ...], p: Params, want: bool, first: First | None) -> Any:
    """Run an op on its arrays, with its counts behind them."""
    started_here()
    comm, status = p["comm"], p.get("status")
    kind = _of_trees if spec.has_blocks or spec.has_counts else _of_arrays
    if any(type(x) not in _ARRAYS for x in args):
        kind = _of_trees
    try:
        program, operand = _prepared(kind, spec, want, args, p)
        out = program(*args) if operand is None else program(*args, operand)
    except TypeError:
        # Says which argument is no array, if that is why.
        pack_arguments(spec, args[: spec.arrays], p)
        if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args)):
            raise
        return run(spec, tuple(with_templates(x) for x in args), p, want, None)
    if status is not None:
        return jax.block_until_ready(out)
    if first and len(args) == len(first.args) and all(map(operator.is_, args, first.args)):
        if len(comm.calls) > _REMEMBERED:
            comm.calls.clear()
        # The code, too, whose id is in the key: it must live.
        comm.calls[first.key] = program, operand, first.code
    return out


def _prepared(
    kind: Callable[..., Any], spec: Spec, want: bool, args: Sequence[Any], p: Params
) -> tuple[Any, jax.Array | None]:
    """The compiled function for a call, and its operand after the arrays, if it has one."""
    p = dict(p)
    if not _reads_operands():
        return program_of(kind, spec, want, p, p["comm"].cache), None
    operand = operand_of(p)
    program = program_of(kind, spec, want, p, PROGRAMS)
    call_once(program, args, operand)
    return program, operand


def take_peers(p: Params, numbers: list[Any]) -> None:
    """Put the peers of an operand like that, whose values are known, among the parameters."""
    for known in numbers:
        for name, number in zip(PEERS, np.asarray(known), strict=True):
            if name in p and (number != 0 or p[name] is None):
                p[name] = int(number) - OFFSET


def run_params(spec: Spec, *args: Any, **p: Any) -> Any:
    """Run a primitive outside of any function that is traced."""
    if jax.config.jax_disable_jit:  # then the program below would come here again
        return _compat.eval_primitive(PRIMITIVES[spec.name])(*args, **p)
    if not _reads_operands():
        return program_of(_of_primitive, spec, False, p, p["comm"].cache)(*args)
    status = p.get("status")
    arrays, numbers, token = split(spec, p, args)
    counts = numbers if spec.has_counts else []
    if not counts:
        take_peers(p, numbers)
    operand = operand_of(p)
    program = program_of(_of_primitive, spec, False, p, PROGRAMS)
    out = run_program(program, [*arrays, *counts], operand, token)
    return out if status is None else jax.block_until_ready(out)
