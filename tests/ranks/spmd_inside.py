"""Functions for `jax.shard_map`: collectives in loops, branches, rules and `vmap`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from spmd import FORWARD, ROWS, A, program, ring, rows, size, vary


@program((ROWS,), (ROWS, P()), rows(2, 3))
def in_scan(x):
    def step(carry, k):
        carry = jnp.sin(carry) + lax.pmean(carry, "i") * k
        return carry, lax.psum(carry.sum(), "i")

    # Small factors: the gradient is of a sine of what comes out.
    return lax.scan(step, x, jnp.arange(1.0, 4.0) / 4)


@program((ROWS,), (ROWS, ROWS), rows(2, 3))
def in_scan_reversed_and_map(x):
    y, ys = lax.scan(
        lambda c, v: (lax.ppermute(c, "i", ring(size("i"))) * v.sum(), c[0]), x, x, reverse=True
    )
    return y + ys.sum(0), lax.map(lambda v: v * lax.psum(v, "i"), x)


@program((ROWS,), (ROWS, P()), rows(2, 3), has_derivative=False)
def in_while_condition(x):
    def again(state):
        return lax.pmax(jnp.abs(state[0]).max(), "i") > 0.1

    def halve(state):
        y, k = state
        return 0.5 * lax.ppermute(y, "i", ring(size("i"))), k + 1

    return lax.while_loop(again, halve, (x, 0))


@program((ROWS,), ROWS, rows(2, 3))
def in_fori_loop(x):
    return lax.fori_loop(0, 3, lambda k, y: jnp.cos(y) + lax.pmean(y, "i") * k, x)


@program((ROWS, P()), (ROWS, P()), rows(2, 3), (1,))
def in_cond_and_switch(x, w):
    def total(y):
        return y * lax.psum(y, "i")

    def shifted(y):
        return lax.ppermute(y, "i", ring(size("i")))

    y = lax.cond(w[0] > 0, total, shifted, x)
    k = lax.pmax(lax.axis_index("i"), "i") % 3
    return y, lax.switch(k, [lambda v, c=c: lax.psum(c * v, "i") for c in (1.0, 2.0, 3.0)], x)


@program((ROWS, P()), (ROWS, P()), rows(2, 3), (3, 3))
def in_checkpoint(x, w):
    names = jax.checkpoint_policies.save_only_these_names("total")

    @functools.partial(jax.checkpoint, policy=names)
    def one(x):
        h = checkpoint_name(lax.pmean(x @ w, "i"), "total")
        return jnp.sin(h) * x

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def other(x):
        return jnp.tanh(lax.all_gather(x, "i").mean(0) @ w)

    y = other(jax.checkpoint(one)(x))
    return y, lax.pmean(y.sum(), "i")


@jax.custom_jvp
def scaled(x, w):
    return x * lax.psum(w.sum(), "i")


@scaled.defjvp
def scaled_jvp(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    total = lax.psum(w.sum(), "i")
    return scaled(x, w), dx * total + 2.0 * x * lax.psum(dw.sum(), "i")


@program((ROWS, ROWS), (ROWS, ROWS), rows(2, 3), rows(1))
def in_custom_jvp(x, w):
    return scaled(x, w), scaled(x, lax.stop_gradient(w))


@jax.custom_vjp
def clipped(x, w):
    return x * w.sum()


def clipped_forward(x, w):
    return clipped(x, w), (x, w)


def clipped_backward(saved, c):
    x, w = saved
    norm = lax.psum((c * c).sum(), "i")
    return c / norm * w.sum(), vary(jnp.full(w.shape, lax.pmean((c * x).sum(), "i")))


clipped.defvjp(clipped_forward, clipped_backward)


@program((ROWS, P()), (ROWS, P()), rows(2, 3), (2,), not_in_jax=FORWARD)
def in_custom_vjp(x, w):
    y = clipped(x, vary(w))
    z, _ = lax.scan(lambda c, _: (clipped(c, vary(w) / 3), None), x, None, length=2)
    return y + z, lax.psum(jax.nn.relu(y).sum() + jax.nn.logsumexp(y), "i")


@jax.custom_vjp
def copied(x):
    """Of tensor parallel layers: the identity, whose transpose is a sum."""
    return x


copied.defvjp(lambda x: (x, None), lambda _, c: (lax.psum(c, "i"),))


@program((ROWS, P()), P(), rows(2, 3), (2, 3), check_vma=False, has_derivative=False)
def in_custom_vjp_without_check_vma(x, w):
    return lax.pmean(jax.grad(lambda w: jnp.sum(jnp.sin(copied(w) * x)))(w), "i")


@program((ROWS,), (ROWS, P()), rows(4, 3), check_vma=False)
def over_the_axis_of_a_vmap(x):
    def one(v):
        return lax.pmean(v, "v") + lax.psum(v, ("i", "v")) * lax.axis_index("v")

    return (
        jax.vmap(one, axis_name="v")(x),
        jax.vmap(lambda v: lax.psum(lax.all_gather(v, "v"), "i"), axis_name="v")(x)[0],
    )


@program((ROWS,), (ROWS, ROWS, P()), rows(4, 3))
def in_vmap(x):
    n = size("i")
    return (
        jax.vmap(lambda v: lax.ppermute(v, "i", ring(n)) + lax.psum(v, "i"))(x),
        jax.vmap(lambda v: lax.all_gather(v, "i", tiled=True), 1, 1)(x)[: x.shape[0]],
        jax.vmap(lambda v: lax.psum(v, "i"))(x),
    )


@program((A, P()), A, lambda n: (2 * n, 3), (3,), grid=True)
def in_vmap_with_names(x, w):
    def one(v):
        return lax.pmean(v, "b") * lax.psum(v * w, "a") + lax.axis_index("a")

    return jax.vmap(jax.vmap(one, axis_name="inner"), axis_name="outer")(x[None])[0]


@program((ROWS,), ROWS, rows(3, 2))
def in_associative_scan(x):
    local = lax.associative_scan(jnp.add, x)
    ends = lax.all_gather(local[-1], "i")
    before = (ends * (jnp.arange(size("i")) < lax.axis_index("i"))[:, None]).sum(0)
    return local + before


@program((ROWS, P()), (P(), ROWS), rows(2, 3), (3,))
def gradient_inside(x, w):
    def loss(w, x):
        return lax.pmean(jnp.sum(jnp.tanh(x * w)), "i")

    return jax.grad(loss, argnums=(0, 1))(w, x)


@program((ROWS, P()), (P(), P()), rows(2, 3), (3,))
def second_derivatives_inside(x, w):
    def loss(w):
        return lax.pmean(jnp.sum(jnp.tanh(x * w) ** 2), "i")

    return jax.hessian(loss)(w), jax.jvp(jax.grad(loss), (w,), (w,))[1]


@program((ROWS,), (P(), P()), lambda n: np.arange(4 * n, dtype=np.int32), has_derivative=False)
def random_numbers(x):
    key = jax.random.fold_in(jax.random.key(3), lax.axis_index("i"))
    y = jax.random.normal(key, (3,))
    return lax.psum(y, "i"), lax.pmax(jax.random.key_data(key)[0] % 1000, "i")


@program((ROWS,), ROWS, rows(2, 3))
def functions_of_numpy(x):
    """From JAX 0.12, these are high-level primitives."""
    y = jnp.einsum("ij,kj->ik", x, lax.psum(x, "i"))
    return y + jnp.searchsorted(jnp.sort(x[0]), x[1]).sum()


@program((ROWS,), (ROWS, P()), rows(2, 3))
def callbacks(x):
    y = lax.psum(x, "i")
    jax.debug.callback(lambda y: None, y.sum())
    z = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), lax.stop_gradient(x))
    return x * y + z, y


def mutable_arrays(x):
    r, total = jax.new_ref(x * 2), jax.new_ref(jnp.zeros(()))
    r[...] += lax.psum(x, "i")

    def step(_, c):
        total[...] += lax.psum(c.sum(), "i")
        return c * 2

    return lax.fori_loop(0, 3, step, x) * r[...], total[...]


def reduced_and_unreduced(x, w):
    """A gradient that is summed by the function itself."""

    def loss(w):
        return jnp.sum(jnp.sin(x * lax.pcast(w, "i", to="varying")))

    value, gradient = jax.value_and_grad(loss)(lax.pcast(w, "i", to="reduced"))
    whole = lax.pcast(lax.all_gather(x, "i", to="reduced", tiled=True), "i", to="varying")
    own = lax.pcast(whole * lax.axis_index("i"), "i", to="unreduced")
    return lax.psum(value, "i"), lax.psum(gradient, "i"), lax.psum_scatter(own, "i", tiled=True)


if hasattr(jax, "new_ref"):
    program((ROWS,), (ROWS, P()), rows(2, 3), has_derivative=False)(mutable_arrays)
if jax.version.__version_info__ >= (0, 10):
    program((ROWS, P()), (P(), P(), ROWS), rows(2, 3), (3,))(reduced_and_unreduced)
