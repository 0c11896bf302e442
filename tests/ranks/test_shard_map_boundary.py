"""What `mpi4jax.shard_map` says of the values of its arguments."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from reference import COMM, RANK as R, SIZE as N

import mpi4jax

pytestmark = pytest.mark.min_ranks(2)
ROWS = P("i")
WAYS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "grad": jax.grad,
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "vmap": lambda f: lambda w, x: jax.vmap(lambda w: f(w, x))(jnp.stack([w, w])),
}


def total(w, x):
    return lax.psum(jnp.sum(w * x["a"]), "i")


def mapped(f=total, shard_map=mpi4jax.shard_map, **how):
    mesh = mpi4jax.Mesh(comm=COMM)
    return shard_map(f, mesh=mesh, in_specs=(P(), ROWS), out_specs=P(), **how)


def named(name):
    """A function of its own for each test: a warning comes once."""

    def f(w, x):
        return total(w, x)

    f.__name__ = name.replace(" ", "_")
    return f


ARRAYS = {
    "whole": (jnp.arange(4.0), True),
    "whole integers": (np.arange(4), True),
    "zeros": (jnp.zeros(4), False),
    "constant": (jnp.full(3, 2.5), False),
    "one element": (jnp.full(1, 2.5), False),
    "own": (jnp.arange(4.0) + R, False),
    "another on one rank": (jnp.arange(4.0) + (R == N - 1), False),
    "empty": (jnp.zeros((0, 2)), False),
}


@pytest.mark.parametrize("how", ["eager", "jit", "grad", "jit of grad"])
@pytest.mark.parametrize("name", ARRAYS)
def test_a_whole_array_for_a_block_is_a_warning(name, how):
    x, is_whole = ARRAYS[name]
    f = WAYS[how](mapped(named(f"{name} {how}")))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            f(2.0, {"a": x})
        COMM.Barrier()
        f(2.0, {"a": x})
    words = [str(w.message) for w in seen if "same array" in str(w.message)]
    assert len(words) == (is_whole and R == 0)
    for text in words:
        assert f"argument [1]['a'] of {f'{name} {how}'.replace(' ', '_')!r}" in text
        assert f"mpi4jax.sharding.cut(x, {ROWS}" in text
        assert "warnings.filterwarnings('ignore', message='shard_map: argument')" in text


@pytest.mark.parametrize("how", ["eager", "jit"])
def test_equal_copies_of_many_parameters_are_one_warning(how):
    """As at the start of local SGD."""
    mesh, copies = mpi4jax.Mesh(comm=COMM), [jnp.arange(2.0) + k for k in range(8)]
    mean = lambda ws: lax.pmean(jax.tree.map(jnp.sum, ws), "i")
    mean.__name__ = f"mean of copies, {how}"
    f = WAYS[how](mpi4jax.shard_map(mean, mesh=mesh, in_specs=ROWS, out_specs=P()))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            f(copies)
            COMM.Barrier()
    assert sum("same array" in str(w.message) for w in seen) == (R == 0)


def test_blocks_of_whole_arrays_are_no_warning():
    f = mapped(named("blocks"), mpi4jax.sharding.global_shard_map)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert f(1.0, {"a": np.tile(np.arange(2.0), N)}) == N


REPLICATED = {
    "equal": (jnp.arange(4.0), False),
    "equal zeros": (np.zeros(3), False),
    "equal number": (0.5, False),
    "one element": (np.float32(R), True),
    "number": (float(R), True),
    "constant": (jnp.full(3, R), True),
    "flags": (np.arange(3) > R, True),
    "large": (jnp.arange(1 << 17).reshape(2, -1) + R, True),
    "key": (jax.random.key(R), True),
    "another on one rank": (jnp.arange(4.0) + (R == N - 1), True),
}


def weighted(w, x):
    if jnp.issubdtype(getattr(w, "dtype", float), jax.dtypes.prng_key):
        w = jax.random.uniform(w)
    return lax.pmean(jnp.sum(w) * jnp.sum(x["a"]), "i")


@pytest.mark.parametrize("how", ["eager", "jit"])
@pytest.mark.parametrize("name", REPLICATED)
def test_replicated_arguments_that_differ_are_a_warning(name, how):
    w, differs = REPLICATED[name]
    f = lambda w, x: weighted(w, x)
    f.__name__ = f"weighted {name}, {how}"
    f = WAYS[how](mapped(f))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            f(w, {"a": jnp.arange(2.0) + R})
        COMM.Barrier()
        f(w, {"a": jnp.arange(2.0) + R})
    words = [str(warning.message) for warning in seen if "same array" in str(warning.message)]
    assert len(words) == (differs and R == 0)
    for text in words:
        assert f"argument [0] of 'weighted {name}, {how}' is not the same array on all {N}" in text
        assert f"along 'i', but its spec {P()} means that these ranks pass the same array" in text
        assert "warnings.filterwarnings('ignore', message='shard_map: argument')" in text


@pytest.mark.ranks(4)
def test_replicated_arguments_are_compared_along_their_axes():
    """Blocks along one axis are compared along the other one, on all ranks."""
    mesh = mpi4jax.Mesh((2, 2), ("a", "b"), comm=COMM)
    f = lambda x: x + lax.pmean(x, "b")
    f.__name__ = "blocks along a"
    f = jax.jit(mpi4jax.shard_map(f, mesh=mesh, in_specs=P("a"), out_specs=P("a")))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        f(jnp.arange(2.0) + (R if R > 1 else 0))
        COMM.Barrier()
        f(jnp.arange(2.0))
    words = [str(warning.message) for warning in seen if "is not the same" in str(warning.message)]
    assert len(words) == (R == 2)
    assert all("on all 2 ranks along 'b'" in text for text in words)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("what", ["", "arguments[0]", "results", "constants[0]"])
def test_replicated_arrays_are_compared(what, how, monkeypatch):
    monkeypatch.setenv("MPI4JAX_CHECK", "1")
    constant = jnp.arange(300.0) + (what == "constants[0]" and R == 1)

    def f(w, x):
        y = total(w, x) + constant.sum()
        return y + lax.axis_index("i") if what == "results" else y

    w = jnp.float32(1 + R if what == "arguments[0]" else 1)
    call = WAYS[how](mapped(f, check_vma=what != "results"))
    x = {"a": jnp.arange(2.0) + R}
    if not what:
        jax.block_until_ready((call(w, x), call(1.0, x)))
        return
    # Outside of `jit`, constants of a function are not known.
    shown = "results" if what == "constants[0]" and not how.startswith("jit") else what
    with pytest.raises(Exception, match="ranks have different values") as error:
        jax.block_until_ready(call(w, x))
    assert "shard_map of 'f', arrays that are not sharded along 'i': ranks have" in str(error.value)
    assert shown in str(error.value)


def test_constants_of_a_function_that_cannot_be_traced_alone(monkeypatch):
    """Its constants are not compared, but the function is called."""
    monkeypatch.setenv("MPI4JAX_CHECK", "1")
    mesh = mpi4jax.Mesh(comm=COMM)
    f = lambda x: lax.psum(x * lax.axis_index("batch"), "i")
    on_ranks = mpi4jax.shard_map(f, mesh=mesh, in_specs=ROWS, out_specs=P())
    y = jax.jit(jax.vmap(on_ranks, axis_name="batch"))(jnp.ones((3, 2)))
    np.testing.assert_array_equal(y, N * np.arange(3.0)[:, None] * np.ones(2))


@pytest.mark.parametrize("how", ["grad", "jit of grad"])
def test_gradients_of_a_mean_do_not_warn(how):
    """The value of the loss is not used there, and nobody has forgotten it."""
    mesh = mpi4jax.Mesh(comm=COMM)
    loss = lambda w, x: lax.pmean(jnp.mean((w * x) ** 2), "i")
    f = mpi4jax.shard_map(loss, mesh=mesh, in_specs=(P(), ROWS), out_specs=P())
    inside = mpi4jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(P(), ROWS), out_specs=P())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = jnp.ones(3) * (R + 1)
        expected = 2 * 3.0 * np.mean((np.arange(N) + 1.0) ** 2)
        assert WAYS[how](f)(3.0, x) == pytest.approx(expected)
        assert (jax.jit(inside) if "jit" in how else inside)(3.0, x) == pytest.approx(expected)


def test_set_mesh():
    if not hasattr(jax, "set_mesh"):
        pytest.skip("JAX has no set_mesh")
    mesh = mpi4jax.Mesh(comm=COMM)
    f = lambda: mpi4jax.shard_map(lambda x: lax.psum(x, "i"), in_specs=ROWS, out_specs=P())
    with jax.set_mesh(mesh) as given:
        assert given is mesh
        np.testing.assert_array_equal(f()(jnp.ones(2)), jnp.full(2, N))
    with pytest.raises(TypeError, match="pass mesh="):
        f()(jnp.ones(2))


def test_a_mesh_may_be_made_in_a_traced_function():
    comm = COMM.Dup()

    @jax.jit
    def f(x):
        mesh = mpi4jax.Mesh(comm=comm)
        return mpi4jax.shard_map(
            lambda x: lax.psum(x, "i"), mesh=mesh, in_specs=ROWS, out_specs=P()
        )(x)

    np.testing.assert_array_equal(f(jnp.ones(2)), jnp.full(2, N))
    comm.Free()


@jax.custom_batching.custom_vmap
def batched_by_rule(x, y):
    return x + lax.psum(y, "i")


@batched_by_rule.def_vmap
def _rule(size, in_batched, x, y):
    return x + (100 if in_batched[1] else 10) * lax.psum(y, "i"), True


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("factor", [10, 100])
def test_the_rule_of_a_custom_vmap(factor, jit):
    axes = (0, 0 if factor == 100 else None)
    mesh = mpi4jax.Mesh(comm=COMM)
    f = mpi4jax.shard_map(batched_by_rule, mesh=mesh, in_specs=(ROWS, ROWS), out_specs=ROWS)
    x, y = jnp.arange(4.0).reshape(2, 2) + R, jnp.ones(2)
    out = jit(jax.vmap(f, axes))(x, jnp.stack([y, y]) if factor == 100 else y)
    np.testing.assert_array_equal(out, x + factor * N)


def cube_root(a):
    """The cube root of a sum over ranks, with the derivative of an implicit function."""

    def solve(f, z):
        return lax.fori_loop(0, 30, lambda _, z: z - f(z) / (3 * z**2), z)

    total = lambda z: z**3 - lax.psum(a, "i")
    return lax.custom_root(total, 0 * a + 1, solve, lambda g, y: y / g(jnp.ones_like(y)))


def test_custom_root():
    mesh = mpi4jax.Mesh(comm=COMM)
    f = mpi4jax.shard_map(cube_root, mesh=mesh, in_specs=ROWS, out_specs=ROWS)
    x = jnp.arange(1.0, 4.0)
    expected = np.cbrt(N * x)
    for call in (f, jax.jit(f)):
        np.testing.assert_allclose(call(x), expected, rtol=1e-6)
        gradient = jax.jit(jax.grad(lambda x, call=call: call(x).sum()))(x)
        np.testing.assert_allclose(gradient, N / (3 * expected**2), rtol=1e-6)  # of all ranks
    rows = jnp.stack([x, 2 * x])
    np.testing.assert_allclose(jax.jit(jax.vmap(f))(rows), np.cbrt(N * rows), rtol=1e-6)
    inside = mpi4jax.shard_map(
        jax.grad(lambda x: cube_root(x).sum()), mesh=mesh, in_specs=ROWS, out_specs=ROWS
    )
    np.testing.assert_allclose(jax.jit(inside)(x), N / (3 * expected**2), rtol=1e-6)


@pytest.mark.ranks(4)
def test_blocks_are_compared_along_the_other_axis(monkeypatch):
    monkeypatch.setenv("MPI4JAX_CHECK", "1")
    mesh = mpi4jax.Mesh((2, 2), ("a", "b"), comm=COMM)
    f = mpi4jax.shard_map(lambda x: x + 1, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    f(jnp.ones(2) * mesh.coordinates["a"])
    with pytest.raises(AssertionError, match="not sharded along 'b'"):
        f(jnp.ones(2) * R)
