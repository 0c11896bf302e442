"""JAX's differentiating and batching traces, as far as `_diff` needs them.

Thin, as `compat.py`, without an idea of why.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import api, core
from jax._src.interpreters import ad as _ad, batching as _batching, partial_eval as pe
from jax.api_util import debug_info
from jax.core import AbstractValue, Tracer
from jax.extend import linear_util as lu
from jax.extend.core import ClosedJaxpr, Literal, Primitive
from jax.interpreters import ad, partial_eval as public_pe

from .compat import debug_callback_p, debug_print_p, replace_by, unless_changed, wrap
from .functions import FUNCTION
from .workarounds import is_needed

_DIFFERENTIATING = (ad.JVPTrace, _ad.LinearizeTrace)
_TRACERS = {ad.JVPTrace: ad.JVPTracer, _ad.LinearizeTrace: _ad.LinearizeTracer}


def differentiates(trace: Any) -> bool:
    return isinstance(trace, _DIFFERENTIATING)


class _Processing(threading.local):
    """Of the trace that differentiates an equation in this thread: what follows."""

    is_transposed = False


_processing = _Processing()


def is_transposed() -> bool:
    """Whether what is differentiated is going to be transposed: in reverse mode, also where JAX
    differentiates functions inside of equations forward for it."""
    return _processing.is_transposed


def outside_of_vmap(trace: Any) -> Any:
    """Return the trace in which the `vmap` is done that ``trace`` belongs to, if it belongs to
    one."""
    while hasattr(trace, "axis_data"):
        trace = trace.parent_trace
    return trace


def are_perturbed(trace: Any, values: Sequence[Any]) -> list[bool]:
    """Return which values of a differentiating trace have a tangent that is not zero."""
    found = []
    for value in values:
        is_tracer = type(value) in _TRACERS.values()
        found.append(is_tracer and type(trace.to_primal_tangent_pair(value)[1]) is not ad.Zero)
    return found


def primal_and_tangent(trace: Any, value: Any) -> tuple[Any, Any]:
    """Return primal and tangent of a value in a differentiating trace; None for a zero tangent."""
    primal, tangent = trace.to_primal_tangent_pair(value)
    return primal, None if type(tangent) is ad.Zero else tangent


def dual(trace: Any, primal: Any, tangent: Any) -> Any:
    """Return the value of a differentiating trace with these two parts."""
    return next(t for kind, t in _TRACERS.items() if isinstance(trace, kind))(
        trace, primal, tangent
    )


def origin(x: Any) -> Any:
    """Return the array that a traced value is, or is the primal of; for a value of a function that
    is being staged, its variable; None if neither is known."""
    while (primal := getattr(x, "primal", None)) is not None:
        x = primal
    if not isinstance(x, Tracer):
        return x
    if not isinstance(x, pe.DynamicJaxprTracer):
        return None
    known = getattr(x._trace.frame, "tracer_to_var", None)  # up to JAX 0.7
    return getattr(x, "val", None) if known is None else known.get(id(x))


def primals_of(trace: Any) -> Any:
    """Context manager: compute with the primals of a differentiating trace."""
    return core.set_current_trace(trace.parent_trace)


def tangents_of(trace: Any) -> Any:
    """Context manager: compute with the tangents of a differentiating trace."""
    return core.set_current_trace(getattr(trace, "tangent_trace", trace.parent_trace))


def current(trace: Any) -> Any:
    """Context manager: let ``trace`` differentiate."""
    return core.set_current_trace(trace)


def on_equation(handle: Callable[..., Any]) -> None:
    """Call ``handle(trace, primitive, args, params)`` before an equation is differentiated that is
    of a primitive of this package or holds functions with effects.

    It returns None to leave the equation to JAX, or its results.
    """

    def make(original: Any) -> Callable[..., Any]:
        def process(self: Any, primitive: Any, args: Any, params: Any) -> Any:
            # Every program calls this function for each equation that JAX differentiates, so it
            # calls as few functions in Python as possible.
            self.mpi4jax_has_begun = True
            # "_prim": a high-level primitive, of JAX 0.12
            is_handled = "_prim" in params or primitive.name.startswith("mpi4jax")
            for value in params.values():
                if isinstance(value, FUNCTION):
                    is_handled = is_handled or bool(value.effects)
                elif isinstance(value, (tuple, list)):
                    for v in value:
                        is_handled = is_handled or (isinstance(v, FUNCTION) and bool(v.effects))
            before = _processing.is_transposed
            _processing.is_transposed = getattr(self, "mpi4jax_is_transposed", before)
            try:
                out = handle(self, primitive, args, params) if is_handled else None
                if out is not None:
                    return out
                return original(self, primitive, args, params)
            finally:
                _processing.is_transposed = before

        return process

    for trace in _DIFFERENTIATING:
        replace_by(trace, "process_primitive", make)


def _remembering_inputs(original: Any) -> Callable[..., Any]:
    """A trace has its inputs, and whether it is transposed, from its first tracer on.

    JAX makes the tracers of the inputs before the trace comes to its first equation.
    """

    def init(self: Any, trace: Any, primal: Any, tangent: Any) -> None:
        original(self, trace, primal, tangent)
        if not hasattr(trace, "mpi4jax_inputs"):
            trace.mpi4jax_inputs = []
            # This runs while JAX processes the equation that makes the trace. Up to JAX 0.7,
            # `jax.linearize` counts as reverse mode.
            is_reverse = _processing.is_transposed or isinstance(trace, _ad.LinearizeTrace)
            trace.mpi4jax_is_transposed = getattr(trace, "is_vjp", is_reverse)
        if not hasattr(trace, "mpi4jax_has_begun") and type(tangent) is not ad.Zero:
            trace.mpi4jax_inputs.append((primal, tangent))

    return init


for _tracer in _TRACERS.values():
    replace_by(_tracer, "__init__", _remembering_inputs)


def inputs(trace: Any) -> list[tuple[Any, Any]]:
    """Return primal and tangent of each input of the function that a trace differentiates."""
    found = getattr(trace, "mpi4jax_inputs", ())
    return [(x, t) for x, t in found if jnp.issubdtype(jax.typeof(t).dtype, np.inexact)]


def on_custom_derivative(handle: Callable[..., Any]) -> None:
    """Have ``handle(bind, trace, primitive, args, fun, rules, symbolic_zeros)`` give the results of
    a function with a derivative rule of the user's, which does not come by :func:`on_equation`.

    ``bind(args)`` gives those that JAX finds for these arguments.
    """

    def make(original: Any) -> Callable[..., Any]:
        def process(self: Any, primitive: Any, fun: Any, *rest: Any, **params: Any) -> Any:
            *rules, args = rest

            def bind(args: Sequence[Any]) -> Any:
                return original(self, primitive, fun, *rules, args, **params)

            return handle(bind, self, primitive, args, fun, rules, params["symbolic_zeros"])

        return process

    for trace in _DIFFERENTIATING:
        replace_by(trace, "process_custom_jvp_call", make)
        replace_by(trace, "process_custom_vjp_call", make)


class _Attempt(threading.local):
    """A function that this thread stages for :func:`bind_unless`, until its jaxpr is made."""

    is_refused: Callable[[Any], bool] | None = None


_attempt = _Attempt()


class _RefusedError(Exception):
    """The function of an equation is not wanted in it as it is."""


def stages_functions(trace: Any) -> bool:
    """Return whether the trace below, outside of `vmap`s, stages functions that have rules."""
    below = trace.parent_trace
    while hasattr(below, "axis_data"):
        below = below.parent_trace
    if not isinstance(below, pe.DynamicJaxprTrace) or getattr(below, "requires_low", False):
        return False
    return not getattr(jax.config, "jax_eager_constant_folding", False)


def bind_unless(
    is_refused: Callable[[Any], bool], bind: Callable[[Sequence[Any]], Any], args: Sequence[Any]
) -> Any:
    """Return the results of ``bind(args)``, or None if ``is_refused(jaxpr)`` of the first function
    that JAX stages for it; nothing has been added to the function around it then."""
    _attempt.is_refused = is_refused
    try:
        return bind(args)
    except _RefusedError:
        return None
    finally:
        _attempt.is_refused = None


def _stage(original: Any) -> Callable[..., Any]:
    def trace(*args: Any, **kwargs: Any) -> Any:
        is_refused, _attempt.is_refused = _attempt.is_refused, None
        out = original(*args, **kwargs)
        if is_refused is not None and is_refused(out[0]):
            raise _RefusedError
        return out

    return trace


replace_by(pe, "trace_to_jaxpr_dynamic", _stage)


def on_shard_map(handle: Callable[..., Any]) -> None:
    """Have ``handle(bind, trace, args, fun, equation)`` give the results of a `jax.shard_map`.

    It does not come by :func:`on_equation`. ``equation(*args)`` is it, with ``fun`` inside, in the
    current trace; ``bind(args)`` gives the results that JAX finds for these arguments.
    """

    def process(
        original: Any, self: Any, primitive: Any, fun: Any, args: Any, **params: Any
    ) -> Any:
        def equation(*args: Any) -> list[Any]:
            trace = core.trace_ctx.trace
            return list(trace.process_shard_map(primitive, fun, args, **params))

        def bind(args: Sequence[Any]) -> Any:
            return original(self, primitive, fun, args, **params)

        return handle(bind, self, args, fun, equation)

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


def _forget(original: Any) -> Callable[..., Any]:
    """Drop what a trace keeps of effects once its jaxpr is made: cycles, leaks to JAX's checker."""

    def make_jaxpr(ins: Any, outs: Any, handles: Any, *args: Any, **kwargs: Any) -> Any:
        jaxpr = original(ins, outs, handles, *args, **kwargs)
        if isinstance(handles, list):
            handles.clear()
        return jaxpr

    return make_jaxpr


if is_needed("effects of traces"):
    replace_by(pe, "tracers_to_jaxpr", _forget)


def _missing(eqn: Any, there: Sequence[bool]) -> list[Any]:
    """Return the operands that a backward pass, which has those that are ``there``, must be
    given."""
    return [v for v, t in zip(eqn.invars, there, strict=True) if not (t or isinstance(v, Literal))]


def treat_as_pure(primitive: Primitive, when: Callable[[dict[str, Any]], Any]) -> None:
    """Let JAX drop equations of ``primitive`` whose results nothing needs, and compute them again
    for a backward pass where a `jax.checkpoint` says so, despite their effect: ``when(params)``.
    """

    def drop(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
        eqn = rest[-1]  # before it, from 0.12: which of the operands are live
        keep = any(used) or not when(eqn.params)
        return [keep] * len(eqn.invars), eqn if keep else None

    def again(saveable: Any, unknown: Sequence[bool], there: Sequence[bool], eqn: Any) -> Any:
        n = len(eqn.outvars)
        missing = _missing(eqn, there)
        if any(unknown):
            return None, eqn, [True] * n, [True] * n, missing
        policy = saveable(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)
        if not when(eqn.params) or not isinstance(pe.ensure_enum(policy), pe.RecomputeType):
            return eqn, None, [False] * n, [False] * n, []
        return eqn, eqn, [False] * n, [True] * n, missing

    public_pe.dce_rules[primitive] = drop
    public_pe.partial_eval_jaxpr_custom_rules[primitive] = again


def keep_results(primitive: Primitive, effect: Any) -> None:
    """Let a `jax.checkpoint` keep the results of equations of ``primitive`` that have an effect and
    that nothing perturbs, in the place of computing them again for a backward pass."""

    rules = public_pe.partial_eval_jaxpr_custom_rules
    original = rules[primitive]

    def partial_eval(saveable: Any, unknown: Sequence[bool], there: Any, eqn: Any) -> Any:
        if effect not in eqn.effects or any(unknown):
            return original(saveable, unknown, there, eqn)
        nothing = [False] * len(eqn.outvars)
        return eqn, None, nothing, nothing, []

    rules[primitive] = partial_eval


def _keep_operands(primitive: Primitive) -> None:
    """Let the backward pass of a `jax.checkpoint` have the operands of a callback that it calls
    again. JAX forgets those that are not computed again, such as the result of a message."""
    rules = public_pe.partial_eval_jaxpr_custom_rules
    original = rules[primitive]

    def partial_eval(saveable: Any, unknown: Any, there: Sequence[bool], eqn: Any) -> Any:
        first, again, *results, needed = original(saveable, unknown, there, eqn)
        return first, again, *results, needed if again is None else _missing(eqn, there)

    rules[primitive] = partial_eval


if is_needed("operands of callbacks"):
    for _callback in dict.fromkeys((debug_callback_p, debug_print_p)):
        _keep_operands(_callback)


def trace_function(fun: lu.WrappedFun, args: Sequence[Any]) -> ClosedJaxpr:
    """Return the jaxpr of a function of JAX for ``args``, values or types."""
    avals = [x if isinstance(x, AbstractValue) else jax.typeof(x) for x in args]
    jaxpr, _, consts = public_pe.trace_to_jaxpr_dynamic(fun, avals)
    return ClosedJaxpr(jaxpr, consts)


def trace_python(fun: Callable[..., Any], args: Sequence[Any]) -> ClosedJaxpr:
    """Return the jaxpr of a Python function with a flat result, for ``args``, values or types."""
    info = debug_info("mpi4jax", fun, args, {})
    return trace_function(lu.wrap_init(fun, debug_info=info), args)


def let_call_again(fun: lu.WrappedFun) -> None:
    """Let a function of JAX's, which stores its auxiliary outputs, be called once more."""
    for store in getattr(fun, "stores", ()):
        if store is not None:
            store.reset()


def concrete(value: Any) -> Any:
    """Return the array of a value, or None if it is not known yet."""
    if isinstance(value, AbstractValue):
        return None
    return value.to_concrete_value() if isinstance(value, Tracer) else value


# ---- vmap

# Names of the axes of such `vmap`s.
_JACFWD, _PROGRAMS = "mpi4jax: jacfwd", "mpi4jax: tangents"


def is_batched(value: Any) -> bool:
    """Return whether the traced `vmap` batches a value."""
    return hasattr(getattr(value, "_trace", None), "axis_data")


def batches_tangents(axis_data: Any, tangents: bool = False) -> bool:
    """Whether a `vmap` around a `jvp`, as in `jax.jacfwd`, batches only the tangents: it requires
    unbatched primal results.

    One of a program's with such results may be around anything, also around messages to ranks with
    another `vmap`: there, only if ``tangents`` are known to be batched.
    """
    return axis_data.name == _JACFWD or (tangents and axis_data.name == _PROGRAMS)


def _is_of_tangents(out_axes: Any) -> bool:
    """Return whether these ``out_axes`` of a `vmap` belong to a `vmap` around a `jvp`."""
    of_pair = out_axes[:2] if isinstance(out_axes, tuple) else ()
    return len(of_pair) == 2 and of_pair[0] is None and isinstance(of_pair[1], int)


def _named_in_jacfwd(vmap: Any, fun: Any, *args: Any, **kwargs: Any) -> Any:
    """`jax.jacfwd` calls this `vmap`. Programs call the original, which other modules name."""
    if not args and kwargs.get("axis_name") is None and _is_of_tangents(kwargs.get("out_axes")):
        kwargs["axis_name"] = _JACFWD
    return vmap(fun, *args, **kwargs)


def _named_in_programs(
    batch: Any, fun: Any, axis_data: Any, in_dims: Any, out_dims: Any, *args: Any, **kwargs: Any
) -> Any:
    """Each `vmap` calls this function when the batched function is called.

    ``out_dims`` is a function there, which has the ``out_axes`` of the `vmap` in its closure.
    """
    if axis_data.name is core.no_axis_name:
        names = getattr(getattr(out_dims, "__code__", None), "co_freevars", ())
        if "out_axes" in names:
            given = out_dims.__closure__[names.index("out_axes")].cell_contents
            if _is_of_tangents(given):
                axis_data = dataclasses.replace(axis_data, name=_PROGRAMS)
    return batch(fun, axis_data, in_dims, out_dims, *args, **kwargs)


def name_axes_of_tangents(jacfwd: Any, programs: Any) -> None:
    """Give the axis of such a `vmap` a name: in `jax.jacfwd`, whose module has ``vmap``, and in
    programs, by the function ``batch`` that each `vmap` calls."""
    with unless_changed("jax.jacfwd of a function that communicates fails"):
        wrap(jacfwd, "vmap", _named_in_jacfwd)
    with unless_changed("jax.vmap around jax.jvp of a function that communicates fails"):
        wrap(programs, "batch", _named_in_programs)


name_axes_of_tangents(api, _batching)
