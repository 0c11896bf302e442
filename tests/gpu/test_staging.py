"""What staging copies between a GPU and the host, and the memory it takes for that."""

import textwrap

import pytest
from stand_ins import ALLREDUCE, NOWHERE


def test_staging_memory_is_used_again(python, fakes, tmp_path):
    log = tmp_path / "cuda.log"
    result = python(ALLREDUCE, {**fakes, "MPI4JAX_TRANSPORT": "staged", "FAKE_CUDA_LOG": log})
    assert result.returncode == 0, result.stderr
    assert "allocations 2 events 0 " in log.read_text()


LARGE = """
import jax.numpy as jnp
from mpi4jax import notoken as nt
x = jnp.ones(1 << 18)
for _ in range(5):
    x = nt.allgather(x)[0]
"""


@pytest.mark.parametrize(("mib", "allocations"), [("2", 2), ("1", 6)])
def test_the_memory_that_is_kept_is_a_setting(python, fakes, tmp_path, mib, allocations):
    """An operand and a result of 1 MiB each: with less memory, one of them is allocated anew."""
    log = tmp_path / "cuda.log"
    settings = {"MPI4JAX_TRANSPORT": "staged", "FAKE_CUDA_LOG": log, "MPI4JAX_STAGING_MIB": mib}
    result = python(LARGE, {**fakes, **settings})
    assert result.returncode == 0, result.stderr
    assert f" allocations {allocations} " in log.read_text()


def test_a_barrier_waits_for_the_stream(python, fakes, tmp_path):
    log = tmp_path / "cuda.log"
    code = "from mpi4jax import notoken as nt; nt.barrier(); nt.barrier()"
    result = python(code, {**fakes, "MPI4JAX_TRANSPORT": "staged", "FAKE_CUDA_LOG": log})
    assert result.returncode == 0, result.stderr
    assert log.read_text().startswith("copies 0 waits 2 ")


HALO = textwrap.dedent("""
    import jax, jax.numpy as jnp, numpy as np
    from mpi4py import MPI
    import mpi4jax
    from mpi4jax import notoken as nt
    cart = MPI.COMM_WORLD.Create_cart([MPI.COMM_WORLD.size, 1], periods=[True, True])
    n, w = 1000, 2
    x = jnp.arange(float(n * n)).reshape(n, n)
    y = x + 0.5

    def wrapped(a, axis):  # all ranks hold the same
        a = np.moveaxis(np.array(a), axis, 0)
        a[:w], a[-w:] = a[-2 * w:-w].copy(), a[w:2 * w].copy()
        return np.moveaxis(a, 0, axis)

    exchange = lambda *xs: nt.halo_exchange(xs, cart, width=w)
    in_place = mpi4jax.jit(lambda x, y: exchange(2 * x, 2 * y))
    kept = mpi4jax.jit(lambda x, y: (x + 0, *exchange(x, y)))
    for block, got in zip((2 * x, 2 * y), in_place(x, y)):
        np.testing.assert_array_equal(got, wrapped(wrapped(block, 0), 1))
    same, *filled = kept(x, y)
    np.testing.assert_array_equal(same, x)
    for block, got in zip((x, y), filled):
        np.testing.assert_array_equal(got, wrapped(wrapped(block, 0), 1))
    # The adjoint: each cell has as cotangent the number of places where it arrives.
    ones = mpi4jax.jit(jax.grad(lambda x: exchange(x)[0].sum()))(x)
    count = np.ones(n)
    count[:w] = count[-w:] = 0
    count[w:2 * w] += 1
    count[-2 * w:-w] += 1
    np.testing.assert_array_equal(ones, np.outer(count, count))
    mpi4jax.flush()
""")


@pytest.mark.parametrize("ranks", [1, 2])
def test_only_cells_that_travel_are_staged(mpirun, fakes, tmp_path, ranks):
    program, log = tmp_path / "halo.py", tmp_path / "cuda.log"
    program.write_text(HALO)
    env = {**fakes, "MPI4JAX_TRANSPORT": "staged", "FAKE_CUDA_LOG": str(log)}
    result = mpirun(ranks, program, env=env)
    assert result.returncode == 0, result.stderr
    ghosts = 4 * (1000**2 - 996**2)
    for line in log.read_text().splitlines():
        # Four exchanges, of six blocks in all: each has one copy down, and one up.
        assert line.startswith("copies 8 ")
        assert line.endswith(f" copied {6 * 2 * ghosts}")


MIXED = """
import os
from mpi4py import MPI
os.environ["MPI4JAX_TRANSPORT"] = ["staged", "mpi"][MPI.COMM_WORLD.rank % 2]
import jax, jax.numpy as jnp, numpy as np
from mpi4jax import notoken as nt
cart = MPI.COMM_WORLD.Create_cart([MPI.COMM_WORLD.size, 1], periods=[True, True])
x = np.arange(30, dtype=np.float32).reshape(5, 6)  # all ranks hold the same
np.testing.assert_array_equal(nt.halo_exchange(x, cart), np.pad(x[1:-1, 1:-1], 1, "wrap"))
for filled in nt.halo_exchange([x, x], cart):
    np.testing.assert_array_equal(filled, np.pad(x[1:-1, 1:-1], 1, "wrap"))
np.testing.assert_array_equal(nt.allreduce(jnp.ones(3 << 20), MPI.SUM), np.full(3 << 20, 2))
print("filled")
"""


@pytest.mark.parametrize("check", ["", "1"])
def test_ranks_on_gpus_and_on_cpus_understand_each_other(mpirun, check):
    """On one rank XLA packs ghost cells, on the other the core does. Large arrays go whole."""
    result = mpirun(2, "-c", MIXED, env={**NOWHERE, "MPI4JAX_CHECK": check})
    assert result.stdout.count("filled") == 2, result.stdout + result.stderr
