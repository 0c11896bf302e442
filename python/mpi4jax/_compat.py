"""Everything that depends on JAX's version or on JAX's internals.

This is the only module that imports from ``jax._src``. Supported: JAX 0.7 and newer.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import (
    api,
    api_util,
    core,
    custom_batching,
    dispatch,
    effects,
    source_info_util,
    xla_bridge,
)
from jax._src import linear_util as lu
from jax._src.ad_checkpoint import remat_p
from jax._src.array import ArrayImpl
from jax._src.custom_derivatives import linear_call_p
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import partial_eval as pe
from jax._src.interpreters import pxla
from jax._src.interpreters.batching import BatchTrace, BatchTracer
from jax._src.lib import version as jaxlib_version
from jax._src.lib.mlir.dialects import hlo as _hlo
from jax._src.pjit import jit_p
from jax._src.state.types import RefEffect
from jax.extend.core import ClosedJaxpr
from jax.extend.core.primitives import (
    closed_call_p,
    cond_p,
    custom_jvp_call_p,
    custom_vjp_call_p,
    linear_solve_p,
    scan_p,
    while_p,
)
from jax.interpreters import mlir, xla

__all__ = [
    "NOT_REPEATED",
    "AbstractToken",
    "ArrayImpl",
    "Token",
    "abstract_token",
    "add_effect_type",
    "batches",
    "below",
    "bind_eqn",
    "close_constants",
    "closed_call_p",
    "cond_p",
    "custom_jvp_call_p",
    "custom_vjp_call_p",
    "dead_where_inside",
    "eqn_line",
    "eval_primitive",
    "explicit_sharding",
    "fresh_xla_token",
    "has_refs",
    "inner_jaxprs",
    "intercept",
    "intercept_custom_derivatives",
    "intercept_linear_transpose",
    "is_of_current_trace",
    "jaxlib_version",
    "jit_p",
    "linear_call_p",
    "linear_solve_p",
    "once",
    "platforms",
    "records_calls",
    "refuse_to_repeat",
    "register_targets",
    "remat_p",
    "remember_token",
    "remembered_token",
    "replace_lowered",
    "scan_counts",
    "scan_p",
    "trace_state_clean",
    "track",
    "tracked",
    "transforms",
    "unbatched_primals",
    "user_line",
    "visible_gpus",
    "wait_also",
    "while_p",
    "with_debug_info",
    "zero_tangent",
]

AbstractToken = core.AbstractToken
Token = core.Token
abstract_token = core.abstract_token
trace_state_clean = core.trace_state_clean
Effect = effects.Effect
# From this version on XLA records custom calls into CUDA graphs together with their states.
records_calls = jaxlib_version >= (0, 9, 1)

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
    _keep_in_partial_evaluation(effect)
    _keep_in_checkpoint(effect)


def _keep_in_partial_evaluation(effect: type[effects.Effect]) -> None:
    """Keep equations that have the effect and unused results, of primitives that JAX forgets.

    Of the primitives with functions inside, JAX keeps only scans and jitted functions.
    """
    forgotten = {remat_p, cond_p, while_p}
    original = pe.new_eqn_recipe

    def new_eqn_recipe(
        trace: Any, ins: Any, outs: Any, primitive: Any, params: Any, effs: Any, *rest: Any
    ) -> Any:
        recipe = original(trace, ins, outs, primitive, params, effs, *rest)
        if primitive in forgotten and any(isinstance(e, effect) for e in effs):
            trace.effect_handles.append(pe.EffectHandle(list(ins), recipe))
        return recipe

    pe.new_eqn_recipe = new_eqn_recipe


def _keep_in_checkpoint(effect: type[effects.Effect]) -> None:
    """Keep a ``jax.checkpoint`` that has an effect and neither operands nor used results.

    Before 0.12, JAX drops those that have effects rather than those that have none.
    """
    original = pe.dce_rules[remat_p]

    def rule(*args: Any) -> Any:
        eqn, result = args[-1], original(*args)
        if result[1] is None and any(isinstance(e, effect) for e in eqn.effects):
            return [True] * len(eqn.invars), eqn
        return result

    pe.dce_rules[remat_p] = rule


NOT_REPEATED = (
    "mpi4jax: {} communicates, and has an invalid value (NaN, infinity) in its results; it is not "
    "run again to find the operation, because other ranks would not take part in it"
)


def refuse_to_repeat(effect: effects.Effect) -> None:
    """Let a compiled function with the effect, that gives a NaN under `jax_debug_nans`, fail.

    JAX would run it again, operation by operation, on this rank alone.
    """
    original = api_util.maybe_recursive_nan_check

    def check(e: Exception, fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = [isinstance(leaf, (ArrayImpl, np.ndarray, core.Tracer)) for leaf in leaves]

        def of_arrays(*values: Any) -> Any:  # the other arguments may be static
            given = iter(values)
            full = [next(given) if a else leaf for a, leaf in zip(arrays, leaves, strict=True)]
            a, k = jax.tree.unflatten(tree, full)
            return fun(*a, **k)

        operands = [leaf for leaf, a in zip(leaves, arrays, strict=True) if a]
        if effect in jax.make_jaxpr(of_arrays)(*operands).effects:
            raise FloatingPointError(NOT_REPEATED.format(getattr(fun, "__name__", fun))) from None
        return original(e, fun, args, kwargs)

    api_util.maybe_recursive_nan_check = check


# JAX forgets the effects of a `linear_call`, and up to 0.8 those of a `custom_vmap`.
linear_call_p.def_effectful_abstract_eval(
    lambda *_, callee, **__: (callee.out_avals, callee.effects)
)
if jax.version.__version_info__ < (0, 9):
    custom_batching.custom_vmap_p.def_effectful_abstract_eval(
        lambda *_, call, **__: (call.out_avals, call.effects)
    )


def replace_lowered(
    effect: effects.Effect,
    replace: Callable[[ClosedJaxpr, Sequence[bool], bool], ClosedJaxpr],
    refusal: str,
) -> bool:
    """Have JAX lower ``replace(jaxpr, donated, for_export)`` for each module's ``jaxpr``.

    ``donated`` says for each argument whether its caller has given it up.

    What jitted functions, eager primitives, ahead-of-time compilation and export lower all comes
    through one function of JAX. Programs with the effect that run on several devices are refused
    by ``refusal``.

    Returns:
        Whether JAX has that function.
    """
    original = getattr(pxla, "lower_sharding_computation", None)
    if original is None:
        return False
    signature = inspect.signature(original)
    if next(iter(signature.parameters)) != "closed_jaxpr":
        return False
    if not {"donated_invars", "lowering_parameters"} <= signature.parameters.keys():
        return False

    @functools.wraps(original)
    def lower(closed_jaxpr: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(closed_jaxpr, *args, **kwargs).arguments
        donated, for_export = given["donated_invars"], given["lowering_parameters"].for_export
        try:
            return original(replace(closed_jaxpr, donated, for_export), *args, **kwargs)
        except ValueError as error:
            if effect in closed_jaxpr.effects and "for more than 1 device" in str(error):
                raise ValueError(refusal) from None
            raise

    pxla.lower_sharding_computation = lower
    return True


def wait_also(wait: Callable[[], None]) -> None:
    """Have ``jax.effects_barrier()``, which waits for effects that JAX sees, call ``wait`` too."""
    original = dispatch.RuntimeTokenSet.block_until_ready

    def block_until_ready(self: Any) -> None:
        original(self)
        wait()

    dispatch.RuntimeTokenSet.block_until_ready = block_until_ready


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


def visible_gpus() -> str:
    """The GPUs that JAX was told to use: ``"all"``, or numbers with commas between them."""
    return xla_bridge.CUDA_VISIBLE_DEVICES.value


def platforms() -> set[str]:
    """Where this process may have arrays."""
    return set(xla_bridge.backends())


def fresh_xla_token() -> Any:
    """An XLA token with no past: the start of a chain of ops."""
    return _hlo.create_token()


def dead_where_inside(primitive: core.Primitive, key: str) -> None:
    """Drop operands and results of ``primitive`` that the jaxpr in its parameter does not use."""

    def rule(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
        eqn = rest[-1]  # before it, from 0.12: which of the operands are live
        closed = eqn.params[key]
        jaxpr, used_in = pe.dce_jaxpr(closed.jaxpr, list(used))[:2]
        return list(used_in), eqn.replace(
            invars=[v for v, u in zip(eqn.invars, used_in, strict=True) if u],
            outvars=[v for v, u in zip(eqn.outvars, used, strict=True) if u],
            params={**eqn.params, key: ClosedJaxpr(jaxpr, closed.consts)},
        )

    pe.dce_rules[primitive] = rule


def with_debug_info(jaxpr: ClosedJaxpr, of: ClosedJaxpr) -> ClosedJaxpr:
    """``jaxpr`` under the names, of arguments and results, of another."""
    return ClosedJaxpr(jaxpr.jaxpr.replace(debug_info=of.jaxpr.debug_info), jaxpr.consts)


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


def zero_tangent(x: Any) -> Any:
    """The symbolic zero that is the tangent of ``x``."""
    return _ad.Zero(core.typeof(x).to_tangent_aval())


def is_of_current_trace(value: Any) -> bool:
    """Whether ``value`` is a tracer of the innermost transformation."""
    return isinstance(value, core.Tracer) and value._trace is core.trace_ctx.trace


def has_refs(jaxpr: ClosedJaxpr) -> bool:
    """Whether it reads or writes mutable arrays (``jax.new_ref``)."""
    kinds = (RefEffect, core.InternalMutableArrayEffect)
    return any(isinstance(e, kinds) for e in jaxpr.effects)


def explicit_sharding(x: Any) -> Any:
    """How an array is cut along a mesh's axes, if its type says so (explicit axes); or None."""
    sharding = core.typeof(x).sharding
    return sharding if any(axis is not None for axis in sharding.spec) else None


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
    frame = next(iter(source_info_util.user_frames(traceback)), None)
    return f"{os.path.basename(frame.file_name)}:{frame.start_line}" if frame else ""


def inner_jaxprs(params: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The functions inside an equation, open or closed, by the names of their parameters."""
    for name, value in params.items():
        several = isinstance(value, (tuple, list))
        for i, v in enumerate(value if several else (value,)):
            if isinstance(v, (ClosedJaxpr, core.Jaxpr)):
                yield f"{name}[{i}]" if several else name, v


def close_constants(jaxpr: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Any]]:
    """A jaxpr whose constants are its first arguments, and the constants."""
    return ClosedJaxpr(pe.convert_constvars_jaxpr(jaxpr.jaxpr), ()), list(jaxpr.consts)


# ---- Transformations
#
# JAX applies a transformation's rule to an equation only where one of its operands is tracked by
# the transformation: perturbed, of the differentiating traces, or batched, of `vmap`. For an op
# that communicates that is wrong. A `recv` into a constant template has no perturbed operand, but
# the `send` on the other rank has one, and its transpose waits for ours; and where that operand is
# batched, its message is too long for an unbatched template. There is no hook for it, so
# `process_primitive` of these traces is wrapped.

_TRANSFORMING = (_ad.JVPTrace, _ad.LinearizeTrace, BatchTrace)
_bypass = threading.local()


def intercept(
    rewrite: Callable[[Any, core.Primitive, Sequence[Any], dict[str, Any]], Any],
) -> None:
    """Call ``rewrite(trace, primitive, args, params)`` before an equation is transformed.

    ``rewrite`` returns None to leave the equation alone, or its results. It runs with ``trace``
    current, so what it binds is transformed; :func:`once` keeps its own bind from coming back.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def process_primitive(self: Any, primitive: Any, args: Any, params: Any, /) -> Any:
            self.mpi4jax_started = True  # see _remember_inputs
            if getattr(_bypass, "once", None) == (id(self), primitive):
                _bypass.once = None
            else:
                out = rewrite(self, primitive, args, params)
                if out is not None:
                    return out
            return original(self, primitive, args, params)

        return process_primitive

    for trace in _TRANSFORMING:
        trace.process_primitive = wrap(trace.process_primitive)


@contextlib.contextmanager
def once(trace: Any, primitive: core.Primitive) -> Iterator[None]:
    """Make ``trace`` current; the next bind of ``primitive`` there is not intercepted."""
    previous = getattr(_bypass, "once", None)
    _bypass.once = (id(trace), primitive)
    try:
        with core.set_current_trace(trace):
            yield
    finally:
        _bypass.once = previous


def transforms(trace: Any) -> bool:
    return isinstance(trace, _TRANSFORMING)


def batches(trace: Any) -> bool:
    return isinstance(trace, BatchTrace)


def tracked(trace: Any, value: Any) -> bool:
    """Whether ``trace`` transforms what is computed from ``value``."""
    if isinstance(trace, BatchTrace):
        return trace.to_batch_info(value)[1] is not None
    return type(trace.to_primal_tangent_pair(value)[1]) is not _ad.Zero


def track(trace: Any, value: Any, seed: Callable[..., Any]) -> Any:
    """``value``, a float32 zero, as one that ``trace`` tracks; None if it does not track anything.

    It is made to depend, by ``seed(*inputs)``, on the inputs of the function that is
    differentiated: so that it is not a constant where they vary, in a loop, say. And its tangent
    on their tangents: or the linear function that is being built would not contain what is made
    from it.
    """
    if isinstance(trace, BatchTrace):
        with core.set_current_trace(trace.parent_trace):
            return BatchTracer(trace, jax.numpy.broadcast_to(value, (trace.axis_data.size,)), 0)
    inputs = [(x, t) for x, t in trace.mpi4jax_inputs if _is_inexact(core.typeof(t))]
    with core.set_current_trace(trace.parent_trace):
        value = seed(*(x for x, _ in inputs), value)
        if isinstance(trace, _ad.JVPTrace):
            return _ad.JVPTracer(trace, value, seed(*(t for _, t in inputs), value))
    if not inputs:
        return None
    with core.set_current_trace(trace.tangent_trace):
        return _ad.LinearizeTracer(trace, value, seed(*(t for _, t in inputs)))


def _is_inexact(aval: Any) -> bool:
    return isinstance(aval, core.ShapedArray) and jax.numpy.issubdtype(aval.dtype, np.inexact)


def remember_token(trace: Any, token: Any) -> None:
    """Keep a token for :func:`remembered_token`, without a cycle between tracer and trace."""
    if isinstance(trace, BatchTrace):
        trace.mpi4jax_token = trace.to_batch_info(token)
    else:
        trace.mpi4jax_token = trace.to_primal_tangent_pair(token)


def remembered_token(trace: Any) -> Any:
    parts = getattr(trace, "mpi4jax_token", None)
    if parts is None:
        return None
    if isinstance(trace, BatchTrace):
        return BatchTracer(trace, *parts)
    tracer = _ad.JVPTracer if isinstance(trace, _ad.JVPTrace) else _ad.LinearizeTracer
    return tracer(trace, *parts)


def _remember_inputs(trace: type, tracer: type) -> None:
    """Keep the inputs, and their tangents, of the functions that a trace differentiates.

    The tracers of its inputs are made before it processes its first equation.
    """
    make_trace, make_tracer = trace.__init__, tracer.__init__  # type: ignore[misc]

    def init_trace(self: Any, *args: Any, **kwargs: Any) -> None:
        make_trace(self, *args, **kwargs)
        self.mpi4jax_inputs, self.mpi4jax_started = [], False

    def init_tracer(self: Any, trace: Any, primal: Any, tangent: Any) -> None:
        make_tracer(self, trace, primal, tangent)
        if not trace.mpi4jax_started and type(tangent) is not _ad.Zero:
            trace.mpi4jax_inputs.append((primal, tangent))

    trace.__init__, tracer.__init__ = init_trace, init_tracer  # type: ignore[misc]


_remember_inputs(_ad.JVPTrace, _ad.JVPTracer)
_remember_inputs(_ad.LinearizeTrace, _ad.LinearizeTracer)


def below(trace: Any, f: Callable[[Any], Any], value: Any) -> Any:
    """``f`` of the whole batch of a batched value, as a value that is not batched."""
    batch, _ = trace.to_batch_info(value)
    with core.set_current_trace(trace.parent_trace):
        return f(batch)


def unbatched_primals(trace: Any) -> bool:
    """Whether only tangents are batched: `jax.jacfwd` wants the primal results unbatched."""
    return getattr(trace, "mpi4jax_unbatched_primals", False)


def _mark_jacfwd() -> None:
    original = api.vmap

    def vmap(fun: Any, *args: Any, **kwargs: Any) -> Any:
        given = fun
        if getattr(fun, "func", None) is api._jvp:  # only jacfwd maps it

            def fun(*basis: Any) -> Any:
                core.trace_ctx.trace.mpi4jax_unbatched_primals = True
                return given(*basis)

        return original(fun, *args, **kwargs)

    api.vmap = vmap


_mark_jacfwd()


def _skip_empty_vmap() -> None:
    """Take away the `vmap` over nothing that JAX puts around the derivative of a `custom_vmap`.

    Ops in a `vmap` are batched although their operands are not.
    """
    original = custom_batching.vmap_unrestricted

    def vmap_unrestricted(f: lu.WrappedFun, *args: Any, in_axes: Any, **kwargs: Any) -> Any:
        if any(axis is not None for axis in in_axes):
            return original(f, *args, in_axes=in_axes, **kwargs)
        out = f.call_wrapped(*args)
        return out, [None for _ in out]

    custom_batching.vmap_unrestricted = vmap_unrestricted


_skip_empty_vmap()

# Functions with a derivative rule of the user's do not come by `process_primitive`.


def trace_to_jaxpr(fun: lu.WrappedFun, args: Sequence[Any]) -> ClosedJaxpr:
    """What ``fun`` does on ``args``. Its auxiliary outputs are stored."""
    avals = [x if isinstance(x, core.AbstractValue) else core.typeof(x) for x in args]
    jaxpr, _, consts = pe.trace_to_jaxpr_dynamic(fun, avals)
    return ClosedJaxpr(jaxpr, consts)


def _reset(fun: lu.WrappedFun) -> None:
    """Let ``fun`` be called again, and store its auxiliary outputs again."""
    for store in fun.stores:
        if store is not None:
            store.reset()


def _communicates(effect: effects.Effect, fun: lu.WrappedFun, args: Sequence[Any]) -> bool:
    """Whether ``fun`` has ``effect`` on ``args``: values, concrete or not, and types."""
    known = [None if isinstance(x, core.AbstractValue) else core.to_concrete_value(x) for x in args]

    def abstract(*traced: Any) -> tuple[()]:
        rest = iter(traced)
        fun.call_wrapped(*(next(rest) if v is None else v for v in known))
        return ()

    traced = [x for x, v in zip(args, known, strict=True) if v is None]
    info = api_util.debug_info("mpi4jax", abstract, traced, {})
    try:
        return effect in trace_to_jaxpr(lu.wrap_init(abstract, debug_info=info), traced).effects
    except Exception:
        # A function of anyone's, which may want concrete values, or may never be called: the
        # error, if it is one, comes when JAX calls it.
        return False
    finally:
        _reset(fun)


def intercept_custom_derivatives(
    effect: effects.Effect, tie: Callable[[Any, Sequence[Any]], Sequence[Any]]
) -> None:
    """Make functions with a derivative rule of the user's, that have ``effect``, use the rule.

    ``tie(trace, args)`` is called where no argument is tracked; it returns tracked ones. The
    linear equation that stands for the rule of a ``custom_vjp`` gets the effect of its backward
    pass, so that it is kept also where no cotangent needs it.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def process(self: Any, primitive: Any, fun: Any, *rest: Any, **params: Any) -> Any:
            *rules, args = rest
            if not any(tracked(self, x) for x in args) and _communicates(effect, fun, args):
                args = tie(self, args)
            return original(self, primitive, fun, *rules, args, **params)

        return process

    for trace in (_ad.JVPTrace, _ad.LinearizeTrace):
        trace.process_custom_jvp_call = wrap(trace.process_custom_jvp_call)
        trace.process_custom_vjp_call = wrap(trace.process_custom_vjp_call)

    lin_p, bind = _ad.custom_lin_p, _ad.custom_lin_p.bind

    def bind_backward(*args: Any, num_res: int, bwd: Any, out_avals: Any, **params: Any) -> Any:
        # Here, not in the abstract evaluation, because the rule may need concrete residuals.
        previous = getattr(_bypass, "backward_communicates", None)
        _bypass.backward_communicates = _communicates(effect, bwd, [*args[:num_res], *out_avals])
        try:
            return bind(*args, num_res=num_res, bwd=bwd, out_avals=out_avals, **params)
        finally:
            _bypass.backward_communicates = previous

    def abstract_eval(*avals: Any, num_res: int, bwd: Any, out_avals: Any, **_: Any) -> Any:
        known = getattr(_bypass, "backward_communicates", None)
        if known is None:  # JAX checks an equation that it has
            known = _communicates(effect, bwd, [*avals[:num_res], *out_avals])
        return out_avals, {effect} if known else set()

    lin_p.bind = bind_backward
    lin_p.def_effectful_abstract_eval(abstract_eval)


def intercept_linear_transpose(evaluate: Callable[[ClosedJaxpr, Sequence[Any]], Any]) -> None:
    """Have ``evaluate(jaxpr, args)`` run the functions that ``jax.linear_transpose`` is given.

    ``args`` are the inputs of the linear function, the unknown values of a partial evaluation.
    """
    original = pe.trace_to_jaxpr_nounits

    def trace_to_jaxpr_nounits(fun: lu.WrappedFun, *args: Any, **kwargs: Any) -> Any:
        if fun.debug_info.traced_for == "linear_transpose":
            given = fun

            def run(*args: Any) -> Any:
                try:
                    jaxpr = trace_to_jaxpr(given, args)
                except Exception:  # it wants values that are concrete in a partial evaluation
                    _reset(given)
                    return given.call_wrapped(*args)
                return evaluate(jaxpr, args)

            fun = lu.wrap_init(run, debug_info=fun.debug_info)
        return original(fun, *args, **kwargs)

    pe.trace_to_jaxpr_nounits = trace_to_jaxpr_nounits
