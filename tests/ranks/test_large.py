"""Messages of more items than an int counts, and more bytes than 32 bits do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI
from reference import RANK, SIZE, assert_equal
from table import cases

import mpi4jax
from mpi4jax import _native, notoken
from run_tests import ALL


@pytest.fixture
def small_pieces():
    """MPI is handed at most 5 items in one argument."""
    mpi4jax.flush()
    _native.set_count_limit(5)
    yield
    mpi4jax.flush()
    _native.set_count_limit(None)


@pytest.mark.parametrize("shape", [(5,), (6,), (3, 7)], ids=str)
def test_more_items_than_one_argument_counts(shape, small_pieces):
    operands = {str(case): case.operands(payload=shape) for case in cases()}
    run = mpi4jax.jit(lambda xs: {str(c): c.run("notoken", xs[str(c)]) for c in cases()})
    results = run({name: xs[RANK] for name, xs in operands.items()})
    for case in cases():
        assert_equal(results[str(case)], case.expected(operands[str(case)]), what=str(case))


# One more than 2^31 - 1, the most that an int counts, is in the second piece.
COUNT, TAIL = 2**31 + 4, 16
# Of both ranks: the operand, the result, and what MPI needs on its way.
MEMORY = 2 * 3 * COUNT


def available_memory():
    with open("/proc/meminfo") as file:
        found = {line.split(":")[0]: line.split()[1] for line in file}
    return 1024 * int(found["MemAvailable"])


@pytest.mark.ranks(2)
@pytest.mark.timeout(300)
def test_past_2_to_the_31():
    """int8, on both sides of a message, broadcast and reduced."""
    if not ALL:
        pytest.skip("takes half a minute: `MPI4JAX_TEST_ALL=1`")
    if not MPI.COMM_WORLD.bcast(available_memory() > MEMORY):
        pytest.skip(f"needs {MEMORY / 2**30:.0f} GiB of memory")
    tail = [np.arange(TAIL, dtype=np.int8) * (rank + 2) for rank in range(SIZE)]
    x = jax.jit(lambda end: jnp.concatenate([jnp.full(COUNT - TAIL, 1, jnp.int8), end]))(tail[RANK])
    other = 1 - RANK
    for op, first, last in (
        (lambda x: notoken.sendrecv(x, x, other, other), 1, tail[other]),
        (lambda x: notoken.bcast(x, 1), 1, tail[1]),
        (lambda x: notoken.allreduce(x, MPI.SUM), 2, tail[0] + tail[1]),
    ):
        y = np.asarray(mpi4jax.jit(op)(x))
        assert y.shape == (COUNT,)
        np.testing.assert_array_equal(y[-TAIL:], last)
        np.testing.assert_array_equal(y[: -TAIL : 2**20 + 1], first)
        del y
