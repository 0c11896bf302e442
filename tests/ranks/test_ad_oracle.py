"""The derivatives of every op against a NumPy model of the whole job."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import transforms
from mpi4py import MPI
from oracle import APIS, CASES, LINEAR, RANK, SIZE

import mpi4jax
from mpi4jax import _derivative, notoken
from mpi4jax._comm import as_comm, as_reduction
from mpi4jax._spec import SPECS

by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
by_linear_case = pytest.mark.parametrize("case", LINEAR, ids=lambda case: case.id)
by_api = pytest.mark.parametrize("api", APIS)


@pytest.fixture(autouse=True, scope="module")
def x64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def close(actual, expected, tolerance=1e-12):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


@by_api
@by_case
def test_value_and_jacobians(case, api):
    xs = case.inputs()
    f, x = case.f(api), jnp.asarray(xs[RANK])
    expected = oracle.model_jacobian(case, xs)

    y = mpi4jax.jit(f)(x)
    close(y, case.model(np, xs)[RANK])

    pushed = mpi4jax.jit(lambda t: jax.jvp(f, (x,), (t,))[1])
    close(oracle.jacobian_from_jvp(case, pushed, xs), expected)

    pulled = mpi4jax.jit(lambda c: jax.vjp(f, x)[1](c)[0])
    from_vjp = oracle.jacobian_from_vjp(case, pulled, xs)
    close(from_vjp, expected)
    # What does not depend on an input is zero, not small.
    np.testing.assert_array_equal(from_vjp[expected == 0], 0)


@by_case
def test_finite_differences(case):
    if case.values in ("ties", "all equal"):
        pytest.skip("a kink has no derivative that differences could give")
    xs, step = case.inputs(), 1e-6
    f = mpi4jax.jit(case.f("notoken"))
    columns = [
        (f(xs[RANK] + step * ts[RANK]) - f(xs[RANK] - step * ts[RANK])) / (2 * step)
        for ts in oracle.basis([x.shape for x in xs], xs[0].dtype)
    ]
    differences = np.stack(oracle.collect(columns), axis=1)
    copies = np.split(differences, SIZE) if case.replicated else [differences]
    for copy in copies:
        close(copy, oracle.model_jacobian(case, xs), tolerance=1e-7)


def test_every_op_is_here():
    """Otherwise an op without derivatives would pass."""
    with_cases, with_transforms = ({c.row for c in cases} for cases in (CASES, transforms.ROWS))
    assert with_cases == with_transforms == set(oracle.ROWS)
    assert {op for row in oracle.ROWS.values() for op in row.ops} == set(SPECS)
    assert set(SPECS) <= set(mpi4jax.__all__) & set(notoken.__all__)


def test_new_reducing_op_has_no_derivative_by_accident():
    """The formulas for PROD, MAX and MIN are those of the ops that there are."""
    spec = dataclasses.replace(SPECS["allreduce"], name="fold", derivative=None)
    p = {"comm": as_comm("", None), "reduction": as_reduction("", MPI.PROD), "adjoint": False}
    with pytest.raises(NotImplementedError, match=r"fold: .* PROD"):
        _derivative.jvp(spec, [jnp.ones(2)], [jnp.ones(2)], **p)
