"""The scope, which hides the effect of operations from JAX, so that dispatch is fast.

JAX dispatches a compiled function from C++ only if it has no effects. Each module that JAX lowers
to run, whichever jit it comes from, is therefore wrapped in one *scope*: a primitive that has the
whole jaxpr inside and no MPI effect outside. Its lowering starts a chain of XLA tokens and lets JAX
thread it through everything inside. A scope is made after all transformations, at the top of a
module, where there is nothing on the same level that it could be reordered with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from .._check import whole_arrays
from .._check.missing_pvary import warn_of_missing_pvary
from .._check.misuse import check_misuse
from .._jax import compat, one_order
from .._jax.token_calls import widen
from .._jax.workarounds import is_needed
from .._job.flush import started_here
from .._op.primitive import HIDDEN, effect
from . import in_place
from .lowering import lowered

one_order.share(effect)

scope_p = Primitive("mpi4jax")
scope_p.multiple_results = True


@scope_p.def_effectful_abstract_eval
def _abstract_eval(*args: Any, jaxpr: ClosedJaxpr) -> tuple[Any, set[Any]]:
    return jaxpr.out_avals, {e for e in jaxpr.effects if e != effect}


def _lowering(ctx: mlir.LoweringRuleContext, *args: Any, jaxpr: ClosedJaxpr) -> Any:
    outer = ctx.tokens_in
    tokens = {effect: stablehlo.create_token()}
    tokens.update({e: outer.get(e) for e in outer.effects()})
    inner = ctx.replace(tokens_in=mlir.TokenSet(tokens), tokens_out=None)
    out = mlir.core_call_lowering(inner, *args, name="mpi4jax", call_jaxpr=jaxpr)
    if outer.effects():
        ctx.set_tokens_out(mlir.TokenSet({e: inner.tokens_out.get(e) for e in outer.effects()}))
    return out


mlir.register_lowering(scope_p, _lowering, cacheable=False)
compat.drop_unused(scope_p, "jaxpr")


def _scoped(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Return a jaxpr of one scope, with ``jaxpr`` in it."""
    inside, consts = compat.close_constants(jaxpr)
    count = len(consts)

    def run(*args: Any) -> Any:
        return scope_p.bind(*consts, *args, jaxpr=inside)

    scoped = jax.make_jaxpr(run)(*inside.in_avals[count:])
    # Arguments and results keep their names.
    return ClosedJaxpr(scoped.jaxpr.replace(debug_info=jaxpr.jaxpr.debug_info), scoped.consts)


SEVERAL_DEVICES = (
    "mpi4jax: a function that communicates must run on one device, got several; start one rank "
    "for each device, and put the arrays of each rank on its device (of a global array of "
    "jax.distributed, the rank's part is x.addressable_data(0))"
)


def _hide(jaxpr: ClosedJaxpr, donated: Sequence[bool], for_export: bool) -> ClosedJaxpr:
    """Return what JAX lowers in place of ``jaxpr``."""
    if effect not in jaxpr.effects:
        return jaxpr
    started_here()
    lowered.makes, lowered.blocks = [], whole_arrays.noted(jaxpr.jaxpr)
    check_misuse(jaxpr)
    warn_of_missing_pvary(jaxpr)
    # An exported function shows its effect where it is called. Refs are replaced by JAX below
    # here, outside of scopes only. Programs of several devices are ordered by runtime tokens alone.
    if for_export or compat.has_refs(jaxpr) or jax.local_device_count() > 1:
        return jaxpr
    return _scoped(in_place.mark(jaxpr, donated))


def _finish(computation: Any) -> None:
    if is_needed("calls of a token alone"):
        widen(computation.stablehlo())
    makes, blocks = lowered.makes, lowered.blocks
    if makes or blocks:

        def begins(args: Sequence[Any]) -> None:
            whole_arrays.compare([(args[k], block) for k, block in blocks])

        def ended() -> None:
            for comm, kind in makes:
                comm.made.add(kind)
            whole_arrays.look([block for _, block in blocks])

        compat.on_first_call(computation, begins, ended)


if not compat.replace_lowered(effect, _hide, _finish, SEVERAL_DEVICES, f"mpi4jax: called {HIDDEN}"):
    compat.warn_of_changed_jax(
        "compiled functions that communicate give correct results, and each call takes about 100 "
        "us longer"
    )
