"""Random functions for `jax.shard_map`: collectives in nested functions of all kinds.

A function has a state of three vectors: two vary, the third is the same on all devices. Each
statement replaces one of them, or is a function with statements inside. Some of their operands are
constants or have no derivative, and some functions close over what others are given.
"""

import random

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from spmd import (
    AROUND,
    FORWARD,
    PROGRAMS,
    REVERSE,
    ROWS,
    Program,
    all_of,
    ring,
    rows,
    size,
    vary,
    varying,
)

WIDTH, DEPTH, SIZES = 4, 3, (2, 3)


def varies(x):
    return "i" in varying(jax.typeof(x))


def own(x):
    """Varying, if it is not yet."""
    return x if varies(x) else vary(x)


def solved(x, w):
    return jnp.linalg.solve(jnp.eye(WIDTH) * 3 + jnp.outer(jnp.sin(x), jnp.sin(w)), x)


def conjugate_gradients(v, w):
    """A system whose matrix is a sum over all."""
    scale = lax.pmean(jnp.sin(v) ** 2, "i")
    matrix = lambda y: 2 * y + lax.psum(own(y) * scale, "i")
    return jax.scipy.sparse.linalg.cg(matrix, w, tol=1e-7)[0]


def numbers(v):
    key = jax.random.fold_in(jax.random.key(7), lax.axis_index("i"))
    return v * jax.random.uniform(key, (WIDTH,))


def blocks(v):
    """One for each device."""
    return jnp.outer(jnp.arange(1.0, size("i") + 1), v)


# Of a varying vector, an invariant one, and integers of both kinds: a varying vector, first on each
# device for itself.
LOCAL = {
    "product": lambda v, w, k, j: v * w,
    "pad": lambda v, w, k, j: jnp.pad(v, 1)[2:] + jnp.pad(w, 1, constant_values=2)[:-2],
    "pad with a value": lambda v, w, k, j: lax.pad(v, w[0], [(1, 0, 0)])[1:] + w[1],
    "take": lambda v, w, k, j: v[k] + w[j],
    "slice": lambda v, w, k, j: lax.dynamic_update_slice_in_dim(v, w[:2], k[0] % 2, 0),
    "where": lambda v, w, k, j: jnp.where(j > k, v, w),
    "relu and softmax": lambda v, w, k, j: jax.nn.relu(v) + jax.nn.softmax(w + v),
    "sort": lambda v, w, k, j: jnp.sort(v) + jnp.cumsum(v),
    "solve": lambda v, w, k, j: solved(v, w),
    "concatenate": lambda v, w, k, j: jnp.concatenate([v[:2], w[2:]]),
    "random": lambda v, w, k, j: numbers(v),
    "axis_index": lambda v, w, k, j: v * (lax.axis_index("i") + 1) + size("i"),
    "index of rows": lambda v, w, k, j: jnp.outer(w, w)[(lax.axis_index("i") + k[0]) % WIDTH] + v,
    "named": lambda v, w, k, j: checkpoint_name(jnp.sin(v), "kept"),
    "einsum": lambda v, w, k, j: jnp.einsum("i,j,j->i", v, w, v),
}
VARYING = {
    **LOCAL,
    "ppermute": lambda v, w, k, j: lax.ppermute(v, "i", ring(size("i"))),
    "ppermute to one": lambda v, w, k, j: lax.ppermute(v * w, "i", [(0, size("i") - 1)]),
    "ppermute of the invariant": lambda v, w, k, j: lax.ppermute(own(w), "i", ring(size("i"))),
    "integers": lambda v, w, k, j: v * lax.ppermute(j, "i", ring(size("i"))) + lax.psum(j, "i"),
    "all_gather": lambda v, w, k, j: (lax.all_gather(v, "i") * w).sum(0),
    "all_gather tiled": lambda v, w, k, j: lax.all_gather(v, "i", tiled=True)[-WIDTH:],
    "psum_scatter": lambda v, w, k, j: lax.psum_scatter(blocks(v), "i"),
    "all_to_all": lambda v, w, k, j: lax.all_to_all(blocks(v), "i", 0, 0).sum(0),
}
# An invariant one.
INVARIANT = {
    "psum": lambda v, w, k, j: lax.psum(v * w, "i"),
    "pmean": lambda v, w, k, j: lax.pmean(jnp.tanh(v), "i") + w,
    "psum of the invariant": lambda v, w, k, j: lax.psum(own(w), "i"),
    "psum of a tree": lambda v, w, k, j: sum(lax.psum((v, v.sum() * w, 1.0), "i")),
    "pmax": lambda v, w, k, j: w * lax.pmax(lax.stop_gradient(v), "i"),
    "sin": lambda v, w, k, j: jnp.sin(w) + k,
    "constant": lambda v, w, k, j: lax.psum(jnp.ones(WIDTH), "i") * w,
    "psum of a product": lambda v, w, k, j: lax.psum(v @ w, "i") * jnp.ones(WIDTH),
    "cg": lambda v, w, k, j: conjugate_gradients(v, w),
}
COLLECTIVE = ("grad", "while", "cond")  # with a psum of their own
WRAPPERS = (
    *("jit", "scan", "scan of xs", "fori", "switch", "cond on the index", "remat", *COLLECTIVE),
    *("remat of names", "vmap", "vmap of one", "custom_jvp", "custom_vjp", "linearize"),
)


def generate(rng, depth=0, local=False):
    """A list of statements."""
    out = []
    for _ in range(rng.randint(1, 3)):
        kind = rng.choice(["op"] * 4 + list(WRAPPERS if depth < DEPTH else []))
        if local and kind in COLLECTIVE:
            kind = "op"
        s = {"kind": kind, "dropped": rng.random() < 0.15}
        if kind == "op":
            s["target"] = rng.choice([0, 1] if local else [0, 1, 2])
            table = LOCAL if local else INVARIANT if s["target"] == 2 else VARYING
            s["name"], s["source"] = rng.choice(list(table)), rng.randrange(2)
        else:
            s["body"] = generate(rng, depth + 1, local or kind == "cond on the index")
            s["times"] = rng.randint(1, 3)
            # Of each vector: it is given as it is, without a derivative, or a constant.
            s["given"] = [rng.choice(["it", "it", "it", "stopped", "constant"]) for _ in range(3)]
            s["closed over"] = rng.random() < 0.3
            if kind == "while" and rng.random() < 0.5:
                s |= {"given": ["stopped"] * 3, "closed over": False}
        out.append(s)
    return out


def has_reverse(program):
    """Whether JAX can differentiate it in reverse mode."""
    loops = [s for s in all_of(program) if s["kind"] == "while"]
    return all(s["given"] == ["stopped"] * 3 for s in loops)


def has_forward(program):
    return all(s["kind"] != "custom_vjp" for s in all_of(program))


def execute(program, values, ints):
    for s in program:
        if s["kind"] == "op":
            table = INVARIANT if s["target"] == 2 else VARYING
            y = jnp.sin(table[s["name"]](values[s["source"]], values[2], *ints)) + 0.1
            y = own(y) if s["target"] != 2 else y
            out = [y if i == s["target"] else v for i, v in enumerate(values)]
        else:
            out = wrapped(s, values, ints)
        if not s["dropped"]:
            values = out
    return values


def given(s, values):
    constant = jnp.full(WIDTH, 0.25)
    ways = {
        "it": lambda x: x,
        "stopped": lax.stop_gradient,
        "constant": lambda x: own(constant) if varies(x) else constant,
    }
    return [ways[way](x) for way, x in zip(s["given"], values, strict=True)]


def wrapped(s, outer, ints):
    """The new state, by a function with statements inside."""
    kind, times = s["kind"], s["times"]
    custom = kind.startswith("custom")  # rules must not close over what is traced

    def body(values, ints=ints):
        if s["closed over"] and not custom:
            values = [values[0], outer[1], values[2]]
        return execute(s["body"], values, ints)

    def other(values):
        return [v * 0.5 for v in values]

    values = given(s, outer)
    v, u, w = values
    if kind in AROUND:
        return AROUND[kind](body, values, times)
    if kind == "scan of xs":
        xs = (jnp.stack([v] * times), jnp.arange(1.0, times + 1))

        def step(c, x):
            c = body([c[0] * x[0], c[1], c[2] * x[1]])
            return c, (c[0], c[2] * x[1])

        c, (ys, zs) = lax.scan(step, values, xs, reverse=times == 2)
        return [c[0], jnp.sin(c[1] + ys.sum(0)), jnp.sin(c[2] + zs[0])]
    if kind == "fori":
        return lax.fori_loop(0, times, lambda i, c: body([c[0] * i, c[1], c[2]]), values)
    if kind == "while":

        def again(c):
            return (c[0] < times) & (lax.psum(jnp.abs(c[1][0]).sum(), "i") > -1)

        return lax.while_loop(again, lambda c: (c[0] + 1, body(c[1])), (0, values))[1]
    if kind == "cond":
        return lax.cond(lax.psum(v.sum(), "i") > 0, body, other, values)
    if kind == "switch":
        return lax.switch(ints[0][times] % 3, [body, other, lambda c: c], values)
    if kind == "cond on the index":
        # No sum over all in a branch of some, the transpose of what makes a value vary, either.
        values, first = [v, u, own(w)], lax.axis_index("i") == 0
        pair = lax.cond(first, lambda c: body(c)[:2], lambda c: other(c)[:2], values)
        return [*pair, w]
    if kind == "vmap of one":
        out = jax.vmap(body, in_axes=([0, None, None],))([jnp.stack([v, v * 2]), u, w])
        return [y[1] for y in out]
    if kind == "grad":

        def loss(values):
            a, b, c = body(values)
            return lax.psum((jnp.sin(a) * b + c).sum(), "i")

        return [jnp.sin(g) for g in jax.grad(loss)(values)]
    if kind == "custom_jvp":
        f = jax.custom_jvp(body)
        f.defjvp(lambda xs, ts: jax.jvp(lambda v: body(v, xs[1]), xs[:1], ts[:1]))
        return f(values, ints)
    assert kind == "custom_vjp"
    f = jax.custom_vjp(body)
    f.defvjp(
        lambda v, ints: jax.vjp(lambda v: body(v, ints), v),
        lambda back, c: (*back(c), None),
    )
    return f(values, ints)


def make(seed):
    """A program, and its statements."""
    rng = random.Random(seed)
    statements = generate(rng)
    while not (has_reverse(statements) or has_forward(statements)):
        statements = generate(rng)
    check_vma = rng.random() < 0.7

    def f(x, y, w, k, j):
        return tuple(execute(statements, [x, y, w], (k, j)))

    def ints(n, step):
        return (step * np.arange(WIDTH * n) % WIDTH).astype(np.int32)

    without = () if has_forward(statements) else FORWARD
    without += () if has_reverse(statements) else REVERSE
    shapes = (rows(WIDTH), rows(WIDTH), (WIDTH,), ints(1, 1), lambda n: ints(n, 3))
    ins, outs = (ROWS, ROWS, P(), P(), ROWS), (ROWS, ROWS, P())
    return Program(
        f, ins, outs, shapes, check_vma=check_vma, not_in_jax=without, sizes=SIZES
    ), statements


# Small functions; each has something that the functions before it do not have.
SEEDS = (1183, 511, 674, 1495, 1149, 950, 1507, 1471, 2750, 2854)
for seed in SEEDS:
    PROGRAMS[f"random functions, {seed}"] = make(seed)[0]
