"""Pytrees: every op that takes an array takes a tree; leaves of one type are one message."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import sparse
from mpi4py import MPI
from reference import LEFT, ON_GPU, RANK, RIGHT, SIZE, assert_equal, exact_values, jits
from table import cases_with_data

import mpi4jax
from mpi4jax import notoken

WITH_DATA = cases_with_data()

packed_by_the_core = pytest.mark.skipif(ON_GPU, reason="on GPUs XLA packs trees")

# (type, shape) of the leaves: several of one type, an empty one, a scalar.
LEAVES = {
    "a": [("float32", (2, 3)), ("int32", (4,))],
    "b": ("float32", ()),
    "c": {"d": ("float32", (0, 2)), "e": ("int32", (1, 2))},
    "f": ("complex64", (3,)),
    "g": None,
}


def is_leaf(x):
    return isinstance(x, tuple) and isinstance(x[0], str)


def trees(case):
    """One tree for each rank, and their leaves, rank by rank."""
    specs, structure = jax.tree.flatten(LEAVES, is_leaf=is_leaf)
    leaves = [
        [
            exact_values(dtype, case.shape(shape, rank), [rank, i])
            for i, (dtype, shape) in enumerate(specs)
        ]
        for rank in range(SIZE)
    ]
    return [jax.tree.unflatten(structure, xs) for xs in leaves], leaves


@pytest.mark.parametrize("op", ["PROD", "MAX"])
@pytest.mark.parametrize("name", ["allreduce", "reduce_scatter", "scan"])
def test_tangents_of_nonlinear_reductions_of_a_tree(name, op):
    """Leaves of one type are one message. Its tangent is split as its result is."""
    f = lambda tree: getattr(notoken, name)(tree, getattr(MPI, op))
    shapes = [(SIZE, 2, 3), (SIZE,), (SIZE, 1)]
    leaves = [exact_values("float32", shape, [RANK, i]) for i, shape in enumerate(shapes)]
    tangents = [exact_values("float32", shape, [RANK, i, 7]) for i, shape in enumerate(shapes)]
    results, found = jax.jvp(f, (leaves,), (tangents,))
    for x, t, y, ty in zip(leaves, tangents, results, found, strict=True):
        expected, expected_tangent = jax.jvp(f, (x,), (t,))
        assert_equal(y, expected)
        assert_equal(ty, expected_tangent)


class GraphsTuple(NamedTuple):
    nodes: Any
    senders: Any


GraphsTuple.__module__ = "jraph._src.graph"


@jits
@pytest.mark.parametrize(
    "x", [sparse.BCOO.fromdense(np.eye(4)), sparse.BCSR.fromdense(np.eye(4)), GraphsTuple(1.0, 2)]
)
def test_indices_are_not_reduced(jit, x):
    """Messages and gathers take such a tree."""
    kind = type(x).__name__
    words = f"allreduce: argument 'x' has a {kind}, whose leaves are indices and values.*; reduce"
    for reduce in (
        notoken.allreduce,
        lambda x: notoken.allreduce({"a": [x, x], "b": np.ones(2)}, MPI.MAX),
        lambda x: notoken.wait(notoken.iallreduce((x,), mpi4jax.MEAN)),
    ):
        with pytest.raises(TypeError, match=words):
            jit(reduce)(x)
    for reduce in (notoken.reduce, notoken.scan, notoken.exscan, notoken.reduce_scatter):
        with pytest.raises(TypeError, match=f"{reduce.__name__}: argument 'x' has a {kind}"):
            jit(functools.partial(reduce, **({"root": 0} if reduce is notoken.reduce else {})))(x)
    y = jit(lambda x: notoken.allgather(x))(x)
    assert jax.tree.structure(y) == jax.tree.structure(x)


@pytest.mark.one_in(2)
@jits
@pytest.mark.parametrize("batched", [False, True], ids=["", "vmap"])
def test_trees(jit, batched):
    """A tree of each op, all in one program."""
    made = {str(case): trees(case) for case in WITH_DATA}
    double = functools.partial(jax.tree.map, lambda x: np.stack([x, x]))

    def f(operands):
        return {str(case): case.run("notoken", operands[str(case)]) for case in WITH_DATA}

    mine = {name: operands[RANK] for name, (operands, _) in made.items()}
    results = jit(jax.vmap(f))(double(mine)) if batched else jit(f)(mine)
    assert jax.tree.structure(results) == jax.tree.structure(mine)
    for case in WITH_DATA:
        for i, leaf in enumerate(jax.tree.leaves(results[str(case)])):
            expected = case.expected([xs[i] for xs in made[str(case)][1]])
            assert_equal(leaf, double(expected) if batched else expected, what=str(case))


@packed_by_the_core
def test_one_message_for_each_type(logged):
    """Of each op, in a program of all of them."""
    operands = {str(case): trees(case)[0][RANK] for case in WITH_DATA}
    kinds = len({leaf.dtype for leaf in jax.tree.leaves(operands[str(WITH_DATA[0])])})

    @jax.jit
    def f(operands):
        return [case.run("notoken", operands[str(case)]) for case in WITH_DATA]

    _, lines = logged(lambda: f(operands))
    expected = []
    for case in WITH_DATA:
        if case.name == "recv":  # from MPI.PROC_NULL it calls nothing
            expected += ["MPI_Send"] * kinds + ["MPI_Recv"] * kinds * (RANK > 0)
        else:
            expected += [case.row.mpi] * kinds
    called = [line.split(" | ")[2].split()[0] for line in lines if " done with " not in line]
    assert called == expected


def test_single_leaf_is_not_copied():
    jaxpr = jax.make_jaxpr(lambda x: notoken.allreduce({"x": [x]}, MPI.SUM))(jnp.ones((2, 3)))
    assert [str(eqn.primitive) for eqn in jaxpr.eqns] == ["mpi4jax_allreduce"]


def _started(x):
    return mpi4jax.wait(mpi4jax.iallreduce(x))


def _gradient(x):
    def loss(x):
        return sum(jnp.vdot(y, y) for y in jax.tree.leaves(notoken.allreduce(x)))

    return jax.grad(loss)(x)


def _ahead(x):
    return jax.jvp(notoken.allreduce, (x,), (x,))[1]


def _blocks(x):
    return notoken.alltoall(jax.tree.map(lambda v: jnp.stack([v] * SIZE), x))


PACKED = {
    "forward": notoken.allreduce,
    "started": _started,
    "reverse": _gradient,
    "ahead": _ahead,
    "vmap": jax.vmap(notoken.allreduce),
    "vmap of vmap": jax.vmap(jax.vmap(notoken.allreduce)),
    "blocks": _blocks,
    "batched blocks": jax.vmap(_blocks),
    "batched gradients": jax.vmap(_gradient),
    "loop": lambda x: lax.fori_loop(0, 3, lambda _, y: notoken.allreduce(y), x),
}


@packed_by_the_core
@pytest.mark.parametrize("name", PACKED)
def test_xla_packs_nothing(name):
    """It would compile a kernel for each leaf."""
    if name.startswith("vmap of"):
        x = {f"leaf {i}": jnp.full((3, 2, i), i, jnp.float32) for i in range(6)}
    else:
        x = {f"leaf {i}": jnp.full((3, i), i, jnp.float32) for i in range(6)}
    text = jax.jit(PACKED[name]).lower(x).as_text()
    slices = text.count("stablehlo.slice ") + text.count("stablehlo.dynamic_slice ")
    assert slices <= 1 < len(x), "one, of a batched token"
    assert "concatenate" not in text or "blocks" in name  # of `jnp.stack`
    assert text.count("@mpi4jax_pack(") in (1, 2, 3)
    compiled = jax.jit(PACKED[name])(x)
    leaf_by_leaf = [jax.jit(PACKED[name])({"leaf": leaf})["leaf"] for leaf in x.values()]
    for packed, alone in zip(compiled.values(), leaf_by_leaf, strict=True):
        assert_equal(packed, alone)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tree", [(), {}, None, [None, ()]], ids=str)
@jits
def test_trees_without_leaves(tree, jit):
    for case in WITH_DATA:
        assert jit(lambda case=case: case.run("notoken", tree))() == tree, case


class Pair(NamedTuple):
    a: object
    b: object


@jax.tree_util.register_dataclass
@dataclass
class State:
    x: object
    y: object


def test_other_containers():
    for make in (Pair, State, lambda a, b: (a, b), lambda a, b: [a, b]):
        tree = make(jnp.float32(RANK), np.arange(3))
        for api in (lambda t: mpi4jax.bcast(t, 0)[0], lambda t: notoken.bcast(t, 0)):
            y = api(tree)
            assert type(y) is type(tree)
            assert_equal(jax.tree.leaves(y)[0], np.float32(0))


@jax.tree_util.register_pytree_node_class
class _Field:
    """A node whose metadata are an array: structures of it cannot be compared."""

    def __init__(self, values, grid):
        self.values, self.grid = values, grid

    def tree_flatten(self):
        return (self.values,), self.grid

    @classmethod
    def tree_unflatten(cls, grid, children):
        return cls(*children, grid)


@pytest.mark.parametrize(
    "call",
    [
        notoken.allreduce,
        lambda x: notoken.sendrecv(x, x, LEFT, RIGHT),
        lambda x: mpi4jax.wait(mpi4jax.iallreduce(x)),
    ],
)
def test_an_array_as_metadata(call):
    for scale in (1.0, 2.0):
        grid = np.arange(3) * scale
        y = call(_Field(jnp.full(2, scale), grid))
        assert y.grid is grid
        assert_equal(y.values, call(jnp.full(2, scale)))


@pytest.mark.min_ranks(2)
@jits
def test_sendrecv_of_trees_of_different_types(jit):
    """Rank 0 sends floats and integers for floats alone; rank 1 the reverse."""
    floats, ints = jnp.full(3, RANK, jnp.float32), jnp.full(2, RANK, jnp.int32)
    if RANK > 1:
        return
    x, template = ([floats, ints], floats) if RANK == 0 else (floats, [floats, ints])
    y = jit(lambda x: notoken.sendrecv(x, template, 1 - RANK, 1 - RANK))(x)
    for leaf, before in zip(jax.tree.leaves(y), jax.tree.leaves(template), strict=True):
        assert_equal(leaf, np.full(before.shape, 1 - RANK, before.dtype))


@jits
def test_sendrecv_of_trees_whose_types_come_in_another_order(jit):
    """Floats come first on some ranks, and integers on others; messages match all the same."""

    def tree(rank):
        parts = np.full(2, rank, np.float32), np.full(3, rank, np.int32)
        return parts if rank % 2 == 0 else parts[::-1]

    y = jit(lambda x, like: notoken.sendrecv(x, like, LEFT, RIGHT))(tree(RANK), tree(LEFT))
    for actual, expected in zip(y, tree(LEFT), strict=True):
        assert_equal(actual, expected)


# ---- PRNG keys

KEY_CASES = [case for case in WITH_DATA if case.op is None]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shape", [(), (2,)], ids=str)
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@jits
def test_keys_of_random_numbers(jit, impl, shape):
    # All ranks' keys, made on each.
    many = max(SIZE, 2, *(case.blocks(rank) for case in KEY_CASES for rank in range(SIZE)))
    keys = jax.random.split(jax.random.key(3, impl=impl), many * int(np.prod(shape)))
    keys = keys.reshape(many, *shape)

    def operand(case, rank):
        blocks = case.blocks(rank)
        return keys[:blocks] if blocks else keys[rank]

    operands = {str(case): [operand(case, r) for r in range(SIZE)] for case in KEY_CASES}

    def f(mine):
        return {str(case): case.run("notoken", mine[str(case)]) for case in KEY_CASES}

    results = jit(f)({name: xs[RANK] for name, xs in operands.items()})
    for case in KEY_CASES:
        y, xs = results[str(case)], operands[str(case)]
        assert jax.random.key_impl(y) == jax.random.key_impl(keys)
        data = [np.asarray(jax.random.key_data(x)) for x in xs]
        assert_equal(jax.random.key_data(y), case.expected(data))


def test_keys_under_vmap_and_scan():
    keys = jax.random.split(jax.random.key(RANK), 3)
    expected = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(0), 3)))
    y = jax.vmap(lambda key: notoken.bcast(key, 0))(keys)
    assert_equal(jax.random.key_data(y), expected)
    _, y = lax.scan(lambda c, key: (c, notoken.bcast(key, 0)), 0, keys)
    assert_equal(jax.random.key_data(y), expected)


@jits
def test_gradients_of_integers(jit):
    """They have no values (float0), and are returned as they are, in the result's shape."""
    loss = lambda p: jnp.sum(p["w"] ** 2)
    grads = jax.grad(loss, allow_int=True)({"w": jnp.ones(3), "n": jnp.arange(2)})
    nothing = grads["n"]
    assert nothing.dtype == jax.dtypes.float0
    started = lambda x: mpi4jax.wait(mpi4jax.iallreduce(x))
    for f in (notoken.allreduce, started, lambda x: notoken.sendrecv(x, x, LEFT, RIGHT)):
        total = jit(f)(grads)
        assert (total["n"].dtype, total["n"].shape) == (nothing.dtype, (2,))
        assert float(total["w"][0]) in (2, 2 * SIZE)
    gathered = jit(notoken.allgather)(grads)
    assert (gathered["n"].dtype, gathered["n"].shape) == (nothing.dtype, (SIZE, 2))
    assert jit(notoken.allreduce)(nothing).dtype == nothing.dtype
