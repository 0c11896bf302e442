"""The traces of JAX that differentiate and batch: what `_diff` needs of them.

Thin, as `compat.py`, without an idea of why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import api, core
from jax._src.interpreters import ad as _ad, partial_eval as pe
from jax.api_util import debug_info
from jax.core import AbstractValue, Tracer
from jax.extend import linear_util as lu
from jax.extend.core import ClosedJaxpr
from jax.interpreters import ad, partial_eval as public_pe

from .compat import wrap

_DIFFERENTIATING = (ad.JVPTrace, _ad.LinearizeTrace)
_TRACERS = {ad.JVPTrace: ad.JVPTracer, _ad.LinearizeTrace: _ad.LinearizeTracer}


def differentiates(trace: Any) -> bool:
    return isinstance(trace, _DIFFERENTIATING)


def outside_of_vmap(trace: Any) -> Any:
    """The trace in which the `vmap` is done that ``trace`` belongs to, if it belongs to one."""
    while hasattr(trace, "axis_data"):
        trace = trace.parent_trace
    return trace


def primal_and_tangent(trace: Any, value: Any) -> tuple[Any, Any]:
    """The two parts of a value in a trace that differentiates; the tangent is None if zero."""
    primal, tangent = trace.to_primal_tangent_pair(value)
    return primal, None if type(tangent) is ad.Zero else tangent


def dual(trace: Any, primal: Any, tangent: Any) -> Any:
    """The value of a trace that differentiates with these two parts."""
    return next(t for kind, t in _TRACERS.items() if isinstance(trace, kind))(
        trace, primal, tangent
    )


def primals_of(trace: Any) -> Any:
    """Context: what is called computes with the primals of a trace that differentiates."""
    return core.set_current_trace(trace.parent_trace)


def tangents_of(trace: Any) -> Any:
    """Context: what is called computes with the tangents of a trace that differentiates."""
    return core.set_current_trace(getattr(trace, "tangent_trace", trace.parent_trace))


def current(trace: Any) -> Any:
    """Context: what is called is differentiated by ``trace``."""
    return core.set_current_trace(trace)


def on_equation(handle: Callable[..., Any]) -> None:
    """Call ``handle(trace, primitive, args, params)`` before an equation is differentiated.

    It returns None to leave the equation to JAX, or its results.
    """

    def process(original: Any, self: Any, primitive: Any, args: Any, params: Any) -> Any:
        out = handle(self, primitive, args, params)
        return original(self, primitive, args, params) if out is None else out

    for trace in _DIFFERENTIATING:
        wrap(trace, "process_primitive", process)


def on_perturbed(handle: Callable[[Any, Any, Any], None]) -> None:
    """Call ``handle(trace, primal, tangent)`` for each value that a trace differentiates."""

    def init(original: Any, self: Any, trace: Any, primal: Any, tangent: Any) -> None:
        original(self, trace, primal, tangent)
        if type(tangent) is not ad.Zero:
            handle(trace, primal, tangent)

    for tracer in _TRACERS.values():
        wrap(tracer, "__init__", init)


def on_custom_derivative(handle: Callable[..., Sequence[Any]]) -> None:
    """Have ``handle(trace, primitive, args, fun, rules, symbolic_zeros)`` give the arguments of a
    function with a derivative rule of the user's, which does not come by :func:`on_equation`.
    """

    def process(
        original: Any, self: Any, primitive: Any, fun: Any, *rest: Any, **params: Any
    ) -> Any:
        *rules, args = rest
        args = handle(self, primitive, args, fun, rules, params["symbolic_zeros"])
        return original(self, primitive, fun, *rules, args, **params)

    for trace in _DIFFERENTIATING:
        wrap(trace, "process_custom_jvp_call", process)
        wrap(trace, "process_custom_vjp_call", process)


def on_shard_map(handle: Callable[..., Sequence[Any]]) -> None:
    """Have ``handle(trace, args, fun, bind)`` give the arguments of a `jax.shard_map`.

    It does not come by :func:`on_equation`. ``bind(*args)`` is the equation, ``fun`` is in it.
    """

    def process(
        original: Any, self: Any, primitive: Any, fun: Any, args: Any, **params: Any
    ) -> Any:
        def bind(*args: Any) -> list[Any]:
            trace = core.trace_ctx.trace
            return list(trace.process_shard_map(primitive, fun, args, **params))

        return original(self, primitive, fun, handle(self, args, fun, bind), **params)

    for trace in _DIFFERENTIATING:
        wrap(trace, "process_shard_map", process)


def on_linear_transpose(handle: Callable[[Any, Sequence[Any]], Any]) -> None:
    """Have ``handle(fun, args)`` run the functions that ``jax.linear_transpose`` is given.

    ``args`` are the inputs of the linear function, the unknown values of a partial evaluation.
    """

    def trace(original: Any, fun: lu.WrappedFun, *args: Any, **kwargs: Any) -> Any:
        if fun.debug_info.traced_for == "linear_transpose":
            given = fun
            fun = lu.wrap_init(lambda *args: handle(given, args), debug_info=given.debug_info)
        return original(fun, *args, **kwargs)

    wrap(pe, "trace_to_jaxpr_nounits", trace)


def trace_function(fun: lu.WrappedFun, args: Sequence[Any]) -> ClosedJaxpr:
    """What a function of JAX's does on ``args``, values or types."""
    avals = [x if isinstance(x, AbstractValue) else jax.typeof(x) for x in args]
    jaxpr, _, consts = public_pe.trace_to_jaxpr_dynamic(fun, avals)
    return ClosedJaxpr(jaxpr, consts)


def trace_python(fun: Callable[..., Any], args: Sequence[Any]) -> ClosedJaxpr:
    """What a Python function does on ``args``, values or types; it returns a flat sequence."""
    info = debug_info("mpi4jax", fun, args, {})
    return trace_function(lu.wrap_init(fun, debug_info=info), args)


def let_call_again(fun: lu.WrappedFun) -> None:
    """Let a function of JAX's, which stores its auxiliary outputs, be called once more."""
    for store in getattr(fun, "stores", ()):
        if store is not None:
            store.reset()


def concrete(value: Any) -> Any:
    """The array that a value stands for; None if it is not known yet."""
    if isinstance(value, AbstractValue):
        return None
    return value.to_concrete_value() if isinstance(value, Tracer) else value


# ---- vmap

_JACFWD = "mpi4jax: jacfwd"  # the name of the axis of its `vmap`


def is_jacfwd(axis_data: Any) -> bool:
    """Whether a `vmap` is that of `jax.jacfwd`: it batches tangents alone, and requires unbatched
    primal results."""
    return bool(axis_data.name == _JACFWD)


def _name_axis(original: Any, fun: Any, *args: Any, **kwargs: Any) -> Any:
    # Nothing else in that module has primal results and, along the last axis, tangents.
    out_axes = kwargs.get("out_axes")
    if isinstance(out_axes, tuple) and out_axes[:2] == (None, -1):
        kwargs["axis_name"] = _JACFWD
    return original(fun, *args, **kwargs)


wrap(api, "vmap", _name_axis)
