"""How functions are rewritten that users have given rules of their own.

A rule of the user's is traced inside of the mesh when JAX needs it. The functions here have a
`Rewriter` (`rewriting.py`) as their first argument.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core
from jax._src.custom_batching import custom_vmap_p
from jax.extend.core import primitives
from jax.interpreters import ad

from . import compat
from .named_axes import plain


def _custom_vjp(self: Any, eqn: Any, args: list[Any]) -> Sequence[Any]:
    params = eqn.params
    n = params["num_consts"]
    consts, args = args[:n], args[n:]
    inner, thunk, bwd = params["call_jaxpr"], params["fwd_jaxpr_thunk"], params["bwd"]
    in_avals = inner.in_avals[n:]
    out_avals = inner.out_avals
    residuals: list[Any] = []  # their types inside the mesh
    forwarded: list[Any] = []

    def run(*args: Any) -> list[Any]:
        return self.run(inner.jaxpr, inner.consts, [*consts, *args])

    fun = jax.custom_vjp(run)

    def forward(*args: Any) -> Any:
        with self.inside():
            jaxpr, closed_over = thunk.call_wrapped(*([True] * len(args)))
        trees = params["out_trees"]()
        forwarded[:] = (
            trees[2] if len(trees) > 2 else [None] * (len(jaxpr.outvars) - len(out_avals))
        )
        out = self.run(jaxpr, closed_over, list(args))
        m = len(out) - len(out_avals)
        residuals[:] = [v.aval for v in jaxpr.outvars[:m]]
        return out[m:], (out[:m], list(args))

    def backward(saved: Any, cotangents: Any) -> Any:
        res, primals = saved
        avals = list(residuals)
        if len(res) != len(forwarded):  # residuals that are arguments are not among the results
            rest, types = iter(res), iter(residuals)
            res = [next(rest) if at is None else primals[at - n] for at in forwarded]
            avals = [next(types) if at is None else in_avals[at - n] for at in forwarded]
        avals += map(_cotangent_type, out_avals)
        back = self.traced_inside(lambda *xs: list(_call(bwd, xs)), avals)
        out = iter(self.run(back.jaxpr, back.consts, [*res, *cotangents]))
        return tuple(
            next(out) if jax.numpy.issubdtype(aval.dtype, jax.numpy.inexact) else _skip(out, aval)
            for aval in in_avals
        )

    fun.defvjp(forward, backward)
    return fun(*args)


def _skip(out: Iterator[Any], aval: Any) -> Any:
    next(out)
    return np.zeros(aval.shape, jax.dtypes.float0)  # the cotangent of integers


def _call(bwd: Any, xs: Sequence[Any]) -> list[Any]:
    outs = bwd.call_wrapped(*xs) if hasattr(bwd, "call_wrapped") else bwd(*xs)
    if len(outs) == 2 and isinstance(outs[0], (list, tuple)):  # from 0.12, with what was logged
        outs = outs[0]
    return [ad.instantiate_zeros(x) for x in outs]


def _cotangent_type(aval: Any) -> Any:
    return (
        aval.to_cotangent_aval() if hasattr(aval, "to_cotangent_aval") else aval.to_tangent_aval()
    )


def _custom_vmap(self: Any, eqn: Any, args: list[Any]) -> Sequence[Any]:
    rule, inner = eqn.params["rule"], eqn.params["call"]

    @functools.wraps(rule)
    def rewritten(size: int, in_batched: Any, *args: Any) -> tuple[Any, Any]:
        batched: list[Any] = []

        def run(*args: Any) -> Any:
            out, out_batched = rule(size, in_batched, *args)
            batched.append(out_batched)
            return out

        types = [
            core.unmapped_aval(size, 0, aval) if is_batched else aval
            for aval, is_batched in zip(inner.in_avals, jax.tree.leaves(in_batched), strict=True)
        ]
        out = self.outside(run, types)(*args)
        return out, batched[-1]

    changed = {**eqn.params, "call": self.function(inner), "rule": rewritten}
    return compat.bind_with(custom_vmap_p, changed, args)


def _linear_call(self: Any, eqn: Any, args: list[Any]) -> Sequence[Any]:
    def transpose() -> tuple[Any, Any]:
        with self.inside():
            inner, consts = eqn.params["transpose_thunk"]()
        return self.function(inner), consts

    callee = self.function(eqn.params["callee"])
    changed = {**eqn.params, "callee": callee, "transpose_thunk": transpose}
    return compat.bind_with(eqn.primitive, changed, args)


def _high_level(self: Any, eqn: Any, args: list[Any]) -> Sequence[Any]:
    """Of a primitive that is an object of Python, as some are from JAX 0.12 on."""
    prim, name = eqn.params["_prim"], type(eqn.params["_prim"]).__name__
    if type(prim).__module__.startswith("jax._src.numpy"):  # as `einsum`: nothing communicates
        new = copy.copy(prim)
        vars(new).update({k: jax.tree.map(plain, v) for k, v in vars(prim).items()})
    elif name == "CustomRoot":
        of_solve, guess, of_f, of_tangent = prim.in_avals
        root = prim.out_aval[0] if prim.has_aux else prim.out_aval
        types = jax.tree.map(plain, prim.in_avals)
        solve = self.outside(prim.solve, (of_solve, guess))
        new = type(prim)(
            self.outside(prim.f, (of_f, root)),
            solve,
            self.outside(prim.tangent_solve, (of_tangent, root, root)),
            jax.jit(solve).trace(*types[:2]),
            types,
            prim.has_aux,
        )
    elif name == "_RootLinearMap":
        out = self.outside(prim.expand, prim.in_avals)(*jax.tree.unflatten(prim.in_tree, args))
        return jax.tree.leaves(out)
    else:
        raise self.refuse(name, compat.eqn_line(eqn))
    return compat.bind_with(eqn.primitive, {"_prim": new}, args)


def _sharding_constraint(self: Any, eqn: Any, args: list[Any]) -> Sequence[Any]:
    return args  # along axes that are not manual: there, each rank has the whole array


RULES: dict[str, Callable[[Any, Any, list[Any]], Sequence[Any]]] = {
    primitives.sharding_constraint_p.name: _sharding_constraint,
    "reshard": _sharding_constraint,
    primitives.custom_vjp_call_p.name: _custom_vjp,
    custom_vmap_p.name: _custom_vmap,
    "linear_call": _linear_call,
    "call_hi_primitive": _high_level,
}
