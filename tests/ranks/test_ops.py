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
    DTYPES,
    FOLDS,
    LEFT,
    RANK,
    RIGHT,
    SIZE,
    SUPPORTED,
    Reduction,
    assert_close,
    assert_equal,
    dtype_of,
    each,
    enable_x64,
    exact_values,
    float32,
    fold,
    jits,
    kind,
    random_bits,
    small,
)
from table import REDUCING, cases, cases_with_data

import mpi4jax
from mpi4jax import notoken

ALL = cases()
WITH_DATA = cases_with_data()
MOVING = [case for case in WITH_DATA if case.op is None]

# ---- Ways to call: each makes of a function of one tree one of BATCH trees, stacked

BATCH = 2
stack = functools.partial(jax.tree.map, lambda *ys: jnp.stack(ys))
at = lambda tree, i: jax.tree.map(lambda x: x[i], tree)
first = lambda tree: jax.tree.leaves(tree)[0]


def _one_by_one(f):
    return lambda xs: stack(*[f(at(xs, i)) for i in range(BATCH)])


def _zeros(f, x, *shape):
    return jax.tree.map(lambda y: jnp.zeros((*shape, *y.shape), y.dtype), jax.eval_shape(f, x))


def _set(out, i, y):
    return jax.tree.map(lambda out, y: out.at[i].set(y), out, y)


def _fori_loop(f):
    def run(xs):
        xs = jax.tree.map(jnp.asarray, xs)
        out = _zeros(f, at(xs, 0), BATCH)
        return lax.fori_loop(0, BATCH, lambda i, out: _set(out, i, f(at(xs, i))), out)

    return run


def _while_loop(f):
    def run(xs):
        def body(state):
            i, out = state
            return i + 1, _set(out, i, f(at(xs, i)))

        out = _zeros(f, at(xs, 0), BATCH)
        return lax.while_loop(lambda state: state[0] < BATCH, body, (0, out))[1]

    return run


def _cond(f):
    zeros = functools.partial(_zeros, f)
    return _one_by_one(lambda x: lax.cond(jnp.sum(first(x)) < np.inf, f, zeros, x))


def _scan(f):
    return lambda xs: lax.scan(lambda carry, x: (carry, f(x)), 0, xs)[1]


def _twice(f):
    """In a loop on the same data, which JAX must not move out of the loop."""
    again = lambda x: lambda carry, _: (carry, f(x))
    return lambda x: at(lax.scan(again(x), 0, None, length=2)[1], 1)


def _vmap_other_axes(f):
    def run(xs):
        xs = jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1), xs)
        out = jax.vmap(f, in_axes=-1, out_axes=-1)(xs)
        return jax.tree.map(lambda y: jnp.moveaxis(y, -1, 0), out)

    return run


def _vmap_nested(f):
    def run(xs):
        xs = jax.tree.map(lambda x: jnp.stack([x, x], axis=1), xs)
        return jax.tree.map(lambda y: y[:, :, 1], jax.vmap(jax.vmap(f, out_axes=1))(xs))

    return run


WAYS = {
    "eager": _one_by_one,
    "jax.jit": lambda f: _one_by_one(jax.jit(f)),
    "fori_loop": _fori_loop,
    "while_loop": lambda f: mpi4jax.jit(_while_loop(f)),
    "scan": lambda f: jax.jit(_scan(f)),
    "scan in jit": lambda f: mpi4jax.jit(_scan(_twice(f))),
    "cond": lambda f: mpi4jax.jit(_cond(f)),
    "vmap": jax.vmap,
    "jit in vmap": lambda f: jax.vmap(mpi4jax.jit(f)),
    "vmap of other axes": lambda f: jax.jit(_vmap_other_axes(f)),
    "vmap of vmap": lambda f: mpi4jax.jit(_vmap_nested(f)),
    "vmap of scan": lambda f: jax.jit(jax.vmap(_twice(f))),
}


@pytest.mark.parametrize("case", WITH_DATA, ids=str)
def test_python_numbers_stay_weak(case):
    """Their type gives way to the type of what they meet, as after every function of JAX's."""
    x = jnp.broadcast_to(2.0, case.shape((), RANK))
    assert x.weak_type
    run = functools.partial(case.run, "notoken")
    pair = lambda x: run({"weak": x, "strong": x.astype(np.float32)})
    tangent = lambda x: jax.jvp(run, (x,), (x,))[1]
    for f in (run, jax.jit(run), jax.vmap(run, axis_size=2, in_axes=None), tangent):
        if f is not tangent or case.op in (None, *FOLDS):
            assert jax.make_jaxpr(f)(x).out_avals[0].weak_type, f
    strong, weak = jax.make_jaxpr(pair)(x).out_avals
    assert (strong.weak_type, weak.weak_type) == (False, True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_call(way):
    """All ops in one program, with both APIs."""
    todo = [(api, case) for case in ALL for api in APIS]

    def f(xs):
        return {f"{api} {case}": case.run(api, xs[str(case)]) for api, case in todo}

    batches = {
        str(case): [
            case.operands(lambda s, seed, i=i: float32(s, [*seed, i])) for i in range(BATCH)
        ]
        for case in ALL
    }
    actual = WAYS[way](f)({name: np.stack([xs[RANK] for xs in b]) for name, b in batches.items()})
    for api, case in todo:
        expected = np.stack([case.expected(xs) for xs in batches[str(case)]])
        assert_equal(actual[f"{api} {case}"], expected, what=f"{api} {case}")


def compare_all(cases, make, payload=(2, 3), bits=False, jit=jax.jit, **options):
    """Run one program of many ops; the operand of this rank."""
    operands = {str(case): case.operands(make, payload) for case in cases}
    run = lambda xs: {str(case): case.run("notoken", xs[str(case)]) for case in cases}
    x = {name: jnp.array(xs[RANK]) for name, xs in operands.items()}
    actual = jit(run, **options)(x)
    for case in cases:
        y, expected = actual[str(case)], case.expected(operands[str(case)])
        if case.op == "MEAN":
            assert_close(y, expected, str(case))
        else:
            assert_equal(y, expected, bits, str(case))
    return x, operands


# ---- Shapes, types and values


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (2, 1, 2, 2)], ids=str)
def test_shapes(shape):
    compare_all(WITH_DATA, float32, shape)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_moves_every_bit(dtype):
    with enable_x64(True):
        compare_all(MOVING, functools.partial(random_bits, dtype), bits=True)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reduces_every_dtype(dtype):
    allowed = list(SUPPORTED[dtype])
    exact = {"float8_e8m0fnu": 2, "float4_e2m1fn": 4}  # up to these ranks: they have no 3, no 5
    if exact.get(dtype, SIZE) < SIZE:
        allowed.remove("SUM")
        allowed.remove("MEAN")
    # float8_e8m0fnu has no 0, which is what exscan gives on rank 0.
    only = set(REDUCING) - {"exscan"} if dtype == "float8_e8m0fnu" else REDUCING
    todo = [case for op in allowed for case in cases(op, only=only)]
    with enable_x64(True):
        # 33 values: more than one step of vectorised code, and a rest.
        compare_all(todo, functools.partial(exact_values, dtype), (33,))


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


PACKED = {"int2", "int4", "uint2", "uint4", "float4_e2m1fn"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("op", ["MAXLOC", "MINLOC"])
@pytest.mark.parametrize("dtype", [d for d in DTYPES if "MAX" in SUPPORTED[d]])
def test_location_of_extremum(dtype, op):
    if jax.version.__version_info__ < (0, 8) and dtype in PACKED:
        pytest.skip("up to 0.7, XLA overruns memory where it transposes packed types, also alone")
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


SMALL_FLOATS = [name for name in DTYPES if kind(d := dtype_of(name)) == "f" and small(d)]


@pytest.mark.one_in(3)
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
        exact = getattr(np, FOLDS[op])(*[x.astype(np.float64) for x in xs])
    # XLA's threads take float32 numbers below the normal ones for zeros.
    tiny = np.finfo(np.float32).tiny
    tested = np.all([(x == 0) | ~(abs(x) < tiny) for x in (*wide, exact)], axis=0)
    if op in ("MAX", "MIN"):  # MPI leaves open what they make of NaNs
        tested &= ~np.isnan(exact)
    xs = [x[tested] for x in xs]
    y = np.asarray(notoken.allreduce(jnp.asarray(xs[RANK]), getattr(MPI, op)))
    with np.errstate(all="ignore"):
        total = getattr(np, FOLDS[op])(*[x.astype(np.float32) for x in xs])
        # XLA converts floats of 8 bits, and with the tests' settings not all as ml_dtypes does.
        eight = xs[0].dtype.itemsize == 1
        expected = (
            np.asarray(jax.jit(lambda v: v.astype(y.dtype))(total)) if eight else fold(op, xs)
        )
    assert len(y) > 100 or "float4" in dtype
    assert y.dtype == expected.dtype
    y, expected = y.astype(np.float32), expected.astype(np.float32)
    wrong = ~((y == expected) | (np.isnan(y) & np.isnan(expected)))
    examples = list(zip(xs[0][wrong], xs[1][wrong], y[wrong], expected[wrong], strict=True))
    assert not wrong.any(), f"{wrong.sum()} wrong: {examples[:5]}"


PYTHON_VALUES = [True, 3, 2.5, 1 - 2j, np.float32(1.5), np.int16(7), np.arange(3), np.ones((2, 2))]


@pytest.mark.parametrize("x64", [False, True], ids=["32 bits", "64 bits"])
def test_python_and_numpy_values(x64):
    with enable_x64(x64):
        arrays = [np.asarray(jnp.asarray(value)) for value in PYTHON_VALUES]
        for value, array in zip(PYTHON_VALUES, arrays, strict=True):
            assert_equal(notoken.sendrecv(value, value, LEFT, RIGHT), array)
            assert notoken.send(value, MPI.PROC_NULL) is None
        gather = lambda values: [notoken.allgather(value) for value in values]
        closed_over = jax.jit(lambda: gather(PYTHON_VALUES))()
        for found in (gather(PYTHON_VALUES), closed_over, jax.jit(gather)(PYTHON_VALUES)):
            for y, array in zip(found, arrays, strict=True):
                assert_equal(y, np.stack([array] * SIZE))


def test_any_root():
    with_root = [case for case in cases(roots=range(SIZE)) if case.root is not None]
    compare_all(with_root, float32)


@pytest.mark.parametrize("same_shape", [True, False])
def test_donated_input(same_shape):
    """An input with the shape of its result is deleted."""

    def has_its_shape(case):  # on all ranks
        xs = case.operands(payload=(40,))
        return all(x.shape == y.shape for x, y in zip(xs, case.model(np, xs), strict=True))

    found = [case for case in WITH_DATA if has_its_shape(case) == same_shape]
    x, _ = compare_all(found, float32, (40,), donate_argnums=0)
    assert not same_shape or all(operand.is_deleted() for operand in x.values())


def test_chain_in_place():
    """Ops whose operand is another's result, which XLA may let them overwrite."""
    operands = {str(case): case.operands(float32, (40,)) for case in WITH_DATA}

    @jax.jit
    def chains(xs):
        def chain(case, x):
            once = case.run("notoken", x + 0)
            return once, case.run("notoken", jnp.flip(jnp.flip(x))), x + 1

        return {str(case): chain(case, xs[str(case)]) for case in WITH_DATA}

    found = chains({name: xs[RANK] for name, xs in operands.items()})
    for case in WITH_DATA:
        xs, (first, second, third) = operands[str(case)], found[str(case)]
        assert_equal(first, case.expected(xs), what=str(case))
        assert_equal(second, case.expected(xs), what=str(case))
        assert_equal(third, xs[RANK] + 1, what=str(case))


def test_sendrecv_of_different_lengths():
    x = np.arange(RANK + 1, dtype=np.int32)
    y = notoken.sendrecv(x, jnp.zeros(LEFT + 1, jnp.int32), LEFT, RIGHT)
    assert_equal(y, np.arange(LEFT + 1, dtype=np.int32))


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
    axis, run = len(x.shape) - 2, functools.partial(case.run, "notoken")
    one = jax.make_jaxpr(run)(x.take(0, axis))
    many = jax.make_jaxpr(jax.vmap(run, in_axes=axis))(x)
    count = lambda jaxpr: sum("mpi4jax" in str(eqn.primitive) for eqn in jaxpr.eqns)
    assert count(many) == count(one) >= 1


def test_vmap_of_an_empty_batch():
    xs = {str(case): case.operands(float32, (0, 2))[RANK] for case in ALL}
    axes = {name: len(x.shape) - 2 for name, x in xs.items()}

    @mpi4jax.jit
    def f(xs):
        run = lambda xs: {str(case): case.run("notoken", xs[str(case)]) for case in ALL}
        ys = jax.vmap(run, (axes,))(xs)
        return sum(jnp.sum(y) for y in ys.values()), ys

    (_, ys), gradients = jax.value_and_grad(f, has_aux=True)(xs)
    assert all(y.size == 0 for y in ys.values())
    assert {n: g.shape for n, g in gradients.items()} == {n: x.shape for n, x in xs.items()}


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


@jits
@pytest.mark.parametrize("function, commutes", [(_affine, False), (_largest_in_magnitude, True)])
def test_reduction_of_the_user(function, commutes, jit):
    def fold(total, x):
        out = x.copy()
        function(total.tobytes(), memoryview(out).cast("B"), None)
        return out

    op = Reduction(MPI.Op.Create(function, commute=commutes), fold)
    todo = cases(op, roots=(0,), only=REDUCING)
    values = [complex(2 * r + 1, 3 - r) for r in range(SIZE)]
    make = lambda shape, seed: np.full(shape, values[seed[0]], np.complex64)
    operands = [case.operands(make, (7,)) for case in todo]
    run = jit(lambda xs: [case.run("notoken", x) for case, x in zip(todo, xs, strict=True)])
    for _ in range(2):
        ys = run([xs[RANK] for xs in operands])
        for case, xs, y in zip(todo, operands, ys, strict=True):
            assert_equal(y, case.expected(xs), what=case.name)
    op.op.Free()
