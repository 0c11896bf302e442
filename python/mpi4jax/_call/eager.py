"""Eager calls of operations.

An eager op is compiled once for all communicators of a size, peers, tags, statuses and callers:
they are in an operand, an int32 vector that the call reads (`Operand::Call` in
`src/call/envelope.rs`). On GPUs, where the host cannot read it, it is compiled once for each.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from mpi4py import MPI

from .. import _native
from .._jax import compat
from .._job.flush import last, started_here
from .._op.comm import Reduction, Status, unmade
from .._op.manual import boundary
from .._op.packing import bind_trees, check_summands, holds_numpy, leaf_paths, pack_arguments
from .._op.primitive import OPERANDS
from .._op.spec import OFFSET, PEERS, SPECS, Call, Params, Spec

# Arguments of these types are arrays; others may be pytrees.
_ARRAYS = {compat.ArrayImpl, np.ndarray, float, int, complex, bool, np.float32, np.float64}

# Whether a file is the user's; and the numbers of lines for the native module.
_is_the_users: dict[str, bool] = {}
_lines: dict[tuple[str, int], int] = {}


def _number_of_caller() -> int:
    """Return the number of the calling user's line for the native module, or 0."""
    frame: Any = sys._getframe(5)  # the frames below are of this package
    while frame is not None:
        file = frame.f_code.co_filename
        is_the_users = _is_the_users.get(file)
        if is_the_users is None:
            is_the_users = _is_the_users[file] = not file.startswith(compat.NOT_THE_USERS)
        if is_the_users:
            number = _lines.get((file, frame.f_lineno))
            if number is None:
                line = f"{os.path.basename(file)}:{frame.f_lineno}"
                number = _lines[file, frame.f_lineno] = _native.add_line(line)
            return number
        frame = frame.f_back
    return 0


@functools.cache
def _reads_operands() -> bool:
    """Return whether all arrays are in the memory of the host."""
    return compat.platforms() == {"cpu"} and not _native.is_gpu_on_cpu()


_ANY_STATUS = Status(None)
_NO_PEERS = (-1,) * len(PEERS)


@functools.lru_cache(1024)
def _on_device(*numbers: int) -> jax.Array:
    """Return these numbers, and an address in two halves, as an operand."""
    *others, address = numbers
    halves = np.array([address], np.uint64).view(np.int32)
    with jax.transfer_guard("allow"):
        return jax.device_put(np.array([*others, *halves], np.int32))


def operand_of(spec: Spec, p: Params) -> jax.Array:
    """Take what may differ between calls out of the parameters, and return it as an operand."""
    number = _number_of_caller()
    comm = p["comm"]
    p["comm"], p["operand"] = comm.any, "call"
    if not spec.has_peer:
        return _on_device(*_NO_PEERS, comm.number, number, 0)
    status, peers = p.get("status"), [p.get(name, -1) for name in PEERS]
    if "recvtag" in p:
        # The result is the template if there is no sender.
        p["source"] = MPI.PROC_NULL if p["source"] == MPI.PROC_NULL else None
        p["recvtag"] = None
        p["status"] = status and _ANY_STATUS
    if "sendtag" in p:
        p["dest"] = p["sendtag"] = None
    address = 0 if status is None else status.address
    return _on_device(*peers, comm.number, number, address)


Make = Callable[[Spec, Params], Callable[..., Any]]  # makes the compiled function of an op


def _of_arguments(spec: Spec, p: Params, with_token: bool = False) -> Callable[..., Any]:
    """Return the function of an operation on arrays, or on lists of the leaves of pytrees.

    A token is a second result, because all results of a program are ready at the same time.
    """
    n = 1 if spec.arrays is None else spec.arrays

    def call(*args: Any) -> Any:
        out = bind_trees(spec, args[:n], p, args[n:])
        return (out, jnp.zeros((), np.float32)) if with_token else out

    call.__name__ = spec.name
    return jax.jit(call)


_of_arguments_with_token = functools.partial(_of_arguments, with_token=True)


# ---- Programs

PROGRAMS: dict[Any, Callable[..., Any]] = {}  # that read such an operand
_NOTHING = np.full(8, -1, np.int32)


def _type(x: Any) -> Any:
    """Return the type of an array, a number or a list of these, as a part of a key."""
    if type(x) is compat.ArrayImpl:
        return x.aval
    if type(x) is list:
        return tuple(map(_type, x))
    if isinstance(x, (np.ndarray, np.generic)):
        return x.shape, x.dtype
    return type(x)


def run_program(
    make: Make, spec: Spec, p: Params, args: Sequence[Any], after: Sequence[Any] = ()
) -> Any:
    """Run the compiled function of an operation, with the arguments of :func:`program_of`."""
    program, operand = program_of(make, spec, p, args, after)
    return program(*args, operand, *after)


def program_of(
    make: Make, spec: Spec, p: Params, args: Sequence[Any], after: Sequence[Any] = ()
) -> tuple[Callable[..., Any], jax.Array]:
    """Return the compiled function of an operation for these parameters and types of arguments.

    The second result is the operand for this call.

    Threads that call one compiled function with types that are new to it wait in JAX until the
    first of these calls has *ended*. That call may wait for another rank, which waits for one of
    the other threads, on another communicator. The first call therefore does nothing
    (`EagerCall::Compile` in `src/call/envelope.rs`).

    Args:
        make: makes the function of ``spec`` and ``p``, whose names have one order in all calls.
        args: its arguments before the operand that :func:`operand_of` makes.
        after: those behind it.
    """
    operand = operand_of(spec, p)
    if not compat.caches_are_kept():  # `jax.clear_caches` has been called
        PROGRAMS.clear()
        _calls.clear()
        compat.keep_caches()
    key = (make, spec, *p.values(), *map(_type, args), *map(_type, after))
    program = PROGRAMS.get(key)
    if program is None:
        _forget_freed(p.get("reduction"))
        program = make(spec, _with_defaults(spec, p))
        with jax.transfer_guard("allow"):
            nothing = jax.device_put(_NOTHING)
        with jax.debug_nans(False), jax.debug_infs(False):  # its result has not been written
            program(*args, nothing, *after)
        PROGRAMS[key] = program
    return program, operand


def _forget_freed(reduction: Any) -> None:
    """Forget the programs of freed reductions when a new user-defined reduction appears."""
    if isinstance(reduction, Reduction) and reduction.user:
        for key in list(PROGRAMS):
            if any(isinstance(part, Reduction) and part.is_freed for part in key):
                PROGRAMS.pop(key, None)


def run_without_operand(make: Make, spec: Spec, p: Params, args: Sequence[Any]) -> Any:
    """Run the compiled function of an operation for one communicator, if no operand can be read."""
    programs, key = p["comm"].cache, (make, spec, *p.items())
    if key not in programs:
        programs[key] = make(spec, _with_defaults(spec, p))
    return programs[key](*args)


def _with_defaults(spec: Spec, p: Params) -> Params:
    return {**spec.defaults, **p, "eager": True}


# ---- Calls

# The compiled functions and operands of earlier calls on arrays, by all that a call may change.
_calls: dict[Any, tuple[Callable[..., Any], jax.Array]] = {}
_MOST_CALLS = 4096
_ONLY_ARRAYS = {compat.ArrayImpl}
_aval = operator.attrgetter("aval")


def run(call: Call, with_token: bool = False) -> Any:
    """Run an operation at once, and return its result or None; with ``with_token``, and a token.

    A call that is like an earlier one costs one look-up.
    """
    started_here()
    args, key = (*call.arrays, *call.counts), None
    caller = sys._getframe(2).f_back  # of the operation's function
    if caller is not None and _ONLY_ARRAYS.issuperset(map(type, args)):
        others = dict(call.params)
        comm = others.pop("comm").number  # not the communicator, which the key would keep alive
        place = caller.f_code.co_filename, caller.f_lineno
        key = (call.op, with_token, boundary(), comm, place, *others.values(), *map(_aval, args))
        known = _calls.get(key)
        if known is not None and compat.caches_are_kept():
            program, operand = known
            return program(*args, operand)
    return _run_other(call, with_token, key)


def _run_other(call: Call, with_token: bool, key: Any) -> Any:
    """Run an operation whose call is unlike earlier ones, and remember it by its key, if any."""
    spec, p = SPECS[call.op], call.params
    if around := boundary():  # the `shard_map` around the call, which ranks compare
        p = {**p, "spmd": around}
    args: Sequence[Any] = call.arrays
    leaves, structure = args, None
    if not _ARRAYS.issuperset(map(type, args)):
        # The structures of pytrees may not be comparable: none is a part of a key.
        trees = [jax.tree.flatten(tree) for tree in args]
        leaves = [leaf for each, _ in trees for leaf in each]
        if jax.ShapeDtypeStruct in map(type, leaves):
            # A compiled function takes no ShapeDtypeStruct: it gets zeros, which are not read.
            messages = pack_arguments(spec, args, p)
            trees = [jax.tree.flatten(each.tree_type.from_leaves(each.leaves)) for each in messages]
        for _, each in trees:
            check_summands(spec, p, each)
        p = {**p, "leaves": tuple(map(leaf_paths, args, (s for _, s in trees)))}
        args, structure = [each for each, _ in trees], trees[-1][1]
    args, make = [*args, *call.counts], _of_arguments_with_token if with_token else _of_arguments
    try:
        if _reads_operands():
            program, operand = program_of(make, spec, dict(p), args)
            out = program(*args, operand)
            if key is not None and _is_remembered(spec, p, key):
                _calls[key] = program, operand
        else:
            out = run_without_operand(make, spec, dict(p), args)
    except TypeError:
        # Raises an error that names an argument that is not an array.
        pack_arguments(spec, call.arrays, p)
        raise
    token = None
    if with_token:
        out, token = out
    if structure is not None and spec.returns:
        y, *counts = out if spec.is_ragged or p.get("env_out") else (out,)
        y = jax.tree.unflatten(structure, y)
        out = (y, *counts) if counts else y
    out = _ended(spec, p, out, [*leaves, *call.counts])
    return (out, token) if with_token else out


def _is_remembered(spec: Spec, p: Params, key: Any) -> bool:
    """Return whether calls that are like this one need nothing but its program and operand."""
    reduction, (file, _) = p.get("reduction"), key[4]
    if (
        unmade(spec.name, p) is not None
        or p.get("status") is not None
        or (isinstance(reduction, Reduction) and reduction.user)  # dies with its mpi4py object
        or not _is_the_users.get(file)
    ):
        return False
    if len(_calls) >= _MOST_CALLS:
        _calls.clear()
    return True


def _ended(spec: Spec, p: Params, out: Any, operands: Sequence[Any]) -> Any:
    """Results; of what fills a status, makes a communicator or reads arrays of NumPy's, after its
    end: the caller may then refill them, as after MPI's blocking functions."""
    kind = unmade(spec.name, p)
    if kind or p.get("status") is not None or holds_numpy(operands):
        jax.block_until_ready(out if spec.returns else last())
    if kind:
        p["comm"].made.add(kind)
    return out


def take_peers(p: Params, numbers: list[Any]) -> None:
    """Move the known peers of such an operand back into the parameters."""
    for peers in numbers:
        for name, number in zip(PEERS, np.asarray(peers), strict=True):
            if name in p and (number != 0 or p[name] is None):
                p[name] = int(number) - OFFSET


def implementation(primitive: Primitive, of: Spec | None = None) -> Callable[..., Any]:
    """Return what runs a primitive eagerly: programs for its parameters.

    Args:
        primitive: of an op, or of all ops, one of which its parameter ``of`` names.
        of: the op, if it is that of one.
    """

    def make(spec: Spec, p: Params) -> Callable[..., Any]:
        def call(*args: Any) -> list[Any]:
            return list(primitive.bind(*args, **p))

        call.__name__ = spec.name
        return jax.jit(call)

    def run_primitive(*args: Any, **p: Any) -> Any:
        if jax.config.jax_disable_jit:  # then the program below would come here again
            return compat.eval_primitive(primitive)(*args, **p)
        spec = of or SPECS[p["of"]]
        if of is not None and not _reads_operands():
            return run_without_operand(make, spec, p, args)
        started_here()
        arrays, numbers, token = OPERANDS[primitive](p, args)
        counts = numbers[: spec.is_ragged]
        take_peers(p, numbers[len(counts) :])
        out = run_program(make, spec, dict(sorted(p.items())), [*arrays, *counts], token)
        return _ended(spec, p, out, args)

    return run_primitive
