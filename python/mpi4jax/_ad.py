"""Differentiation that is the same on every rank.

Whether JAX differentiates an equation depends on whether its operands are perturbed on this
rank; whether its transpose waits for a message depends on the other ranks. So while a function
is differentiated, one token, a float32 scalar that is always perturbed, is threaded through every
op in program order: through those of the function itself, and through the jaxprs of the jitted
functions, loops, branches and rematerialised functions that it calls. Then every op has a
perturbed operand on every rank, no op of a loop is loop-invariant, and no op is without outputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, Primitive
from jax.interpreters import ad, batching, mlir

from . import _compat
from ._primitive import PRIMITIVES, TOKEN, effect, split
from ._scope import scope_p
from ._spec import SPECS

# ---- The seed: a float32 zero that depends linearly on its operands

seed_p = Primitive("mpi4jax_seed")
seed_p.def_abstract_eval(lambda *xs: TOKEN)
seed_p.def_impl(_compat.eval_primitive(seed_p))
mlir.register_lowering(
    seed_p, mlir.lower_fun(lambda *xs: jnp.zeros((), np.float32), multiple_results=False)
)
batching.primitive_batchers[seed_p] = lambda args, dims: (seed_p.bind(*args), None)


def _seed_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return seed_p.bind(*primals), seed_p.bind(*[ad.instantiate_zeros(t) for t in tangents])


def _seed_transpose(c: Any, *xs: Any) -> list[Any]:
    return [
        jnp.zeros(x.aval.shape, x.aval.dtype) if ad.is_undefined_primal(x) else None for x in xs
    ]


ad.primitive_jvps[seed_p] = _seed_jvp
ad.primitive_transposes[seed_p] = _seed_transpose


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

        for eqn in jaxpr.eqns:
            ins = [read(v) for v in eqn.invars]
            rule = RULES.get(eqn.primitive) if effect in eqn.effects else None
            with eqn.ctx.manager:
                if rule is None:
                    outs = _compat.bind_eqn(eqn, ins)
                else:
                    token, outs = rule(eqn.params, token, ins)
            env.update(zip(eqn.outvars, outs, strict=True))
        return token, [read(v) for v in jaxpr.outvars]

    return run


def _rule_op(name: str) -> Callable[..., Threaded]:
    spec, primitive = SPECS[name], PRIMITIVES[name]

    def rule(params: dict[str, Any], token: Any, args: Sequence[Any]) -> Threaded:
        arrays, env, own = split(spec, params, args)
        *out, token = primitive.bind(*arrays, *env, token, **params)
        return token, [*out, *(token for _ in own)]

    return rule


_jitted: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _rule_jit(params: dict[str, Any], token: Any, args: Sequence[Any]) -> Threaded:
    jaxpr, _ = _open(params["jaxpr"])
    if jaxpr not in _jitted:
        run = _thread(params["jaxpr"])
        run.__name__ = params["name"]
        _jitted[jaxpr] = jax.jit(run, inline=params["inline"])
    return _jitted[jaxpr](token, *args)  # type: ignore[no-any-return]


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
    prevent_cse = params["prevent_cse"]
    if isinstance(prevent_cse, tuple):  # one for each operand
        prevent_cse = (True, *prevent_cse)
    run = jax.checkpoint(_thread(params["jaxpr"]), prevent_cse=prevent_cse, policy=params["policy"])
    return run(token, *args)  # type: ignore[no-any-return]


RULES: dict[Primitive, Callable[..., Threaded]] = {
    **{primitive: _rule_op(name) for name, primitive in PRIMITIVES.items()},
    _compat.jit_p: _rule_jit,
    _compat.closed_call_p: _rule_inline("call_jaxpr"),
    scope_p: _rule_inline("jaxpr"),
    _compat.scan_p: _rule_scan,
    _compat.while_p: _rule_while,
    _compat.cond_p: _rule_cond,
    _compat.remat_p: _rule_remat,
}

_OPS = {primitive: SPECS[name] for name, primitive in PRIMITIVES.items()}
_BINDS_ITSELF = {_compat.scan_p, _compat.while_p, _compat.cond_p, _compat.remat_p, _compat.jit_p}


def _communicates(primitive: Primitive, params: dict[str, Any]) -> bool:
    if primitive in _OPS:
        return True
    jaxprs = [
        j
        for value in params.values()
        for j in (value if isinstance(value, tuple) else (value,))
        if hasattr(j, "effects")
    ]
    return any(effect in j.effects for j in jaxprs)


def _rewrite(trace: Any, primitive: Primitive, args: Sequence[Any], params: dict[str, Any]) -> Any:
    rule = RULES.get(primitive)
    if rule is None or not _communicates(primitive, params):
        return None
    if primitive in _OPS:
        own = split(_OPS[primitive], params, args)[2]
        if own and _compat.perturbed(trace, own[0]):
            return None
    token = getattr(trace, "mpi4jax_token", None)
    if token is None:
        token = _compat.perturb(trace, seed_p.bind)
        if token is None:  # nothing is differentiated
            return None
    # Binds that the rule makes come back here; its own must not be rewritten again.
    with _compat.once(trace, primitive if primitive in _BINDS_ITSELF else None):
        trace.mpi4jax_token, out = rule(params, token, list(args))
    return out


_compat.intercept_differentiation(_rewrite)
