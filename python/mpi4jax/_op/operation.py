"""What an operation is: a class for each, whose fields are its static parameters.

The native module has a row for each (`table.py`): its names, what it takes, and how much a rank
sends and receives. An operation's file in `ops` has its class, whose methods say the rest: what it
does on a rank, what its transpose is, its derivative. The JAX primitives of the blocking operation,
of its initiation and of the wait have the operation as their parameter ``op``, and a :class:`How`
as their parameter ``how``.

Operands of every primitive: ``(*arrays, counts?, numbers?, token?)``; results: ``(*arrays,
envelope?, token?)``. The arrays are the leaves of one dtype of the arguments, which are one
message. The token is a float32 scalar. Counts are int32: how many rows go to each rank; in a
derivative also how many come from each. The numbers are int32, and known when the operation runs
(`How.operand`).

The envelope is (source, tag, number of elements), with ``OFFSET`` added, of the message that was
received. Of an operation with counts it is how many rows have come from each rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from jax.extend.core import JaxprEqn
from mpi4py import MPI

from .arguments import DERIVATIVE
from .comm import AnyComm, Comm, Reduction, Status
from .plan import Plan
from .rows import Part
from .table import ROWS, Extents, Row

T = TypeVar("T")  # type of the operand and of the result, which have the same structure

OFFSET = 3  # makes all of MPI's constants positive
ASKED: Literal["asked"] = "asked"  # `How.env_out` where the program asks for the envelope
PEERS = ("source", "recvtag", "dest", "sendtag")


class How(NamedTuple):
    """How an operation is called: parameters of its primitive that are not the operation's own.

    Attributes:
        operand: what the numbers among the operands are, or None if there are none.

            ``"traced"``: ``(source, recvtag, dest, sendtag)`` of a message, each with ``OFFSET``
            added, or 0 for one that is a field of the operation. The fields of the others are None.

            ``"recorded"``: the same, recorded by an operation for its derivative. There 0 may also
            be what JAX makes of the residuals of a branch of a `cond` that is not taken.

            ``"call"``: all that may change from one eager call to the next: those four, as they
            are, and more (`Operand::Call` in `src/call/envelope.rs`).
        arity: how many leaves each argument has, if one of them has several or none.
        tree: what ranks compare of a tree: of what is sent, and of what is received.
        env_out: whether the envelope is a result: where a derivative needs to know what a wildcard
            has matched; or, if it is `ASKED`, where the program asks for it: then messages may be
            short.
        threaded: whether `_diff/ad.py` has threaded a token through the operation.
        spmd: whether all ranks have the operation, in one program (`manual.of_all_ranks`): false,
            true, or words for the function around it and for its arguments, which ranks compare.
        in_place: whether the result may overwrite the operand.
        eager: whether it is compiled for eager calls.
        leaves: the names of the leaves of each argument, where lists of them stand for trees.
        buffers: of a wait, the types of the arrays that the initiation has.
        derived: whether a derivative has made it: the transpose of an operation, or a wait.
    """

    operand: Literal["traced", "recorded", "call"] | None = None
    arity: tuple[int, ...] = ()
    tree: tuple[str, str] = ("", "")
    env_out: bool | Literal["asked"] = False
    threaded: bool = False
    spmd: bool | str = False
    in_place: bool = False
    eager: bool = False
    leaves: tuple[tuple[str, ...], ...] | None = None
    buffers: tuple[Any, ...] = ()
    derived: bool = False


PLAIN = How()


@dataclass(frozen=True)
class Operation:
    """An operation, with its static parameters.

    Attributes:
        comm: its communicator.
        adjoint: whether it is the transpose of the operation that its name says, where this
            transpose is no other operation.

    Class attributes:
        row: what the native module says of it.
        name: its name.
        sends: whether it takes an array that is sent.
        returns: whether it returns an array.
        arrays: the number of array arguments (data or templates); None for any number.
        has_any_size: whether ranks may have arrays of different sizes.
        is_uniform: whether its result is one global value, equal on all ranks. Then its adjoint is
            local.
        prepare: its function as it is written, which makes a :class:`Call` of its arguments.
    """

    comm: Comm | AnyComm
    adjoint: bool = field(default=False, kw_only=True)

    row: ClassVar[Row]
    name: ClassVar[str]
    sends: ClassVar[bool]
    returns: ClassVar[bool]
    arrays: ClassVar[int | None]
    has_any_size: ClassVar[bool]
    is_uniform: ClassVar[bool] = False
    prepare: ClassVar[Callable[..., Call]]

    def __init_subclass__(cls, name: str = "") -> None:
        """Add an operation to the table.

        Raises:
            ImportError: if the native module does not have it.
        """
        if not name:  # a class of several operations
            return
        if name not in ROWS:
            raise ImportError(
                f"mpi4jax: the native module has no op {name}: it was built from another version "
                "of mpi4jax than the Python package; reinstall mpi4jax"
            )
        row = cls.row = ROWS[name]
        cls.name = name
        cls.sends = row.at_root[0] != "none"  # the root sends if any rank does
        cls.returns = row.at_root[1] != "none" or row.elsewhere[1] != "none"
        cls.arrays = cls.sends + cls.returns if row.has_peer else int(cls.sends or cls.returns)
        if row.has_blocks:
            cls.arrays = None
        cls.has_any_size = "variable" in (*row.at_root, *row.elsewhere)
        OPERATIONS[name] = cls

    # ---- What it does
    #
    # `Any` stands for types of packages above this one: `lower` gets a `Lowering` of `_compile`,
    # `initiate` may return a `Request` of `_requests`, and `tangent` gets a `ReductionTangent` of
    # `_diff`. The operations in `ops`, which are above those, name the types.

    def plan(self, how: How) -> Plan:
        """Return what it does on this rank: by default, every rank calls it, sends its operand and
        returns what it receives."""
        return Plan(self.name)

    def lower(self, low: Any, arrays: list[Any], out: list[Any]) -> list[Any]:
        """Return its results, given the `Lowering` that emits its calls."""
        return low.run(self.plan(low.how), arrays, out)  # type: ignore[no-any-return]

    def initiate(self, args: Sequence[Any]) -> Any:
        """Initiate other operations in its place, and return their request; by default None: the
        core initiates it itself."""
        return None

    def only_for_its_result(self) -> bool:
        """Return whether it is called for nothing else: then it is worth a warning if nothing uses
        the result."""
        return False

    def overwrites(self) -> bool:
        """Return whether it may leave the result where the operand is, at no cost.

        Not where the result is the operand, has another shape, or where the MPI library or we would
        have to copy.
        """
        return False

    def communicator_to_make(self, called: Row | None = None) -> str | None:
        """Return the kind of private communicator that the core must make to run it, or None.

        All ranks make it together. Python waits for such an operation: with Open MPI, a
        communicator that a program makes in Python while another rank waits for the operation would
        deadlock (`src/ops/DECISIONS.md`).

        Args:
            called: the row of the operation that its plan calls, if it is another one.
        """
        kind, comm = (called or self.row).private, self.comm
        if kind is None or (kind == "reversed" and not self.adjoint) or isinstance(comm, AnyComm):
            return None
        return None if kind in comm.made else kind

    # ---- Its derivative

    def transposed(self) -> Operation:
        """Return the operation that is its transpose; by default the adjoint of the same class,
        whose plan says what it does."""
        return replace(self, adjoint=not self.adjoint)

    def on_tangents(self) -> Operation:
        """Return the operation on tangents."""
        return self

    def tangent(self, r: Any) -> Any:
        """Return the tangent with the reductions PROD, MAX and MIN; an operation that has a
        derivative for them overrides it."""
        raise NotImplementedError

    # ---- Its arrays

    def extents(self) -> Extents:
        """Return what this rank sends and receives, as the row says it."""
        return self.row.elsewhere

    def lengths(self) -> tuple[int | None, int | None]:
        """Return the length of the first axis of the operand and of the result of the operation
        that its name says, if this axis counts blocks or rows, else None."""
        sent, received = self.extents()
        size = self.comm.size
        return size if sent == "per rank" else None, size if received == "per rank" else None

    def first_lengths(self) -> tuple[int | None, int | None]:
        """Return the same of this operation: a transpose exchanges the two."""
        length, result_length = self.lengths()
        return (result_length, length) if self.adjoint else (length, result_length)

    def lead(self) -> tuple[int, int]:
        """Return how many axes the operand and the result have in front of the data of one rank or
        row: 1 if there is an axis of blocks or rows, else 0."""
        length, result_length = self.first_lengths()
        return int(length is not None), int(result_length is not None)

    def is_template(self, argument: int) -> bool:
        """Return whether an argument is a template: its values are not read."""
        send, recv = self.extents()
        return send == "none" and recv != "none"

    def arity(self, how: How) -> tuple[int, ...]:
        """Return how many leaves each argument has that is an array."""
        return how.arity or (1,) * (self.arrays or 0)

    def count_results(self, how: How) -> int:
        """Return how many arrays it returns: one for each leaf of its last argument."""
        return self.arity(how)[-1] if self.returns else 0


OPERATIONS: dict[str, type[Operation]] = {}  # in alphabetical order once `ops` is imported


def made(name: str, comm: Comm | AnyComm, **fields: Any) -> Operation:
    """Return an operation by its name: its class is in `ops`, above this package."""
    operation: Callable[..., Operation] = OPERATIONS[name]
    return operation(comm, **fields)


def write_fields_at_once(cls: type[Operation]) -> None:
    """Replace the constructor of an operation by one with the same parameters that is faster.

    Every eager call constructs its operation. The constructor that `dataclass` generates for a
    frozen class calls `object.__setattr__` once for each field. This one updates the dictionary of
    the instance once. Like `dataclass`, this function generates the constructor's source, because a
    constructor that takes ``**fields`` would be as slow.
    """
    generated, namespace = cls.__init__, dict[str, Any]()
    positional = [f.name for f in fields(cls) if not f.kw_only]
    keyword = [f.name for f in fields(cls) if f.kw_only]
    values = ", ".join(f"{f.name!r}: {f.name}" for f in fields(cls))
    exec(
        f"def __init__(self, {', '.join(positional)}, *, {', '.join(keyword)}):\n"
        f"    self.__dict__.update({{{values}}})",
        namespace,
    )
    init: Any = functools.wraps(generated)(namespace["__init__"])
    init.__defaults__, init.__kwdefaults__ = generated.__defaults__, generated.__kwdefaults__
    cls.__init__ = init  # type: ignore[method-assign]


# ---- What several operations have


@dataclass(frozen=True)
class Reducing(Operation):
    """An operation that reduces."""

    reduction: Reduction

    @property
    def is_linear(self) -> bool:
        return self.reduction.name in ("SUM", "MEAN")

    def only_for_its_result(self) -> bool:
        return True


@dataclass(frozen=True)
class Rooted(Operation):
    """An operation with a root."""

    root: int

    @property
    def is_root(self) -> bool:
        return self.root == self.comm.rank

    def extents(self) -> Extents:
        return self.row.at_root if self.is_root else self.row.elsewhere


@dataclass(frozen=True)
class WithRows(Operation):
    """An operation on rows of arrays.

    Attributes:
        rows: the lengths of the first axis of operand and result; None if no axis counts rows.
    """

    rows: tuple[int | None, int | None]

    def lengths(self) -> tuple[int | None, int | None]:
        return self.rows


@dataclass(frozen=True)
class WithParts(WithRows):
    """An operation on rows whose numbers are static.

    Attributes:
        send_parts, recv_parts: the rows that go to ranks, and those that come from them, in the
            order of the ranks. Ranks that get no rows are left out.
        whole: the number of rows of the root, if there is one.
    """

    send_parts: tuple[Part, ...]
    recv_parts: tuple[Part, ...]
    whole: int | None = None


@dataclass(frozen=True)
class Ragged(WithRows):
    """An operation on rows whose numbers are in an array, its counts.

    Attributes:
        has_owners: whether `migrate` has made the counts, so that errors name its arguments.
    """

    has_owners: bool = field(default=False, kw_only=True)

    def of_counts(self) -> Operation:
        """Return the operation by which ranks tell each other their counts."""
        return made("alltoall", self.comm)


@dataclass(frozen=True)
class OfBlocks(Operation):
    """An operation on the blocks of a grid.

    Attributes:
        axes: the exchanged axes of the argument.
        widths: the number of ghost cells below and above, along each of these axes.
        neighbors: the ranks in all directions, or ``MPI.PROC_NULL``.
        leaf_axes: when it is bound, in place of ``axes``: the exchanged axes of each leaf, counted
            from its end.
    """

    axes: tuple[int, ...]
    widths: tuple[tuple[int, int], ...]
    neighbors: tuple[int, ...]
    leaf_axes: tuple[tuple[int, ...], ...] = ()

    def arity(self, how: How) -> tuple[int, ...]:
        return (len(self.leaf_axes),)


@dataclass(frozen=True)
class Message(Operation):
    """A message to one rank, or from one, or both."""

    def peers(self) -> dict[str, int | None]:
        """Return its ranks and tags by the names in `PEERS`: None where it has none, or where an
        operand has it."""
        return {name: getattr(self, name, None) for name in PEERS}

    def is_template(self, argument: int) -> bool:
        return self.returns and argument == self.sends

    def has_wildcard(self) -> bool:
        """Return whether the receiver leaves the source or the tag open.

        One that is known when it runs may turn out to be a wildcard. Without a sender
        (``MPI.PROC_NULL``) there is nothing to record.
        """
        return False


@dataclass(frozen=True)
class Sending(Message):
    """A message to another rank; None: an operand says which, or with what tag."""

    dest: int | None
    sendtag: int | None

    def on_tangents(self) -> Operation:
        return replace(self, sendtag=tag_of_derivative(self.sendtag))

    def received_back(self) -> dict[str, Any]:
        """Return the fields of a message that is received from where this one went."""
        return {"source": self.dest, "recvtag": tag_of_derivative(self.sendtag)}


@dataclass(frozen=True)
class Receiving(Message):
    """A message from another rank; None: an operand says which, or with what tag."""

    source: int | None
    recvtag: int | None
    status: Status | None = None

    def has_wildcard(self) -> bool:
        if self.source == MPI.PROC_NULL:
            return False
        return self.source in (MPI.ANY_SOURCE, None) or self.recvtag in (MPI.ANY_TAG, None)

    def on_tangents(self) -> Operation:
        return replace(self, recvtag=tag_of_derivative(self.recvtag), status=None)

    def sent_back(self) -> dict[str, Any]:
        """Return the fields of a message that is sent to where this one came from.

        A message received with any tag is sent back with tag 0.
        """
        tag = 0 if self.recvtag == MPI.ANY_TAG else self.recvtag
        return {"dest": self.source, "sendtag": tag_of_derivative(tag)}


@dataclass(frozen=True)
class SendingAndReceiving(Receiving, Sending):
    """A message to another rank, and one from another."""

    def on_tangents(self) -> Operation:
        sendtag, recvtag = map(tag_of_derivative, (self.sendtag, self.recvtag))
        return replace(self, sendtag=sendtag, recvtag=recvtag, status=None)

    def send(self) -> Operation:
        """Return the message that it sends."""
        return made("send", self.comm, dest=self.dest, sendtag=self.sendtag)

    def recv(self) -> Operation:
        """Return the message that it receives."""
        fields = {"source": self.source, "recvtag": self.recvtag, "status": self.status}
        return made("recv", self.comm, **fields)


def tag_of_derivative(tag: int | None) -> int | None:
    """Return the tag of a message of a derivative, which no receive of the program matches."""
    return tag if tag is None or tag == MPI.ANY_TAG else tag | DERIVATIVE


# ---- Calls


class Call(NamedTuple):
    """A call of an operation.

    Attributes:
        op: the operation.
        arrays: arguments that are arrays, or pytrees of arrays.
        counts: of an operation that takes counts, the array of them.
        how: how it is called.
    """

    op: Operation
    arrays: tuple[Any, ...]
    counts: tuple[Any, ...] = ()
    how: How = PLAIN


def call(op: Operation, *arrays: Any, counts: tuple[Any, ...] = (), how: How = PLAIN) -> Any:
    """Return what the function of an operation returns: a :class:`Call`, which `define` has run."""
    # Each eager call runs this. `Call(...)` would be one more call of a Python function.
    return tuple.__new__(Call, (op, arrays, counts, how))


def op_of(eqn: JaxprEqn) -> Operation | None:
    """Return the operation of an equation of a jaxpr, or None."""
    name: str = eqn.primitive.name.removeprefix("mpi4jax_")
    return eqn.params["op"] if name in OPERATIONS and name != eqn.primitive.name else None
