"""The token API: tokens are accepted, returned and honoured, and never needed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from mpi4py import MPI
from reference import LEFT, RANK, RIGHT, SIZE, Threaded, assert_equal, jits
from table import cases

import mpi4jax


def is_token(token):
    return jnp.shape(token) == () and token.dtype == np.float32


def test_create_token():
    assert mpi4jax.gen_token is mpi4jax.create_token
    assert is_token(mpi4jax.create_token())
    assert is_token(mpi4jax.create_token(jnp.ones(3)))
    assert is_token(jax.jit(mpi4jax.create_token)())


@jits
def test_chain_of_all_ops(jit):
    """Each takes a token and returns a new one, also those that have no result."""
    operands = {str(case): case.operands() for case in cases()}

    @jit
    def f(xs, token):
        api = Threaded(token)
        return {str(c): c.run(api, xs[str(c)]) for c in cases()}, api.token

    for token in (None, mpi4jax.create_token()):
        results, new = f({name: xs[RANK] for name, xs in operands.items()}, token)
        assert is_token(new)
        for case in cases():
            assert_equal(results[str(case)], case.expected(operands[str(case)]), what=str(case))


def test_token_carried_by_loops():
    def step(i, carry):
        x, token = carry
        x, token = mpi4jax.sendrecv(x, x, LEFT, RIGHT, token=token)
        return x, mpi4jax.barrier(token=token)

    start = (jnp.float32(RANK), mpi4jax.create_token())
    expected = (RANK - 3) % SIZE
    x, token = lax.fori_loop(0, 3, step, start)
    assert float(x) == expected
    assert is_token(token)
    (x, token), _ = mpi4jax.jit(
        lambda c: lax.scan(lambda c, i: (step(i, c), None), c, jnp.arange(3))
    )(start)
    assert float(x) == expected
    assert is_token(token)
    _i, (x, token) = jax.jit(
        lambda c: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(0, c[1])), (0, c))
    )(start)
    assert float(x) == expected
    assert is_token(token)
    x, token = jax.jit(lambda p, c: lax.cond(p, lambda c: step(0, c), lambda c: c, c))(True, start)
    assert float(x) == LEFT
    assert is_token(token)


def test_token_stays_unbatched_under_vmap():
    """It does not depend on what the batch holds."""

    def f(x, token):
        y, token = mpi4jax.allreduce(x, MPI.SUM, token=token)
        z, token = mpi4jax.allgather(np.float32(RANK), token=token)  # no operand is batched
        return y, z, mpi4jax.barrier(token=token)

    y, z, token = jax.jit(jax.vmap(f, (0, None), (0, 0, None)))(
        jnp.arange(3.0), mpi4jax.create_token()
    )
    assert_equal(y, SIZE * np.arange(3, dtype=np.float32))
    assert_equal(z, np.tile(np.arange(SIZE, dtype=np.float32), (3, 1)))
    assert token.shape == ()


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("tokens", ["dropped", "reversed", "equal"])
@jits
def test_order_does_not_depend_on_tokens(jit, tokens):
    """Messages of the same tag overtake each other if ops do."""
    count = 10

    @jit
    def f(xs):
        token = mpi4jax.create_token()
        others = [mpi4jax.create_token() for _ in range(count)]
        ys = []
        for i in range(count):
            t = {"dropped": None, "reversed": others[count - 1 - i], "equal": token}[tokens]
            if RANK == 0:
                new = mpi4jax.send(xs[i], 1, token=t)
            elif RANK == 1:
                y, new = mpi4jax.recv(xs[i], 0, token=t)
                ys.append(y)
            else:
                continue
            if tokens == "reversed":
                others[i] = new
        return ys

    ys = f([jnp.float32(i if RANK == 0 else -1) for i in range(count)])
    if RANK == 1:
        assert [float(y) for y in ys] == list(range(count))


def test_eager_token_is_ready_after_the_op(capfd):
    from mpi4jax import _native

    _native.set_debug(True)
    try:
        token = mpi4jax.send(jnp.ones(1000), MPI.PROC_NULL)
        jax.block_until_ready(token)
    finally:
        _native.set_debug(False)
    assert "MPI_Send done with code 0" in capfd.readouterr().out


# ---- auto_tokenize, which programs for earlier packages of this kind call


def test_auto_tokenize():
    from mpi4jax.experimental import auto_tokenize

    assert auto_tokenize is mpi4jax.auto_tokenize

    @functools.partial(jax.jit, static_argnames="n")
    @auto_tokenize
    def f(x, *, n):
        """Doc."""
        for _ in range(n):
            x, _ = mpi4jax.allreduce(x, MPI.SUM)
        return {"x": x}

    assert float(f(jnp.float32(1), n=2)["x"]) == SIZE**2
    assert f.__doc__ == "Doc."
    assert float(jax.grad(lambda x: auto_tokenize(f)(x, n=1)["x"])(1.0)) == 1.0
