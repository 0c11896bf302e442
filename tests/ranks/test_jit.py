"""`mpi4jax.jit` is a drop-in for `jax.jit`."""

import copy
import functools
import gc
import sys
import textwrap
import threading
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

JITS = {"jax.jit": jax.jit, "mpi4jax.jit": mpi4jax.jit}
jits = pytest.mark.parametrize("jit", JITS.values(), ids=JITS)


def total(x):
    return notoken.allreduce(x, MPI.SUM)


@jits
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


@jits
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


@jits
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


@jits
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


@jits
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_copies(jit, duplicate):
    """Objects that have compiled functions are copied with them."""
    f = duplicate({"f": jit(total)})["f"]
    assert float(f(jnp.float32(1))) == SIZE


@jits
def test_closures_and_constants(jit):
    big = np.arange(5000, dtype=np.float32)
    device = jnp.asarray(big)
    y = jit(lambda x: (total(big) + x, total(device) + x))(1.0)
    for z in y:
        assert_equal(z, big * SIZE + 1)


@jits
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


@jits
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


@jits
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


@jits
def test_arguments_that_are_not_used_are_dropped(jit):
    f = jit(lambda a, x, b: (total(x), b + 1, a)[:2])
    main = f.lower(jnp.ones(2), jnp.ones(3), jnp.ones(4)).as_text().partition("@main")[2]
    assert main.partition("->")[0].count("tensor<") == 2
    y, z = f(jnp.ones(2), jnp.ones(3), jnp.ones(4))
    assert_equal(y, np.full(3, SIZE, np.float32))
    assert_equal(z, np.full(4, 2, np.float32))


@jits
def test_keys_and_weak_types(jit):
    """What stands around the program keeps the types of arguments and results."""
    f = jit(lambda key, w: (notoken.bcast(key, 0), total(w), w))
    key, y, w = f(jax.random.key(RANK), 2.0)
    assert jax.random.key_impl(key) == jax.random.key_impl(jax.random.key(0))
    assert_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(0)))
    assert float(y) == 2 * SIZE
    assert w.weak_type


def test_it_is_jax_jit():
    """So it can be pickled, copied, inspected ... as far as a function of `jax.jit` can."""
    assert type(mpi4jax.jit(total)) is type(jax.jit(total))


@jits
def test_eval_shape_and_trace(jit):
    f = jit(lambda x: {"y": notoken.allgather(x)})
    shape = f.eval_shape(jnp.ones((2, 3)))
    assert shape["y"].shape == (SIZE, 2, 3)
    assert jax.eval_shape(f, jax.ShapeDtypeStruct((2, 3), jnp.int8))["y"].dtype == jnp.int8
    assert "mpi4jax" in str(f.trace(jnp.ones(3)).jaxpr)
    f.clear_cache()
    assert_equal(f(np.ones(1, np.float32))["y"], np.ones((SIZE, 1), np.float32))


@jits
def test_ahead_of_time(jit):
    f = jit(lambda x, n: total(x) * n, static_argnums=1)
    compiled = f.lower(jnp.ones(3), 2).compile()
    for i in range(4):
        assert_equal(compiled(np.full(3, i, np.float32)), np.full(3, 2 * i * SIZE, np.float32))
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert_equal(f.lower(shape, 3).compile()(jnp.ones(2)), np.full(2, 3 * SIZE, np.float32))
    assert "mpi4jax_allreduce" in f.lower(shape, 3).as_text()


SEVERAL_DEVICES = """
    import jax, jax.numpy as jnp, mpi4jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from mpi4jax import notoken
    from mpi4py import MPI

    mesh = Mesh(jax.devices(), "i")
    x = jax.device_put(jnp.ones(4), NamedSharding(mesh, PartitionSpec("i")))
    f = lambda x: notoken.allreduce(x, MPI.SUM)
    mapped = jax.shard_map(f, mesh=mesh, in_specs=PartitionSpec("i"), out_specs=PartitionSpec("i"))
    for g in (f, jax.jit(f), mpi4jax.jit(f), jax.jit(mapped), mpi4jax.jit(mapped)):
        try:
            g(x)
        except ValueError as error:
            assert "device" in str(error), error
        else:
            raise AssertionError("not refused")
    assert mpi4jax.jit(f)(jnp.ones(4)).tolist() == [1] * 4
"""


@pytest.mark.ranks(1)
def test_arrays_on_several_devices_are_refused(mpirun, tmp_path):
    """Order is kept on one device only."""
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(SEVERAL_DEVICES))
    job = mpirun(1, file, env={"XLA_FLAGS": "--xla_force_host_platform_device_count=2"})
    assert job.returncode == 0, job.stderr


def test_ahead_of_time_twice_from_one_trace():
    traced = mpi4jax.jit(lambda x: notoken.sendrecv(total(x), x, LEFT, RIGHT)).trace(jnp.ones(3))
    for compiled in (traced.lower().compile(), traced.lower().compile()):
        for _ in range(2):
            assert_equal(compiled(jnp.ones(3)), np.full(3, SIZE, np.float32))


@jits
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


@pytest.mark.parametrize("outer", JITS.values(), ids=JITS)
@pytest.mark.parametrize("inner", JITS.values(), ids=JITS)
def test_nested(outer, inner):
    g = inner(lambda x: (total(x), notoken.send(x, MPI.PROC_NULL))[0])

    @outer
    def f(x):
        g(x)  # unused
        y = g(g(x))
        return lax.fori_loop(0, 2, lambda i, y: g(y), y)

    assert float(f(jnp.float32(1))) == SIZE**4
    assert float(g(jnp.float32(1))) == SIZE


@jits
def test_inside_other_transformations(jit):
    f = jit(total)
    assert_equal(jax.vmap(f)(jnp.arange(3.0)), np.arange(3, dtype=np.float32) * SIZE)
    assert float(jax.grad(lambda x: f(x) ** 2)(1.0)) == 2 * SIZE
    y, t = jax.jvp(f, (jnp.float32(2),), (jnp.float32(1),))
    assert float(y) == 2 * SIZE
    assert float(t) == SIZE
    assert float(jax.checkpoint(f)(jnp.float32(1))) == SIZE


@jits
def test_disable_jit(jit):
    @jit
    def f(x):
        if x > 0:  # concrete, without jit
            return total(x)
        return x

    with jax.disable_jit():
        assert float(f(jnp.float32(2))) == 2 * SIZE
        assert float(lax.fori_loop(0, 2, lambda i, x: total(x), jnp.float32(1))) == SIZE**2
        y, _token = mpi4jax.allreduce(jnp.arange(3.0), MPI.SUM)
        assert_equal(y, np.arange(3, dtype=np.float32) * SIZE)
        assert_equal(jax.vmap(total)(jnp.ones(2)), np.full(2, SIZE, np.float32))
        assert_equal(notoken.bcast({"a": jnp.ones(2)}, 0)["a"], np.ones(2, np.float32))


@jits
def test_errors_of_the_function_come_through(jit):
    class Mine(Exception):
        pass

    @jit
    def f(x):
        total(x)
        raise Mine("here")

    for _ in range(2):
        with pytest.raises(Mine, match="here"):
            f(jnp.ones(3))
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jit(lambda x: total(x) if total(x) > 0 else x)(1.0)
    assert float(notoken.allreduce(1.0, MPI.SUM)) == SIZE


@jits
def test_debug_callbacks_and_other_effects(jit):
    """Effects of others beside ours, ordered ones included."""
    seen = []

    @jit
    def f(x):
        jax.debug.callback(lambda v: seen.append(float(v)), x, ordered=True)
        y = total(x)
        jax.debug.callback(lambda v: seen.append(float(v)), y, ordered=True)
        z = jax.pure_callback(lambda v: np.asarray(v) + 1, jax.ShapeDtypeStruct((), jnp.float32), y)
        return total(z)

    assert float(f(jnp.float32(1))) == (SIZE + 1) * SIZE
    jax.effects_barrier()
    assert seen == [1, SIZE]


@jits
def test_mutable_arrays(jit):
    new_ref = getattr(jax, "new_ref", None) or pytest.skip("this JAX has no jax.new_ref")

    @jit
    def f(ref, x):
        inner = new_ref(jnp.zeros(3))

        def body(i, carry):
            inner[...] += total(x)
            return carry

        lax.fori_loop(0, 2, body, 0)
        ref[...] = total(ref[...])
        return inner[...]

    ref = new_ref(jnp.full(3, RANK + 1.0))
    for k in (1, 2):
        assert_equal(f(ref, jnp.ones(3)), np.full(3, 2 * SIZE, np.float32))
        value = SIZE * (SIZE + 1) // 2 * SIZE ** (k - 1)
        assert_equal(ref[...], np.full(3, value, np.float32))


@jits
def test_arrays_whose_type_says_how_they_are_sharded(jit):
    if jax.version.__version_info__ < (0, 8):
        pytest.skip("up to 0.7, JAX cannot transpose a reshard to another mesh")
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
        x = jax.device_put(jnp.arange(3.0) + RANK, sharding)

        def loss(x):
            y, _ = lax.scan(lambda c, _: (total(c) / SIZE, None), x, None, length=2)
            return (y**2).sum() + notoken.allgather(x).sum()

        mean = np.arange(3) + (SIZE - 1) / 2
        gradient = jit(jax.grad(loss))(x)
        assert gradient.sharding.spec == sharding.spec
        np.testing.assert_allclose(gradient, 2 * mean / SIZE**2 + 1, rtol=1e-6)


@jits
def test_debug_nans(jit):
    """JAX runs what gave a NaN again, operation by operation; a rank alone must not."""
    received = lambda x: notoken.sendrecv(x, x, LEFT, RIGHT)
    x = jnp.full(3, jnp.nan if RANK == 0 else 1.0)
    with jax.debug_nans(True):
        for f in (received, jit(received), jit(lambda x: received(x) + 1)):
            if LEFT == 0:
                with pytest.raises(FloatingPointError, match="communicates, and has an"):
                    jax.block_until_ready(f(x))
            else:
                assert_equal(f(x) > 0, np.full(3, True))
        assert float(total(jnp.float32(1))) == SIZE


@jits
def test_custom_vmap(jit):
    @jax.custom_batching.custom_vmap
    def f(x):
        notoken.barrier()
        return total(x)

    @f.def_vmap
    def rule(size, batched, x):
        return total(x), batched[0]

    x = jnp.arange(6.0).reshape(2, 3)
    assert_equal(jit(f)(x), SIZE * np.asarray(x))
    assert_equal(jit(jax.vmap(f))(x), SIZE * np.asarray(x))
    jvp = lambda x: jax.jvp(f, (x,), (2 * x,))[1]
    assert_equal(jit(jvp)(x), 2 * SIZE * np.asarray(x))
    assert_equal(jit(jax.vmap(jvp))(x), 2 * SIZE * np.asarray(x))


def test_flush_where_transfers_are_forbidden():
    with jax.transfer_guard("disallow"):
        mpi4jax.flush()


@jits
def test_flush_in_a_function_that_is_compiled(jit):
    def f(x):
        y = total(x)
        mpi4jax.flush()
        return y

    with pytest.raises(RuntimeError, match="flush: called inside a function that is being"):
        jit(f)(jnp.float32(1))
    assert float(f(jnp.float32(1))) == SIZE
    assert float(jax.grad(f)(jnp.float32(1))) == 1


@jits
def test_checkify(jit):
    from jax.experimental import checkify

    def f(x):
        y = total(x)
        checkify.check(y > 0, "not positive: {}", y)
        return y

    error, y = jit(checkify.checkify(f))(jnp.float32(1))
    assert error.get() is None
    assert float(y) == SIZE
    error, _ = jit(checkify.checkify(f))(jnp.float32(-1))
    assert "not positive" in error.get()


# ---- Threads


def in_threads(work, count=2):
    errors = []

    def run(i):
        try:
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not errors, errors


@jits
def test_threads_with_a_communicator_each(jit):
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("MPI allows one thread at a time")
    comms = [MPI.COMM_WORLD.Dup() for _ in range(2)]

    def work(i):
        f = jit(
            lambda x: notoken.sendrecv(
                notoken.allreduce(x, MPI.SUM, comm=comms[i]), x, LEFT, RIGHT, comm=comms[i]
            )
        )
        for k in range(10):
            assert float(f(jnp.float32(k + i))) == (k + i) * SIZE
            assert float(notoken.allreduce(jnp.float32(k), MPI.SUM, comm=comms[i])) == k * SIZE

    in_threads(work)
    mpi4jax.flush()
    [comm.Free() for comm in comms]


@pytest.mark.ranks(1)
@jits
def test_threads_with_one_communicator(jit):
    """On one rank no order is wrong; nothing breaks. A tag each: MPI matches by nothing else."""
    f = jit(
        lambda x, i: notoken.sendrecv(total(x), x, 0, 0, sendtag=i, recvtag=i), static_argnums=1
    )
    status = threading.local()

    def work(i):
        status.mine = MPI.Status()
        for k in range(20):
            assert float(f(jnp.float32(k), i)) == k
            y = notoken.sendrecv(
                jnp.full(3, i), jnp.full(3, -1), 0, 0, sendtag=i, recvtag=i, status=status.mine
            )
            assert_equal(y, np.full(3, i, np.int32))
            assert status.mine.Get_tag() == i

    in_threads(work, 4)


def test_work_in_another_thread_than_main():
    def work(i):
        assert float(jax.jit(total)(jnp.float32(2))) == 2 * SIZE

    in_threads(work, 1)


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
