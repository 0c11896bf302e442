"""Every op, called in every way, compared with NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from mpi4py import MPI
from reference import (
    APIS,
    COMM,
    FOLDS,
    LEFT,
    NEEDS,
    RANK,
    REDUCING,
    RIGHT,
    SIZE,
    Case,
    assert_equal,
    cases,
    dtype_of,
    enable_x64,
    exact_values,
    float32,
    fold,
    kind,
    names_of,
    random_bits,
    small,
    supported_dtypes,
)

import mpi4jax
from mpi4jax import notoken
from mpi4jax._primitive import DTYPES

ALL = list(cases())
MOVING = [case for case in ALL if case.op is None and case.name != "barrier"]
WITH_DATA = [case for case in ALL if case.name != "barrier"]
DTYPES_HERE = list(supported_dtypes())


def each(values):
    return pytest.mark.parametrize("case", values, ids=names_of(values))


# ---- Ways to call: each makes of a function of one array one of BATCH arrays, stacked

BATCH = 2
stack = functools.partial(jax.tree.map, lambda *ys: jnp.stack(ys))


def _one_by_one(f):
    return lambda xs: stack(*[f(xs[i]) for i in range(BATCH)])


def _zeros(f, x, *shape):
    return jax.tree.map(lambda y: jnp.zeros((*shape, *y.shape), y.dtype), jax.eval_shape(f, x))


def _set(out, i, y):
    return jax.tree.map(lambda out, y: out.at[i].set(y), out, y)


def _fori_loop(f):
    def run(xs):
        xs = jnp.asarray(xs)
        out = _zeros(f, xs[0], BATCH)
        return lax.fori_loop(0, BATCH, lambda i, out: _set(out, i, f(xs[i])), out)

    return run


def _while_loop(f):
    def run(xs):
        def body(state):
            i, out = state
            return i + 1, _set(out, i, f(xs[i]))

        out = _zeros(f, xs[0], BATCH)
        return lax.while_loop(lambda state: state[0] < len(xs), body, (0, out))[1]

    return run


def _cond(f):
    return _one_by_one(lambda x: lax.cond(jnp.sum(x) < np.inf, f, lambda x: _zeros(f, x), x))


def _switch(f):
    def nothing(x):
        return _zeros(f, x)

    return _one_by_one(lambda x: lax.switch(jnp.int32(1), [nothing, f, nothing], x))


def _scan(f):
    return lambda xs: lax.scan(lambda carry, x: (carry, f(x)), 0, xs)[1]


def _twice(f):
    """In a loop on the same data, which JAX must not move out of the loop."""

    def run(x):
        ys = lax.scan(lambda carry, _: (carry, f(x)), 0, None, length=2)[1]
        return jax.tree.map(lambda y: y[1], ys)

    return run


def _vmap_other_axes(f):
    def run(xs):
        out = jax.vmap(f, in_axes=-1, out_axes=-1)(jnp.moveaxis(xs, 0, -1))
        return jax.tree.map(lambda y: jnp.moveaxis(y, -1, 0), out)

    return run


def _vmap_nested(f):
    def run(xs):
        out = jax.vmap(jax.vmap(f, out_axes=1))(jnp.stack([xs, xs], axis=1))
        return jax.tree.map(lambda y: y[:, :, 1], out)

    return run


WAYS = {
    "eager": _one_by_one,
    "jax.jit": lambda f: _one_by_one(jax.jit(f)),
    "mpi4jax.jit": lambda f: _one_by_one(mpi4jax.jit(f)),
    "jit in jit": lambda f: mpi4jax.jit(_one_by_one(jax.jit(f))),
    "mpi4jax.jit in jit": lambda f: jax.jit(_one_by_one(mpi4jax.jit(f))),
    "fori_loop": _fori_loop,
    "while_loop": lambda f: mpi4jax.jit(_while_loop(f)),
    "scan": lambda f: jax.jit(_scan(f)),
    "scan in jit": lambda f: mpi4jax.jit(_scan(_twice(f))),
    "map": lambda f: functools.partial(lax.map, f),
    "cond": lambda f: mpi4jax.jit(_cond(f)),
    "switch": lambda f: jax.jit(_switch(f)),
    "checkpoint": lambda f: mpi4jax.jit(_one_by_one(jax.checkpoint(f))),
    "vmap": jax.vmap,
    "vmap in jit": lambda f: mpi4jax.jit(jax.vmap(f)),
    "jit in vmap": lambda f: jax.vmap(mpi4jax.jit(f)),
    "vmap of other axes": lambda f: jax.jit(_vmap_other_axes(f)),
    "vmap of vmap": lambda f: mpi4jax.jit(_vmap_nested(f)),
    "vmap of scan": lambda f: jax.jit(jax.vmap(_twice(f))),
}


@pytest.mark.parametrize("way", WAYS)
@each(ALL)
def test_ways_to_call(case, way):
    def f(x):
        return {name: case.run(api, x) for name, api in APIS.items()}

    batches = [case.operands(functools.partial(_seeded, i)) for i in range(BATCH)]
    if way.startswith("vmap") and case.name == "barrier":
        f = jax.jit(lambda x, f=f: (x, f(x))[1])  # vmap asks for something to return
    actual = WAYS[way](f)(np.stack([xs[RANK] for xs in batches]))
    for api in APIS:
        results = [case.expected(xs) for xs in batches]
        assert_equal(actual[api], None if results[0] is None else np.stack(results))


def _seeded(i, shape, seed):
    return float32(shape, [*seed, i])


# ---- Shapes, types and values


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (2, 1, 2, 2)], ids=str)
@each(WITH_DATA)
def test_shapes(case, shape):
    xs = case.operands(float32, shape)
    assert_equal(case.run(notoken, xs[RANK]), case.expected(xs))


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (2, 1, 2, 2)], ids=str)
def test_shapes_in_jit(shape):
    compare_all(WITH_DATA, {case: case.operands(float32, shape) for case in WITH_DATA})


def compare_all(cases, operands, bits=False):
    """Run one program of many ops."""
    names = {str(case): case for case in cases}
    run = mpi4jax.jit(lambda xs: {n: case.run(notoken, xs[n]) for n, case in names.items()})
    actual = run({name: operands[case][RANK] for name, case in names.items()})
    for name, case in names.items():
        assert_equal(actual[name], case.expected(operands[case]), bits)


@pytest.mark.parametrize("dtype", DTYPES_HERE)
def test_moves_every_bit(dtype):
    make = functools.partial(random_bits, dtype)
    with enable_x64(True):
        compare_all(MOVING, {case: case.operands(make) for case in MOVING}, bits=True)


@pytest.mark.parametrize("dtype", DTYPES_HERE)
def test_reduces_every_dtype(dtype):
    allowed = [op for op, need in NEEDS.items() if DTYPES[dtype][need]]
    if dtype == "float8_e8m0fnu" and SIZE > 2:
        allowed.remove("SUM")  # it has no 3
    assert allowed
    todo = [case for op in allowed for case in cases(op, where=lambda spec: spec.has_reduction)]
    # 33 values: more than one step of vectorised code, and a rest.
    make = functools.partial(exact_values, dtype)
    with enable_x64(True):
        compare_all(todo, {case: case.operands(make, (33,)) for case in todo})


def _locate(op, xs):
    """MPI's MAXLOC or MINLOC of pairs (value, index): the lowest index of those that attain it."""
    better = np.greater if op == "MAXLOC" else np.less
    best = xs[0].astype(np.float64)
    for x in xs[1:]:
        x = x.astype(np.float64)
        wins = better(x[..., 0], best[..., 0])
        wins |= (x[..., 0] == best[..., 0]) & (x[..., 1] < best[..., 1])
        best = np.where(wins[..., None], x, best)
    return best.astype(xs[0].dtype)


@pytest.mark.parametrize("op", ["MAXLOC", "MINLOC"])
@pytest.mark.parametrize("dtype", [name for name in DTYPES_HERE if DTYPES[name]["ordered"]])
def test_location_of_extremum(dtype, op):
    rng = np.random.default_rng(1)
    values = rng.integers(0, 2, (SIZE, 3, 5))
    indices = np.stack([rng.permuted(np.arange(SIZE) % 2, axis=0) for _ in range(15)], axis=1)
    xs = np.stack([values, indices.reshape(SIZE, 3, 5)], axis=-1).astype(dtype_of(dtype))
    if dtype == "float8_e8m0fnu":
        xs = np.where(xs.astype(np.float32) == 1, 1, 2).astype(xs.dtype)  # it has no 0
    with enable_x64(True):
        x = jnp.asarray(xs[RANK])

        @mpi4jax.jit
        def f(x):
            total = notoken.allreduce(x, getattr(MPI, op))
            lines = jax.vmap(lambda row: notoken.scan(row, getattr(MPI, op)), 1, 1)(x)
            return total, lines, notoken.reduce(x, getattr(MPI, op), 0)

        total, lines, on_root = f(x)
    assert_equal(total, _locate(op, xs))
    assert_equal(lines, _locate(op, xs[: RANK + 1]))
    assert_equal(on_root, _locate(op, xs) if RANK == 0 else xs[RANK])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint64"])
def test_integer_sums_wrap(dtype):
    xs = [np.array([np.iinfo(dtype).max - r], dtype) for r in range(SIZE)]
    with enable_x64(True):
        assert_equal(notoken.allreduce(xs[RANK], MPI.SUM), fold("SUM", xs))


def test_float_sums_agree_on_all_ranks():
    x = np.random.default_rng(RANK).normal(size=100).astype(np.float32)
    y = notoken.allreduce(x, MPI.SUM)
    everywhere = COMM.allgather(np.asarray(y).tobytes())
    assert len(set(everywhere)) == 1
    np.testing.assert_allclose(y, np.sum(COMM.allgather(x), axis=0), rtol=1e-6, atol=1e-6)


SMALL_FLOATS = [name for name in DTYPES_HERE if kind(d := dtype_of(name)) == "f" and small(d)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", ["SUM", "PROD", "MAX", "MIN"])
@pytest.mark.parametrize("dtype", SMALL_FLOATS)
def test_small_floats_are_computed_in_float32(dtype, op):
    """All pairs of 8-bit numbers, many pairs of 16-bit numbers: rounded once, to nearest."""
    if dtype_of(dtype).itemsize == 1:
        values = np.arange(16 if "float4" in dtype else 256, dtype=np.uint8).view(dtype_of(dtype))
        xs = [np.tile(values, len(values)), np.repeat(values, len(values))]
    else:
        xs = [random_bits(dtype, (50_000,), seed=r) for r in range(2)]
    wide = [x.astype(np.float32) for x in xs]
    with np.errstate(all="ignore"):
        exact = FOLDS[op](*[x.astype(np.float64) for x in xs])
    # XLA's threads take float32 numbers below the normal ones for zeros.
    tiny = np.finfo(np.float32).tiny
    tested = np.all([(x == 0) | ~(abs(x) < tiny) for x in (*wide, exact)], axis=0)
    if op in ("MAX", "MIN"):  # MPI leaves open what they make of NaNs
        tested &= ~np.isnan(exact)
    xs = [x[tested] for x in xs]
    y = np.asarray(notoken.allreduce(jnp.asarray(xs[RANK]), getattr(MPI, op)))
    with np.errstate(all="ignore"):
        expected = fold(op, xs)
    assert len(y) > 100 or "float4" in dtype
    assert y.dtype == expected.dtype
    y, expected = y.astype(np.float32), expected.astype(np.float32)
    wrong = ~((y == expected) | (np.isnan(y) & np.isnan(expected)))
    examples = list(zip(xs[0][wrong], xs[1][wrong], y[wrong], expected[wrong], strict=True))
    assert not wrong.any(), f"{wrong.sum()} wrong: {examples[:5]}"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_sums_are_close(dtype):
    xs = [exact_values("float32", (1000,), r) * np.float32(1.1) for r in range(SIZE)]
    xs = [x.astype(dtype_of(dtype)) for x in xs]
    y = notoken.allreduce(jnp.asarray(xs[RANK]), MPI.SUM)
    rounding = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    exact = sum(x.astype(np.float64) for x in xs)
    atol = SIZE * rounding * sum(abs(x.astype(np.float64)) for x in xs)
    assert np.all(abs(np.asarray(y).astype(np.float64) - exact) <= atol)


PYTHON_VALUES = [True, 3, 2.5, 1 - 2j, np.float32(1.5), np.int16(7), np.arange(3), np.ones((2, 2))]


@pytest.mark.parametrize("x64", [False, True], ids=["32 bits", "64 bits"])
@pytest.mark.parametrize("value", PYTHON_VALUES, ids=repr)
def test_python_and_numpy_values(value, x64):
    with enable_x64(x64):
        expected = np.asarray(jnp.asarray(value))
        everywhere = np.stack([expected] * SIZE)
        assert_equal(notoken.allgather(value), everywhere)
        assert_equal(notoken.sendrecv(value, value, LEFT, RIGHT), expected)
        assert notoken.send(value, MPI.PROC_NULL) is None
        assert_equal(mpi4jax.jit(lambda: notoken.allgather(value))(), everywhere)
        assert_equal(mpi4jax.jit(notoken.allgather)(value), everywhere)


def test_x64_can_be_switched():
    for x64 in (False, True, False):
        with enable_x64(x64):
            x = jnp.arange(3.0)
            assert x.dtype == (np.float64 if x64 else np.float32)
            assert_equal(notoken.allreduce(x, MPI.SUM), np.asarray(x) * SIZE)


@pytest.mark.parametrize("root", range(SIZE))
@each([case for case in ALL if case.root is not None])
def test_any_root(case, root):
    case = Case(case.name, root, case.op)
    xs = case.operands(float32)
    assert_equal(case.run(notoken, xs[RANK]), case.expected(xs))


@each(WITH_DATA)
def test_input_is_unchanged(case):
    x = jnp.asarray(case.operands(float32)[RANK])
    before = np.array(x)
    case.run(notoken, x)
    jax.jit(functools.partial(case.run, notoken))(x)
    mpi4jax.flush()
    assert_equal(x, before)


@each(WITH_DATA)
def test_donated_input(case):
    xs = case.operands(float32, (40,))
    x = jnp.array(xs[RANK])
    y = mpi4jax.jit(functools.partial(case.run, notoken), donate_argnums=0)(x)
    assert_equal(y, case.expected(xs))
    assert x.is_deleted() or y.shape != x.shape


@each(WITH_DATA)
def test_chain_in_place(case):
    """Ops whose operand is another's result, which XLA may let them overwrite."""
    xs = case.operands(float32, (40,))

    @mpi4jax.jit
    def chain(x):
        once = case.run(notoken, x + 0)
        return once, case.run(notoken, jnp.flip(jnp.flip(x))), x + 1

    first, second, third = chain(xs[RANK])
    assert_equal(first, case.expected(xs))
    assert_equal(second, case.expected(xs))
    assert_equal(third, xs[RANK] + 1)


def test_sendrecv_of_different_lengths():
    x = np.arange(RANK + 1, dtype=np.int32)
    y = notoken.sendrecv(x, jnp.zeros(LEFT + 1, jnp.int32), LEFT, RIGHT)
    assert_equal(y, np.arange(LEFT + 1, dtype=np.int32))


@pytest.mark.min_ranks(2)
def test_sendrecv_of_different_types():
    """Even ranks send integers and receive floats, odd ranks do the reverse."""
    other = RANK ^ 1
    if other >= SIZE:
        return
    ints, floats = np.arange(3, dtype=np.int32), np.arange(4, dtype=np.float32)
    mine, theirs = (ints, floats) if RANK % 2 == 0 else (floats, ints)
    for jit in (lambda f: f, jax.jit):
        y = jit(lambda x, t: notoken.sendrecv(x, t, other, other))(mine, np.zeros_like(theirs))
        assert_equal(y, theirs)


def test_vmap_of_one_of_two_operands():
    x = np.arange(6, dtype=np.float32).reshape(2, 3) + RANK
    f = lambda x, template: notoken.sendrecv(x, template, LEFT, RIGHT)
    expected = np.arange(6, dtype=np.float32).reshape(2, 3) + LEFT
    assert_equal(jax.vmap(f, (0, None))(x, np.zeros(3, np.float32)), expected)
    expected = np.stack([expected[0]] * 4)
    assert_equal(jax.vmap(f, (None, 0))(x[0], np.zeros((4, 3), np.float32)), expected)


@each(ALL)
def test_vmap_is_one_communication(case):
    x = case.operands(float32, (5, 2))[RANK]
    axis = len(x.shape) - 2
    one = jax.make_jaxpr(functools.partial(case.run, notoken))(x.take(0, axis))
    many = jax.make_jaxpr(jax.vmap(functools.partial(case.run, notoken), in_axes=axis))(x)
    count = lambda jaxpr: sum("mpi4jax" in str(eqn.primitive) for eqn in jaxpr.eqns)
    assert count(many) == count(one) >= 1


@each(ALL)
def test_vmap_of_an_empty_batch(case):
    x = case.operands(float32, (0, 2))[RANK]
    many = lambda x: jax.vmap(functools.partial(case.run, notoken), *[len(x.shape) - 2] * 2)(x)
    if case.name != "barrier":  # vmap asks for something to return
        assert jax.jit(many)(x).size == 0
    total = lambda x: jnp.sum(many(x))
    if case.name != "barrier":
        assert mpi4jax.jit(jax.grad(total))(x).shape == x.shape


def test_vmap_of_an_op_on_a_constant():
    y = jax.vmap(lambda x: x + notoken.allreduce(1.0, MPI.SUM))(jnp.arange(3.0))
    assert_equal(y, np.arange(3, dtype=np.float32) + SIZE)


# ---- Reductions of the user's own


def _affine(a, b, _):
    """Composition of the maps ``x -> s x + t``, kept as ``s + t i``: not commutative."""
    a, b = np.frombuffer(a, np.complex64), np.frombuffer(b, np.complex64)
    b[:] = a.real * b.real + 1j * (a.real * b.imag + a.imag)


def _largest_in_magnitude(a, b, _):
    a, b = np.frombuffer(a, np.complex64), np.frombuffer(b, np.complex64)
    b[:] = np.where(np.abs(a) > np.abs(b), a, b)


@pytest.mark.parametrize(
    "jit", [lambda f: f, mpi4jax.jit, jax.jit], ids=["eager", "mpi4jax.jit", "jax.jit"]
)
@pytest.mark.parametrize("name", REDUCING)
@pytest.mark.parametrize("function, commutes", [(_affine, False), (_largest_in_magnitude, True)])
def test_reduction_of_the_user(name, function, commutes, jit):
    op = MPI.Op.Create(function, commute=commutes)
    x = np.array([complex(r + 2, 3 - r) for r in range(SIZE)], np.complex64)[:, None].repeat(7, 1)

    def total(xs):
        out = xs[-1].copy()
        for x in reversed(xs[:-1]):
            function(x.tobytes(), memoryview(out).cast("B"), None)
        return out

    call = {
        "allreduce": lambda x: notoken.allreduce(x, op),
        "reduce": lambda x: notoken.reduce(x, op, 0),
        "scan": lambda x: notoken.scan(x, op),
    }[name]
    last = {"allreduce": SIZE, "reduce": SIZE if RANK == 0 else None, "scan": RANK + 1}[name]
    expected = x[RANK] if last is None else total(list(x[:last]))
    run = jit(call)
    assert_equal(run(x[RANK]), expected)
    assert_equal(run(x[RANK]), expected)
    op.Free()


def test_many_reductions_of_the_user():
    for k in range(5):  # a freed reduction's handle is given to the next one

        def plus_k(a, b, _, k=k):
            b = np.frombuffer(b, np.float32)
            b += np.frombuffer(a, np.float32) + k

        op = MPI.Op.Create(plus_k, commute=True)
        y = notoken.allreduce(jnp.float32(1), op)
        assert float(y) == SIZE + k * (SIZE - 1)
        op.Free()
