"""Everything that depends on JAX's version or on JAX's internals.

This is the only module that imports from ``jax._src``. Supported: JAX 0.7 and newer.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core, effects, source_info_util
from jax._src.ad_checkpoint import remat_p
from jax._src.interpreters import ad as _ad
from jax._src.lib.mlir.dialects import hlo as _hlo
from jax._src.pjit import jit_p
from jax.extend.core.primitives import closed_call_p, cond_p, scan_p, while_p
from jax.interpreters import mlir, xla
from jax.interpreters import partial_eval as pe

__all__ = [
    "AbstractToken",
    "Token",
    "abstract_token",
    "add_effect_type",
    "bind_eqn",
    "closed_call_p",
    "cond_p",
    "eqn_line",
    "eval_primitive",
    "fresh_xla_token",
    "intercept_differentiation",
    "jit_p",
    "never_dead",
    "perturb",
    "perturbed",
    "register_targets",
    "remat_p",
    "scan_counts",
    "scan_p",
    "trace_state_clean",
    "user_line",
    "while_p",
]

AbstractToken = core.AbstractToken
Token = core.Token
abstract_token = core.abstract_token
trace_state_clean = core.trace_state_clean
Effect = effects.Effect

_OPS_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_ops.py")
# Frames of this package are not the user's: error messages and `user_line` skip them.
source_info_util.register_exclusion(os.path.dirname(os.path.abspath(__file__)))


def add_effect_type(effect: type[effects.Effect]) -> None:
    """Declare ``effect`` ordered, and allowed wherever an op may stand.

    Leaving any of these out loses ops: without ``partial_eval_kept_effects``, for instance, a
    ``send`` (which has no outputs) drops out of the forward pass of a gradient.
    """
    for kind in (
        effects.lowerable_effects,
        effects.ordered_effects,
        effects.control_flow_allowed_effects,
        effects.custom_derivatives_allowed_effects,
        effects.remat_allowed_effects,
        effects.partial_eval_kept_effects,
    ):
        kind.add_type(effect)


def register_targets(
    targets: Sequence[tuple[str, dict[str, Any], str]],
    types: Sequence[tuple[str, dict[str, Any], str]],
) -> None:
    """Hand the native module's custom-call targets (and the types of their state) to XLA."""
    register_type = getattr(jax.ffi, "register_ffi_type", None)
    for name, registration, platform in types:
        if register_type is not None:
            register_type(name, registration, platform=platform)
        else:
            jax.ffi.register_ffi_type_id(name, registration["type_id"], platform=platform)
    for name, bundle, platform in targets:
        jax.ffi.register_ffi_target(name, bundle, platform=platform)


def fresh_xla_token() -> Any:
    """An XLA token with no past: the start of a chain of ops."""
    return _hlo.create_token()


def never_dead(primitive: core.Primitive) -> None:
    """Keep equations of ``primitive``, with all their operands, also where no result is used."""

    def rule(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
        eqn = rest[-1]  # before it, from 0.12: which of the operands are live
        return [True] * len(eqn.invars), eqn

    pe.dce_rules[primitive] = rule


def eval_primitive(primitive: core.Primitive) -> Callable[..., Any]:
    """The implementation that JAX gives its own primitives: compile and run."""

    def impl(*args: Any, **params: Any) -> Any:
        return xla.apply_primitive(primitive, *args, **params)

    return impl


def bind_eqn(eqn: core.JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """Evaluate one equation of a jaxpr on ``args``."""
    found = eqn.primitive.get_bind_params(eqn.params)
    subfuns, params = found if isinstance(found, tuple) else ((), found)  # a tuple up to 0.9
    out = eqn.primitive.bind(*subfuns, *args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """The number of constants and of carried values of a scan equation."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry = [len(tree) for tree in params["ft_in"].unpack()][:2]  # from 0.11
    return consts, carry


def user_line(ctx: mlir.LoweringRuleContext) -> str:
    """``file.py:81`` of the user's call that is being lowered, or ``""``."""
    return _line(ctx.traceback)


def eqn_line(eqn: core.JaxprEqn) -> str:
    """``file.py:81`` of the user's call that an equation stands for, or ``""``."""
    return _line(eqn.source_info.traceback)


def _line(traceback: Any) -> str:
    """The user's line. An eager op is compiled once for all its callers, so it has none."""
    codes = traceback.raw_frames()[0] if traceback else []
    if any(code.co_name == "_eager" and code.co_filename == _OPS_FILE for code in codes):
        return ""
    frame = next(iter(source_info_util.user_frames(traceback)), None)
    return f"{os.path.basename(frame.file_name)}:{frame.start_line}" if frame else ""


# ---- Differentiation
#
# JAX skips an equation's differentiation rule where none of its operands is perturbed on this
# rank. For an op that communicates that is wrong: a `recv` into a constant template has no
# perturbed operand, but the `send` on the other rank has one, and its transpose waits for ours.
# There is no hook for it, so `process_primitive` of the two differentiating traces is wrapped.

_DIFFERENTIATING = (_ad.JVPTrace, _ad.LinearizeTrace)
_bypass = threading.local()


def intercept_differentiation(
    rewrite: Callable[[Any, core.Primitive, Sequence[Any], dict[str, Any]], Any],
) -> None:
    """Call ``rewrite(trace, primitive, args, params)`` before an equation is differentiated.

    ``rewrite`` returns None to leave the equation alone, or its results. It runs with ``trace``
    current, so what it binds is differentiated; :func:`once` keeps its own bind from coming back.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def process_primitive(self: Any, primitive: Any, args: Any, params: Any, /) -> Any:
            if getattr(_bypass, "primitive", None) is primitive:
                _bypass.primitive = None
            else:
                out = rewrite(self, primitive, args, params)
                if out is not None:
                    return out
            return original(self, primitive, args, params)

        return process_primitive

    for trace in _DIFFERENTIATING:
        trace.process_primitive = wrap(trace.process_primitive)


@contextlib.contextmanager
def once(trace: Any, primitive: core.Primitive) -> Iterator[None]:
    """Make ``trace`` current; the next bind of ``primitive`` there is not intercepted."""
    previous = getattr(_bypass, "primitive", None)
    _bypass.primitive = primitive
    try:
        with core.set_current_trace(trace):
            yield
    finally:
        _bypass.primitive = previous


def perturbed(trace: Any, value: Any) -> bool:
    """Whether ``value`` has a nonzero tangent in ``trace``."""
    return type(trace.to_primal_tangent_pair(value)[1]) is not _ad.Zero


def perturb(trace: Any, seed: Callable[..., Any]) -> Any:
    """A float32 zero that is a perturbed value of ``trace``, or None if nothing is.

    In reverse mode its tangent must depend on an input of the linear function that is being
    built, or its transpose would not contain what is made from it: ``seed(*inputs)`` makes it.
    """
    with core.set_current_trace(trace.parent_trace):
        value = jax.numpy.zeros((), np.float32)
        if isinstance(trace, _ad.JVPTrace):
            return _ad.JVPTracer(trace, value, jax.numpy.zeros((), np.float32))
    tangents = trace.tangent_trace
    where = source_info_util.current()
    inputs = [
        tangents.var_to_tracer(v, where)
        for v in tangents.frame.invars
        if isinstance(v.aval, core.ShapedArray) and jax.numpy.issubdtype(v.aval.dtype, np.inexact)
    ]
    if not inputs:
        return None
    with core.set_current_trace(tangents):
        return _ad.LinearizeTracer(trace, value, seed(*inputs))
