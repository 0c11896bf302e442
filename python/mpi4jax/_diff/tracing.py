"""What a trace that differentiates has to know, so that every op in it has a perturbed operand.

JAX applies the rule of a derivative to an equation only where one of its operands is perturbed.
For an op that communicates that is wrong: a `recv` into a constant template has no perturbed
operand, but the `send` on the other rank has one, and its transpose waits for ours. So each trace
has a *token*, a float32 zero that is always perturbed, which `_diff/ad.py` threads through all that
communicates. It is a *seed*: made of the inputs of the function that is differentiated.

Functions with a derivative rule of the user's use the rule if one of their arguments is perturbed:
one is *tied* to the token.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive, primitives
from jax.interpreters import ad, batching, mlir

from .._jax import compat, traces
from .._op.primitive import TOKEN, effect, has_derivative

# ---- The seed: a float32 zero that depends linearly on its operands

seed_p = Primitive("mpi4jax_seed")
seed_p.def_abstract_eval(lambda *xs: TOKEN)
seed_p.def_impl(compat.eval_primitive(seed_p))
mlir.register_lowering(
    seed_p, mlir.lower_fun(lambda *xs: jnp.zeros((), np.float32), multiple_results=False)
)


def _seed_batch(axis_data: Any, args: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, Any]:
    """It is batched as ops are: also where none of its operands is."""
    token = seed_p.bind(*args)
    if traces.is_jacfwd(axis_data) and all(d is None for d in dims):
        return token, None
    return jnp.broadcast_to(token, (axis_data.size,)), 0


def _seed_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return seed_p.bind(*primals), seed_p.bind(*[ad.instantiate_zeros(t) for t in tangents])


def _seed_transpose(c: Any, *xs: Any) -> list[Any]:
    return [
        ad.instantiate_zeros(ad.Zero(x.aval)) if ad.is_undefined_primal(x) else None for x in xs
    ]


batching.fancy_primitive_batchers[seed_p] = _seed_batch
ad.primitive_jvps[seed_p] = _seed_jvp
ad.primitive_transposes[seed_p] = _seed_transpose


def tie(token: Any, args: Sequence[Any], only_first: bool = False) -> list[Any]:
    """``args``, of which those that have a derivative, or the first, depend on ``token``.

    What they are made of besides themselves is never chosen, which JAX does not see.
    """

    def tied(x: Any) -> Any:
        other = jnp.zeros_like(x) + lax.convert_element_type(token, jnp.result_type(x))
        return lax.select_n(np.bool_(True), other, x)

    which = [i for i, x in enumerate(args) if has_derivative(x)][: 1 if only_first else None]
    return [tied(x) if i in which else x for i, x in enumerate(args)]


# ---- The token of a trace


class _State:
    """What is remembered of a trace. It holds no tracers of the trace itself: no cycles."""

    def __init__(self) -> None:
        self.inputs: list[tuple[Any, Any]] = []
        self.started = False
        self.token: Any = None  # primal and tangent


def _state(trace: Any) -> _State:
    if not hasattr(trace, "mpi4jax_state"):
        trace.mpi4jax_state = _State()
    state: _State = trace.mpi4jax_state
    return state


def _remember_input(trace: Any, primal: Any, tangent: Any) -> None:
    """JAX makes the tracers of a function's inputs before it processes its first equation."""
    state = _state(trace)
    if not state.started and jnp.issubdtype(jax.typeof(tangent).dtype, np.inexact):
        state.inputs.append((primal, tangent))


def remember_token(trace: Any, token: Any) -> None:
    """Make the token that an op has returned the one that the next op of ``trace`` takes."""
    _state(trace).token = traces.primal_and_tangent(trace, token)


def perturbed(trace: Any, value: Any) -> bool:
    return traces.primal_and_tangent(trace, value)[1] is not None


def token_of(trace: Any) -> Any:
    """The token of a trace; None if the trace differentiates nothing.

    A new one depends on the inputs of the function, so that it is not a constant where they vary,
    in a loop, say; and on the token of the trace below. Its tangent depends on their tangents, or
    the linear function that is being built would not contain what is made from it.
    """
    trace = traces.outside_of_vmap(trace)
    if not traces.differentiates(trace):
        return np.zeros((), np.float32)
    state = _state(trace)
    if state.token is None:
        below = token_of(trace.parent_trace)
        with traces.primals_of(trace):
            primal = seed_p.bind(*(x for x, _ in state.inputs), *([] if below is None else [below]))
        if not state.inputs:
            return None
        with traces.tangents_of(trace):
            state.token = primal, seed_p.bind(*(t for _, t in state.inputs))
    return traces.dual(trace, *state.token)


# ---- Equations

Handle = Callable[[Any, Primitive, Sequence[Any], dict[str, Any]], Any]
_own = threading.local()


def rewrite_equations(handle: Handle) -> None:
    """Call ``handle(trace, primitive, args, params)`` before an equation is differentiated.

    It returns None to leave the equation to JAX, or its results. What it binds with ``trace``
    current comes back, but for that in :func:`left_to_jax`.
    """

    def on_equation(trace: Any, primitive: Any, args: Any, params: Any) -> Any:
        _state(trace).started = True
        if getattr(_own, "left", None) == (id(trace), primitive):
            _own.left = None
            return None
        return handle(trace, primitive, args, params)

    traces.on_equation(on_equation)
    traces.on_perturbed(_remember_input)


@contextlib.contextmanager
def left_to_jax(trace: Any, primitive: Primitive | None = None) -> Iterator[None]:
    """Make ``trace`` current; the next bind of ``primitive`` there is left to JAX."""
    previous = getattr(_own, "left", None)
    _own.left = (id(trace), primitive)
    try:
        with traces.current(trace):
            yield
    finally:
        _own.left = previous


# ---- Functions with a derivative rule of the user's


def communicates(fun: Any, args: Sequence[Any]) -> bool:
    """Whether a function of JAX's has the effect on ``args``: values, concrete or not, and types.

    It is given concrete values as they are, because it may need them. If it raises an error, JAX
    calls it next and the error comes then, unless it is of a backward pass that is never needed.
    """
    known = [traces.concrete(x) for x in args]

    def run(*unknown: Any) -> Any:
        rest = iter(unknown)
        with contextlib.suppress(Exception):
            fun.call_wrapped(*(next(rest) if v is None else v for v in known))
        return ()

    unknown = [x for x, v in zip(args, known, strict=True) if v is None]
    try:
        return effect in traces.trace_python(run, unknown).effects
    finally:
        traces.let_call_again(fun)


def note_communication() -> None:
    """Tell :func:`_differentiates_ops` of an equation that is differentiated."""
    _own.communicated = True


def _differentiates_ops(trace: Any, args: Sequence[Any], rule: Any) -> bool:
    """Whether a rule of a ``custom_jvp`` that is given symbolic zeros differentiates ops.

    Equinox's loops do, to see what is perturbed in their bodies.
    """
    types = [jax.typeof(x) for x in args]
    tangents = [x.to_tangent_aval() for x in types]
    given = [perturbed(trace, x) for x in args]

    def run(*traced: Any) -> Any:
        rest = iter(traced[len(types) :])
        zeros = [next(rest) if g else SymbolicZero(t) for g, t in zip(given, tangents, strict=True)]
        # JAX calls it next, and an error comes again, unless it needed concrete values.
        with contextlib.suppress(Exception):
            rule.call_wrapped(*traced[: len(types)], *zeros)
        return ()

    _own.communicated = False
    try:
        traces.trace_python(run, [*types, *(t for t, g in zip(tangents, given, strict=True) if g)])
    finally:
        traces.let_call_again(rule)
    return bool(_own.communicated)


def _arguments(
    trace: Any,
    primitive: Primitive,
    args: Sequence[Any],
    fun: Any,
    rules: Sequence[Any],
    symbolic_zeros: bool,
) -> Sequence[Any]:
    """The arguments of a function with a rule, perturbed if ops need that.

    If the rule alone communicates, JAX uses it where an argument is perturbed, and only there.
    """
    is_jvp = primitive is primitives.custom_jvp_call_p
    which = [perturbed(trace, x) for x in args]
    if not any(which):
        is_needed = communicates(fun, args)
    else:
        leaves_out = is_jvp and symbolic_zeros and not all(which)
        is_needed = leaves_out and _differentiates_ops(trace, args, rules[0])
    token = token_of(trace) if is_needed else None
    if token is None:
        return args
    with left_to_jax(trace):
        # Equinox's custom_vjps fail if more is perturbed than their first argument. A custom_jvp
        # may communicate the tangent of any.
        return tie(token, args, only_first=not is_jvp)


def _arguments_of_shard_map(trace: Any, args: Sequence[Any], fun: Any, bind: Any) -> Sequence[Any]:
    """The arguments of a `jax.shard_map`, of which one is perturbed if it communicates."""
    token = None if any(perturbed(trace, x) for x in args) else token_of(trace)
    if token is None:
        return args
    try:
        jaxpr = traces.trace_python(bind, args)
    finally:
        traces.let_call_again(fun)
    if effect not in jaxpr.effects:
        return args
    with left_to_jax(trace):
        return tie(token, args)


class _CommunicatingPass:
    """A backward pass that communicates, in the place of JAX's function."""

    def __init__(self, fun: Any):
        self._fun = fun

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fun, name)

    def call_wrapped(self, *args: Any) -> Any:
        # Of symbolic zeros, it may leave out what other ranks wait for.
        return self._fun.call_wrapped(
            *(ad.instantiate_zeros(ad.Zero(x.aval)) if type(x) is SymbolicZero else x for x in args)
        )


def _bind_backward(
    bind: Any, *args: Any, num_res: int, bwd: Any, out_avals: Any, **params: Any
) -> Any:
    """Bind the linear equation of a ``custom_vjp``.

    It has the effect of its backward pass, so that it is kept also where no cotangent needs it.
    """
    # Here, not in the abstract evaluation, because the rule may need concrete residuals.
    known = isinstance(bwd, _CommunicatingPass)
    if not known and communicates(bwd, [*args[:num_res], *out_avals]):
        bwd = _CommunicatingPass(bwd)
    return bind(*args, num_res=num_res, bwd=bwd, out_avals=out_avals, **params)


compat.wrap(primitives.custom_lin_p, "bind", _bind_backward)
primitives.custom_lin_p.def_effectful_abstract_eval(
    lambda *_, bwd, out_avals, **params: (
        out_avals,
        {effect} if isinstance(bwd, _CommunicatingPass) else set(),
    )
)


# ---- jax.linear_transpose


def _evaluate_linear(fun: Any, args: Sequence[Any]) -> Any:
    """A linear function of unknown ``args``, in which every op is part of the function.

    What an op gives is linear in the inputs of other ranks also where its operands are constants
    here; and where they are constants everywhere, it is a constant. The derivative at zero tells
    the two apart.
    """
    if not all(jnp.issubdtype(x.dtype, np.inexact) for x in args) or not communicates(fun, args):
        return fun.call_wrapped(*args)
    zeros = [jnp.zeros(x.shape, x.dtype) for x in args]
    return list(jax.jvp(lambda *xs: fun.call_wrapped(*xs), zeros, list(args))[1])


traces.on_custom_derivative(_arguments)
traces.on_shard_map(_arguments_of_shard_map)
traces.on_linear_transpose(_evaluate_linear)
