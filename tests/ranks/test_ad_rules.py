"""Derivatives below what JAX puts around operations: rules of the user's, meshes, solvers, caches.

On one rank and on two: the ranks of a test do the same, unless it says otherwise.
"""

import gc
import inspect
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.interpreters.ad import LinearizeTrace
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P
from mpi4py import MPI
from reference import enable_x64

import mpi4jax
from mpi4jax import notoken

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
X = jnp.array([0.1, 0.2, 0.3])
NEXT, PREVIOUS = (RANK + 1) % SIZE, (RANK - 1) % SIZE

pytestmark = [pytest.mark.ranks(1, 2), pytest.mark.timeout(60)]


def total(x):
    return notoken.allreduce(x, MPI.SUM)


# ---- shard_map

OPS = {
    "allreduce": total,
    "alltoall": lambda x: notoken.alltoall(jnp.stack([x] * SIZE)).sum(0),
    "bcast": lambda x: notoken.bcast(x, 0),
    "pvary": mpi4jax.pvary,
    "scan": lambda x: notoken.scan(x, MPI.MAX),
    "sendrecv": lambda x: notoken.sendrecv(x, x, PREVIOUS, NEXT),
    "sendrecv into a constant": lambda x: notoken.sendrecv(
        x, np.zeros(3, np.float32), PREVIOUS, NEXT
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("op", OPS)
def test_shard_map(op, check):
    """What varies over the axes of the mesh also varies in derivatives."""
    auto = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((1,), ("i",), axis_types=(auto,), devices=jax.local_devices()[:1])

    def plain(x):
        return jnp.sum(OPS[op](jnp.sin(x)))

    def sharded(x):
        f = lambda x: lax.psum(plain(x), "i")
        return jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P(), check_vma=check)(x)

    for inner in (sharded, jax.jit(sharded), jax.checkpoint(sharded)):
        np.testing.assert_allclose(jax.jit(jax.grad(inner))(X), jax.grad(plain)(X), rtol=1e-6)
    tangent = jax.jit(lambda x: jax.jvp(sharded, (x,), (x,))[1])(X)
    np.testing.assert_allclose(tangent, jax.jvp(plain, (X,), (X,))[1], rtol=1e-6)


# ---- Solvers


@pytest.mark.parametrize("transform", ["jacfwd", "hessian", "vmap of jvp"])
def test_linear_solve(transform):
    """A solve with an operator that communicates: as the same one that does not."""

    def solve(mean):
        def f(b):
            diagonal = jnp.array([2.0, 3.0, 4.0]) + b
            operator = lambda v: diagonal * v + 0.1 * mean(v)
            inverse = lambda _, b: b / (diagonal + 0.1)
            return lax.custom_linear_solve(operator, b, inverse, inverse, symmetric=True)

        return {
            "jacfwd": jax.jacfwd(f),
            "hessian": jax.hessian(lambda b: jnp.sum(f(b) ** 2)),
            "vmap of jvp": lambda b: jax.vmap(lambda t: jax.jvp(f, (b,), (t,))[1])(jnp.eye(3)),
        }[transform]

    mean = lambda v: mpi4jax.pvary(total(v)) / SIZE
    np.testing.assert_allclose(jax.jit(solve(mean))(X), solve(lambda v: v)(X), rtol=1e-5, atol=1e-6)


# ---- jax.checkpoint


@pytest.mark.parametrize(
    "dtype, policy", [("complex64", None), ("complex128", "everything_saveable")]
)
def test_checkpoint_of_complex_values(dtype, policy):
    """JAX rounds what it stores to the precision that it has, without asking for a real type."""

    def f(x):
        z = jnp.fft.fft(x * (1 + 2j))
        z = jnp.sin(total(z / 9) * z)
        return jnp.sum(jnp.abs(total(z)) ** 2)

    policy = policy and getattr(jax.checkpoint_policies, policy)
    with enable_x64(dtype == "complex128"):
        x = jnp.array([0.1, 0.2, 0.3], jnp.finfo(dtype).dtype)
        expected = jax.grad(f)(x)
        assert expected.dtype == x.dtype
        for transform in (lambda f: f, jax.jit):
            actual = transform(jax.grad(jax.checkpoint(f, policy=policy)))(x)
            np.testing.assert_allclose(actual, expected, rtol=1e-5)


# ---- Loops


def loop(x):
    step = lambda s: (s[0] + 1, notoken.allreduce(jnp.sin(s[1]), MPI.SUM))
    return lax.while_loop(lambda s: s[0] < 3, step, (0, x))[1]


AROUND_LOOP = {
    "eager": loop,
    "jit": jax.jit(loop),
    "scan": lambda x: lax.scan(lambda c, _: (loop(c), None), x, None, length=1)[0],
}


@pytest.mark.parametrize("f", AROUND_LOOP.values(), ids=AROUND_LOOP)
def test_a_linearized_loop(f):
    """JAX runs the whole loop again."""
    value, linear = jax.linearize(f, X)
    expected, tangent = jax.jvp(jax.checkpoint(f), (X,), (X,))
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(linear(X), tangent, rtol=1e-6)


@pytest.mark.parametrize("transform", [jax.linearize, jax.vjp])
@pytest.mark.parametrize("f", AROUND_LOOP.values(), ids=AROUND_LOOP)
def test_a_checkpoint_around_a_linearized_loop(f, transform):
    with pytest.raises(NotImplementedError, match="cannot linearize this"):
        transform(jax.checkpoint(f), X)


# Where a loop communicates: what its condition and its body do to the value.
COMMUNICATING = {
    "condition": (total, lambda v: v),
    "body": (lambda v: v, total),
    "inner loop": (
        lambda v: v,
        lambda v: lax.while_loop(lambda c: total(c) < 10 * SIZE, lambda c: c + 1, v),
    ),
}
# Why its result has no gradient.
WITHOUT_GRADIENT = {
    "constant": lambda loop: lambda w: w * loop(jnp.float32(1)),
    "of its input": lambda loop: lambda w: w * loop(lax.stop_gradient(w)),
    "of its result": lambda loop: lambda w: w * lax.stop_gradient(loop(w)),
}
WITHIN = {
    "": lambda f: f,
    "jit": jax.jit,
    "scan": lambda f: lambda w: lax.scan(lambda c, _: (c + f(w), None), 0 * w, None, length=1)[0],
    "cond": lambda f: lambda w: lax.cond(w > 0, f, lambda w: w, w),
    "checkpoint": jax.checkpoint,
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("around", WITHIN)
@pytest.mark.parametrize("without", WITHOUT_GRADIENT)
@pytest.mark.parametrize("where", COMMUNICATING)
def test_a_loop_without_a_gradient(where, without, around):
    """JAX has a gradient of such functions, whose loops it cannot transpose."""
    if (without, around) == ("of its result", "checkpoint"):
        pytest.skip("JAX cannot linearize it")
    again, change = COMMUNICATING[where]

    def loop(x):
        return lax.while_loop(lambda v: again(v) < 50 * SIZE, lambda v: v + change(v) / 2, x)

    f = WITHIN[around](WITHOUT_GRADIENT[without](loop))
    value = float(loop(jnp.float32(1)))
    for gradient in (jax.grad(f), jax.jit(jax.grad(f))):
        np.testing.assert_allclose(gradient(jnp.float32(1)), value, rtol=1e-6)
    # In a derivative of this one, JAX transposes nothing.
    np.testing.assert_allclose(jax.jvp(jax.grad(f), (1.0,), (1.0,))[1], 0, atol=1e-6)


def test_a_loop_that_is_perturbed_on_one_rank():
    """In forward mode, all ranks send its tangents; also where functions of both modes are one."""

    @jax.jit
    def f(w, v):
        loop = lambda x: lax.while_loop(lambda v: v[0] < 3, lambda v: total(v) / SIZE + 1, x)
        return lax.scan(lambda c, _: (c + loop(v), None), w, None, length=1)[0]

    ones = jnp.ones(3)
    np.testing.assert_allclose(jax.grad(lambda w: f(w, ones).sum())(ones), 1)
    own = (lambda v: f(ones, v)) if RANK == 0 else (lambda v: f(v, ones))
    expected = 1 / SIZE + (RANK != 0)
    np.testing.assert_allclose(jax.jvp(own, (ones,), (ones,))[1], expected, rtol=1e-6)
    if "is_vjp" in inspect.signature(LinearizeTrace).parameters:  # not in JAX 0.7
        np.testing.assert_allclose(jax.linearize(own, ones)[1](ones), expected, rtol=1e-6)


def test_condition_that_communicates_below_vmap():
    """Elements of the batch whose own condition is false keep their values."""

    def f(x, limit):
        return lax.while_loop(lambda v: total(v) < SIZE * limit, lambda v: v + 1, x)

    actual = jax.jit(jax.vmap(f))(jnp.zeros(3), jnp.array([1.0, 3.0, 2.0]))
    np.testing.assert_array_equal(actual, [1, 3, 2])


def test_body_that_communicates_below_vmap():
    """The same of a condition that does not communicate, where the batch is differentiated."""

    def f(x, limit):
        return lax.while_loop(lambda v: v < limit, lambda v: total(v) / SIZE + 1, x)

    batch = lambda x: jax.vmap(f)(x, jnp.array([1.0, 3.0, 2.0]))
    actual, tangent = jax.jit(lambda x: jax.jvp(batch, (x,), (x + 1,)))(jnp.zeros(3))
    np.testing.assert_array_equal(actual, [1, 3, 2])
    np.testing.assert_array_equal(tangent, [1, 1, 1])


# ---- Rules of the user's


@jax.custom_vjp
def copied(x):
    """The identity; its cotangent is summed over the ranks."""
    return x


copied.defvjp(lambda x: (x, None), lambda _, c: (total(c),))


def doubled(x):
    """The same times two, of a function that closes over a value."""
    two = jnp.exp2(jnp.ones(3))
    f = jax.custom_vjp(lambda x: x * two)
    f.defvjp(lambda x: (x * 2, (x,)), lambda _, c: (total(2 * c),))
    return f(x)


AROUND = {
    "jit": jax.jit,
    "scan": lambda f: lambda x: lax.scan(lambda c, v: (c, f(v)), 0, jnp.stack([x, x]))[1][0],
    "carry": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    "cond": lambda f: lambda x: lax.cond(x[0] < 1, f, lambda x: x, x),
    "checkpoint": jax.checkpoint,
    "vmap in jit": lambda f: jax.jit(lambda x: jax.vmap(f)(jnp.stack([x, x]))[0]),
    "in what is differentiated": lambda f: jax.jit(lambda x: f(lax.stop_gradient(x)) + f(x)),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("function", [copied, doubled], ids=["copied", "doubled"])
@pytest.mark.parametrize("around", AROUND)
def test_only_a_backward_pass_communicates(around, function, jit):
    """In the place where it stands, between the adjoints of other operations."""
    f = AROUND[around](function)

    def loss(x):
        once = jnp.sum((RANK + 1) * f(x))
        other = jnp.sum(notoken.sendrecv(x, x, PREVIOUS, NEXT))
        return once + other + jnp.sum((RANK + 1) * f(x))

    factor = 1 if function is copied else 2
    expected = factor * SIZE * (SIZE + 1) / 2  # the sum of all cotangents
    if around == "carry":
        expected *= factor * SIZE
    np.testing.assert_array_equal(jit(jax.grad(loss))(X), np.full(3, 1 + 2 * expected))


# ---- Equations that have no rule


call_p = Primitive("some_call")
call_p.multiple_results = True
call_p.def_effectful_abstract_eval(lambda *_, jaxpr: (jaxpr.out_avals, jaxpr.effects))


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_equation_without_a_rule_is_an_error(jit):
    jaxpr = jax.make_jaxpr(total)(X)
    f = jit(lambda x: jnp.sum(x * call_p.bind(np.ones(3, np.float32), jaxpr=jaxpr)[0]))
    with pytest.raises(NotImplementedError, match="inside 'some_call' cannot be differentiated"):
        jax.make_jaxpr(jax.grad(f))(X)


with_vmap_rule = jax.custom_batching.custom_vmap(total)
with_vmap_rule.def_vmap(lambda size, batched, x: (total(x), batched[0]))
WITHOUT_RULE = {
    "custom_vmap": with_vmap_rule,
    "linear_call": lambda x: jax.custom_derivatives.linear_call(
        lambda _, x: total(x), lambda _, c: total(c), (), x
    ),
}


@pytest.mark.parametrize("f", WITHOUT_RULE.values(), ids=WITHOUT_RULE)
def test_what_jax_calls_by_rules_of_its_own_is_an_error(f):
    with pytest.raises(NotImplementedError, match=r"cannot be differentiated|hides effects"):
        jax.jit(jax.grad(lambda x: jnp.sum(x * f(np.ones(3, np.float32))))).lower(X)


@pytest.mark.skipif(jax.version.__version_info__ < (0, 12), reason="of JAX 0.12")
@pytest.mark.parametrize("flag", ["jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3"])
def test_high_level_primitives_are_refused(flag):
    def rule(kind):
        if kind == "jax_remat3":
            return jax.checkpoint(total)
        f = (jax.custom_vjp if kind == "jax_custom_vjp3" else jax.custom_jvp)(total)
        if kind == "jax_custom_vjp3":
            f.defvjp(lambda x: (total(x), None), lambda _, c: (c,))
        else:
            f.defjvp(lambda p, t: (total(*p), total(*t)))
        return f

    jax.config.update(flag, True)
    try:
        with pytest.raises(NotImplementedError, match=f"set {flag} to False"):
            jax.make_jaxpr(jax.grad(lambda x: jnp.sum(rule(flag)(x))))(X)
    finally:
        jax.config.update(flag, False)


# ---- Roots

ROOTS = {
    "of a replicated sum": lambda a: a,
    "unperturbed on rank 1": lambda a: lax.stop_gradient(a) if RANK else a,
    "a constant on rank 1": lambda a: jnp.full(3, 2.0) if RANK else a,
}
TRANSFORMS = {
    "grad": lambda f: jax.grad(f),
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "grad under vmap": lambda f: lambda a: jax.vmap(jax.grad(f))(jnp.stack([a, a]))[0],
    "grad of directional derivative": lambda f: jax.grad(
        lambda a: jax.jvp(f, (a,), (jnp.ones(3),))[1]
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("operand", ROOTS)
def test_custom_root(operand, transform):
    """The root of x^3 = sum over the ranks of a, differentiated by the implicit function."""

    def root(a):
        own = ROOTS[operand](a)

        def f(x):
            return x**3 - total(own)

        def newton(f, x):
            return lax.fori_loop(0, 40, lambda _, x: x - f(x) / (3 * x**2), x)

        def tangent_solve(g, y):
            return jnp.linalg.solve(jax.jacobian(g)(y), y)

        return lax.custom_root(f, jnp.full(3, 1.5), newton, tangent_solve)

    def loss(a):
        return jnp.sum(root(a) * weights)

    weights = jnp.arange(1.0, 4.0)
    s = 2.0 * SIZE
    own = float(operand == "of a replicated sum" or RANK == 0)
    expected = own * s ** (-2 / 3) / 3 * weights
    if "directional" in transform:
        # The tangent is the sum of the ranks' own ones, and its cotangent is each rank's.
        perturbed = SIZE if operand == "of a replicated sum" else 1
        expected = own * perturbed * -2 / 9 * s ** (-5 / 3) * weights
    got = TRANSFORMS[transform](loss)(jnp.full(3, 2.0))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


# ---- What is kept of functions


def test_differentiated_functions_are_forgotten():
    alive = []

    def differentiate():
        constant = jnp.arange(3.0)
        inner = jax.jit(lambda x: total(x * constant))
        jax.make_jaxpr(jax.grad(lambda x: jnp.sum(inner(x))))(X)
        alive.append(weakref.ref(constant))

    for _ in range(3):
        differentiate()
    jax.clear_caches()
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3
