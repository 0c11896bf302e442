"""Eager calls of operations.

An eager op is compiled once for all communicators of a size, peers, tags, statuses and callers:
they are in an operand, an int32 vector that the call reads (`Operand::Call` in
`src/call/envelope.rs`). On GPUs, where the host cannot read it, it is compiled once for each.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from mpi4py import MPI

from .. import _native
from .._jax import compat, lines
from .._job.flush import last, started_here
from .._op.comm import Comm, Reduction, Status
from .._op.manual import current_spmd
from .._op.operation import OFFSET, PEERS, PLAIN, Call, How, Message, Operation, Receiving, Reducing
from .._op.packing import bind_trees, check_summands, holds_numpy, leaf_paths, pack_arguments
from .._op.primitive import OPERANDS

# Arguments of these types are arrays; others may be pytrees.
_ARRAYS = {compat.ArrayImpl, np.ndarray, float, int, complex, bool, np.float32, np.float64}

# Whether a file belongs to the user; and the numbers under which the native module knows source
# lines.
_is_the_users: dict[str, bool] = {}
_lines: dict[tuple[str, int, str], int] = {}


def _number_of_caller() -> int:
    """Return the number of the calling user's line for the native module, or 0."""
    frame: Any = sys._getframe(5)  # the frames below belong to this package
    function = ""
    while frame is not None:
        file = frame.f_code.co_filename
        is_the_users = _is_the_users.get(file)
        if is_the_users is None:
            is_the_users = _is_the_users[file] = not file.startswith(compat.NOT_THE_USERS)
        if is_the_users:
            number = _lines.get((file, frame.f_lineno, function))
            if number is None:
                line = lines.called(function, f"{os.path.basename(file)}:{frame.f_lineno}")
                number = _lines[file, frame.f_lineno, function] = _native.add_line(line)
            return number
        function = lines.function_of(frame.f_code) or function
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


_OF_RUN = re.compile(
    "(?:INVALID_ARGUMENT|FAILED_PRECONDITION|INTERNAL): (?:Buffer Definition Event: )?(.*)", re.S
)
_ERRORS = (ValueError, jax.errors.JaxRuntimeError)


def raise_in_own_words(error: Exception) -> None:
    """Raise an error of the native module with its own words, and always of one type.

    JAX raises a ValueError if it dispatches from C++, and else a JaxRuntimeError, and puts the name
    of XLA's code before the message.
    """
    if found := _OF_RUN.match(str(error)):
        raise jax.errors.JaxRuntimeError(found[1]) from None


Fields = dict[str, Any]  # of an operation, by their names


def operand_of(op: Operation, fields: Fields) -> jax.Array:
    """Take what may differ between calls out of the fields, and return it as an operand."""
    number = _number_of_caller()
    comm = fields["comm"]
    fields["comm"] = comm.any
    if not isinstance(op, Message):
        return _on_device(*_NO_PEERS, comm.number, number, 0)
    peers = [fields.get(name, -1) for name in PEERS]
    address = 0
    if isinstance(op, Receiving):
        # The result is the template if there is no sender.
        fields["source"] = MPI.PROC_NULL if op.source == MPI.PROC_NULL else None
        fields["recvtag"] = None
        if op.status is not None:
            address, fields["status"] = op.status.address, _ANY_STATUS
    if "sendtag" in fields:
        fields["dest"] = fields["sendtag"] = None
    return _on_device(*peers, comm.number, number, address)


Make = Callable[[Operation, How], Callable[..., Any]]  # makes the compiled function of an operation


def _on_trees(op: Operation, how: How, with_token: bool = False) -> Callable[..., Any]:
    """Return the compiled function of an operation on arrays, or on lists of leaves of pytrees.

    A token is a second result, because all results of a program are ready at the same time.
    """
    n = 1 if op.arrays is None else op.arrays

    def call(*args: Any) -> Any:
        out = bind_trees(op, args[:n], how, args[n:])
        return (out, jnp.zeros((), np.float32)) if with_token else out

    call.__name__ = op.name
    return jax.jit(call)


# One object, because `program_of` has it in its keys.
_on_trees_with_token = functools.partial(_on_trees, with_token=True)


# ---- Programs

PROGRAMS: dict[Any, Callable[..., Any]] = {}  # compiled functions that read such an operand
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


def program_of(
    make: Make, op: Operation, how: How, args: Sequence[Any], after: Sequence[Any] = ()
) -> tuple[Callable[..., Any], jax.Array]:
    """Return the compiled function of an operation for its fields and types of arguments.

    The second result is the operand for this call.

    Threads that call one compiled function with types that are new to it wait in JAX until the
    first of these calls has *ended*. That call may wait for another rank, which waits for one of
    the other threads, on another communicator. The first call therefore does nothing
    (`EagerCall::Compile` in `src/call/envelope.rs`).

    Args:
        make: makes the function.
        op, how: the operation, and how it is called.
        args: its arguments before the operand that :func:`operand_of` makes.
        after: those behind it.
    """
    fields = {**op.__dict__}
    operand = operand_of(op, fields)
    if not compat.caches_are_kept():  # `jax.clear_caches` was called
        PROGRAMS.clear()
        _calls.clear()
        compat.keep_caches()
    # The key is a flat tuple of objects whose hashes are computed in C, because every call pays for
    # hashing it.
    key = (make, op.__class__, how, *fields.values(), *map(_type, args), *map(_type, after))
    program = PROGRAMS.get(key)
    if program is None:
        _forget_freed(op)
        program = make(op.__class__(**fields), how._replace(operand="call", eager=True))
        with jax.transfer_guard("allow"):
            nothing = jax.device_put(_NOTHING)
        with jax.debug_nans(False), jax.debug_infs(False):  # its result is uninitialized memory
            program(*args, nothing, *after)
        PROGRAMS[key] = program
    return program, operand


def _forget_freed(op: Operation) -> None:
    """Forget the programs of freed reductions when a new user-defined reduction appears."""
    if isinstance(op, Reducing) and op.reduction.user:
        for key in list(PROGRAMS):
            if any(isinstance(part, Reduction) and part.is_freed for part in key):
                PROGRAMS.pop(key, None)


def run_without_operand(make: Make, op: Operation, how: How, args: Sequence[Any]) -> Any:
    """Run the compiled function of an operation for one communicator, if no operand can be read."""
    programs, key = cast(Comm, op.comm).cache, (make, op, how)
    if key not in programs:
        programs[key] = make(op, how._replace(eager=True))
    return programs[key](*args)


# ---- Calls

# The compiled functions and operands of earlier calls on arrays. The key has everything that may
# differ between calls.
_calls: dict[Any, tuple[Callable[..., Any], jax.Array]] = {}
_MOST_CALLS = 4096
_ONLY_ARRAYS = {compat.ArrayImpl}
_aval = operator.attrgetter("aval")


def run(call: Call, with_token: bool = False) -> Any:
    """Run an operation at once, and return its result or None; with ``with_token``, and a token.

    A call that is like an earlier one costs one look-up.
    """
    started_here()
    op, arrays, counts, how = call
    args, key = (*arrays, *counts), None
    caller = sys._getframe(2).f_back  # the caller of the operation's function
    try:
        if caller is not None and _ONLY_ARRAYS.issuperset(map(type, args)):
            # The key has the number of the communicator instead of the communicator, which it would
            # keep alive.
            comm, *fields = op.__dict__.values()
            place = caller.f_code.co_filename, caller.f_lineno
            # The default, PLAIN, is replaced by True, which is cheaper to hash.
            called = place, with_token, current_spmd(), how is PLAIN or how
            key = (*called, op.__class__, comm.number, *fields, *map(_aval, args))
            known = _calls.get(key)
            if known is not None and compat.caches_are_kept():
                program, operand = known
                return program(*args, operand)
        return _run_other(call, with_token, key)
    except _ERRORS as error:
        raise_in_own_words(error)
        raise


def _run_other(call: Call, with_token: bool, key: Any) -> Any:
    """Run an operation whose call is unlike earlier ones, and remember it by its key, if any."""
    op, arrays, counts, how = call
    if spmd := current_spmd():
        how = how._replace(spmd=spmd)
    leaves: Sequence[Any] = arrays
    structure = None
    if not _ARRAYS.issuperset(map(type, arrays)):
        # The structures of pytrees may not be comparable, so they are not part of a key.
        trees = [jax.tree.flatten(tree) for tree in arrays]
        leaves = [leaf for each, _ in trees for leaf in each]
        if jax.ShapeDtypeStruct in map(type, leaves):
            # A compiled function does not take a ShapeDtypeStruct, so it gets zeros, which are not
            # read.
            messages = pack_arguments(op, arrays)
            trees = [jax.tree.flatten(each.tree_type.from_leaves(each.leaves)) for each in messages]
        for _, each in trees:
            check_summands(op, each)
        how = how._replace(leaves=tuple(map(leaf_paths, arrays, (s for _, s in trees))))
        arrays, structure = tuple(each for each, _ in trees), trees[-1][1]
    args, make = [*arrays, *counts], _on_trees_with_token if with_token else _on_trees
    try:
        if _reads_operands():
            program, operand = program_of(make, op, how, args)
            out = program(*args, operand)
            if key is not None and _is_remembered(op, file=key[0][0]):
                _calls[key] = program, operand
        else:
            out = run_without_operand(make, op, how, args)
    except TypeError:
        # Raises an error that names an argument that is not an array.
        pack_arguments(op, call.arrays)
        raise
    token = None
    if with_token:
        out, token = out
    if structure is not None and op.returns:
        y, *envelope = out if how.env_out else (out,)
        y = jax.tree.unflatten(structure, y)
        out = (y, *envelope) if envelope else y
    out = _wait_if_needed(op, out, [*leaves, *counts])
    return (out, token) if with_token else out


def _is_remembered(op: Operation, file: str) -> bool:
    """Return whether calls in this file that are like this one need nothing but its program and
    operand."""
    if (
        op.communicator_to_make() is not None
        or (isinstance(op, Receiving) and op.status is not None)
        # `_forget_freed` forgets programs of reductions that the user frees, in `PROGRAMS` alone.
        or (isinstance(op, Reducing) and op.reduction.user)
        or not _is_the_users.get(file)
    ):
        return False
    if len(_calls) >= _MOST_CALLS:
        _calls.clear()
    return True


def _wait_if_needed(op: Operation, out: Any, operands: Sequence[Any]) -> Any:
    """Return results, and wait first for an operation that fills a status, makes a communicator or
    reads NumPy arrays, which the caller may refill then, as after MPI's blocking functions.
    """
    kind = op.communicator_to_make() if op.row.private else None
    if kind or (isinstance(op, Receiving) and op.status is not None) or holds_numpy(operands):
        jax.block_until_ready(out if op.returns else last())
    if kind:
        cast(Comm, op.comm).made.add(kind)
    return out


def with_known_peers(op: Operation, numbers: Sequence[Any]) -> Operation:
    """Return an operation whose peers are fields again, given the numbers that have them."""
    if not (isinstance(op, Message) and numbers):
        return op
    known: dict[str, Any] = {
        name: int(number) - OFFSET
        for (name, value), number in zip(op.peers().items(), np.asarray(numbers[0]), strict=True)
        if hasattr(op, name) and (number != 0 or value is None)
    }
    return dataclasses.replace(op, **known)


def implementation(primitive: Primitive) -> Callable[..., Any]:
    """Return what runs a primitive eagerly: programs for its parameters."""

    def make(op: Operation, how: How) -> Callable[..., Any]:
        def call(*args: Any) -> list[Any]:
            return list(primitive.bind(*args, op=op, how=how))

        call.__name__ = op.name
        return jax.jit(call)

    is_of_request = primitive.name in ("mpi4jax_start", "mpi4jax_wait")

    def run_primitive(*args: Any, op: Operation, how: How) -> Any:
        try:
            # Otherwise the compiled function below would be called recursively.
            if jax.config.jax_disable_jit:
                return compat.eval_primitive(primitive)(*args, op=op, how=how)
            if not (is_of_request or _reads_operands()):
                return run_without_operand(make, op, how, args)
            started_here()
            arrays, numbers, token = OPERANDS[primitive](op, how, args)
            given = [*arrays, *numbers[: op.row.is_ragged]]
            op = with_known_peers(op, numbers[op.row.is_ragged :])
            program, operand = program_of(make, op, how._replace(operand=None), given, token)
            return _wait_if_needed(op, program(*given, operand, *token), args)
        except _ERRORS as error:
            raise_in_own_words(error)
            raise

    return run_primitive
