"""The token of each differentiating trace, which perturbs an operand of every operation.

JAX applies the rule of a derivative to an equation only where one of its operands is perturbed.
For an op that communicates that is wrong: a `recv` into a constant template has no perturbed
operand, but the `send` on the other rank has one, and its transpose waits for ours. Each trace has
a *token*, a float32 zero that is always perturbed, which `_diff/ad.py` threads through all that
communicates. It is a *seed*: made of the inputs of the function that is differentiated.

A function that JAX differentiates as a whole, by a rule of the user's, is differentiated where an
argument is perturbed: an argument is made to *depend* on the token.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Trace
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

from .._jax import compat, traces
from .._jax.functions import inner_jaxprs
from .._op.primitive import TOKEN, effect, has_derivative

# ---- The seed: a float32 zero that depends linearly on its operands

seed_p = Primitive("mpi4jax_seed")
seed_p.def_abstract_eval(lambda *xs, **_: TOKEN)
seed_p.def_impl(compat.eval_primitive(seed_p))
mlir.register_lowering(
    seed_p, mlir.lower_fun(lambda *xs, **_: jnp.zeros((), np.float32), multiple_results=False)
)


def _seed_batch(
    axis_data: Any, args: Sequence[Any], dims: Sequence[Any], batched_tangents: bool = False
) -> tuple[Any, Any]:
    """Batch a seed as operations are batched: also if none of its operands is batched, except in a
    `vmap` around a `jvp`, in which ``batched_tangents`` is set."""
    token = seed_p.bind(*args, batched_tangents=batched_tangents)
    if traces.batches_tangents(axis_data, batched_tangents) and all(d is None for d in dims):
        return token, None
    return jnp.broadcast_to(token, (axis_data.size,)), 0


@compat.allows_transfers
def _seed_jvp(primals: Sequence[Any], tangents: Sequence[Any], **p: Any) -> tuple[Any, Any]:
    return seed_p.bind(*primals, **p), seed_p.bind(*[ad.instantiate_zeros(t) for t in tangents])


def _seed_transpose(c: Any, *xs: Any, **_: Any) -> list[Any]:
    return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in xs]


batching.fancy_primitive_batchers[seed_p] = _seed_batch
ad.primitive_jvps[seed_p] = _seed_jvp
ad.primitive_transposes[seed_p] = _seed_transpose


def depend_on(token: Any, args: Sequence[Any], only_first: bool = False) -> list[Any]:
    """Return ``args``; those that have a derivative, or the first one, depend on ``token``.

    What they are made of besides themselves is never chosen, which JAX does not see.
    """

    def dependent(x: Any) -> Any:
        other = jnp.zeros_like(x) + lax.convert_element_type(token, jnp.result_type(x))
        return lax.select_n(np.bool_(True), other, x)

    which = [i for i, x in enumerate(args) if has_derivative(x)][: 1 if only_first else None]
    with jax.transfer_guard("allow"):  # constants are transferred to the device here
        return [dependent(x) if i in which else x for i, x in enumerate(args)]


# ---- The token of a trace


class Differentiation:
    """What is remembered of a differentiating trace; no tracers of its own, to avoid cycles.

    Attributes:
        token: primal and tangent of the token that the next operation takes.
        rewritten: the primitive of an equation that a rule of `ad.py` is about to bind, with the
            token. To JAX it is an equation like any other.
    """

    def __init__(self) -> None:
        self.token: Any = None
        self.rewritten: Primitive | None = None


def _differentiation(trace: Trace) -> Differentiation:
    if not hasattr(trace, "mpi4jax_differentiation"):
        trace.mpi4jax_differentiation = Differentiation()
    found: Differentiation = trace.mpi4jax_differentiation
    return found


def remember_token(trace: Trace, token: Any) -> None:
    """Pass the token of an operation on to the next operation of ``trace``."""
    _differentiation(trace).token = traces.primal_and_tangent(trace, token)


def perturbed(trace: Trace, value: Any) -> bool:
    return traces.are_perturbed(trace, [value])[0]


def token_of(trace: Trace) -> Any:
    """Return the token of a trace, or None if the trace differentiates nothing.

    A new one depends on the inputs of the function, so that it is not a constant where they vary,
    in a loop, say; and on the token of the trace below. Its tangent depends on their tangents, or
    the linear function that is being built would not contain what is made from it.
    """
    trace = traces.outside_of_vmap(trace)
    if not traces.differentiates(trace):
        return np.zeros((), np.float32)
    this = _differentiation(trace)
    if this.token is None:
        below = token_of(trace.parent_trace)
        # Not for a constant, which JAX's transfer guard would count as a transfer.
        varies = isinstance(below, jax.core.Tracer)
        inputs = traces.inputs(trace)
        batched = any(traces.is_batched(t) for _, t in inputs)
        with traces.primals_of(trace):
            primal = seed_p.bind(
                *(x for x, _ in inputs), *[below] * varies, batched_tangents=batched
            )
        if not inputs:
            return None
        with traces.tangents_of(trace):
            this.token = primal, seed_p.bind(*(t for _, t in inputs))
    return traces.dual(trace, *this.token)


# ---- Equations

_found: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def needs_token(jaxpr: Any) -> bool:
    """Return whether a function, open or closed, has operations that only this rank may have."""
    if effect not in jaxpr.effects:
        return False
    if not hasattr(jaxpr, "eqns"):
        jaxpr = getattr(jaxpr, "jaxpr", None)
        if jaxpr is None:  # a high-level primitive, of JAX 0.12
            return True
    if jaxpr not in _found:
        _found[jaxpr] = any(effect in e.effects and eqn_needs_token(e) for e in jaxpr.eqns)
    return _found[jaxpr]


def eqn_needs_token(eqn: JaxprEqn) -> bool:
    """Return the same for an equation that communicates."""
    inside = [inner for _, inner in inner_jaxprs(eqn.params)]
    if inside:
        return any(map(needs_token, inside))
    return "how" not in eqn.params or not eqn.params["how"].spmd


def is_rewritten(trace: Trace, primitive: Primitive) -> bool:
    """Return whether an equation is the one with the token that a rule was about to bind."""
    this = _differentiation(trace)
    if primitive is not this.rewritten:
        return False
    this.rewritten = None
    return True


@contextlib.contextmanager
def rewriting(trace: Trace, primitive: Primitive) -> Iterator[None]:
    """Context of a rule that makes an equation with the token of one without: ``trace`` is current.

    Of what the rule binds, the first equation of ``primitive`` is the one with the token.
    """
    this = _differentiation(trace)
    before, this.rewritten = this.rewritten, primitive
    try:
        with traces.current(trace):
            yield
    finally:
        this.rewritten = before
