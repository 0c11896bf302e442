"""Messages of more items than an int counts, and more bytes than 32 bits do."""

import pytest
from reference import RANK, assert_equal
from table import cases

import mpi4jax
from mpi4jax import _native


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
