"""The table of operations.

The native module has a row for each (`src/ops/table.rs`): its names, what it takes, and how much a
rank sends and receives. An op's file in `ops` adds what JAX's rules need (`define`);
together they are a :class:`Spec`.

Operands of every primitive: ``(*arrays, counts?, numbers?, token?)``; results: ``(*arrays,
envelope?, token?)``. The arrays are the leaves of one dtype of the arguments, which are one
message; the parameter ``arity`` says how many leaves each argument has, where one has several or
none. The token is a float32 scalar. Counts are int32: how many rows go to each
rank; in a derivative also how many come from each. The numbers are int32, and known when the op
runs; the parameter ``operand`` says what they are:

``"traced"``
    ``(source, recvtag, dest, sendtag)`` of a message, each with ``OFFSET`` added, or 0 for one that
    a parameter says. The parameters of the others are None.
``"recorded"``
    The same, kept by an op for its derivative. There 0 may also be what JAX makes of what a branch
    of a `cond` keeps, where it takes another branch.
``"call"``
    All that may change from one eager call to the next: those four, as they are, and more
    (`Operand::Call` in `src/call/envelope.rs`).

The envelope is (source, tag, number of elements), with ``OFFSET`` added, of the message that was
received; it is there with ``env_out``: where a derivative needs to know what a wildcard matched,
or, if that is `ASKED`, where the program asks for it, whose messages may be short. Of an op with
counts it is how many rows have come from each rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from mpi4py import MPI

from .. import _native

Params = dict[str, Any]

T = TypeVar("T")  # of what an op takes, which it returns with the same structure

OFFSET = 3  # makes all of MPI's constants positive
ASKED = "asked"  # the parameter `env_out` where the program asks for the envelope
PEERS = ("source", "recvtag", "dest", "sendtag")


class Call(NamedTuple):
    """A call of an operation, with the arguments of its function.

    Attributes:
        op: name of the op.
        arrays: arguments that are arrays, or pytrees of arrays.
        params: the others, as parameters of the primitive.
        counts: of an op that takes counts, the array of them.
    """

    op: str
    arrays: tuple[Any, ...]
    params: Params
    counts: tuple[Any, ...] = ()


def call(op: str, arrays: tuple[Any, ...], params: Params, counts: tuple[Any, ...] = ()) -> Any:
    """Return what the function of an op returns: a :class:`Call`, which `define` has run."""
    return Call(op, arrays, params, counts)


def is_root(p: Params) -> bool:
    return bool(p["root"] == p["comm"].rank)


@dataclass(frozen=True, eq=False)
class Spec:
    """One operation.

    Attributes:
        name: the op, as in ``mpi4jax.<name>``.
        mpi: the MPI function that it calls.
        has_reduction, has_root, has_peer: whether it takes a reduction; a root; a source, a
            destination, or both.
        has_mean: whether the reduction is over all ranks, and may be ``MEAN``.
        has_blocks: whether it takes any number of arrays at once, and returns as many.
        has_parts: whether it has parameters for the rows that go to each rank and come from it.
        is_ragged: whether an array says, when it runs, how many rows go to each rank.
        private: the kind of communicator that the core makes to run it: ``"messages"``; or, for its
            transpose, ``"reversed"``.
        at_root, elsewhere: what a rank sends and receives: ``"none"``, ``"one"`` block, one
            ``"per rank"``, or ``"variable"``: then ranks may differ.
        started: the MPI function that starts it without waiting for its end, if the native module
            does.
        prepare: its function as it is written, which makes a :class:`Call` of its arguments.
        plan: what it does on this rank, given the parameters: a `_op.plan.Plan`. By default every
            rank calls it, sends its operand and returns what it receives.
        adjoint: the same of its transpose, if that is no other op. The primitive then has a
            parameter of that name.
        lower: how it is lowered, and its adjoint, where it takes several arrays: no plan says that.
            The transpose of a message goes the other way (`_diff/derivative.py`); an op without
            either is its own transpose.
        derivative: its tangent with the reductions PROD, MAX and MIN.
        start: how it is started as other ops: given what starts one of a name with arguments and
            parameters, arguments and parameters; a `_requests.request.CompositeRequest`.
        is_uniform: whether its result is one global value, equal on all ranks. Then its adjoint
            is local.
        only_for_its_result: given the parameters, whether it is done for nothing else: then it
            is worth a warning if nothing uses the result.
        overwrites: given the parameters, whether it may leave the result where the operand is,
            at no cost. Not where the result is the operand, has another shape, or where the MPI
            library or we would have to copy.
    """

    name: str
    mpi: str
    has_reduction: bool
    has_mean: bool
    has_root: bool
    has_peer: bool
    has_blocks: bool
    has_parts: bool
    is_ragged: bool
    private: str | None
    at_root: tuple[str, str]
    elsewhere: tuple[str, str]
    started: str | None
    prepare: Callable[..., Call]
    plan: Callable[[Params], Any] | None = None
    adjoint: Callable[..., Any] | None = None
    lower: Callable[..., Any] | None = None
    derivative: Callable[..., Any] | None = None
    start: Callable[..., Any] | None = None
    is_uniform: bool = False
    only_for_its_result: Callable[[Params], bool] = lambda p: False
    overwrites: Callable[[Params], bool] = lambda p: False

    @cached_property
    def sends(self) -> bool:
        return self.at_root[0] != "none" or self.elsewhere[0] != "none"

    @cached_property
    def returns(self) -> bool:
        """Whether it returns an array."""
        return self.at_root[1] != "none" or self.elsewhere[1] != "none"

    @cached_property
    def arrays(self) -> int | None:
        """The number of array arguments (data or templates); None for any number."""
        if self.has_blocks:
            return None
        return self.sends + self.returns if self.has_peer else int(self.sends or self.returns)

    def arity(self, p: Params) -> tuple[int, ...]:
        """Return how many leaves each argument has that is an array."""
        if self.has_blocks:
            return (len(p["axes"]),)
        return p.get("arity") or (1,) * (self.arrays or 0)

    def count_results(self, p: Params) -> int:
        """Return how many arrays it returns: one for each leaf of its last argument."""
        return self.arity(p)[-1] if self.returns else 0

    @cached_property
    def has_any_size(self) -> bool:
        """Whether ranks may have arrays of different sizes."""
        return "variable" in (*self.at_root, *self.elsewhere)

    @cached_property
    def defaults(self) -> Params:
        """Parameters that only derivatives change."""
        if self.has_peer:
            return {"env_out": False}
        adjoint: Params = {} if self.adjoint is None else {"adjoint": False}
        return {**adjoint, "env_out": True} if self.is_ragged else adjoint

    @cached_property
    def params(self) -> frozenset[str]:
        """Names of its static parameters."""
        names = {"comm", *self.defaults}
        names |= {"reduction"} if self.has_reduction else set()
        names |= {"root"} if self.has_root else set()
        names |= {"source", "recvtag", "status"} if self.has_peer and self.returns else set()
        names |= {"dest", "sendtag"} if self.has_peer and self.sends else set()
        names |= {"axes", "widths", "neighbours"} if self.has_blocks else set()
        names |= {"rows", "sends", "receives"} if self.has_parts else set()
        names |= {"rows"} if self.is_ragged else set()
        return frozenset(names)


SPECS: dict[str, Spec] = {}  # in alphabetical order once `mpi4jax.ops` is imported
_ROWS = {row["name"]: row for row in json.loads(_native.ops_table())}


def add(name: str, **fields: Any) -> Spec:
    """Add an operation to the table.

    Raises:
        ImportError: if the native module does not have it.
    """
    if name not in _ROWS:
        raise ImportError(
            f"mpi4jax: the native module has no op {name}: it was built from another version of "
            "mpi4jax than the Python package; reinstall mpi4jax"
        )
    SPECS[name] = Spec(**_ROWS[name], **fields)
    return SPECS[name]


def op_of(eqn: Any) -> str | None:
    """Return the operation of an equation of a jaxpr, or None."""
    name: str = eqn.primitive.name.removeprefix("mpi4jax_")
    return name if name in SPECS and name != eqn.primitive.name else None


def first_axes(spec: Spec, p: Params) -> tuple[int | None, int | None]:
    """Return the length of the first axis of input and result if it counts blocks or rows, else
    None. A transpose exchanges the two.
    """
    if "rows" in p:
        before, after = p["rows"]
    else:
        sides = spec.at_root if spec.has_root and is_root(p) else spec.elsewhere
        before, after = (p["comm"].size if side == "per rank" else None for side in sides)
    return (after, before) if p.get("adjoint") else (before, after)


def wildcard(p: Params) -> bool:
    """Return whether the receiver of a message leaves its source or its tag open.

    One that is known when it runs may turn out to be a wildcard. Without a
    sender (``MPI.PROC_NULL``) there is nothing to record.
    """
    if "source" not in p or p["source"] == MPI.PROC_NULL:
        return False
    return p["source"] in (MPI.ANY_SOURCE, None) or p["recvtag"] in (MPI.ANY_TAG, None)


def is_template(spec: Spec, p: Params, argument: int) -> bool:
    """Return whether an argument is a template: its values are not read."""
    if spec.has_peer:
        return spec.returns and argument == spec.sends
    send, recv = spec.at_root if spec.has_root and is_root(p) else spec.elsewhere
    return send == "none" and recv != "none"
