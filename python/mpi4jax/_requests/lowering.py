"""What an initiation and a wait are compiled to: the two halves of the operation's plan.

The initiation does all up to the call, and gives the core the operand if it is needed again. The
wait gets back what was received and the operand, and does the rest.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from jax.interpreters import mlir

from .._compile.description import parts_of
from .._compile.emit import Avals, Operands
from .._compile.lowering import Lowering, register
from .._compile.wire import Wire, carrier
from .._op.leaves import message_type
from .._op.operation import How, Operation, Receiving
from .._op.plan import Result
from .._op.primitive import result_avals, split
from .primitives import HANDLE, split_wait, start_p, wait_p


class _Half(Lowering):
    """The lowering of an initiation or of a wait.

    Attributes:
        plan: what the operation does on this rank.
        called: the op of the core that is called; of a plan without a call, the operation's own
            name.
        before, after: how many axes the leaves of the operand and of the result have in common with
            their messages.
        sends, receives, keeps: the types of what goes into the call, of what comes out of it, and
            of the operand if it is needed at the end; each is none or one message.
        initial: whether the call gets the operand as the initial value of what it receives.
        out: the type of the message that is the result, if there is one.
        leaves: the types of the results.
    """

    def __init__(
        self, on_gpu: bool, ctx: mlir.LoweringRuleContext, op: Operation, how: How, buffers: Avals
    ):
        super().__init__(on_gpu, ctx, op, how)
        self.plan = plan = op.plan(how)
        self.called = plan.called or op.name
        self.before, self.after = op.lead()
        self.leaves = result_avals(op, how, buffers)
        self.out = [message_type(self.leaves, self.after)] if self.leaves else []
        operand = [message_type(buffers, self.before)] if buffers else []
        self.sends = operand if plan.called is not None and plan.sends else []
        self.receives = self.out if plan.receives else []
        self.keeps = [] if not plan.keeps else operand if plan.select is None else self.out
        # Without a sender, the result is the template. In eager code, only the call has the
        # template.
        is_open = isinstance(op, Receiving) and op.source is None and how.operand != "call"
        self.initial = plan.result is Result.TEMPLATE and is_open
        if not all(isinstance(n, int) for x in (*self.receives, *self.keeps) for n in x.shape):
            raise NotImplementedError(f"i{op.name}: cannot be exported with symbolic shapes")
        first = operand if plan.sends else []
        self.attrs = plan.attrs | parts_of(op, self.called, [*first, *self.out])

    def wire(self, called: str, dtype: Any) -> Wire:
        """Return how arrays of a dtype travel in the call of an op."""
        if self.plan.called is None:  # the core only keeps the operand
            return Wire(np.dtype(dtype), carrier(dtype))
        wire = super().wire(called, dtype)
        # The operand that the core keeps is encoded like the one that is sent. On ranks other than
        # the root, an ireduce returns it, and a conversion keeps only what the reduction needs.
        return replace(wire, converted=None) if called == "reduce" else wire

    def emit(self, target: str, operands: Operands, out: Avals, initial: bool) -> list[Any]:
        """Emit the custom call, which takes and returns the token; return its other results."""
        gives = [self.wire(self.called, aval.dtype).type_of(aval) for aval in self.receives]
        request = {
            "sends": bool(self.sends),
            "keeps": self.plan.keeps,
            "initial": initial,
            "gives": (str(gives[0].dtype), math.prod(gives[0].shape)) if gives else None,
            "local": self.plan.called is None,
        }
        description = self.describe(self.called, self.sends, request=request, **self.attrs)
        return self.custom_call(target, operands, out, description)


def _lower_start(
    on_gpu: bool, ctx: mlir.LoweringRuleContext, *args: Any, op: Operation, how: How
) -> list[Any]:
    arrays, numbers, token = split(op, how, list(zip(args, ctx.avals_in, strict=True)))
    avals = [aval for _, aval in arrays]
    low = _Half(on_gpu, ctx, op, how, avals)
    low.take(numbers, avals)
    operands: Operands = []
    if low.sends or low.initial or low.keeps:
        operands = low.selected(low.plan, [low.packed(arrays, low.before)], low.out)
        operands = [low.encoded(low.called, x) for x in operands]
    (handle,) = low.emit("mpi4jax_start", [*operands, *low.numbers], [HANDLE], low.initial)
    low.finish()
    return [handle, *(value for value, _ in token)]


def _lower_wait(
    on_gpu: bool, ctx: mlir.LoweringRuleContext, *args: Any, op: Operation, how: How
) -> list[Any]:
    (handle,), numbers, token = split_wait(op, how, list(zip(args, ctx.avals_in, strict=True)))
    numbers = numbers[op.row.is_ragged :]  # counts are for the transpose alone
    # Communicators share eager programs; the native module finds the communicator of the request.
    op = replace(op, comm=op.comm.any)
    low = _Half(on_gpu, ctx, op, how, list(how.buffers))
    types = [*low.receives, *low.keeps]
    wires = [low.wire(low.called, aval.dtype) for aval in types]
    given_back = [wire.type_of(aval) for wire, aval in zip(wires, types, strict=True)]
    values = low.emit("mpi4jax_wait", [handle, *numbers], given_back, how.derived)
    arrays = [
        (low.decoded(wire, value, aval), aval)
        for wire, value, aval in zip(wires, values, types, strict=True)
    ]
    received = arrays[0][0] if low.receives else None
    # Without a sender, the result already is the template.
    operand = arrays[-1] if low.keeps else None
    results = low.results(low.plan, received, operand, low.leaves, low.after)
    low.finish()
    return [*results, *(value for value, _ in token)]


register(start_p, _lower_start)
register(wait_p, _lower_wait)
