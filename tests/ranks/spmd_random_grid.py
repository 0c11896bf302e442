"""Random functions for `jax.shard_map` over a mesh of one to three axes.

A function has a state of four vectors, which vary over all of its axes, over the first one, over
the others, or over none. Each statement replaces one of the vectors, or is a function with
statements inside. Some functions are manual over a part of the axes of the mesh, and have a nested
`shard_map` over the others. `spmd_random.py` has more functions over one axis.
"""

import math
import random
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from spmd import AROUND, FORWARD, PROGRAMS, REVERSE, Program, all_of, ring, size, varying

WIDTH, DEPTH = 3, 3


@dataclass(frozen=True)
class Axes:
    """The axes that a function is manual over; a `shard_map` inside of it may add the others."""

    names: tuple
    mesh: dict  # the size of each axis
    check_vma: bool

    @property
    def others(self):
        return tuple(axis for axis in self.mesh if axis not in self.names)

    @property
    def over(self):
        """What each vector of the state varies over."""
        every = tuple(self.mesh)
        found = (every, every[:1], every[1:], ())
        return tuple(tuple(axis for axis in axes if axis in self.names) for axes in found)

    def along(self, diverged=frozenset()):
        """What a collective runs over, where the devices along some axes take other branches."""
        names = tuple(axis for axis in self.names if axis not in diverged)
        found = [(axis,) for axis in names]
        found += [names, names[::-1]] if len(names) > 1 else []
        return found + ([names[::2], names[:0:-1]] if len(names) > 2 else [])


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
    *("jit", "scan", "scan of xs", "fori", "while", "cond", "cond over", "cond over", "remat"),
    *("remat of names", "vmap", "vmap of one", "custom_jvp", "custom_vjp", "grad", "linearize"),
)
TOGETHER = ("cond", "while", "grad", "nested")  # have collectives over all axes


def generate(rng, axes, depth=0, diverged=frozenset()):
    """A list of statements."""
    out, kinds = [], WRAPPERS + ("nested",) * (4 if axes.others else 0)
    for _ in range(rng.randint(1, 3)):
        kind = rng.choice(["op"] * 5 + list(kinds if depth < DEPTH else []))
        if diverged and kind in TOGETHER:
            kind = "op"
        s = {"kind": kind, "dropped": rng.random() < 0.1}
        if kind == "op":
            s |= operation(rng, axes, diverged)
        else:
            s["axis"], inner, split = rng.choice(axes.names), axes, diverged
            if kind == "nested":
                inner = replace(axes, names=tuple(axes.mesh))
            if kind == "cond over":
                split = diverged | {s["axis"]}
            s["body"], s["times"] = generate(rng, inner, depth + 1, split), rng.randint(1, 3)
            s["given"] = [rng.choice(["it", "it", "it", "stopped", "constant"]) for _ in range(4)]
            s["closed over"] = rng.random() < 0.3
        out.append(s)
    return out


def operation(rng, axes, diverged):
    over, along = axes.over, axes.along(diverged)
    table = rng.choice(["reduction", "reduction", "exchange", "exchange", "local"])
    if not along or (diverged and table == "exchange"):
        table = "local"  # XLA's permutations are of all devices
    s = {"table": table, "name": rng.choice(list(TABLES[table]))}
    s["axes"] = rng.choice(along) if along else ()
    s["source"], s["other"] = rng.randrange(4), rng.randrange(4)
    if table == "reduction" and {*over[s["other"]]} & {*s["axes"]}:
        s["other"] = 3
    result = {*over[s["source"]], *over[s["other"]], *s["axes"]}
    result -= {*s["axes"]} if table == "reduction" else set()
    # In a branch that some devices along an axis take, all varies over that axis.
    s["target"] = rng.choice([t for t in range(4) if result | diverged <= {*over[t]}])
    return s


def execute(program, values, axes):
    for s in program:
        if s["kind"] == "op":
            x, w, along = values[s["source"]], values[s["other"]], s["axes"]
            y = TABLES[s["table"]][s["name"]](own(x, along), w, along)
            y = jnp.sin(y) + 0.1
            t = s["target"]
            out = [own(y, varying(jax.typeof(v))) if i == t else v for i, v in enumerate(values)]
        else:
            out = wrapped(s, values, axes)
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


def wrapped(s, outer, axes):
    """The new state, by a function with statements inside."""
    kind, times, names = s["kind"], s["times"], axes.names
    custom = kind.startswith("custom")  # rules must not close over what is traced

    def body(values):
        if s["closed over"] and not custom:
            values = [values[0], outer[1], values[2], values[3]]
        return execute(s["body"], values, axes)

    def other(values):
        return [v * 0.5 for v in values]

    values = given(s, outer)
    if kind in AROUND:
        return AROUND[kind](body, values, times)
    if kind == "nested":
        return nested(s, values, axes)
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
        again = lambda c: (c[0] < times) & (lax.psum(jnp.abs(c[1][0]).sum(), names[::-1]) > -1)
        loop = lambda c: (c[0] + 1, execute(s["body"], c[1], axes))
        return lax.while_loop(again, loop, (0, values))[1]
    if kind == "cond":
        total = lax.psum(own(values[0], names).sum(), names)
        if times == 3:
            which = jnp.floor(total).astype(int) % 3
            return lax.switch(which, [body, other, lambda c: [jnp.sin(v) for v in c]], values)
        return lax.cond(total > 0, body, other, values)
    if kind == "cond over":
        axis = s["axis"]
        values = [own(v, (axis,)) for v in values]
        here = [k for k in range(4) if axis in axes.over[k]]
        first = lax.axis_index(axis) == 0
        pick = lambda out: [out[k] for k in here]
        run = lambda c: pick(execute(s["body"], c, axes))
        found = lax.cond(first, run, lambda c: pick(other(c)), values)
        return [found[here.index(k)] if k in here else v for k, v in enumerate(given(s, outer))]
    if kind == "vmap of one":
        which = times % 4
        batched = [0 if k == which else None for k in range(4)]
        args = [jnp.stack([v, v * 2]) if k == which else v for k, v in enumerate(values)]
        return [y[1] for y in jax.vmap(body, in_axes=(batched,))(args)]
    if kind == "grad":

        def loss(values):
            a, b, c, d = body(values)
            total = lax.psum(own((jnp.sin(a) * b + c).sum(), names) * d.sum(), names[:1])
            return lax.psum(total, names[1:]) if names[1:] else total

        found = []
        for g, over in zip(jax.grad(loss)(values), axes.over, strict=True):
            # Without the types, the gradient of a replicated value may differ between devices.
            rest = tuple(axis for axis in names if axis not in over)
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


def nested(s, values, axes):
    """By a `shard_map` over the other axes, along which each vector is several."""
    inner = replace(axes, names=tuple(axes.mesh))
    added = [tuple(axis for axis in over if axis in axes.others) for over in inner.over]
    how = {"axis_names": {*axes.others}, "check_vma": axes.check_vma}
    specs = tuple(P(over) if over else P() for over in added)
    lengths = [math.prod(axes.mesh[axis] for axis in over) for over in added]
    several = lambda v, k: jnp.outer(jnp.arange(1.0, k + 1), v).ravel()
    values = list(map(several, values, lengths))
    f = lambda *values: tuple(execute(s["body"], [*values], inner))
    found = jax.shard_map(f, in_specs=specs, out_specs=specs, **how)(*values)
    return [jnp.sin(y.reshape(-1, WIDTH).sum(0)) for y in found]


# ---- Arguments and results: blocks of vectors, of matrices, pairs with one spec, None

FORMS = ("vector", "vector", "matrix", "pair", "None")


def spec_of(form, over):
    specs = {"None": None, "matrix": P(None, over or None), "index": P()}
    return specs.get(form, P(over) if over else P())


def taken(form, x, over):
    """The vector that an argument is for."""
    forms = {
        "None": lambda: jnp.full(WIDTH, 0.5),
        "matrix": lambda: x[0] * x[1],
        "pair": lambda: x["u"] + jnp.sin(x["v"]),
        "index": lambda: x * (lax.axis_index(over) + 1),
    }
    return own(forms.get(form, lambda: x)(), over)


def shape_of(form, length):
    vector = (WIDTH * length,)
    shapes = {"None": None, "matrix": (2, *vector), "pair": {"u": vector, "v": vector}}
    return shapes.get(form, (WIDTH,) if form == "index" else vector)


def returned(form, y):
    """What a result is made of a vector."""
    forms = {"None": None, "matrix": jnp.stack([y, 2 * y]), "pair": {"u": y, "v": y * y}}
    return forms.get(form, y)


def make(shape, seed):
    """A program over a mesh of this shape, and its statements."""
    rng = random.Random(f"{shape} {seed}")
    mesh = dict(zip("abc", shape, strict=False))
    names = tuple(mesh)
    if len(names) > 1 and rng.random() < 0.4:
        names = tuple(sorted(rng.sample(names, rng.randint(1, len(names) - 1))))
    axes = Axes(names, mesh, rng.random() < 0.7)
    statements = generate(rng, axes, seed % DEPTH)  # functions are nested in 1 to 3 levels
    # An argument of the form "index" is the same on all devices, which multiply it by their index.
    forms = [rng.choice(FORMS + ("index",) * 3 if over else FORMS) for over in axes.over]
    order = [tuple(rng.sample(over, len(over))) for over in axes.over]
    out_forms = [rng.choice(FORMS) for _ in range(4)]
    if {*out_forms} == {"None"}:
        out_forms[0] = "vector"

    def f(*args):
        values = [taken(*how) for how in zip(forms, args, order, strict=True)]
        return tuple(map(returned, out_forms, execute(statements, values, axes)))

    lengths = [math.prod(mesh[axis] for axis in over) for over in order]
    kinds = {s["kind"] for s in all_of(statements)}
    return Program(
        f,
        tuple(map(spec_of, forms, order)),
        tuple(map(spec_of, out_forms, order)),
        tuple(map(shape_of, forms, lengths)),
        grid=True,
        mesh=(tuple(mesh.values()), tuple(mesh)),
        check_vma=axes.check_vma,
        how={"axis_names": {*names}} if axes.others else {},
        # With `check_vma`, JAX cannot lower the transpose of many a `shard_map` in another one.
        not_in_jax=(
            *(FORWARD if "custom_vjp" in kinds else ()),
            *(REVERSE if "nested" in kinds and axes.check_vma else ()),
        ),
        sizes=(math.prod(shape),),
    ), statements


# Small ones, which together have most of the collectives and functions; and more of any size.
SEEDS = {(1, 2): (84, 40, 391), (3, 1): (137, 44), (2, 2): (44, 46, 105), (2, 1, 2): (223, 121)}
MORE = range(40, 46)
for shape, small in SEEDS.items():
    for seed in sorted({*small, *MORE}):
        function = make(shape, seed)[0]
        function.is_extra = seed not in small
        PROGRAMS[f"random functions over {shape}, {seed}"] = function
