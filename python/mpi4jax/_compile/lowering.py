"""The lowering of operations: what this rank computes and calls, in order.

:func:`lowering` is the rule that JAX calls for the equation of a blocking operation. It reads from
top to bottom: the operation's plan (`_op/plan.py`), the call that the plan names, and what is made
of the received data. `emit.py` has how code is emitted, `wire.py` the types as which arrays travel,
and `description.py` what a call says to the core.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from mpi4py import MPI

from .. import _native
from .._check.whole_arrays import Block
from .._op.comm import MEAN, Comm
from .._op.leaves import joined, message_type, parted
from .._op.operation import OFFSET, How, Message, Operation, Receiving, Reducing, Rooted
from .._op.plan import Plan, Result
from .._op.primitive import envelope, result_avals, split
from .._op.table import DTYPES, ROWS
from . import reductions
from .description import check_exportable, describe, forms_of, parts_of
from .emit import Avals, Emitter, Operand, Operands
from .wire import Wire, carrier


class _Lowered(threading.local):
    """Of the module that this thread lowers: the private communicators that it makes, and its
    arguments that are compared when it is first called, by their index from the end."""

    def __init__(self) -> None:
        self.makes: list[tuple[Comm, str]] = []
        self.blocks: list[tuple[int, Block]] = []


lowered = _Lowered()


def register(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Register a lowering rule, which is told first whether arrays are on a GPU."""
    for platform, on_gpu in (("cpu", _native.is_gpu_on_cpu()), ("cuda", True), ("rocm", True)):
        # The lowering is not cached: JAX would use one lowering for equal operations on different
        # lines, and reports would name only one of the lines.
        rule_there = functools.partial(rule, on_gpu)
        mlir.register_lowering(primitive, rule_there, platform=platform, cacheable=False)


def lowering(
    on_gpu: bool, ctx: mlir.LoweringRuleContext, *args: Any, op: Operation, how: How
) -> list[Any]:
    """Lower a blocking operation."""
    arrays, numbers, token = split(op, how, list(zip(args, ctx.avals_in, strict=True)))
    avals = [aval for _, aval in arrays]
    low = Lowering(on_gpu, ctx, op, how)
    low.take(numbers, avals)
    results = op.lower(low, arrays, result_avals(op, how, avals))
    low.finish()
    return [*results, *(value for value, _ in token)]


class Lowering(Emitter):
    """The lowering of one equation of an operation.

    Attributes:
        op, how: its parameters.
        numbers: its operands that say, when it runs, who the peers are or how many rows are sent.
        forms: what ranks compare of its arrays.
    """

    def __init__(self, on_gpu: bool, ctx: mlir.LoweringRuleContext, op: Operation, how: How):
        super().__init__(on_gpu, ctx, op.name)
        self.op, self.how = op, how
        self.reduction = op.reduction if isinstance(op, Reducing) else None
        self.numbers: Operands = []
        self.forms: dict[str, str] | None = None

    def take(self, numbers: Operands, arrays: Avals) -> None:
        """Take the operands that are numbers, and the types of those that are arrays."""
        self.numbers = [self._with_fields(each) for each in numbers]
        self.forms = forms_of(self.op, self.how, arrays)

    def _with_fields(self, numbers: Operand) -> Operand:
        """Return the numbers of a message, with the peers and tags that are fields as well."""
        if not isinstance(self.op, Message) or self.how.operand == "call":
            return numbers
        peers = self.op.peers().values()
        unset = np.array([-OFFSET if value is None else value for value in peers], np.int32)
        values = self.local(lambda n: jnp.where(n == 0, unset, n - OFFSET), numbers[1], numbers)
        return values, numbers[1]

    # ---- A plan, from its operand to its results

    def run(self, plan: Plan, leaves: Operands, out: Avals) -> list[Any]:
        """Run a plan at once, and return its results without the token."""
        op = self.op
        is_identity = plan.result is Result.OPERAND and plan.called is None and plan.select is None
        if is_identity and self.reduction is not MEAN:
            # Packing the leaves into one message would copy them.
            return [value for value, _ in leaves]
        before, after = op.lead()
        rest = iter(leaves)
        packed = [self.packed([next(rest) for _ in range(n)], before) for n in op.arity(self.how)]
        message = [message_type(out, after)] if out else []
        operands = self.selected(plan, packed, message)
        others: list[Any] = []
        if plan.called is not None:
            sent = operands[:1] if plan.sends else []
            received_types = message if plan.receives else []
            others = self.call(plan.called, *sent, out=received_types, **plan.attrs)
        received = others.pop(0) if plan.receives and out else None
        operand = operands[-1] if operands else None
        return [*self.results(plan, received, operand, out, after), *others]

    def selected(self, plan: Plan, operands: Operands, out: Avals) -> Operands:
        """Return the part of the operands that a plan takes."""
        if plan.select is not None:
            operands = [(self.local(plan.select, out[0], *operands), out[0])]
        # A mean is a sum that is divided; in the transpose, what the sum gets is divided.
        return [self._divided(x) for x in operands] if self.op.adjoint else operands

    def results(
        self, plan: Plan, received: Any, operand: Operand | None, leaves: Avals, lead: int
    ) -> list[Any]:
        """Return the results of a plan, which have these types, from received data and its
        operand."""
        if not leaves:
            return []
        out = message_type(leaves, lead)
        message = self._result(plan, received, operand, out), out
        return self.unpacked(message if self.op.adjoint else self._divided(message), leaves, lead)

    def _result(self, plan: Plan, received: Any, operand: Operand | None, out: ShapedArray) -> Any:
        if plan.result is Result.ZEROS:
            return self.local(lambda: jnp.zeros(out.shape, out.dtype), out)
        if plan.result is Result.RECEIVED or operand is None:
            return received
        if plan.result is Result.OPERAND:
            return operand[0]
        if plan.result is Result.SUM:
            return self.local(jnp.add, out, (received, out), operand)
        # A receive without a sender returns the template, because MPI leaves the buffer unchanged.
        assert isinstance(self.op, Receiving)
        if self.op.source == MPI.PROC_NULL:
            return operand[0]
        if self.op.source is not None or self.how.operand == "call":
            return received

        def choose(y: Any, template: Any, peers: Any) -> Any:
            return jnp.where(peers[0] == MPI.PROC_NULL, template, y)

        return self.local(choose, out, (received, out), operand, *self.numbers)

    def _divided(self, x: Operand) -> Operand:
        """Return a sum divided by the number of ranks, if the reduction is the mean and this rank
        has the sum."""
        op = self.op
        if self.reduction is not MEAN or (isinstance(op, Rooted) and not op.is_root):
            return x
        return self.local(lambda y: mean_of_sum(y, op.comm.size), x[1], x), x[1]

    # ---- The leaves of one dtype, and their message

    def packed(self, leaves: Operands, lead: int) -> Operand:
        """Return the message of leaves: of a single one, itself. The core copies, or XLA does."""
        if len(leaves) == 1:
            return leaves[0]
        message = message_type([aval for _, aval in leaves], lead)
        if self._core_copies(message):
            return self.pure_call("mpi4jax_pack", leaves, [message])[0], message
        return self.local(lambda *xs: joined(xs, lead), message, *leaves), message

    def unpacked(self, message: Operand, out: Avals, lead: int) -> list[Any]:
        """Return the leaves of a message, which have these types."""
        if len(out) == 1:
            return [message[0]]
        if self._core_copies(message[1]):
            return self.pure_call("mpi4jax_unpack", [message], out)
        return self.locals(lambda x: parted(x, out, lead), out, message)

    def _core_copies(self, message: ShapedArray) -> bool:
        """Return whether the core packs and unpacks a message, which saves XLA a kernel per leaf.

        XLA does it on a GPU; in exported programs, because the process that runs one may not have
        the core; and for values of less than a byte, several of which XLA stores in one byte.
        """
        is_whole_bytes = DTYPES[message.dtype.name].carrier is None
        return is_whole_bytes and not (self.on_gpu or self._is_exported)

    # ---- The call

    def call(
        self,
        called: str,
        *operands: Operand,
        out: Sequence[ShapedArray] = (),
        in_place: bool | None = None,
        **attrs: Any,
    ) -> list[Any]:
        """Emit the custom call of an op of the core, and return its results without the token.

        Args:
            called: the name of the op.
            *operands: what it sends.
            out: the types of the results that are arrays.
            in_place: whether each result is to be where its operand is; by default where
                `in_place.py` says so.
            **attrs: what only the description of this op has.
        """
        op = self.op
        if kind := op.communicator_to_make(ROWS[called]):
            lowered.makes.append((cast(Comm, op.comm), kind))
        if self._is_exported:
            check_exportable(op)
        if isinstance(op, Receiving) and op.status is not None and op.status.mpi is not None:
            self.ctx.module_context.add_keepalive(op.status)
        if called in ("scan", "exscan") and self._may_gather(operands[0][1]):
            return [self._gathered(called, operands[0], **attrs)]
        if "parts" not in attrs:
            attrs |= parts_of(op, called, [*(aval for _, aval in operands), *out])
        if in_place is None:
            # A packed message is a temporary array, which may be overwritten.
            is_packed = sum(op.arity(self.how)) > 1
            in_place = called == op.name and (self.how.in_place or (is_packed and op.overwrites()))
        aliases = {i: i for i in range(len(out))} if in_place else None
        envelopes = envelope(op, self.how)
        wires = [self.wire(called, aval.dtype) for aval in out]
        results = self.custom_call(
            f"mpi4jax_{called}",
            [*(self.encoded(called, x) for x in operands), *self.numbers],
            [*(wire.type_of(aval) for wire, aval in zip(wires, out, strict=True)), *envelopes],
            self.describe(called, [aval for _, aval in operands], **attrs),
            aliases,
        )
        for i, (wire, aval) in enumerate(zip(wires, out, strict=True)):
            results[i] = self.decoded(wire, results[i], aval)
        if envelopes and not op.row.is_ragged:
            results[-1] = self.local(
                lambda e: e + OFFSET, envelopes[0], (results[-1], envelopes[0])
            )
        return results

    def describe(self, called: str, operands: Avals, **attrs: Any) -> str:
        """Return the description of a call with these operands."""
        converted = self.wire(called, operands[0].dtype).converted if operands else None
        reduction = converted.reduction if converted else None
        return describe(self.ctx, self.op, self.how, called, self.forms, reduction, **attrs)

    @property
    def _is_exported(self) -> bool:
        return bool(self.ctx.module_context.lowering_parameters.for_export)

    def _reduces(self, called: str) -> bool:
        """Return whether the core computes with the operands; not if MPI calls the user's code."""
        has_reduction = self.reduction is not None and not self.reduction.user
        return has_reduction and ROWS[called].has_reduction

    def wire(self, called: str, dtype: Any) -> Wire:
        """Return how arrays of a dtype travel in the call of an op."""
        dtype = np.dtype(dtype)
        if self.reduction is None or not self._reduces(called):
            return Wire(dtype, carrier(dtype))
        carried = carrier(dtype, reduces=True)
        # A scan that the host reduces is reduced in the operand's own type.
        if called in ("scan", "exscan") or not reductions.are_on_stream(self.on_gpu):
            return Wire(dtype, carried)
        size = self.op.comm.size
        return Wire(dtype, carried, reductions.converted(self.reduction.name, carried, size))

    def encoded(self, called: str, operand: Operand) -> Operand:
        """Return an operand as the call of an op takes it."""
        aval = operand[1]
        wire = self.wire(called, aval.dtype)
        if wire.is_identity:
            return operand
        return self.local(wire.encode, wire.type_of(aval), operand), wire.type_of(aval)

    def decoded(self, wire: Wire, y: Any, aval: ShapedArray) -> Any:
        """Return a result of a call as one of the type that the program has."""
        return y if wire.is_identity else self.local(wire.decode, aval, (y, wire.type_of(aval)))

    def _may_gather(self, aval: ShapedArray) -> bool:
        """Return whether a prefix reduction of a block gathers the blocks of all ranks."""
        if self.reduction is None or self.reduction.user or self.how.operand == "call":
            return False
        is_fixed = all(isinstance(size, int) for size in aval.shape)
        return (
            is_fixed
            and reductions.are_on_stream(self.on_gpu)
            and reductions.can_gather(self.reduction.name, aval.dtype, aval.size, self.op.comm.size)
        )

    def _gathered(self, called: str, operand: Operand, reverse: bool) -> Any:
        """Return a prefix reduction by XLA, of the blocks of all ranks."""
        assert self.reduction is not None
        comm, aval, name = self.op.comm, operand[1], self.reduction.name
        blocks = aval.update(shape=(comm.size, *aval.shape))
        (all_of_them,) = self.call("allgather", operand, out=[blocks], in_place=False)

        def fold(x: Any) -> Any:
            is_exclusive = called == "exscan"
            return reductions.folded(name, x, comm.rank, is_exclusive=is_exclusive, reverse=reverse)

        return self.local(fold, aval, (all_of_them, blocks))


def mean_of_sum(y: Any, size: int) -> Any:
    """Return the mean over ``size`` ranks, given their sum."""
    # A narrow float type may not be able to represent the number of ranks.
    dividend = y.astype(np.float32) if y.dtype.itemsize < 4 else y
    return (dividend / size).astype(y.dtype)
