"""What an op is compiled to: custom calls that follow one another, and local arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.interpreters import mlir

from . import _compat, _native
from ._primitive import ENVELOPE, effect, result_avals, split
from ._spec import SPECS, Params, Spec

# Envelopes are stored with this added, which makes all of MPI's constants positive: JAX makes zeros
# of what a branch of a `cond` keeps for the backward pass where it takes another branch.
ENVELOPE_OFFSET = 3
# Values of `env_in`: which side of a message the envelope operand overrides.
RECEIVE_SIDE, SEND_SIDE = 1, 2

Operand = tuple[Any, Any]  # a value of the compiler's, and its aval
Operands = list[Operand]
Avals = list[Any]

# XLA packs several values of a 4-bit type into a byte, where a rank's block may not begin: they
# travel as values of a wider type, which holds each of them exactly.
_CARRIERS = dict(_native.carriers())


def carrier(aval: Any) -> Any:
    """The aval under which an array is communicated."""
    name = _CARRIERS.get(str(aval.dtype))
    return ShapedArray(aval.shape, np.dtype(jnp.dtype(name))) if name else aval


class Lowering:
    """The lowering of one equation. An op's own part of it is a function of this, of the arrays and
    of the avals of the arrays that result."""

    def __init__(self, ctx: mlir.LoweringRuleContext, spec: Spec, p: Params, on_gpu: bool):
        self.ctx, self.spec, self.p, self.on_gpu = ctx, spec, p, on_gpu
        self.in_place = p.get("in_place", False)
        self.envelope: Operands = []
        if effect not in ctx.tokens_in.effects():
            raise NotImplementedError(
                f"{spec.name}: called inside a primitive that does not tell JAX of the effects of "
                "the functions in it (a lineax.linear_solve is one), so that the operation could "
                "be lost; use a solver of JAX (jax.scipy.sparse.linalg, custom_linear_solve)"
            )
        self.token = ctx.tokens_in.get(effect)

    def call(
        self,
        op: str,
        *operands: Operand,
        out: Sequence[Any] = (),
        in_place: bool | None = None,
        **attrs: Any,
    ) -> list[Any]:
        """Emit the custom call of ``op`` on (value, aval) pairs; its results, without the token.

        Args:
            op: name of the op.
            *operands: values with their avals.
            out: avals of the results that are arrays.
            in_place: whether each result is to be where its operand is; by default where
                ``_in_place`` says so.
            **attrs: attributes that only this op has.
        """
        p = self.p
        status = p.get("status")
        if self.ctx.module_context.lowering_parameters.for_export:
            _check_exportable(self.spec.name, p)
        if status is not None:
            self.ctx.module_context.add_keepalive(status.mpi)
        carried = [self._convert(operand, carrier(operand[1])) for operand in operands]
        carried += self.envelope
        wire = [carrier(aval) for aval in out]
        outs = [*wire, *([ENVELOPE] if p.get("env_out") else [])]
        values = [value for value, _ in carried]
        # The adjoint of a reduce calls bcast, which has none.
        reduction = p["reduction"].name if SPECS[op].has_reduction else ""
        target = self._gpu_target(op, reduction, carried) if self.on_gpu else f"mpi4jax_{op}"
        if in_place is None:
            in_place = self.in_place and op == self.spec.name
        aliases = {i: i for i in range(len(out))} if in_place else None
        lower = jax.ffi.ffi_lowering(target, has_side_effect=True, operand_output_aliases=aliases)
        ctx = self.ctx.replace(
            avals_in=[*(aval for _, aval in carried), _compat.abstract_token],
            avals_out=[*outs, _compat.abstract_token],
        )
        *results, self.token = lower(
            ctx,
            *values,
            self.token,
            comm=p["comm"].key,
            dest=np.int64(p.get("dest", -1)),
            env_in=np.int64(p.get("env_in", 0)),
            env_out=np.int64(p.get("env_out", 0)),
            op=op,
            recvtag=np.int64(p.get("recvtag", -1)),
            reduction=reduction,
            reverse=np.int64(attrs.pop("reverse", 0)),
            root=np.int64(p.get("root", -1)),
            sendtag=np.int64(p.get("sendtag", -1)),
            site=_compat.user_line(self.ctx),
            source=np.int64(p.get("source", -1)),
            status=np.int64(status.address if status is not None else 0),
            **attrs,
        )
        for i, (carried_aval, aval) in enumerate(zip(wire, out, strict=True)):
            results[i], _ = self._convert((results[i], carried_aval), aval)
        if p.get("env_out"):
            results[-1] = self.local(
                lambda e: e + ENVELOPE_OFFSET, ENVELOPE, (results[-1], ENVELOPE)
            )
        return results

    def use_envelope(self, stored: Operand) -> None:
        """Let an envelope override one side of a message; the parameters hold where it is unset."""
        sides = {RECEIVE_SIDE: ("source", "recvtag"), SEND_SIDE: ("dest", "sendtag")}
        default = np.array([self.p[name] for name in sides[self.p["env_in"]]], np.int32)
        set_or_default = self.local(
            lambda e: jnp.where(e == 0, default, e - ENVELOPE_OFFSET), ENVELOPE, stored
        )
        self.envelope = [(set_or_default, ENVELOPE)]

    def _gpu_target(self, op: str, reduction: str, operands: list[Operand]) -> str:
        """The custom-call target: some transports leave some calls to a second one."""
        return _native.gpu_target(
            op,
            self.p["comm"].key,
            str(operands[0][1].dtype) if operands else None,
            reduction,
            self.p.get("source", -1),
            self.p.get("recvtag", -1),
            self.p.get("dest", -1),
            self.p.get("sendtag", -1),
            self.p.get("status") is not None,
        )

    def _convert(self, operand: Operand, to: Any) -> Operand:
        if operand[1].dtype == to.dtype:
            return operand
        return self.local(lambda v: v.astype(to.dtype), to, operand), to

    def local(self, f: Callable[..., Any], out: Any, *operands: Operand) -> Any:
        """Emit ``f``, ordinary JAX code, on (value, aval) pairs."""
        ctx = self.ctx.replace(
            avals_in=[aval for _, aval in operands], avals_out=[out], tokens_in=mlir.TokenSet()
        )
        (y,) = mlir.lower_fun(f, multiple_results=False)(ctx, *(value for value, _ in operands))
        return y

    def zeros(self, aval: Any) -> Any:
        return self.local(lambda: jnp.zeros(aval.shape, aval.dtype), aval)

    def plus(self, y: Any, x: Operand) -> Any:
        """``x`` and a value like it, added."""
        return self.local(jnp.add, x[1], (y, x[1]), x)


def _check_exportable(op: str, p: Params) -> None:
    """Refuse to export what names nothing in another process, or something else."""
    comm, reduction = p["comm"], p.get("reduction")
    if "#" in comm.key:
        raise ValueError(
            f"{op}: communicator {comm.key} has no name of its own, by which an exported program "
            "could find it again; give it one with comm.Set_name(...) before its first use"
        )
    if reduction is not None and reduction.user:
        raise ValueError(f"{op}: a reduction made with MPI.Op.Create cannot be exported")
    if p.get("status") is not None:
        raise ValueError(f"{op}: cannot be exported with a status, which is in this process")


def _everywhere(low: Lowering, xs: Operands, out: Avals) -> list[Any]:
    """Every rank sends and every rank receives."""
    return low.call(low.spec.name, *xs, out=out)


def lowering(
    spec: Spec, on_gpu: bool, ctx: mlir.LoweringRuleContext, *args: Any, **p: Any
) -> list[Any]:
    """The lowering rule of a primitive."""
    arrays, env, token = split(spec, p, list(zip(args, ctx.avals_in, strict=True)))
    low = Lowering(ctx, spec, p, on_gpu)
    for stored in env:
        low.use_envelope(stored)
    out = result_avals(spec, p, [aval for _, aval in arrays])
    lower = spec.adjoint if p.get("adjoint") else spec.lower
    results = (lower or _everywhere)(low, arrays, out)
    # Other ordered effects have tokens of their own.
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({effect: low.token})))
    return [*results, *(value for value, _ in token)]
