"""The code of one equation: ordinary JAX code, and custom calls in the order of the token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.core import ShapedArray
from jax.interpreters import mlir

from .._jax import compat
from .._jax.workarounds import is_needed
from .._op.primitive import HIDDEN, effect

Operand = tuple[Any, ShapedArray]  # an MLIR value, and its type
Operands = list[Operand]
Avals = list[ShapedArray]


class Emitter:
    """Emits the code of one equation.

    Attributes:
        on_gpu: whether arrays are in the memory of a GPU.
        ctx: JAX's context of the equation.
        token: the XLA token that the next custom call takes.
    """

    def __init__(self, on_gpu: bool, ctx: mlir.LoweringRuleContext, name: str):
        self.on_gpu, self.ctx = on_gpu, ctx
        if effect not in ctx.tokens_in.effects():
            raise NotImplementedError(f"{name}: called {HIDDEN}")
        self.token = ctx.tokens_in.get(effect)

    def finish(self) -> None:
        """Hand on the token. Nothing can be emitted after that."""
        # Other ordered effects have tokens of their own.
        tokens = mlir.TokenSet({effect: self.token})
        self.ctx.set_tokens_out(self.ctx.tokens_in.update_tokens(tokens))

    def local(self, f: Callable[..., Any], out: ShapedArray, *operands: Operand) -> Any:
        """Emit ``f``, ordinary JAX code, and return its one result, which has the type ``out``."""
        (y,) = self.locals(lambda *values: [f(*values)], [out], *operands)
        return y

    def locals(self, f: Callable[..., Any], out: Avals, *operands: Operand) -> list[Any]:
        """Do the same for several results."""
        ctx = self.ctx.replace(
            avals_in=[aval for _, aval in operands], avals_out=out, tokens_in=mlir.TokenSet()
        )
        return list(mlir.lower_fun(f)(ctx, *(value for value, _ in operands)))

    def convert(self, operand: Operand, to: ShapedArray) -> Operand:
        """Return an array as one of another dtype."""
        if operand[1].dtype == to.dtype:
            return operand
        return self.local(lambda x: x.astype(to.dtype), to, operand), to

    def pure_call(self, target: str, operands: Operands, out: Avals) -> list[Any]:
        """Emit a custom call that does not communicate, and return its results."""
        ctx = self.ctx.replace(avals_in=[aval for _, aval in operands], avals_out=out)
        lower = jax.ffi.ffi_lowering(target, has_side_effect=False)
        return list(lower(ctx, *(value for value, _ in operands)))

    def custom_call(
        self,
        target: str,
        operands: Operands,
        out: Avals,
        description: str,
        aliases: dict[int, int] | None = None,
    ) -> list[Any]:
        """Emit a custom call, which takes and returns the token; return its other results."""
        operands = self._unfused(operands)
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
        return [y for y, _ in self._unfused(list(zip(results, out, strict=True)))]

    def _unfused(self, values: Operands) -> Operands:
        """Return operands or results behind a barrier, so that XLA does not fuse them with the
        call.

        On a GPU, XLA makes one kernel of a call, the slices that it takes and the slices that its
        results update, and ends the process because of the token beside them.
        """
        if not self.on_gpu or not values or not is_needed("fused slices"):
            return values
        avals = [aval for _, aval in values]
        fenced = self.locals(lambda *x: jax.lax.optimization_barrier(list(x)), avals, *values)
        return list(zip(fenced, avals, strict=True))
