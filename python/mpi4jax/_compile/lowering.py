"""The lowering of operations: custom calls in order, and local arithmetic."""

from __future__ import annotations

import functools
import json
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from mpi4py import MPI

from .. import _native
from .._check.whole_arrays import Block
from .._jax import compat
from .._jax.workarounds import is_needed
from .._op.comm import MEAN, Comm, Status
from .._op.leaves import joined, message_type, parted
from .._op.operation import (
    ASKED,
    OFFSET,
    How,
    Message,
    Operation,
    Ragged,
    Receiving,
    Reducing,
    Rooted,
    WithParts,
)
from .._op.plan import Plan, Result
from .._op.primitive import HIDDEN, effect, envelope, result_avals, split
from .._op.table import DTYPES, ROWS
from . import reductions
from .description import check_exportable, forms_of, line_of, parts_of

# Names of the values in an operand, as in `Operand` of `src/call/envelope.rs`.
_OPERANDS: dict[str | None, str] = {"traced": "peers", "recorded": "peers", "call": "call"}

# Placeholder for a value that is in an operand: `Envelope::TRACED` in `src/call/envelope.rs`.
_TRACED = np.iinfo(np.int32).min

Operand = tuple[Any, ShapedArray]  # an MLIR value, and its type
Operands = list[Operand]
Avals = list[ShapedArray]


class _Lowered(threading.local):
    """Of the module that this thread lowers: the private communicators that it makes, and its
    arguments that are compared when it is first called, by their index from the end."""

    def __init__(self) -> None:
        self.makes: list[tuple[Comm, str]] = []
        self.blocks: list[tuple[int, Block]] = []


lowered = _Lowered()


def carrier(aval: ShapedArray, reduces: bool = False) -> Any:
    """Return the type as which an array is communicated, or communicated and reduced.

    XLA packs several values of a 4-bit type into a byte, where a rank's block may not begin: they
    travel as values of a wider type, which holds each of them exactly. The core has no arithmetic
    for floats of 8 bits: they are reduced as values of a wider type.
    """
    dtype = DTYPES[str(aval.dtype)]
    wider = dtype.carrier or (dtype.reduced_as if reduces else None)
    return ShapedArray(aval.shape, np.dtype(jnp.dtype(wider))) if wider else aval


class Lowering:
    """The lowering of one equation."""

    def __init__(
        self, ctx: mlir.LoweringRuleContext, op: Operation, how: How, on_gpu: bool = False
    ):
        self.ctx, self.op, self.how, self.on_gpu = ctx, op, how, on_gpu
        self.reduction = op.reduction if isinstance(op, Reducing) else None
        self.numbers: Operands = []
        self.forms: dict[str, str] | None = None
        if effect not in ctx.tokens_in.effects():
            raise NotImplementedError(f"{op.name}: called {HIDDEN}")
        self.token = ctx.tokens_in.get(effect)

    def run(self, plan: Plan, leaves: Operands, out: Avals) -> list[Any]:
        """Run a plan at once, and return its results without the token."""
        op, mean = self.op, self.reduction is MEAN
        if plan.result is Result.OPERAND and plan.select is None and plan.call is None and not mean:
            return [value for value, _ in leaves]
        before, after = op.lead()
        rest = iter(leaves)
        packed = [self.packed([next(rest) for _ in range(n)], before) for n in op.arity(self.how)]
        to = [message_type(out, after)] if out else []
        operands = self.selected(plan, packed, to)
        others: list[Any] = []
        if plan.call is not None:
            sent = operands[:1] if plan.sends else []
            others = self.call(plan.call, *sent, out=to if plan.receives else [], **plan.attrs)
        received = others.pop(0) if plan.receives and out else None
        operand = operands[-1] if operands else None
        return [*self.results(plan, received, operand, out, after), *others]

    def packed(self, leaves: Operands, lead: int) -> Operand:
        """Return the message of leaves: of a single one, itself. The core copies, or XLA does."""
        types = [aval for _, aval in leaves]
        if len(leaves) == 1:
            return leaves[0]
        to = message_type(types, lead)
        if self.core_copies(to):
            (message,) = self.copied("mpi4jax_pack", leaves, [to])
        else:
            message = self.local(lambda *xs: joined(xs, lead), to, *leaves)
        return message, to

    def unpacked(self, message: Operand, out: Avals, lead: int) -> list[Any]:
        """Return the leaves of a message, which have these types."""
        if len(out) == 1:
            return [message[0]]
        if self.core_copies(message[1]):
            return self.copied("mpi4jax_unpack", [message], out)
        return self.locals(lambda x: parted(x, out, lead), out, message)

    def core_copies(self, aval: ShapedArray) -> bool:
        """Return whether the core packs and unpacks a message, which saves XLA a kernel per leaf.

        XLA does it on a GPU; in exported programs, because the process that runs one may not have
        the core; and for values of less than a byte, several of which XLA stores in one byte.
        """
        for_export = self.ctx.module_context.lowering_parameters.for_export
        return not (self.on_gpu or for_export or aval.dtype.name in _NARROW)

    def copied(self, target: str, operands: Operands, out: Avals) -> list[Any]:
        ctx = self.ctx.replace(avals_in=[aval for _, aval in operands], avals_out=out)
        copy = jax.ffi.ffi_lowering(target, has_side_effect=False)
        return list(copy(ctx, *(value for value, _ in operands)))

    def mean(self, x: Operand, of_adjoint: bool) -> Operand:
        """Return the mean, where this rank has the sum; of the operand of an adjoint, what the sum
        gets. Other values stay as they are."""
        op = self.op
        if self.reduction is not MEAN or op.adjoint != of_adjoint:
            return x
        if isinstance(op, Rooted) and not op.is_root:
            return x
        return self.local(lambda y: mean_of_sum(y, op.comm.size), x[1], x), x[1]

    def selected(self, plan: Plan, operands: Operands, out: Avals) -> Operands:
        """Return the part of the operands that a plan takes."""
        if plan.select is not None:
            operands = [(self.local(plan.select, out[0], *operands), out[0])]
        return [self.mean(x, of_adjoint=True) for x in operands]

    def results(
        self, plan: Plan, received: Any, operand: Operand | None, leaves: Avals, lead: int
    ) -> list[Any]:
        """Return the results of a plan, which are like these leaves, from received data and its
        operand."""
        if not leaves:
            return []
        message = message_type(leaves, lead)
        y = self.result(plan, received, operand, message)
        return self.unpacked(self.mean((y, message), of_adjoint=False), leaves, lead)

    def result(self, plan: Plan, received: Any, operand: Operand | None, out: Any) -> Any:
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

    def call(
        self,
        op: str,
        *operands: Operand,
        out: Sequence[Any] = (),
        in_place: bool | None = None,
        **attrs: Any,
    ) -> list[Any]:
        """Emit the custom call of ``op`` on (value, aval) pairs.

        Return its results without the token.

        Args:
            op: name of the op.
            *operands: values with their avals.
            out: avals of the results that are arrays.
            in_place: whether each result is to be where its operand is; by default where
                `in_place.py` says so.
            **attrs: what only the description of this op has.
        """
        status = self.status
        if kind := self.op.unmade(ROWS[op]):
            lowered.makes.append((cast(Comm, self.op.comm), kind))
        if self.ctx.module_context.lowering_parameters.for_export:
            check_exportable(self.op)
        if status is not None and status.mpi is not None:
            self.ctx.module_context.add_keepalive(status)
        if op in ("scan", "exscan") and self.may_gather(operands[0][1]):
            return [self.gathered(op, operands[0], **attrs)]
        carried = [self.to_wire(op, operand) for operand in operands] + self.numbers
        wire = [self.wire(op, aval)[0] for aval in out]
        attrs |= self.reduction_on_wire(op, operands)
        envelopes = envelope(self.op, self.how)
        outs = [*wire, *envelopes]
        if "parts" not in attrs:
            attrs |= self.parts(op, [*(aval for _, aval in operands), *out])
        if in_place is None:
            # A packed message is a temporary array, which may be overwritten.
            is_packed = sum(self.op.arity(self.how)) > 1
            is_ours = self.how.in_place or (is_packed and self.op.overwrites())
            in_place = is_ours and op == self.op.name
        aliases = {i: i for i in range(len(out))} if in_place else None
        description = self.describe(op, **attrs)
        results = self.custom_call(f"mpi4jax_{op}", carried, outs, description, aliases)
        for i, aval in enumerate(out):
            results[i] = self.from_wire(op, results[i], aval)
        if envelopes and not self.op.row.is_ragged:
            results[-1] = self.local(
                lambda e: e + OFFSET, envelopes[0], (results[-1], envelopes[0])
            )
        return results

    def wire(self, op: str | None, aval: ShapedArray) -> tuple[Any, reductions.Converted | None]:
        """Return the type as which an array is communicated by the call of ``op``, and how it is
        converted to this type, if NCCL does not reduce arrays of its :func:`carrier`."""
        reduces = self.reduces(op)
        carried = carrier(aval, reduces)
        # A scan that the host reduces is reduced in the operand's own type.
        reduction = self.reduction if reduces else None
        if reduction is None or op in ("scan", "exscan"):
            return carried, None
        if not reductions.are_on_stream(self.on_gpu):
            return carried, None
        converted = reductions.converted(reduction.name, carried.dtype, self.op.comm.size)
        return (carried.update(dtype=converted.dtype) if converted else carried), converted

    def to_wire(self, op: str | None, operand: Operand) -> Operand:
        """Return an operand as the call of ``op`` takes it."""
        wire, converted = self.wire(op, operand[1])
        if converted is None:
            return self.convert(operand, wire)
        carried = self.convert(operand, carrier(operand[1], True))
        return self.local(converted.to, wire, carried), wire

    def from_wire(self, op: str | None, y: Any, aval: ShapedArray) -> Any:
        """Return a result of the call of ``op`` as one of the type that the program has."""
        wire, converted = self.wire(op, aval)
        if converted is not None:
            carried = carrier(aval, True)
            y, wire = self.local(converted.back, carried, (y, wire)), carried
        return self.convert((y, wire), aval)[0]

    def reduction_on_wire(self, op: str | None, operands: Sequence[Operand]) -> dict[str, Any]:
        """Return the reduction of a call, where it is another one than the program's."""
        converted = self.wire(op, operands[0][1])[1] if operands else None
        return {"reduction": converted.reduction} if converted else {}

    def may_gather(self, aval: ShapedArray) -> bool:
        """Return whether a prefix reduction of a block gathers the blocks of all ranks."""
        if not self.reduces(self.op.name) or self.how.operand == "call":
            return False
        assert self.reduction is not None
        is_fixed = all(isinstance(size, int) for size in aval.shape)
        return (
            is_fixed
            and reductions.are_on_stream(self.on_gpu)
            and reductions.can_gather(self.reduction.name, aval.dtype, aval.size, self.op.comm.size)
        )

    def gathered(self, op: str, operand: Operand, reverse: bool = False) -> Any:
        """Return a prefix reduction by XLA, of the blocks of all ranks."""
        assert self.reduction is not None
        comm, aval, name = self.op.comm, operand[1], self.reduction.name
        blocks = aval.update(shape=(comm.size, *aval.shape))
        (all_of_them,) = self.call("allgather", operand, out=[blocks], in_place=False)

        def fold(x: Any) -> Any:
            is_exclusive = op == "exscan"
            return reductions.folded(name, x, comm.rank, is_exclusive=is_exclusive, reverse=reverse)

        return self.local(fold, aval, (all_of_them, blocks))

    def custom_call(
        self,
        target: str,
        operands: Operands,
        out: Avals,
        description: str,
        aliases: dict[int, int] | None = None,
    ) -> list[Any]:
        """Emit a custom call, which takes and returns the token; return its other results."""
        operands = self.unfused(operands)
        lower = jax.ffi.ffi_lowering(target, has_side_effect=True, operand_output_aliases=aliases)
        # Symbolic shapes are resolved when an exported program is called, but not beside a token.
        fixed = all(isinstance(size, int) for aval in out for size in aval.shape)
        ctx = self.ctx.replace(
            avals_in=[*(aval for _, aval in operands), compat.abstract_token],
            avals_out=[*out, compat.abstract_token] if fixed else out,
        )
        values = (value for value, _ in operands)
        results = list(lower(ctx, *values, self.token, call=description))
        if fixed:
            self.token = results.pop()
        else:
            ctx = self.ctx.replace(avals_in=out, avals_out=[compat.abstract_token])
            (self.token,) = jax.ffi.ffi_lowering("mpi4jax_after")(ctx, *results)
        return [y for y, _ in self.unfused(list(zip(results, out, strict=True)))]

    def reduces(self, op: str | None) -> bool:
        """Return whether the core computes with the operands; not if MPI calls the user's code."""
        if op is None or not ROWS[op].has_reduction:
            return False
        return self.reduction is not None and not self.reduction.user

    @property
    def status(self) -> Status | None:
        """The status that the operation fills."""
        return self.op.status if isinstance(self.op, Receiving) else None

    def parts(self, op: str, avals: Avals) -> dict[str, Any]:
        """Return what the call of ``op`` says about parts or rows, from the first types of its
        operands and results.
        """
        if ROWS[op].has_parts:
            assert isinstance(self.op, WithParts)
            return {"parts": parts_of(self.op, avals[0])}
        if isinstance(self.op, Ragged):
            rows, capacity = self.op.rows
            row = math.prod(avals[0].shape[1:])
            owners = {"has_owners": True} if self.op.has_owners else {}
            return {"ragged": {"rows": rows, "capacity": capacity, "row": row, **owners}}
        return {}

    def describe(self, op: str, **more: Any) -> str:
        """Return the description of the call of ``op`` in JSON.

        `Description` in `src/xla/description.rs`, without entries that are None.
        """
        how, row, status = self.how, ROWS[op], self.status
        fields = {
            "op": op,
            "comm": self.op.comm.key,
            "operand": _OPERANDS.get(how.operand),
            # The adjoint of a reduce calls bcast, which has no reduction.
            "reduction": (self.reduction.name if self.reduction is not MEAN else "SUM")
            if row.has_reduction and self.reduction is not None
            else None,
            "root": self.op.root if row.has_root and isinstance(self.op, Rooted) else None,
            "envelope": self._peers() if row.has_peer else None,
            "envelope_result": bool(how.env_out) or None,
            "may_be_short": how.env_out == ASKED or None,
            "status": (status is not None and status.address) or None,
            "forms": self.forms,
            # An eager op is compiled once for all callers, so the line is an operand.
            "line": None if how.eager else line_of(self.ctx),
            **more,
        }
        return json.dumps({name: x for name, x in fields.items() if x is not None}, default=int)

    def _peers(self) -> dict[str, int]:
        """Return ranks and tags of a message by their names."""
        assert isinstance(self.op, Message)
        peers = self.op.peers().items()
        return {name: _TRACED if value is None else value for name, value in peers}

    def use_numbers(self, numbers: Operand) -> None:
        """Take destination and source of a message, or the counts, from an operand."""
        if isinstance(self.op, Message) and self.how.operand != "call":
            peers = self.op.peers().values()
            unset = np.array([-OFFSET if value is None else value for value in peers], np.int32)
            values = self.local(lambda n: jnp.where(n == 0, unset, n - OFFSET), numbers[1], numbers)
            numbers = (values, numbers[1])
        self.numbers.append(numbers)

    def finish(self) -> None:
        """Hand on the token. Nothing can be emitted after that."""
        # Other ordered effects have tokens of their own.
        tokens = mlir.TokenSet({effect: self.token})
        self.ctx.set_tokens_out(self.ctx.tokens_in.update_tokens(tokens))

    def unfused(self, values: Operands) -> Operands:
        """Return operands or results behind a barrier, so that XLA does not fuse them with the
        call.

        On a GPU, XLA makes one kernel of a call, the slices that it takes and
        the slices that its results update, and ends the process because of the token beside them.
        """
        if not self.on_gpu or not values or not is_needed("fused slices"):
            return values
        avals = [aval for _, aval in values]
        fenced = self.locals(lambda *x: jax.lax.optimization_barrier(list(x)), avals, *values)
        return list(zip(fenced, avals, strict=True))

    def convert(self, operand: Operand, to: Any) -> Operand:
        if operand[1].dtype == to.dtype:
            return operand
        return self.local(lambda v: v.astype(to.dtype), to, operand), to

    def local(self, f: Callable[..., Any], out: Any, *operands: Operand) -> Any:
        """Emit ``f``, ordinary JAX code, on (value, aval) pairs."""
        (y,) = self.locals(lambda *values: [f(*values)], [out], *operands)
        return y

    def locals(self, f: Callable[..., Any], out: Avals, *operands: Operand) -> list[Any]:
        """Do the same for several results."""
        ctx = self.ctx.replace(
            avals_in=[aval for _, aval in operands], avals_out=out, tokens_in=mlir.TokenSet()
        )
        return list(mlir.lower_fun(f)(ctx, *(value for value, _ in operands)))


_NARROW = {"int2", "uint2", "int4", "uint4", "float4_e2m1fn"}  # less than a byte


def mean_of_sum(y: Any, size: int) -> Any:
    """Return the mean over ``size`` ranks, given their sum."""
    # A narrow float type may not be able to represent the number of ranks.
    dividend = y.astype(np.float32) if y.dtype.itemsize < 4 else y
    return (dividend / size).astype(y.dtype)


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
    low = Lowering(ctx, op, how, on_gpu)
    for operand in numbers:
        low.use_numbers(operand)
    low.forms = forms_of(op, how, [aval for _, aval in arrays])
    out = result_avals(op, how, [aval for _, aval in arrays])
    results = op.lower(low, arrays, out)
    low.finish()
    return [*results, *(value for value, _ in token)]
