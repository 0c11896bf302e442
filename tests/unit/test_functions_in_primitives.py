"""Every collective of JAX has a counterpart or is refused on purpose, and so has every place where
an equation holds a function. A new version of JAX that adds one fails here."""

import functools
import types

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax._src.lax import parallel
from jax.extend.core import Primitive

import mpi4jax
from mpi4jax._jax.functions import equations, inner_jaxprs
from mpi4jax._spmd.collectives import Collectives

# Messages between devices, which JAX has for GPUs only.
REFUSED = {"psend", "precv"}
# `pgather` is of `pmap` in JAX 0.7. No collective has the `done` of JAX 0.12: each has its own.
OTHERS = {"done", "pgather"}


def test_every_collective_of_jax():
    known = Collectives(mpi4jax.Mesh(), frozenset("i"), True, "").table()
    found = {p.name for p in vars(parallel).values() if isinstance(p, Primitive)}
    assert len(found) > 10
    assert found - known.keys() <= REFUSED | OTHERS, found - known.keys()


@jax.custom_jvp
def with_jvp(x):
    return jnp.sin(x)


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), jnp.cos(primals[0]) * tangents[0]))


@jax.custom_vjp
def with_vjp(x):
    return jnp.sin(x)


with_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, c: (jnp.cos(x) * c,))


@jax.custom_batching.custom_vmap
def with_vmap(x):
    return jnp.sin(x)


with_vmap.def_vmap(lambda size, batched, x: (jnp.sin(x), True))


def root(x):
    return lax.custom_root(
        lambda z: z - x, x, lambda f, z: z - f(z), lambda g, y: y / g(jnp.ones_like(y))
    )


def linear(x):
    return lax.custom_linear_solve(lambda v: 2 * v, x, lambda f, b: b / 2, symmetric=True)


FUNCTIONS = {
    "jit": jax.jit(jnp.sin),
    "checkpoint": jax.checkpoint(jnp.sin),
    "cond": lambda x: lax.cond(x > 0, jnp.sin, jnp.cos, x),
    "switch": lambda x: lax.switch(0, [jnp.sin, jnp.cos], x),
    "scan": lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=2)[0],
    "while": lambda x: lax.while_loop(lambda c: c < 3, lambda c: c + 1, x),
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "custom_vmap": with_vmap,
    "custom_root": root,
    "custom_linear_solve": linear,
    "linear_call": lambda x: jax.custom_derivatives.linear_call(
        lambda _, y: y, lambda _, c: c, (), x
    ),
    "reduce": lambda x: lax.reduce(x[None], jnp.float32(1), lambda a, b: a * b * a, (0,)),
    "reduce_window": lambda x: lax.reduce_window(
        x[None], jnp.float32(1), lambda a, b: a * b * a, (1,), (1,), "VALID"
    ),
    "scatter": lambda x: jnp.zeros(3).at[0].apply(jnp.sin) + x,
    "sort": lambda x: lax.sort(x[None]),
    "associative_scan": lambda x: lax.associative_scan(jnp.add, x[None]),
    "cumsum": lambda x: jnp.cumsum(x[None]),
    "grad": jax.grad(with_vjp),
    "jvp": lambda x: jax.jvp(with_jvp, (x,), (x,))[1],
    "einsum": lambda x: jnp.einsum("i,i->", x[None], x[None]),
    "composite": lax.composite(jnp.sin, "test.sin"),
}
# Parameters with a function of Python, which JAX calls later: rules of ours call it, or it is one
# of JAX's own, or a number of scalars.
CALLED_LATER = {
    ("custom_jvp_call", "jvp_jaxpr_fun"),
    ("custom_vjp_call", "fwd_jaxpr_thunk"),
    ("custom_vjp_call", "bwd"),
    ("custom_vjp_call", "out_trees"),
    ("custom_vmap_call", "rule"),
    ("call_hi_primitive", "_prim"),
    ("linear_call", "transpose_thunk"),
    ("reduce", "computation"),
}


def holds_python(value):
    if isinstance(value, (tuple, list)):
        return any(map(holds_python, value))
    kinds = (types.FunctionType, types.MethodType, functools.partial)
    return isinstance(value, kinds) or hasattr(value, "call_wrapped") or hasattr(value, "expand")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_in_a_primitive(name):
    jaxpr = jax.make_jaxpr(FUNCTIONS[name])(jnp.float32(2)).jaxpr
    for eqn in equations(jaxpr):
        shown = {key.partition("[")[0] for key, _ in inner_jaxprs(eqn.params)}
        for key, value in eqn.params.items():
            if key in shown or "jaxpr" in type(value).__name__.lower():
                assert key in shown, (eqn.primitive, key)
                continue
            known = (eqn.primitive.name, key) in CALLED_LATER
            assert known or not holds_python(value), (eqn.primitive, key, value)
