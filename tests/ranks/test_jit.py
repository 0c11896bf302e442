"""`mpi4jax.jit` is a drop-in for `jax.jit`."""

import copy
import functools
import gc
import pickle
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from mpi4py import MPI
from reference import LEFT, RANK, RIGHT, SIZE, assert_equal, compilations

import mpi4jax
from mpi4jax import notoken

compilers = pytest.mark.parametrize("jit", [jax.jit, mpi4jax.jit], ids=["jax.jit", "mpi4jax.jit"])


def total(x):
    return notoken.allreduce(x, MPI.SUM)


@compilers
def test_static_arguments(jit):
    def reduced(x, n, *, op):
        return notoken.allreduce(x, getattr(MPI, op)) * n

    f = jit(reduced, static_argnums=1, static_argnames="op")
    assert float(f(jnp.float32(2), 3, op="SUM")) == 6 * SIZE
    assert float(f(jnp.float32(2), 3, op="MAX")) == 6

    @functools.partial(jit, static_argnames=("root", "how"))
    def g(x, root, how=(1, 2)):
        return notoken.bcast(x, root) * how[1]

    assert float(g(jnp.float32(RANK), root=SIZE - 1)) == 2 * (SIZE - 1)
    assert float(g(jnp.float32(RANK), SIZE - 1, how=("a", 5))) == 5 * (SIZE - 1)
    assert float(g(jnp.float32(RANK), how=(None, 7), root=0)) == 0


@compilers
def test_decorator_forms(jit):
    @jit
    def f(x):
        """Sum over the ranks."""
        return total(x)

    assert f.__name__ == "f"
    assert f.__doc__ == "Sum over the ranks."
    assert float(f(jnp.float32(1))) == SIZE

    @functools.partial(jit, donate_argnums=(0,))
    def g(x):
        return total(x)

    x = jnp.ones(3)
    assert_equal(g(x), np.full(3, SIZE, np.float32))
    assert x.is_deleted()


def test_decorator_with_keywords_only():
    @mpi4jax.jit(static_argnames="n")
    def f(x, n):
        return total(x) * n

    assert float(f(jnp.float32(1), n=2)) == 2 * SIZE


@compilers
def test_arguments_of_all_kinds(jit):
    @jit
    def f(x, *args, scale=2.0, **kwargs):
        return {"sum": total(x) * scale, "rest": [total(a) for a in args], **kwargs}

    y = f(1.0, 2, [3.0, {"z": np.arange(2)}][1]["z"], scale=3.0, other=(jnp.ones(2), None))
    assert float(y["sum"]) == 3 * SIZE
    assert int(y["rest"][0]) == 2 * SIZE
    assert_equal(y["rest"][1], np.arange(2, dtype=np.int32) * SIZE)
    assert_equal(y["other"][0], np.ones(2, np.float32))
    assert y["other"][1] is None


@compilers
def test_methods(jit):
    class Model:
        def __init__(self, factor):
            self.factor = factor

        @functools.partial(jit, static_argnums=0)
        def run(self, x):
            return self.factor * total(x)

        @staticmethod
        @jit
        def static(x):
            return total(x)

    assert float(Model(3).run(jnp.float32(1))) == 3 * SIZE
    assert float(Model(4).run(x=jnp.float32(1))) == 4 * SIZE
    assert float(Model.static(1.0)) == SIZE
    assert float(jit(Model(5).run)(1.0)) == 5 * SIZE


@compilers
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_copies(jit, duplicate):
    """Objects that have compiled functions are copied with them."""
    f = duplicate({"f": jit(total)})["f"]
    assert float(f(jnp.float32(1))) == SIZE


@compilers
def test_closures_and_constants(jit):
    big = np.arange(5000, dtype=np.float32)
    device = jnp.asarray(big)
    y = jit(lambda x: (total(big) + x, total(device) + x))(1.0)
    for z in y:
        assert_equal(z, big * SIZE + 1)


@compilers
def test_outputs(jit):
    """Inputs, constants, Python numbers, twice the same and nothing at all."""
    f = jit(lambda x: (x, total(x), 3, None, {"same": x, "shape": x.shape[0]}))
    x = jnp.arange(4.0)
    a, b, three, nothing, rest = f(x)
    assert_equal(a, np.asarray(x))
    assert_equal(b, np.asarray(x) * SIZE)
    assert int(three) == 3
    assert nothing is None
    assert int(rest["shape"]) == 4
    assert jit(lambda x: None)(x) is None
    assert jit(lambda x: notoken.send(x, MPI.PROC_NULL))(x) is None


@compilers
def test_compiles_once_per_signature(jit):
    f = jit(lambda x: total(x) + 1)
    f(jnp.ones(19))
    with compilations() as compiled:
        for _ in range(5):
            f(jnp.ones(19))
    assert len(compiled) == 0
    with compilations() as compiled:
        f(np.ones(20, np.float32)), f(np.ones(20, np.int32)), f(np.ones(20, np.int32))
    assert len(compiled) == 2


def test_new_function_objects_compile_again_but_eager_ops_do_not():
    x = jnp.ones(23)
    notoken.allgather(x)
    with compilations() as compiled:
        for _ in range(5):
            mpi4jax.allgather(x), notoken.allgather(x)
    assert len(compiled) <= 1  # the form with a token


def python_calls(f, *args):
    """Names of the Python functions that run while ``f(*args)`` does."""
    names = []
    sys.setprofile(
        lambda frame, event, _: names.append(frame.f_code.co_name) if event == "call" else None
    )
    try:
        f(*args)
    finally:
        sys.setprofile(None)
    return names


@compilers
def test_dispatch_is_that_of_a_function_without_effects(jit):
    """JAX's C++ path runs no Python."""
    x = jnp.ones(3)
    for function in (
        total,
        lambda x: notoken.send(x, MPI.PROC_NULL),
        lambda x: lax.fori_loop(0, 2, lambda i, y: total(y), x),
        lambda x: jax.jit(total)(x).sum() + x,
        jax.value_and_grad(lambda x: total(x).sum()),
    ):
        f = jit(function)
        assert jax.make_jaxpr(f)(x).effects
        f(x), f(x)
        assert python_calls(f, x) == []


@compilers
def test_arguments_that_are_not_used_are_dropped(jit):
    f = jit(lambda a, x, b: (total(x), b + 1, a)[:2])
    main = f.lower(jnp.ones(2), jnp.ones(3), jnp.ones(4)).as_text().partition("@main")[2]
    assert main.partition("->")[0].count("tensor<") == 2
    y, z = f(jnp.ones(2), jnp.ones(3), jnp.ones(4))
    assert_equal(y, np.full(3, SIZE, np.float32))
    assert_equal(z, np.full(4, 2, np.float32))


@compilers
def test_keys_and_weak_types(jit):
    """What stands around the program keeps the types of arguments and results."""
    f = jit(lambda key, w: (notoken.bcast(key, 0), total(w), w))
    key, y, w = f(jax.random.key(RANK), 2.0)
    assert jax.random.key_impl(key) == jax.random.key_impl(jax.random.key(0))
    assert_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(0)))
    assert float(y) == 2 * SIZE
    assert w.weak_type


def test_it_is_jax_jit():
    """So it can be copied, inspected ... as far as a function of `jax.jit` can."""
    assert type(mpi4jax.jit(total)) is type(jax.jit(total))


@pytest.mark.parametrize("f", [total, lambda x: x], ids=["named", "lambda"])
def test_pickling(f):
    """With `check` too, what comes of it is what comes of a function of `jax.jit`."""

    def outcome(jitted):
        try:
            return float(pickle.loads(pickle.dumps(jitted))(jnp.float32(1)))
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            return type(error), str(error)

    assert outcome(mpi4jax.jit(f, check=True)) == outcome(jax.jit(f))
    assert outcome(mpi4jax.jit(f)) == outcome(jax.jit(f))


MINE = RANK == 0  # what this rank does differently
RING = MPI.COMM_WORLD.Create_cart([SIZE], periods=[True])
X = jnp.ones(6, np.float32)


def exchanged(x):
    return notoken.alltoall(jnp.ones((SIZE, 1), x.dtype) * x)


DIFFERENT = {
    "operation": lambda x: (notoken.scan if MINE else notoken.allreduce)(x, MPI.SUM),
    "root": lambda x: notoken.bcast(x, int(MINE)),
    "reduction": lambda x: notoken.allreduce(x, MPI.MAX if MINE else MPI.SUM),
    "dtype": lambda x: notoken.allreduce(x.astype(np.int32) if MINE else x, MPI.SUM),
    "count": lambda x: notoken.allreduce(x[int(MINE) :], MPI.SUM),
    "block": lambda x: notoken.alltoall(jnp.ones((SIZE, 1 + MINE))),
    "width": lambda x: notoken.halo_exchange(x, RING, width=1 + MINE),
    "order": lambda x: [total(v) for v in ((x, x[:2]) if MINE else (x[:2], x))],
    "one more": lambda x: [total(x) for _ in range(1 + MINE)],
    "length": lambda x: lax.scan(lambda c, _: (total(c), None), x, length=1 + MINE),
    "loop": lambda x: lax.scan(lambda c, _: (total(c), None), x, length=1) if MINE else total(x),
    "branch": lambda x: total(lax.cond(x[0] > 0, total if MINE else abs, abs, x)),
    "started": lambda x: mpi4jax.wait(mpi4jax.iallreduce(x)) if MINE else total(x),
    "derivative": lambda x: (jax.grad(lambda x: exchanged(x).sum()) if MINE else exchanged)(x),
}


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("f", DIFFERENT.values(), ids=DIFFERENT)
def test_schedules_that_differ(f):
    with pytest.raises(RuntimeError, match=r"the ranks' versions of .* differ on .*, at step \d"):
        mpi4jax.jit(f, check=True)(X)


@compilers
def test_eval_shape_and_trace(jit):
    f = jit(lambda x: {"y": notoken.allgather(x)})
    shape = f.eval_shape(jnp.ones((2, 3)))
    assert shape["y"].shape == (SIZE, 2, 3)
    assert jax.eval_shape(f, jax.ShapeDtypeStruct((2, 3), jnp.int8))["y"].dtype == jnp.int8
    assert "mpi4jax" in str(f.trace(jnp.ones(3)).jaxpr)
    f.clear_cache()
    assert_equal(f(np.ones(1, np.float32))["y"], np.ones((SIZE, 1), np.float32))


@compilers
def test_ahead_of_time(jit):
    f = jit(lambda x, n: total(x) * n, static_argnums=1)
    compiled = f.lower(jnp.ones(3), 2).compile()
    for i in range(4):
        assert_equal(compiled(np.full(3, i, np.float32)), np.full(3, 2 * i * SIZE, np.float32))
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert_equal(f.lower(shape, 3).compile()(jnp.ones(2)), np.full(2, 3 * SIZE, np.float32))
    assert "mpi4jax_allreduce" in f.lower(shape, 3).as_text()


def test_ahead_of_time_twice_from_one_trace():
    traced = mpi4jax.jit(lambda x: notoken.sendrecv(total(x), x, LEFT, RIGHT)).trace(jnp.ones(3))
    for compiled in (traced.lower().compile(), traced.lower().compile()):
        for _ in range(2):
            assert_equal(compiled(jnp.ones(3)), np.full(3, SIZE, np.float32))


@compilers
def test_donation(jit):
    @functools.partial(jit, donate_argnames="x")
    def step(x, y):
        return notoken.sendrecv(x, x, LEFT, RIGHT), total(y)

    x, y = jnp.full(100, RANK, jnp.float32), jnp.ones(100)
    for i in range(1, 4):
        old = x
        x, z = step(x=x, y=y)
        assert old.is_deleted()
        assert not y.is_deleted()
        assert_equal(x, np.full(100, (RANK - i) % SIZE, np.float32))
        assert_equal(z, np.full(100, SIZE, np.float32))


@compilers
def test_nested(jit):
    g = jit(lambda x: (total(x), notoken.send(x, MPI.PROC_NULL))[0])

    @jit
    def f(x):
        g(x)  # unused
        y = g(g(x))
        return lax.fori_loop(0, 2, lambda i, y: g(y), y)

    assert float(f(jnp.float32(1))) == SIZE**4
    assert float(g(jnp.float32(1))) == SIZE


@compilers
def test_inside_other_transformations(jit):
    f = jit(total)
    assert_equal(jax.vmap(f)(jnp.arange(3.0)), np.arange(3, dtype=np.float32) * SIZE)
    assert float(jax.grad(lambda x: f(x) ** 2)(1.0)) == 2 * SIZE
    y, t = jax.jvp(f, (jnp.float32(2),), (jnp.float32(1),))
    assert float(y) == 2 * SIZE
    assert float(t) == SIZE
    assert float(jax.checkpoint(f)(jnp.float32(1))) == SIZE


def test_a_compiled_function_is_freed():
    class Owner:
        def __init__(self):
            self.call = mpi4jax.jit(lambda x: x + self.shift)  # a cycle, as in a method
            self.shift = 1

    owner = Owner()
    assert owner.call(1) == 2
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None
