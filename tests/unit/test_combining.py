"""Independent collectives become one: `mpi4jax._jax.combining`, in a rewritten function."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import PartitionSpec as P

from mpi4jax._jax import combining, named_axes, rewriting

MESH = named_axes.abstract_mesh((2,), ("i",))
SUMS = ("psum", "psum_invariant")


def rewritten(f, n=1, combine=True, limit=None, monkeypatch=None):
    """A function of ``n`` rows for a mesh of two, whose sums multiply by ten; and how many operands
    each of its collectives has."""
    how = {"mesh": MESH, "in_specs": P("i"), "out_specs": P()}
    shapes = [jax.ShapeDtypeStruct((6,), np.float32)] * n
    closed = jax.make_jaxpr(jax.shard_map(f, **how))(*shapes)
    (eqn,) = (e for e in closed.jaxpr.eqns if e.primitive is named_axes.shard_map_p)
    operands = []

    def times(factor):
        def evaluate(p, xs, types):
            operands.append(len(xs))
            return [factor * x for x in xs]

        return evaluate

    table = {name: times(10) for name in SUMS} | {
        "pmax": times(3),
        "pmin": times(7),
        "pvary": lambda p, xs, types: xs,
    }
    many = (*SUMS, "pmax") if combine else ()
    local = frozenset({"pvary"})
    refuse = lambda *words: NotImplementedError(*words)
    rewriter = rewriting.Rewriter(MESH, table, refuse, True, many=many, local=local)
    rewriter._equations = _Never()
    return rewriter.function(ClosedJaxpr(eqn.params["jaxpr"], ())), operands


class _Never(dict):
    """A cache that keeps nothing, so that each collective is seen."""

    def __setitem__(self, key, value):
        pass


def step(x):
    return x.sum() + 1


def turns(x, y):
    return [lax.psum(y, "i"), lax.pmax(x, "i")]


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (lambda x, y: [lax.psum(x, "i"), lax.psum(y, "i")], [2]),
        # What is computed on this rank alone waits.
        (lambda x, y: [lax.psum(x, "i") / 2, lax.psum(y, "i") / 2, lax.psum(x * y, "i")], [3]),
        (lambda x, y: [lax.psum(step(lax.psum(x, "i")) * y, "i")], [1, 1]),
        # One does not wait for another whose result it does not need.
        (lambda x, y: [lax.pmax(lax.psum(x, "i"), "i"), lax.psum(jnp.sin(y), "i")], [1, 1, 1]),
        # But it moves up, if its operand is there.
        (lambda x, y: [lax.pmax(lax.psum(x, "i"), "i"), lax.psum(y, "i")], [2, 1]),
        (lambda x, y: [lax.psum(x, "i"), lax.pmax(y, "i"), lax.psum(y, "i")], [2, 1]),
        # A collective that is not combined needs the first sum.
        (lambda x, y: [lax.pmin(lax.psum(x, "i"), "i"), lax.psum(jnp.sin(y), "i")], [1, 1, 1]),
        # The second extremum needs a sum that has moved behind the first.
        (lambda x, y: turns(x + lax.psum(x, "i"), lax.pmax(y, "i")), [1, 2, 1]),
        (lambda x, y: [lax.psum(x, "i"), lax.psum(y.astype(int), "i")], [1, 1]),
        (lambda x, y: [lax.psum(x, "i"), lax.psum(x, "i")], [1]),
    ],
)
def test_what_is_combined(f, expected):
    x, y = jnp.arange(3.0), jnp.ones(3)
    jaxpr, operands = rewritten(f, 2)
    alone, _ = rewritten(f, 2, combine=False)
    assert operands == expected
    for a, b in zip(jaxpr_as_fun(jaxpr)(x, y), jaxpr_as_fun(alone)(x, y), strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_ordered_effect_is_a_limit():
    def f(x, y):
        a = lax.psum(x, "i")
        jax.debug.print("{}", 1, ordered=True)
        return a, lax.psum(y, "i")

    assert rewritten(f, 2)[1] == [1, 1]


def test_an_unordered_effect_is_none():
    """One rank alone may print."""

    def f(x, y):
        a = lax.psum(x, "i")
        jax.debug.print("{}", a[0])
        return a, lax.psum(y, "i")

    assert rewritten(f, 2)[1] == [2]


def test_a_limit_of_bytes(monkeypatch):
    def f(*xs):
        return [lax.psum(x, "i") for x in xs]

    monkeypatch.setattr(combining.combined, "__defaults__", (24,))  # two blocks of three
    assert rewritten(f, 5)[1] == [2, 2, 1]


def test_a_collective_that_some_ranks_may_not_call():
    def f(x):
        y = lax.cond(x[0] > 0, lambda: x * lax.psum(x, "i"), lambda: x)
        return lax.psum(y, "i")

    with pytest.raises(ValueError, match=r"this cond varies over \['i'\], and the psum"):
        rewritten(f)


def test_functions_linear_in_some_operands_combine_nothing():
    """JAX transposes a rule equation by equation."""

    @jax.custom_jvp
    def f(x):
        return x * lax.psum(x, "i")

    @f.defjvp
    def rule(primals, tangents):
        (x,), (t,) = primals, tangents
        return f(x), t * lax.psum(x, "i") + x * lax.psum(t, "i")

    jaxpr, _ = rewritten(lambda x: lax.psum(f(x), "i"))
    (y,) = jax.grad(lambda x: jaxpr_as_fun(jaxpr)(x)[0].sum())(jnp.ones(3)).reshape(1, 3)
    np.testing.assert_allclose(y, 10 * (10 + 10) * np.ones(3))


def gather(w):
    return lax.all_gather(w, "i", tiled=True)


def fsdp(x, *layers, first=False):
    """Layers of a weight and a bias, which are gathered in their layer or before all of them."""
    pairs = [*zip(layers[::2], layers[1::2], strict=True)]
    pairs = [tuple(map(gather, pair)) for pair in pairs] if first else pairs
    for pair in pairs:
        w, b = pair if first else map(gather, pair)
        x = jnp.tanh(x @ w.astype(x.dtype) + b)
    return x


def attention(x, *layers):
    """The projection of the output is gathered before the three others."""
    o, q, k, v = map(gather, layers[::2])
    return (x @ q * (x @ k) * (x @ v)) @ o


def recurrent(x, w, b, v, *layers):
    """Layers that are applied to a constant first, and the first of them to its own result."""
    w = gather(w)
    x = jnp.tanh(jnp.zeros_like(x) @ w)
    return jnp.tanh(x @ w + x @ gather(v))


def gathered_twice(x, w, b, v, *layers):
    """Weights that are sharded along two axes of a mesh are gathered along one after the other."""
    for each in (w, v):
        x = jnp.tanh(x @ gather(gather(each))[: x.shape[1]])
    return x


def bias_first(x, w, b, *layers):
    b = gather(b)
    return jnp.tanh(x @ gather(w) + b)


def scatters(x, w, b, v, *layers):
    """Together, their operands have twice the bytes of the limit; their results have just these."""
    return [lax.psum_scatter(y, "i", tiled=True) for y in (w, v)]


@pytest.mark.parametrize(
    ("f", "n", "expected"),
    [
        (fsdp, 256, ["gather 2", "tanh"] * 4),
        (functools.partial(fsdp, first=True), 256, ["gather 2"] * 4 + ["tanh"] * 4),
        (fsdp, 64, ["gather 8"] + ["tanh"] * 4),  # 8 KiB of a weight are no large gather
        (attention, 160, ["gather 1", "gather 3"]),  # 50 KiB become 100 KiB
        (attention, 64, ["gather 4"]),
        (recurrent, 256, ["gather 1", "tanh"] * 2),
        (gathered_twice, 256, ["gather 1", "gather 1", "tanh"] * 2),
        (bias_first, 256, ["gather 2", "tanh"]),
        (scatters, 1448, ["scatter 1"] * 2),
    ],
)
def test_large_gathers_are_combined_if_they_are_needed_together(f, n, expected):
    """If the next layer were gathered too, all parameters would be in memory at once."""
    x, w, b = (jax.ShapeDtypeStruct(s, np.float32) for s in ((8, n), (n, n), (n,)))
    how = {"mesh": MESH, "in_specs": P("i"), "out_specs": P("i")}
    closed = jax.make_jaxpr(jax.shard_map(f, **how))(x, *[w, b] * 4)
    (eqn,) = (e for e in closed.jaxpr.eqns if e.primitive is named_axes.shard_map_p)
    kind = lambda e: {"all_gather": "gather", "reduce_scatter": "scatter"}.get(e.primitive.name)
    new, _ = combining.combined(eqn.params["jaxpr"].eqns, kind, kind)
    names = [f"{kind(e)} {len(e.invars)}" if kind(e) else e.primitive.name for e in new]
    assert [name for name in names if name == "tanh" or name[-1].isdigit()] == expected


def program(seed):
    """A random function, in which few values depend on many others."""
    choose = random.Random(seed)
    lines = []
    for k in range(choose.randint(4, 30)):
        kind = choose.choice(["psum", "psum", "psum", "pmax", "sin", "add", "scan"])
        lines.append((kind, choose.randrange(k + 3), choose.randrange(k + 3)))

    def f(*xs):
        values = list(xs)
        for kind, a, b in lines:
            x, y = values[a], values[b]
            if kind == "psum":
                y = lax.psum(x, "i")
            elif kind == "pmax":
                y = lax.pmax(x / 8, "i")
            elif kind == "sin":
                y = jnp.sin(x)
            elif kind == "add":
                y = x + y
            else:
                step = lambda c, _: (jnp.cos(lax.psum(c, "i")) * 1.0, None)
                y = lax.scan(step, lax.psum(x, "i"), None, length=2)[0]
            values.append(y)
        return [lax.psum(v, "i") for v in values]

    return f


@pytest.mark.parametrize("seed", range(25))
def test_random_programs(seed):
    """Values are those without, collectives are fewer, and nothing is used before it is there."""
    f, xs = program(seed), [jnp.arange(3.0) + k for k in range(3)]
    (jaxpr, operands), (alone, each) = (rewritten(f, 3, c) for c in (True, False))
    assert sum(operands) <= sum(each)
    assert len(operands) < len(each)
    pairs = zip(jaxpr_as_fun(jaxpr)(*xs), jaxpr_as_fun(alone)(*xs), strict=True)
    for a, b in pairs:
        np.testing.assert_array_equal(a, b)
