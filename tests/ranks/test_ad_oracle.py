"""The derivatives of every op against a NumPy model of the whole job."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from mpi4py import MPI
from reference import RANK, SIZE, each
from table import derivative_cases

import mpi4jax
from mpi4jax._diff import derivative as _derivative
from mpi4jax._op.comm import as_comm, as_reduction
from mpi4jax._op.operation import PLAIN, Operation
from mpi4jax.ops.allreduce import Allreduce


@pytest.fixture(autouse=True, scope="module")
def x64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def close(actual, expected, tolerance=1e-12):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


@each(derivative_cases())
def test_value_and_derivatives(case):
    xs = case.inputs()
    x, shapes = jnp.asarray(xs[RANK]), [x.shape for x in xs]
    expected = oracle.model_jacobian(case, xs)

    f = lambda x: case.run("notoken", x)  # with tokens: test_transforms.py
    pushed = mpi4jax.jit(lambda x, t: jax.jvp(f, (x,), (t,)))
    pulled = mpi4jax.jit(lambda x, c: jax.vjp(f, x)[1](c)[0])

    close(pushed(x, x)[0], case.expected(xs))
    close(oracle.jacobian_from_jvp(case, lambda t: pushed(x, t)[1], xs), expected)
    from_vjp = oracle.jacobian_from_vjp(case, lambda c: pulled(x, c), xs)
    close(from_vjp, expected)
    # What does not depend on an input is zero, not small.
    np.testing.assert_array_equal(from_vjp[expected == 0], 0)

    if case.values not in ("ties", "all equal"):  # those have no derivative that differences give
        step = 1e-6
        columns = [
            (pushed(x + step * ts[RANK], x)[0] - pushed(x - step * ts[RANK], x)[0]) / (2 * step)
            for ts in oracle.basis(shapes, x.dtype)
        ]
        differences = np.stack(oracle.collect(columns), axis=1)
        for copy in np.split(differences, SIZE) if case.row.replicated else [differences]:
            close(copy, expected, tolerance=1e-7)


def test_new_reducing_op_has_no_derivative_by_accident():
    """The formulas for PROD, MAX and MIN hold for the existing operations only."""

    class Fold(Allreduce):
        name = "fold"
        tangent = Operation.tangent

    op = Fold(as_comm("", None), reduction=as_reduction("", MPI.PROD))
    with pytest.raises(NotImplementedError, match=r"fold: .* PROD"):
        _derivative.jvp([jnp.ones(2)], [jnp.ones(2)], op=op, how=PLAIN)
