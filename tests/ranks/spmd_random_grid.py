"""Random functions for `jax.shard_map` over two axes: collectives over one of them or both.

A function has a state of four vectors, which vary over both axes, one of them or none. Each
statement replaces one of them, or is a function with statements inside. `spmd_random.py` has those
over one axis.
"""

import random

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from spmd import AB, AROUND, FORWARD, PROGRAMS, A, B, Program, all_of, ring, rows, size, varying

WIDTH, DEPTH = 3, 3
OVER = (("a", "b"), ("a",), ("b",), ())  # what each vector of the state varies over
ALONG = (("a",), ("b",), ("a", "b"), ("b", "a"))  # what a collective runs over


def own(x, axes):
    """The same value, varying over these axes, too."""
    more = tuple(sorted(set(axes) - set(varying(jax.typeof(x)))))
    cast = (lambda x: lax.pcast(x, more, to="varying")) if hasattr(lax, "pcast") else None
    return (cast(x) if cast else lax.pvary(x, more)) if more else x


def count(axes):
    return int(np.prod([size(axis) for axis in axes]))


def blocks(x, axes):
    return jnp.outer(jnp.arange(1.0, count(axes) + 1), x)


def invariant_gather(x, axes):
    if len(axes) > 1 or not hasattr(lax, "all_gather_invariant"):
        return lax.psum(x, axes)
    return lax.all_gather_invariant(x, axes[0]).mean(0)


# Of an operand that varies over the axes: a result that does not.
REDUCTIONS = {
    "psum": lambda x, w, axes: lax.psum(x, axes),
    "pmean": lambda x, w, axes: lax.pmean(jnp.tanh(x), axes),
    "psum of a tree": lambda x, w, axes: sum(lax.psum((x, {"y": x.sum() * w}, 1.0), axes)[0:1]),
    "psum of two": lambda x, w, axes: lax.psum(x, axes) * lax.psum(jnp.cos(x), axes),
    "pmax": lambda x, w, axes: w * lax.pmax(lax.stop_gradient(x), axes),
    "pmin": lambda x, w, axes: w + lax.pmin(lax.stop_gradient(x), axes),
    "one after the other": lambda x, w, axes: lax.psum(
        lax.pmean(x, axes[:1]) if axes[1:] else x, axes[1:] or axes
    ),
    "product": lambda x, w, axes: lax.psum(x @ w, axes) * w,
    "gather": lambda x, w, axes: invariant_gather(x, axes),
}
# A result that varies over them.
EXCHANGES = {
    "ppermute": lambda x, w, axes: lax.ppermute(x, axes, ring(count(axes))),
    "ppermute to one": lambda x, w, axes: lax.ppermute(x * w, axes, [(0, count(axes) - 1)]),
    "all_gather": lambda x, w, axes: (lax.all_gather(x, axes) * blocks(w, axes)).sum(0),
    "all_gather tiled": lambda x, w, axes: lax.all_gather(x, axes, tiled=True)[-WIDTH:],
    "all_gather along 1": lambda x, w, axes: lax.all_gather(x, axes, axis=1)[:, -1] * w,
    "psum_scatter": lambda x, w, axes: lax.psum_scatter(blocks(x, axes), axes),
    "psum_scatter tiled": lambda x, w, axes: lax.psum_scatter(
        jnp.tile(x * w, count(axes)), axes, tiled=True
    ),
    "all_to_all": lambda x, w, axes: (
        lax.all_to_all(blocks(x, axes), axes, 0, 0) * blocks(w, axes)
    ).sum(0),
    "all_to_all tiled": lambda x, w, axes: lax.all_to_all(blocks(x, axes), axes, 0, 1, tiled=True)[
        0, -WIDTH:
    ],
    "index": lambda x, w, axes: x * (lax.axis_index(axes) + 1) + w,
    "row of the index": lambda x, w, axes: jnp.outer(w, w)[lax.axis_index(axes) % WIDTH] + x,
    "integers": lambda x, w, axes: x * lax.psum(own(lax.axis_index(axes), axes), axes),
    "named": lambda x, w, axes: checkpoint_name(jnp.sin(lax.ppermute(x, axes, [(0, 0)])), "kept"),
}
LOCAL = {
    "product": lambda x, w, axes: x * w,
    "softmax": lambda x, w, axes: jax.nn.softmax(x + w),
    "where": lambda x, w, axes: jnp.where(x > w, x, w * w),
    "sort": lambda x, w, axes: jnp.sort(x) + jnp.cumsum(w),
}
TABLES = {"reduction": REDUCTIONS, "exchange": EXCHANGES, "local": LOCAL}
WRAPPERS = (
    *("jit", "scan", "scan of xs", "fori", "while", "cond", "cond over a", "cond over b", "remat"),
    *("remat of names", "vmap", "vmap of one", "custom_jvp", "custom_vjp", "grad", "linearize"),
)


def generate(rng, depth=0, along=ALONG):
    """A list of statements, whose collectives run over these axes."""
    out = []
    for _ in range(rng.randint(1, 3)):
        kind = rng.choice(["op"] * 5 + list(WRAPPERS if depth < DEPTH else []))
        if len(along) == 1 and kind in ("cond", "while", "grad", "cond over a", "cond over b"):
            kind = "op"
        s = {"kind": kind, "dropped": rng.random() < 0.1}
        if kind == "op":
            s["table"] = rng.choice(["reduction", "reduction", "exchange", "exchange", "local"])
            if len(along) == 1 and s["table"] == "exchange":
                s["table"] = "local"  # XLA's permutations are of all devices
            s["name"], s["axes"] = rng.choice(list(TABLES[s["table"]])), rng.choice(along)
            s["source"], s["other"] = rng.randrange(4), rng.randrange(4)
            # In a branch that some ranks along an axis take, all varies over that axis.
            whole = {"a", "b"} - set(sum(along, ()))
            result = {*OVER[s["source"]], *OVER[s["other"]], *s["axes"]}
            result -= {*s["axes"]} if s["table"] == "reduction" else set()
            if s["table"] == "reduction" and {*OVER[s["other"]]} & {*s["axes"]}:
                s["other"] = 3
                result = {*OVER[s["source"]]} - {*s["axes"]}
            s["target"] = rng.choice([t for t in range(4) if result | whole <= {*OVER[t]}])
        else:
            inner = {"cond over a": (("b",),), "cond over b": (("a",),)}.get(kind, along)
            s["body"], s["times"] = generate(rng, depth + 1, inner), rng.randint(1, 3)
            s["given"] = [rng.choice(["it", "it", "it", "stopped", "constant"]) for _ in OVER]
            s["closed over"] = rng.random() < 0.3
        out.append(s)
    return out


def execute(program, values):
    for s in program:
        if s["kind"] == "op":
            x, w, axes = values[s["source"]], values[s["other"]], s["axes"]
            y = TABLES[s["table"]][s["name"]](own(x, axes), w, axes)
            y = jnp.sin(y) + 0.1
            t = s["target"]
            out = [own(y, varying(jax.typeof(v))) if i == t else v for i, v in enumerate(values)]
        else:
            out = wrapped(s, values)
        if not s["dropped"]:
            values = out
    return values


def given(s, values):
    ways = {
        "it": lambda x: x,
        "stopped": lax.stop_gradient,
        "constant": lambda x: own(jnp.full(WIDTH, 0.25), varying(jax.typeof(x))),
    }
    return [ways[way](x) for way, x in zip(s["given"], values, strict=True)]


def wrapped(s, outer):
    """The new state, by a function with statements inside."""
    kind, times = s["kind"], s["times"]
    custom = kind.startswith("custom")  # rules must not close over what is traced

    def body(values):
        if s["closed over"] and not custom:
            values = [values[0], outer[1], values[2], values[3]]
        return execute(s["body"], values)

    def other(values):
        return [v * 0.5 for v in values]

    values = given(s, outer)
    if kind in AROUND:
        return AROUND[kind](body, values, times)
    if kind == "scan of xs":
        xs = (jnp.stack([values[0]] * times), jnp.arange(1.0, times + 1))

        def step(c, x):
            c = body([c[0] * x[0], c[1], c[2], c[3] * x[1]])
            return c, (c[0], c[3] * x[1])

        c, (ys, zs) = lax.scan(step, values, xs, reverse=times == 2)
        return [jnp.sin(c[0] + ys.sum(0)), c[1], c[2], jnp.sin(c[3] + zs[0])]
    if kind == "fori":
        return lax.fori_loop(0, times, lambda i, c: body([c[0] * i, *c[1:]]), values)
    if kind == "while":
        values = [lax.stop_gradient(v) for v in values]
        again = lambda c: (c[0] < times) & (lax.psum(jnp.abs(c[1][0]).sum(), ("b", "a")) > -1)
        loop = lambda c: (c[0] + 1, execute(s["body"], c[1]))
        return lax.while_loop(again, loop, (0, values))[1]
    if kind == "cond":
        return lax.cond(lax.psum(values[0].sum(), ("a", "b")) > 0, body, other, values)
    if kind in ("cond over a", "cond over b"):
        axis = kind[-1]
        values = [own(v, axis) for v in values]
        here = [k for k in range(4) if axis in OVER[k]]
        first = lax.axis_index(axis) == 0
        pick = lambda out: [out[k] for k in here]
        run = lambda c: pick(execute(s["body"], c))
        found = lax.cond(first, run, lambda c: pick(other(c)), values)
        return [found[here.index(k)] if k in here else v for k, v in enumerate(given(s, outer))]
    if kind == "vmap of one":
        which = times % 4
        axes = [0 if k == which else None for k in range(4)]
        args = [jnp.stack([v, v * 2]) if k == which else v for k, v in enumerate(values)]
        return [y[1] for y in jax.vmap(body, in_axes=(axes,))(args)]
    if kind == "grad":

        def loss(values):
            a, b, c, d = body(values)
            return lax.psum(lax.psum((jnp.sin(a) * b + c).sum(), "a") * d.sum(), "b")

        found = []
        for g, axes in zip(jax.grad(loss)(values), OVER, strict=True):
            # Without the types, the gradient of a replicated value may differ between devices.
            rest = tuple(axis for axis in ("a", "b") if axis not in axes)
            found.append(jnp.sin(lax.pmean(own(g, rest), rest) if rest else g))
        return found
    if kind == "custom_jvp":
        f = jax.custom_jvp(body)
        f.defjvp(lambda xs, ts: jax.jvp(body, xs, ts))
        return f(values)
    assert kind == "custom_vjp"
    f = jax.custom_vjp(body)
    f.defvjp(lambda v: jax.vjp(body, v), lambda back, c: back(c))
    return f(values)


def make(seed):
    """A program, and its statements."""
    rng = random.Random(f"grid {seed}")
    statements, check_vma = generate(rng), rng.random() < 0.7

    def f(x, y, z, w):
        rows, columns = (own(v * (lax.axis_index(a) + 1), a) for v, a in ((y, "a"), (z, "b")))
        return tuple(execute(statements, [x, rows, columns, w]))

    has_forward = all(s["kind"] != "custom_vjp" for s in all_of(statements))
    return Program(
        *(f, (AB, P(), P(), P()), (AB, A, B, P()), (rows(WIDTH), *[(WIDTH,)] * 3)),
        grid=True,
        check_vma=check_vma,
        not_in_jax=() if has_forward else FORWARD,
        sizes=(4,),
    ), statements


# Small ones, which together have most of the collectives and functions.
SEEDS = (1474, 5733, 3771, 1947, 668, 1699, 140)
for seed in SEEDS:
    PROGRAMS[f"random functions over two axes, {seed}"] = make(seed)[0]
