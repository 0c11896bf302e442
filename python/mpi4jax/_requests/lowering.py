"""What an initiation and a wait are compiled to: the two halves of the operation's plan.

The start does all up to the call, and gives the native module the operand if it is needed again.
The wait gets back what was received and the operand, and does the rest.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from jax.core import ShapedArray
from jax.interpreters import mlir

from .._compile.description import forms_of
from .._compile.lowering import Avals, Lowering, Operands, carrier, register
from .._op.leaves import message_type
from .._op.operation import How, Operation, Receiving
from .._op.plan import Result
from .._op.primitive import result_avals, split
from .primitives import HANDLE, split_wait, start_p, wait_p


class _Half(Lowering):
    """The lowering of an initiation or of a wait.

    Attributes:
        lead: how many axes the leaves of operand and result have in common with their messages.
        sends, receives, keeps: the types of what goes into the call, of what comes out of it, and
            of the operand if it is needed at the end; each is none or one message.
        initial: whether the call gets the operand as the initial value of what it receives.
        out: the type of the message that is the result, if there is one.
        leaves: the types of the results.
    """

    def __init__(
        self, on_gpu: bool, ctx: mlir.LoweringRuleContext, op: Operation, how: How, buffers: Avals
    ):
        super().__init__(ctx, op, how, on_gpu)
        self.plan = plan = op.plan(how)
        self.lead = op.lead()
        self.leaves = result_avals(op, how, buffers)
        self.out = [message_type(self.leaves, self.lead[1])] if self.leaves else []
        buffers = [message_type(buffers, self.lead[0])] if buffers else []
        self.sends = buffers if plan.call is not None and plan.sends else []
        self.receives = self.out if plan.receives else []
        self.keeps = [] if not plan.keeps else buffers if plan.select is None else self.out
        # Without a sender, the result is the template. In eager code, only the call has the
        # template.
        is_open = isinstance(op, Receiving) and op.source is None and how.operand != "call"
        self.initial = plan.result is Result.TEMPLATE and is_open
        if not all(isinstance(n, int) for x in (*self.receives, *self.keeps) for n in x.shape):
            raise NotImplementedError(f"i{op.name}: cannot be exported with symbolic shapes")
        first = buffers if plan.sends else []
        self.attrs = plan.attrs | self.parts(plan.call or op.name, [*first, *self.out])
        self.attrs |= self.reduction_on_wire(plan.call, [(None, aval) for aval in self.sends])

    def wire(self, op: str | None, aval: ShapedArray) -> tuple[Any, Any]:
        # On ranks other than the root, the wait of an ireduce returns the operand.
        return (carrier(aval, self.reduces(op)), None) if op == "reduce" else super().wire(op, aval)

    def emit(self, target: str, operands: Operands, out: Avals, initial: bool) -> list[Any]:
        """Emit the custom call, which takes and returns the token; return its other results."""
        plan = self.plan
        gives = [
            (str(x.dtype), math.prod(x.shape))
            for x in (self.wire(plan.call, x)[0] for x in self.receives)
        ]
        request = {
            "sends": bool(self.sends),
            "keeps": plan.keeps,
            "initial": initial,
            "gives": gives[0] if gives else None,
            "local": plan.call is None,
        }
        description = self.describe(plan.call or self.op.name, request=request, **self.attrs)
        return self.custom_call(target, operands, out, description)


def _lower_start(
    on_gpu: bool, ctx: mlir.LoweringRuleContext, *args: Any, op: Operation, how: How
) -> list[Any]:
    arrays, numbers, token = split(op, how, list(zip(args, ctx.avals_in, strict=True)))
    low = _Half(on_gpu, ctx, op, how, [aval for _, aval in arrays])
    low.forms = forms_of(op, how, [aval for _, aval in arrays])
    plan = low.plan
    for operand in numbers:
        low.use_numbers(operand)
    operands = []
    if low.sends or low.initial or low.keeps:
        operands = low.selected(plan, [low.packed(arrays, low.lead[0])], low.out)
        operands = [low.to_wire(plan.call, x) for x in operands]
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
    wire = [low.wire(low.plan.call, x)[0] for x in types]
    back = low.emit("mpi4jax_wait", [handle, *numbers], wire, how.derived)
    arrays = [(low.from_wire(low.plan.call, x, to), to) for x, to in zip(back, types, strict=True)]
    received = arrays[0][0] if low.receives else None
    # Without a sender, the result already is the template.
    operand = arrays[-1] if low.keeps else None
    results = low.results(low.plan, received, operand, low.leaves, low.lead[1])
    low.finish()
    return [*results, *(value for value, _ in token)]


register(start_p, _lower_start)
register(wait_p, _lower_wait)
