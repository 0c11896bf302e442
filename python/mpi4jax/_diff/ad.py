"""Derivatives that take the same form on every rank.

Whether JAX differentiates an equation depends on whether its operands are perturbed on this
rank; whether its transpose waits for a message depends on the other ranks. While a function
is differentiated, one token, a float32 scalar that is always perturbed, is threaded through every
op in program order: through the ops of the function itself, and through the jaxprs of the jitted
functions, loops, branches and rematerialized functions that it calls. Then every op has a perturbed
operand on every rank, no op of a loop is loop-invariant, and no op is without outputs.

Under `vmap` all messages of all ranks carry the batch. But ops that were given their token here
have `How.threaded` set: they are batched only if an operand is, and the token is one.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Trace
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive, jaxpr_as_fun, primitives
from jax.interpreters import ad, batching, mlir

from .._jax import compat, traces
from .._jax.functions import HOLDS, inner_jaxprs, opened
from .._jax.workarounds import is_needed
from .._op.primitive import OPERANDS, TOKEN, effect, has_derivative
from .custom_rules import note_differentiated_ops
from .tracing import (
    depend_on,
    eqn_needs_token,
    is_rewritten,
    needs_token,
    perturbed,
    remember_token,
    rewriting,
    seed_p,
    token_of,
)

# ---- The first equation of a function that a token was threaded through: the identity

entry_p = Primitive("mpi4jax_entry")
entry_p.def_abstract_eval(lambda token: token)
entry_p.def_impl(lambda token: token)
mlir.register_lowering(entry_p, lambda ctx, token: [token])
batching.primitive_batchers[entry_p] = lambda args, dims: (entry_p.bind(*args), *dims)
ad.deflinear2(entry_p, lambda c, token: [c])


# ---- What follows a branch or a `jax.checkpoint`: the identity, with the effect
#
# Partial evaluation keeps loops and jitted functions because of their effect. It keeps other
# equations with inner functions only if their results are needed; here, these are their tokens.

exit_p = Primitive("mpi4jax_exit")
exit_p.def_effectful_abstract_eval(lambda token: (token, {effect}))
exit_p.def_impl(lambda token: token)
batching.primitive_batchers[exit_p] = lambda args, dims: (exit_p.bind(*args), *dims)
ad.deflinear2(exit_p, lambda c, token: [c])


def _lower_exit(ctx: mlir.LoweringRuleContext, token: Any) -> list[Any]:
    ctx.set_tokens_out(ctx.tokens_in)
    return [token]


mlir.register_lowering(exit_p, _lower_exit)


def _rule_exit(params: dict[str, Any], token: Any, args: Sequence[Any]) -> tuple[Any, list[Any]]:
    return token, [exit_p.bind(token)]


# ---- Threading a token through an equation: (params, token, args) -> (token, results)

Threaded = tuple[Any, list[Any]]


def _thread(jaxpr: Any) -> Callable[..., Threaded]:
    """Return the function of a jaxpr, with a token as first argument and first result."""
    consts, jaxpr = getattr(jaxpr, "consts", ()), opened(jaxpr)

    def run(token: Any, *args: Any) -> Threaded:
        def step(eqn: JaxprEqn, ins: list[Any]) -> Sequence[Any]:
            nonlocal token
            communicates = effect in eqn.effects and eqn_needs_token(eqn)
            # A loop that is differentiated in reverse mode has no transpose, so other equations
            # must not depend on it: `_rewrite` gives it a token where it is differentiated.
            communicates = communicates and eqn.primitive is not primitives.while_p
            rule = _rule_of(eqn.primitive, eqn.params) if communicates else None
            if rule is not None:
                token, outs = rule(eqn.params, token, ins)
                return outs
            if communicates and eqn.primitive in _CUSTOM_DERIVATIVES:
                n = eqn.params["num_consts"]  # closed over, so not differentiated
                only_first = eqn.primitive is primitives.custom_vjp_call_p
                ins = [*ins[:n], *depend_on(token, ins[n:], only_first)]
            elif communicates and eqn.primitive is not primitives.custom_lin_p:
                raise _no_rule(eqn.primitive.name, eqn.params)
            return compat.bind_with(eqn.primitive, eqn.params, ins)

        token = entry_p.bind(token)
        out = compat.evaluate(jaxpr, consts, args, step)
        return token, out

    return run


def _rule_op(primitive: Primitive) -> Callable[..., Threaded]:
    def rule(params: dict[str, Any], token: Any, args: Sequence[Any]) -> Threaded:
        op, how = params["op"], params["how"]
        arrays, numbers, own_token = OPERANDS[primitive](op, how, args)
        how = how._replace(threaded=True)
        *out, token = primitive.bind(*arrays, *numbers, token, op=op, how=how)
        return token, [*out, *(token for _ in own_token)]

    return rule


# Cache from a function to its threaded versions, which keep no reference to the original: one that
# is transposed, whose loops may be left alone, and one that is not transposed. JAX caches the
# derivatives of each.
_threaded: weakref.WeakKeyDictionary[Any, dict[bool, Callable[..., Any]]]
_threaded = weakref.WeakKeyDictionary()


def _threaded_jaxpr(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Return the jaxpr of a function with a token as first argument and first result."""

    def run(token: Any, *args: Any) -> list[Any]:
        token, out = _thread(jaxpr)(token, *args)
        return [token, *out]

    return traces.trace_python(run, [TOKEN, *jaxpr.in_avals])


def _rule_jit(params: dict[str, Any], token: Any, args: Sequence[Any]) -> Threaded:
    versions, is_transposed = _threaded.setdefault(params["jaxpr"], {}), traces.is_transposed()
    if is_transposed not in versions:
        call = jaxpr_as_fun(_threaded_jaxpr(params["jaxpr"]))
        call = functools.wraps(call)(lambda *args, call=call: call(*args))
        call.__name__ = params["name"]
        versions[is_transposed] = jax.jit(call)
    token, *out = versions[is_transposed](token, *args)
    return token, out


def _rule_closed_call(params: dict[str, Any], token: Any, args: Sequence[Any]) -> Threaded:
    (jaxpr,) = HOLDS[primitives.closed_call_p].functions(params)
    return _thread(jaxpr)(token, *args)


def _rule_scan(params: dict[str, Any], token: Any, args: Sequence[Any]) -> Threaded:
    n, m = compat.scan_counts(params)
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
    batch = opened(params["cond_jaxpr"]).outvars[0].aval.shape

    def again(token: Any, values: Sequence[Any]) -> Any:
        token, (predicate,) = cond(token, *cond_consts, *values)
        return token, predicate

    def keep(predicate: Any, new: Any, old: Any) -> Any:
        """A vmapped loop runs until all predicates are false; finished elements stay the same."""
        return jnp.where(predicate.reshape(batch + (1,) * (new.ndim - len(batch))), new, old)

    def step(state: Any) -> Any:
        token, predicate, values = state
        token, new = body(token, *body_consts, *values)
        if batch:
            pairs = zip(map(compat.as_value, new), values, strict=True)
            new = [keep(predicate, n, v) for n, v in pairs]
        return *again(token, new), new

    state = (*again(token, init), list(init))
    token, _, values = lax.while_loop(lambda state: state[1].any(), step, state)
    return token, values


def _rule_cond(params: dict[str, Any], token: Any, args: Sequence[Any]) -> Threaded:
    index, *operands = args
    if "branches_platforms" in params:  # a lax.platform_dependent
        branches = tuple(map(_threaded_jaxpr, params["branches"]))
        token, *out = primitives.cond_p.bind(
            index, token, *operands, **{**params, "branches": branches}
        )
    else:
        functions = [_thread(branch) for branch in params["branches"]]
        token, out = lax.switch(index, functions, token, *operands)
    return exit_p.bind(token), out


def _rule_remat(params: dict[str, Any], token: Any, args: Sequence[Any]) -> Threaded:
    threaded = jax.make_jaxpr(_thread(params["jaxpr"]))(token, *args)
    jaxpr, consts = compat.close_constants(threaded)
    prevent_cse = params["prevent_cse"]
    if isinstance(prevent_cse, tuple):  # one for each operand
        prevent_cse = (*(False for _ in consts), True, *prevent_cse)
    params = {**params, "jaxpr": jaxpr.jaxpr, "prevent_cse": prevent_cse}
    try:
        token, *out = compat.remat_p.bind(*consts, token, *args, **params)
    except AssertionError as error:  # raised by JAX, without a message
        raise NotImplementedError(
            "mpi4jax: JAX cannot linearize this jax.checkpoint, because it contains operations, "
            "probably in a while_loop; use jax.jvp, remove the checkpoint, or write the loop as a "
            "lax.scan"
        ) from error
    return exit_p.bind(token), out


def _rule_linear_solve(params: dict[str, Any], token: Any, args: Sequence[Any]) -> Threaded:
    # The solve is differentiated as a whole, by solving again. The matrix depends on it, too: on a
    # rank where it were not perturbed, a matvec that communicates would be left out.
    return token, primitives.linear_solve_p.bind(*depend_on(token, args), **params)


def _rule_root(params: dict[str, Any], token: Any, args: Sequence[Any]) -> Threaded:
    """Thread the token through `jax.lax.custom_root`, a high-level primitive from JAX 0.12 on, or
    through its linear map."""
    # As for a linear solve, with the derivative of the function at the root with respect to its
    # constants.
    root = params["_prim"]
    function_consts = jax.tree.unflatten(root.in_tree, args)[2]
    if not any(map(has_derivative, jax.tree.leaves(function_consts))):
        raise _no_rule("custom_root", params)
    return token, jax.tree.leaves(root(*jax.tree.unflatten(root.in_tree, depend_on(token, args))))


def _rule_shard_map(params: dict[str, Any], token: Any, args: Sequence[Any]) -> Threaded:
    # JAX differentiates the inner function itself, if one operand is perturbed.
    if not any(map(has_derivative, args)):
        raise _no_rule(compat.shard_map_p.name, params)
    return token, compat.bind_with(compat.shard_map_p, params, depend_on(token, args))


# The rules of primitives that do not communicate by themselves.
RULES: dict[Primitive, Callable[..., Threaded]] = {
    exit_p: _rule_exit,
    primitives.jit_p: _rule_jit,
    primitives.closed_call_p: _rule_closed_call,
    primitives.scan_p: _rule_scan,
    primitives.while_p: _rule_while,
    primitives.cond_p: _rule_cond,
    compat.remat_p: _rule_remat,
    primitives.linear_solve_p: _rule_linear_solve,
    compat.shard_map_p: _rule_shard_map,
}

# High-level primitives share one JAX primitive, so their rules are found by class name.
_HIGH_RULES = {"CustomRoot": _rule_root, "_RootLinearMap": _rule_root}


def _rule_of(primitive: Primitive, params: dict[str, Any]) -> Callable[..., Threaded] | None:
    if "_prim" in params:
        return _HIGH_RULES.get(type(params["_prim"]).__name__)
    return _rule_op(primitive) if primitive in OPERANDS else RULES.get(primitive)


_CUSTOM_DERIVATIVES = {primitives.custom_jvp_call_p, primitives.custom_vjp_call_p}


def _no_rule(name: str, params: dict[str, Any]) -> NotImplementedError:
    """Return the error for an equation that might be differentiated on some ranks only."""
    name = type(params["_prim"]).__name__ if "_prim" in params else name
    flags = {
        "RematTraced": "jax_remat3",
        "CustomVJPTraced": "jax_custom_vjp3",
        "CustomJVPTraced": "jax_custom_jvp3",
    }
    advice = f"; set {flags[name]} to False" if name in flags else ""
    return NotImplementedError(
        f"mpi4jax: operations inside {name!r} cannot be differentiated: a rank without perturbed "
        f"operands would skip them, and the other ranks would deadlock{advice}"
    )


def _own_token(primitive: Primitive, params: dict[str, Any], args: Sequence[Any]) -> Any:
    """Return the token that an equation already has, or None."""
    if primitive in OPERANDS:
        token = OPERANDS[primitive](params["op"], params["how"], args)[2]
        return next(iter(token), None)
    for _, jaxpr in inner_jaxprs(params):
        first = opened(jaxpr).eqns[:1]
        if first and first[0].primitive is entry_p:
            # The last arguments of the equation are the arguments of the jaxpr.
            operands = opened(jaxpr).invars
            position = next((i for i, v in enumerate(operands) if v is first[0].invars[0]), None)
            if position is not None:
                return args[len(args) - len(operands) + position]
    return None


def _rewrite(
    trace: Trace, primitive: Primitive, args: Sequence[Any], params: dict[str, Any]
) -> Any:
    if is_rewritten(trace, primitive):
        return None
    # Once a `vmap` is done, its batch of tokens is an ordinary array.
    if primitive is entry_p and np.shape(args[0]) == () and perturbed(trace, args[0]):
        remember_token(trace, args[0])
    inside = [jaxpr for _, jaxpr in inner_jaxprs(params)]
    inside += [params["_prim"]] if "_prim" in params else []  # a high-level one, of JAX 0.12
    if params["how"].spmd if primitive in OPERANDS else not any(map(needs_token, inside)):
        return None
    note_differentiated_ops()
    rule = _rule_of(primitive, params)
    if rule is None:
        raise _no_rule(primitive.name, params)
    is_loop = primitive is primitives.while_p
    if is_loop and traces.is_transposed() and not any(traces.are_perturbed(trace, args)):
        return None  # on a rank where the argument is perturbed, JAX refuses to transpose it
    own = _own_token(primitive, params, args)
    if own is not None and perturbed(trace, own):
        return None
    token = token_of(trace)
    if token is None:
        return None
    with rewriting(trace, primitive):
        token, out = rule(params, token, list(args))
    if not is_loop:
        remember_token(trace, token)
    return out


traces.on_equation(_rewrite)


def _transpose_while(refuse: Callable[..., Any]) -> Callable[..., Any]:
    """Return JAX's rule, which raises an error, except for loops whose results need no cotangent.

    JAX drops such loops before it transposes, unless they communicate.
    """

    def rule(cotangents: Sequence[Any], *args: Any, **params: Any) -> Any:
        if any(type(c) is not ad.Zero for c in cotangents):
            return refuse(cotangents, *args, **params)
        return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in args]

    return rule


ad.primitive_transposes[primitives.while_p] = _transpose_while(
    ad.primitive_transposes[primitives.while_p]
)
traces.keep_results(primitives.while_p, effect)


# ---- vmap: ops are batched by themselves (`_op/primitive.py`)


def _batch_while(original: Callable[..., Any]) -> Callable[..., Any]:
    """Apply JAX's rule, except for loops whose condition communicates.

    There JAX would still change the elements of the batch whose own condition is false.
    """

    def rule(axis_data: Any, args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
        cond, body = params["cond_jaxpr"], params["body_jaxpr"]
        if effect not in cond.effects:
            return original(axis_data, args, dims, **params)
        loop = jax.jit(lambda *args: _rule_while(params, seed_p.bind(), args)[1])
        avals = [*cond.in_avals[: params["cond_nconsts"]], *body.in_avals]
        with jax.disable_jit(False):
            (eqn,) = jax.make_jaxpr(loop)(*avals).eqns
        batch = batching.fancy_primitive_batchers[eqn.primitive]
        return batch(axis_data, args, dims, **eqn.params)

    return rule


if is_needed("batched conditions"):
    batching.fancy_primitive_batchers[primitives.while_p] = _batch_while(
        batching.fancy_primitive_batchers[primitives.while_p]
    )
