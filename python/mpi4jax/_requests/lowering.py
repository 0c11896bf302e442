"""What a start and a wait are compiled to.

An op's lowering says what goes into its call, and what is done with what comes out. It is asked
twice, without a call being emitted, so that the first half can be done where the op is started and
the second half where it is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from .. import _native
from .._compile.lowering import Avals, Lowering, Operand, Operands, carrier, everywhere
from .._jax import compat
from .._op.primitive import HANDLE, effect, result_avals, split_start, split_wait, start_p, wait_p
from .._op.spec import SPECS, Params, Spec

_XLA_CODES = {name: code for name, code, *_ in _native.dtypes_table()}

# What a lowering that is asked gets for values.
_OPERAND, _RECEIVED, _SUM, _ZEROS = "operand", "received", "sum", "zeros"


class _Plan(Lowering):
    """What the lowering of an op does, on operands of these types.

    Attributes:
        op: the op that is called, or None: nothing is communicated.
        attrs: attributes of that call.
        sends: whether the operand goes into it.
        received: the type of what comes out of it, or None.
        initial: whether the operand is the result if nothing comes.
        before: what is done with the operand first, if something is, with the type of what results.
        result: what the result is: the operand, what was received, their sum, or zeros. None: there
            is none.
        out: the type of the result.
    """

    def __init__(self, spec: Spec, p: Params, avals: Avals):
        self.spec, self.p, self.in_place = spec, p, False
        self.op: str | None = None
        self.sends = self.initial = False
        self.received_type: Any = None
        self.before: tuple[Callable[..., Any], Any] | None = None
        lower = (spec.adjoint if p.get("adjoint") else spec.lower) or everywhere
        operands, out = [(_OPERAND, aval) for aval in avals], result_avals(spec, p, avals)
        self.attrs = self.parts(spec.name, operands, out)
        results = lower(self, operands, out)
        self.result: str | None = results[0] if results else None
        self.out = next(iter(out), None)
        # A kept operand that something was done with is that.
        self.kept = None
        if self.result in (_OPERAND, _SUM):
            self.kept = self.before[1] if self.before else avals[0]

    def call(
        self,
        op: str,
        *operands: Operand,
        out: Sequence[Any] = (),
        in_place: bool | None = None,
        **attrs: Any,
    ) -> list[Any]:
        self.op, self.sends = op, bool(operands)
        self.attrs = attrs | self.parts(op, operands, out)
        self.received_type = next(iter(out), None)
        return [_RECEIVED for _ in out]

    def received(self, y: Any, template: Operand) -> Any:
        self.initial = self.p["source"] is None and self.p.get("operand") != "call"
        return y

    def local(self, f: Callable[..., Any], out: Any, *operands: Operand) -> Any:
        self.before = f, out
        return _OPERAND

    def zeros(self, aval: Any) -> Any:
        return _ZEROS

    def plus(self, y: Any, x: Operand) -> Any:
        return _SUM


class _Requested(Lowering):
    """The lowering of a start, or of a wait."""

    def __init__(
        self, on_gpu: bool, ctx: mlir.LoweringRuleContext, of: str, p: Params, given: Avals
    ):
        super().__init__(ctx, SPECS[of], p, on_gpu)
        self.plan = _Plan(self.spec, p, given)
        reduces = self.reduces(self.plan.op)
        wire = [x and carrier(x, reduces) for x in (self.plan.received_type, self.plan.kept)]
        if not all(isinstance(n, int) for x in wire if x for n in x.shape):
            raise NotImplementedError(f"i{of}: cannot be exported with symbolic shapes")
        self.received_wire, self.kept_wire = wire

    def emit(self, target: str, operands: Operands, out: Avals, initial: bool) -> list[Any]:
        """Emit the custom call, which takes and gives the token; its other results."""
        plan, gives = self.plan, self.received_wire
        shape = [] if gives is None else [_XLA_CODES[str(gives.dtype)], int(np.prod(gives.shape))]
        ctx = self.ctx.replace(
            avals_in=[*(aval for _, aval in operands), compat.abstract_token],
            avals_out=[*out, compat.abstract_token],
        )
        *results, self.token = jax.ffi.ffi_lowering(target, has_side_effect=True)(
            ctx,
            *(value for value, _ in operands),
            self.token,
            **self.attributes(plan.op or self.spec.name, **plan.attrs),
            gives=np.array(shape, np.int64),
            initial=np.int64(initial),
            keeps=np.int64(self.kept_wire is not None),
            local=np.int64(plan.op is None),
            sends=np.int64(plan.sends),
        )
        return results

    def end(self) -> None:
        token = mlir.TokenSet({effect: self.token})
        self.ctx.set_tokens_out(self.ctx.tokens_in.update_tokens(token))


def _lower_start(
    on_gpu: bool, ctx: mlir.LoweringRuleContext, *args: Any, of: str, **p: Any
) -> list[Any]:
    arrays, numbers, token = split_start(
        {"of": of, **p}, list(zip(args, ctx.avals_in, strict=True))
    )
    low = _Requested(on_gpu, ctx, of, p, [aval for _, aval in arrays])
    plan = low.plan
    for operand in numbers:
        low.use_numbers(operand)
    operands = []
    if plan.sends or plan.initial or plan.kept is not None:
        (x,) = arrays
        if plan.before is not None:
            function, aval = plan.before
            x = low.local(function, aval, x), aval
        operands = [low.convert(x, carrier(x[1], low.reduces(plan.op)))]
    if on_gpu and plan.op and not SPECS[plan.op].has_peer and not p.get("eager"):
        low._gpu_target(plan.op, operands)  # what carries it meets the other ranks
    (handle,) = low.emit("mpi4jax_start", [*operands, *low.numbers], [HANDLE], plan.initial)
    low.end()
    return [handle, *(value for value, _ in token)]


def _lower_wait(
    on_gpu: bool, ctx: mlir.LoweringRuleContext, *args: Any, of: str, given: Any, **p: Any
) -> list[Any]:
    (handle,), numbers, token = split_wait(
        {"of": of, **p}, list(zip(args, ctx.avals_in, strict=True))
    )
    numbers = numbers[SPECS[of].has_counts :]  # counts are for the transpose alone
    derived = p.pop("derived")
    # Which communicator it is, the native module knows: what is eager is compiled for all.
    low = _Requested(
        on_gpu, ctx, of, {**p, "comm": p["comm"].any}, [] if given is None else [given]
    )
    plan, wire = low.plan, [x for x in (low.received_wire, low.kept_wire) if x is not None]
    found = low.emit("mpi4jax_wait", [handle, *numbers], wire, derived)
    back = iter(found)
    received: Any = None
    kept: Any = None
    if plan.received_type is not None:
        received = low.convert((next(back), low.received_wire), plan.received_type)
    if plan.kept is not None:
        kept = low.convert((next(back), low.kept_wire), plan.kept)
    results = []
    if plan.result == _SUM:
        results = [low.plus(received[0], kept)]
    elif plan.result == _ZEROS:
        results = [low.zeros(plan.out)]
    elif plan.result is not None:
        results = [(received if plan.result == _RECEIVED else kept)[0]]
    low.end()
    return [*results, *(value for value, _ in token)]


for _platform, _on_gpu in (("cpu", _native.is_gpu_on_cpu()), ("cuda", True)):
    for _primitive, _rule in ((start_p, _lower_start), (wait_p, _lower_wait)):

        def _lower(*args: Any, _rule: Any = _rule, _on_gpu: bool = _on_gpu, **p: Any) -> list[Any]:
            return _rule(_on_gpu, *args, **p)

        # Not cached: it would name one line for all.
        mlir.register_lowering(_primitive, _lower, platform=_platform, cacheable=False)
