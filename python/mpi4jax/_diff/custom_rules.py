"""Functions with derivative rules of the user, and others that JAX calls as a whole.

JAX uses the rule of a function where one of its arguments is perturbed. If the function
communicates, all ranks have to use it, so an argument is made to depend on the token
(`tracing.py`). A trial trace shows whether it communicates.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Trace
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive, primitives
from jax.interpreters import ad

from .._jax import compat, traces
from .._op.primitive import effect
from .tracing import depend_on, needs_token, token_of

# ---- Trials


class _Trial(threading.local):
    """A user's function that this thread traces only to find operations in it."""

    is_running = False
    differentiates_ops = False


_trial = _Trial()


@contextlib.contextmanager
def _on_trial(fun: Any) -> Iterator[None]:
    """Context of a call of ``fun``, which JAX will call again."""
    before, _trial.is_running = _trial.is_running, True
    try:
        yield
    finally:
        _trial.is_running = before
        traces.let_call_again(fun)


def communicates(fun: Any, args: Sequence[Any]) -> bool:
    """Return whether a function of JAX has the effect for ``args``, which are values or types.

    It is given concrete values as they are, because it may need them. If it raises an error, JAX
    calls it next and the error comes then, unless it is of a backward pass that is never needed.
    """
    concrete = [traces.concrete(x) for x in args]

    def run(*unknown: Any) -> Any:
        rest = iter(unknown)
        with contextlib.suppress(Exception):
            fun.call_wrapped(*(next(rest) if v is None else v for v in concrete))
        return ()

    unknown = [x for x, v in zip(args, concrete, strict=True) if v is None]
    with _on_trial(fun):
        return needs_token(traces.trace_python(run, unknown))


def note_differentiated_ops() -> None:
    """Tell :func:`_differentiates_ops` of an equation with ops that is differentiated."""
    _trial.differentiates_ops = True


def _differentiates_ops(trace: Trace, args: Sequence[Any], rule: Any) -> bool:
    """Return whether the rule of a ``custom_jvp`` with symbolic zeros differentiates operations.

    Equinox's loops do, to see what is perturbed in their bodies.
    """
    types = [jax.typeof(x) for x in args]
    tangents = [x.to_tangent_aval() for x in types]
    which = traces.are_perturbed(trace, args)

    def run(*traced: Any) -> Any:
        rest = iter(traced[len(types) :])
        zeros = [next(rest) if g else SymbolicZero(t) for g, t in zip(which, tangents, strict=True)]
        # JAX calls it next and raises the same error, unless only concrete values were missing.
        with contextlib.suppress(Exception):
            rule.call_wrapped(*traced[: len(types)], *zeros)
        return ()

    _trial.differentiates_ops = False
    with _on_trial(rule):
        traces.trace_python(run, [*types, *(t for t, g in zip(tangents, which, strict=True) if g)])
    return _trial.differentiates_ops


# ---- Functions with a derivative rule of the user's


def _results(
    bind: Callable[[Sequence[Any]], Any],
    trace: Trace,
    primitive: Primitive,
    args: Sequence[Any],
    fun: Any,
    rules: Sequence[Any],
    symbolic_zeros: bool,
) -> Any:
    """Return the results of a function with a rule; perturb its arguments if operations need it.

    If the rule alone communicates, JAX uses it where an argument is perturbed, and only there.
    """
    is_jvp = primitive is primitives.custom_jvp_call_p
    which = traces.are_perturbed(trace, args)
    leaves_out = is_jvp and symbolic_zeros and not all(which)
    if any(which) and not leaves_out:
        return bind(args)

    if any(which):
        is_needed = _differentiates_ops(trace, args, rules[0])
    elif traces.stages_functions(trace):
        # No trial is needed: JAX stages the function once, and again only if it communicates.
        results = traces.bind_unless(needs_token, bind, args)
        if results is not None:
            return results
        traces.let_call_again(fun)
        is_needed = True
    else:
        is_needed = communicates(fun, args)
    token = token_of(trace) if is_needed else None
    if token is None:
        return bind(args)
    with traces.current(trace):
        # Equinox's custom_vjps fail if more is perturbed than their first argument. A
        # custom_jvp may communicate the tangent of any.
        dependent = depend_on(token, args, only_first=not is_jvp)
    return bind(dependent)


def _results_of_shard_map(
    bind: Callable[[Sequence[Any]], Any], trace: Trace, args: Sequence[Any], fun: Any, equation: Any
) -> Any:
    """Return the results of a `jax.shard_map`; perturb one argument if it communicates."""
    if any(traces.are_perturbed(trace, args)):
        return bind(args)

    token = token_of(trace)
    if token is None:
        return bind(args)
    with _on_trial(fun):
        jaxpr = traces.trace_python(equation, args)
    if not needs_token(jaxpr):
        return bind(args)
    with traces.current(trace):
        dependent = depend_on(token, args)
    return bind(dependent)


class _CommunicatingPass:
    """A backward pass that communicates, in place of JAX's function."""

    def __init__(self, fun: Any):
        self._fun = fun

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fun, name)

    def call_wrapped(self, *args: Any) -> Any:
        # With symbolic zeros, the rule may omit operations that other ranks wait for.
        return self._fun.call_wrapped(
            *(ad.instantiate_zeros(ad.Zero(x.aval)) if type(x) is SymbolicZero else x for x in args)
        )


def _bind_backward(
    bind: Any, *args: Any, num_res: int, bwd: Any, out_avals: Any, **params: Any
) -> Any:
    """Bind the linear equation of a ``custom_vjp``.

    It has the effect of its backward pass, so that it is kept also where no cotangent needs it.
    """
    # The check is here and not in the abstract evaluation, because the rule may need concrete
    # residuals. Rules that a rule calls are not checked, because each level would double the number
    # of calls.
    is_settled = isinstance(bwd, _CommunicatingPass) or _trial.is_running
    if not is_settled and communicates(bwd, [*args[:num_res], *out_avals]):
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
    """Return a linear function of unknown ``args``, with every operation a part of it.

    The result of an operation is linear in the inputs of other ranks even if its operands are
    constants here. If they are constants on all ranks, it is a constant. The derivative at zero
    distinguishes the two.
    """
    is_known = all(jnp.issubdtype(x.dtype, np.inexact) for x in args)
    if not is_known or not communicates(fun, args):
        return fun.call_wrapped(*args)
    zeros = [jnp.zeros(x.shape, x.dtype) for x in args]
    return list(jax.jvp(lambda *xs: fun.call_wrapped(*xs), zeros, list(args))[1])


traces.on_custom_derivative(_results)
traces.on_shard_map(_results_of_shard_map)
traces.on_linear_transpose(_evaluate_linear)
