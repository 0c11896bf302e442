"""Transformations that are the same on every rank.

Whether JAX differentiates an equation depends on whether its operands are perturbed on this
rank; whether its transpose waits for a message depends on the other ranks. So while a function
is differentiated, one token, a float32 scalar that is always perturbed, is threaded through every
op in program order: through those of the function itself, and through the jaxprs of the jitted
functions, loops, branches and rematerialised functions that it calls. Then every op has a
perturbed operand on every rank, no op of a loop is loop-invariant, and no op is without outputs.

In the same way, under `vmap`, one batched token makes all messages of all ranks carry the batch.

Ops that were given their token here have the parameter `threaded`. There the token tells whether
the op is batched; elsewhere an op under `vmap` always is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from . import _compat
from ._misuse import warn_of_batched_loop
from ._primitive import PRIMITIVES, TOKEN, effect, first_token, split
from .ops import SPECS

# ---- The seed: a float32 zero that depends linearly on its operands

seed_p = Primitive("mpi4jax_seed")
seed_p.def_abstract_eval(lambda *xs: TOKEN)
seed_p.def_impl(_compat.eval_primitive(seed_p))
mlir.register_lowering(
    seed_p, mlir.lower_fun(lambda *xs: jnp.zeros((), np.float32), multiple_results=False)
)


def _seed_batch(args: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, Any]:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    return jnp.broadcast_to(seed_p.bind(*args), (size,)), 0


batching.primitive_batchers[seed_p] = _seed_batch


def _seed_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return seed_p.bind(*primals), seed_p.bind(*[ad.instantiate_zeros(t) for t in tangents])


def _seed_transpose(c: Any, *xs: Any) -> list[Any]:
    return [
        ad.instantiate_zeros(ad.Zero(x.aval)) if ad.is_undefined_primal(x) else None for x in xs
    ]


ad.primitive_jvps[seed_p] = _seed_jvp
ad.primitive_transposes[seed_p] = _seed_transpose


# ---- The tie: the identity of its first operand, which is tracked if the token is

tie_p = Primitive("mpi4jax_tie")
tie_p.def_abstract_eval(lambda x, token: x)
tie_p.def_impl(_compat.eval_primitive(tie_p))
mlir.register_lowering(tie_p, lambda ctx, x, token: [x])


def _tie_batch(args: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, Any]:
    (x, token), (dim, token_dim) = args, dims
    if dim is None:
        x, dim = jnp.broadcast_to(x, (token.shape[token_dim], *x.shape)), 0
    return tie_p.bind(x, token if token_dim is None else first_token(token)), dim


def _tie_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return tie_p.bind(*primals), tie_p.bind(*[ad.instantiate_zeros(t) for t in tangents])


def _tie_transpose(c: Any, x: Any, token: Any) -> list[Any]:
    linear = ad.is_undefined_primal
    return [c if linear(x) else None, jnp.zeros((), np.float32) if linear(token) else None]


batching.primitive_batchers[tie_p] = _tie_batch
ad.primitive_jvps[tie_p] = _tie_jvp
ad.primitive_transposes[tie_p] = _tie_transpose


def _tie(token: Any, args: Sequence[Any]) -> list[Any]:
    def inexact(x: Any) -> bool:  # literals may be Python numbers
        dtype = x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
        return bool(jnp.issubdtype(dtype, np.inexact))

    return [tie_p.bind(x, token) if inexact(x) else x for x in args]


# ---- The first equation of a function that a token was threaded through: the identity

entry_p = Primitive("mpi4jax_entry")
entry_p.def_abstract_eval(lambda token: token)
entry_p.def_impl(lambda token: token)
mlir.register_lowering(entry_p, lambda ctx, token: [token])
batching.primitive_batchers[entry_p] = lambda args, dims: (entry_p.bind(*args), *dims)
ad.deflinear2(entry_p, lambda c, token: [c])


# ---- Threading a token through an equation: (params, token, args) -> (token, results)

Threaded = tuple[Any, list[Any]]


def _open(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, ClosedJaxpr) else (jaxpr, ())


def _thread(jaxpr: Any) -> Callable[..., Threaded]:
    """The function of a jaxpr, with a token as first argument and first result."""
    jaxpr, consts = _open(jaxpr)

    def run(token: Any, *args: Any) -> Threaded:
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def read(v: Any) -> Any:
            return v.val if isinstance(v, Literal) else env[v]

        token = entry_p.bind(token)
        for eqn in jaxpr.eqns:
            ins = [read(v) for v in eqn.invars]
            communicates = effect in eqn.effects
            with eqn.ctx.manager:
                if communicates and eqn.primitive in RULES:
                    token, outs = RULES[eqn.primitive](eqn.params, token, ins)
                else:
                    if communicates and eqn.primitive in _CUSTOM_DERIVATIVES:
                        n = eqn.params["num_consts"]  # closed over, so not differentiated
                        ins = [*ins[:n], *_tie(token, ins[n:])]
                    outs = _compat.bind_eqn(eqn, ins)
            env.update(zip(eqn.outvars, outs, strict=True))
        return token, [read(v) for v in jaxpr.outvars]

    return run


def _rule_op(name: str) -> Callable[..., Threaded]:
    spec, primitive = SPECS[name], PRIMITIVES[name]

    def rule(params: dict[str, Any], token: Any, args: Sequence[Any]) -> Threaded:
        arrays, env, own = split(spec, params, args)
        *out, token = primitive.bind(*arrays, *env, token, **{**params, "threaded": True})
        return token, [*out, *(token for _ in own)]

    return rule


@functools.lru_cache(maxsize=1024)  # one function for all calls, so that it is compiled once
def _threaded_jit(jaxpr: ClosedJaxpr, name: str, inline: Any) -> Callable[..., Threaded]:
    run = _thread(jaxpr)
    run.__name__ = name
    return jax.jit(run, inline=inline)


def _rule_jit(params: dict[str, Any], token: Any, args: Sequence[Any]) -> Threaded:
    run = _threaded_jit(params["jaxpr"], params["name"], params["inline"])
    return run(token, *args)


def _rule_inline(key: str) -> Callable[..., Threaded]:
    return lambda params, token, args: _thread(params[key])(token, *args)


def _rule_scan(params: dict[str, Any], token: Any, args: Sequence[Any]) -> Threaded:
    n, m = _compat.scan_counts(params)
    consts, init, xs = args[:n], args[n : n + m], args[n + m :]
    run = _thread(params["jaxpr"])

    def body(carry: Any, x: Any) -> Any:
        token, out = run(carry[0], *consts, *carry[1], *x)
        return (token, out[:m]), out[m:]

    (token, carry), ys = lax.scan(
        body,
        (token, list(init)),
        list(xs),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return token, [*carry, *ys]


def _rule_while(params: dict[str, Any], token: Any, args: Sequence[Any]) -> Threaded:
    a, b = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts, init = args[:a], args[a : a + b], args[a + b :]
    cond, body = _thread(params["cond_jaxpr"]), _thread(params["body_jaxpr"])
    batch = _open(params["cond_jaxpr"])[0].outvars[0].aval.shape

    def again(token: Any, values: Sequence[Any]) -> Any:
        token, (predicate,) = cond(token, *cond_consts, *values)
        return token, predicate

    def keep(predicate: Any, new: Any, old: Any) -> Any:
        """A vmapped loop goes on until all its predicates are false; those that are, hold."""
        return jnp.where(predicate.reshape(batch + (1,) * (new.ndim - len(batch))), new, old)

    def step(state: Any) -> Any:
        token, predicate, values = state
        token, new = body(token, *body_consts, *values)
        if batch:
            new = [keep(predicate, n, v) for n, v in zip(new, values, strict=True)]
        return *again(token, new), new

    state = (*again(token, init), list(init))
    token, _, values = lax.while_loop(lambda state: state[1].any(), step, state)
    return token, values


def _rule_cond(params: dict[str, Any], token: Any, args: Sequence[Any]) -> Threaded:
    index, *operands = args
    branches = [_thread(branch) for branch in params["branches"]]
    return lax.switch(index, branches, token, *operands)  # type: ignore[no-any-return]


def _rule_remat(params: dict[str, Any], token: Any, args: Sequence[Any]) -> Threaded:
    threaded = jax.make_jaxpr(_thread(params["jaxpr"]))(token, *args)
    jaxpr, consts = _compat.close_constants(threaded)
    prevent_cse = params["prevent_cse"]
    if isinstance(prevent_cse, tuple):  # one for each operand
        prevent_cse = (*(False for _ in consts), True, *prevent_cse)
    token, *out = _compat.remat_p.bind(
        *consts, token, *args, **{**params, "jaxpr": jaxpr.jaxpr, "prevent_cse": prevent_cse}
    )
    return token, out


def _rule_linear_solve(params: dict[str, Any], token: Any, args: Sequence[Any]) -> Threaded:
    # The solve is differentiated as a whole, by solving again. The matrix is tied as well: on a
    # rank where it were not perturbed, a matvec that communicates would be left out.
    return token, _compat.linear_solve_p.bind(*_tie(token, args), **params)


def _rule_linear_call(params: dict[str, Any], token: Any, args: Sequence[Any]) -> Threaded:
    n = params["num_callee_consts"] + params["num_res"]  # may not be tracked
    args = [*args[:n], *_tie(token, args[n:])]
    return token, _compat.linear_call_p.bind(*args, **params)


RULES: dict[Primitive, Callable[..., Threaded]] = {
    **{primitive: _rule_op(name) for name, primitive in PRIMITIVES.items()},
    _compat.jit_p: _rule_jit,
    _compat.closed_call_p: _rule_inline("call_jaxpr"),
    _compat.scan_p: _rule_scan,
    _compat.while_p: _rule_while,
    _compat.cond_p: _rule_cond,
    _compat.remat_p: _rule_remat,
    _compat.linear_solve_p: _rule_linear_solve,
    _compat.linear_call_p: _rule_linear_call,
}

_CUSTOM_DERIVATIVES = {_compat.custom_jvp_call_p, _compat.custom_vjp_call_p}
_OPS = {primitive: SPECS[name] for name, primitive in PRIMITIVES.items()}


def _own_token(primitive: Primitive, params: dict[str, Any], args: Sequence[Any]) -> Any:
    """The token that an equation already has, or None."""
    if primitive in _OPS:
        return next(iter(split(_OPS[primitive], params, args)[2]), None)
    for _, jaxpr in _compat.inner_jaxprs(params):
        first = _open(jaxpr)[0].eqns[:1]
        if first and first[0].primitive is entry_p:
            # The arguments of the equation end with those of the jaxpr.
            operands = _open(jaxpr)[0].invars
            position = next((i for i, v in enumerate(operands) if v is first[0].invars[0]), None)
            if position is not None:
                return args[len(args) - len(operands) + position]
    return None


def _token(trace: Any) -> Any:
    """The token of a trace, None if it transforms nothing.

    At first it is a new one, made of the token of the trace below, so that both track it.
    """
    if not _compat.transforms(trace):
        return np.zeros((), np.float32)
    token = _compat.remembered_token(trace)
    if token is not None:
        return token
    value = _token(trace.parent_trace)
    if _compat.unbatched_primals(trace):
        return value
    return _compat.track(trace, np.zeros((), np.float32) if value is None else value, seed_p.bind)


def _is_transformed(trace: Any, primitive: Primitive, params: Any, own: Any) -> bool:
    """Whether ``trace`` will do the right thing with an equation, of token ``own``, by itself."""
    if own is not None and _compat.tracked(trace, own):
        return True
    if not _compat.batches(trace):
        return False
    threaded = own is not None and (primitive not in _OPS or params.get("threaded"))
    return threaded or _compat.unbatched_primals(trace)


def _rewrite(trace: Any, primitive: Primitive, args: Sequence[Any], params: dict[str, Any]) -> Any:
    # Below a `vmap` that is done, a batch of tokens is an array like any other.
    if primitive is entry_p and np.shape(args[0]) == () and _compat.tracked(trace, args[0]):
        _compat.remember_token(trace, args[0])
    rule = RULES.get(primitive)
    if rule is None:
        return None
    if primitive not in _OPS and not any(
        effect in jaxpr.effects for _, jaxpr in _compat.inner_jaxprs(params)
    ):
        return None
    if primitive is _compat.while_p and _compat.batches(trace):
        warn_of_batched_loop(params, [_compat.tracked(trace, x) for x in args])
    own = _own_token(primitive, params, args)
    if _is_transformed(trace, primitive, params, own):
        return None
    token = _token(trace)
    if token is None:
        return None
    # A rule of an op binds it with the token, and stops above; the others bind what they are for.
    with _compat.once(trace, None if primitive in _OPS else primitive):
        token, out = rule(params, token, list(args))
    _compat.remember_token(trace, token)
    if primitive in _OPS and own is not None and _compat.batches(trace):
        # The user's token was not batched, and is not now.
        out[-1] = _compat.below(trace, first_token, out[-1])
    return out


def _tie_to_trace(trace: Any, args: Sequence[Any]) -> Sequence[Any]:
    token = _token(trace)
    if token is None:
        return args
    with _compat.once(trace, None):
        return _tie(token, args)


def _evaluate_linear(jaxpr: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """A linear function of unknown ``args``, in which every op is part of the function.

    What an op gives is linear in the inputs of other ranks also where its operands are constants
    here; and where they are constants everywhere, it is a constant. The derivative at zero tells
    the two apart.
    """
    if effect not in jaxpr.effects or not all(jnp.issubdtype(x.dtype, np.inexact) for x in args):
        return jaxpr_as_fun(jaxpr)(*args)  # type: ignore[no-any-return]
    zeros = [jnp.zeros(x.shape, x.dtype) for x in args]
    return list(jax.jvp(lambda *xs: jaxpr_as_fun(jaxpr)(*xs), zeros, list(args))[1])


_compat.intercept(_rewrite)
_compat.intercept_custom_derivatives(effect, _tie_to_trace)
_compat.intercept_linear_transpose(_evaluate_linear)
