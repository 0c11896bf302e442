"""The token API: tokens are accepted, returned and honoured, and never needed."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from mpi4py import MPI
from reference import LEFT, RANK, RIGHT, SIZE, SPECS, assert_equal, cases, float32, names_of, ring

import mpi4jax
from mpi4jax import notoken

JITS = {"eager": lambda f: f, "jax.jit": jax.jit, "mpi4jax.jit": mpi4jax.jit}
ALL = list(cases())

each = pytest.mark.parametrize("case", ALL, ids=names_of(ALL))
jits = pytest.mark.parametrize("jit", JITS.values(), ids=JITS)

SIGNATURES = {
    "allgather": "(x, *, comm, token)",
    "allreduce": "(x, op, *, comm, token)",
    "alltoall": "(x, *, comm, token)",
    "barrier": "(*, comm, token)",
    "bcast": "(x, root, *, comm, token)",
    "gather": "(x, root, *, comm, token)",
    "halo_exchange": "(x, cart, *, axes, width, corners, token)",
    "recv": "(x, source, *, tag, comm, status, token)",
    "reduce": "(x, op, root, *, comm, token)",
    "scan": "(x, op, *, comm, token)",
    "scatter": "(x, root, *, comm, token)",
    "send": "(x, dest, *, tag, comm, token)",
    "sendrecv": "(sendbuf, recvbuf, source, dest, *, sendtag, recvtag, comm, status, token)",
}
DEFAULTS = {
    "comm": None,
    "token": None,
    "status": None,
    "axes": None,
    "width": 1,
    "corners": True,
    "sendtag": 0,
    "recvtag": MPI.ANY_TAG,
    ("send", "tag"): 0,
    ("recv", "tag"): MPI.ANY_TAG,
    ("recv", "source"): MPI.ANY_SOURCE,
}


class Threaded:
    """The token API, with one token handed from op to op."""

    def __init__(self, token=None):
        self.token = token

    def __getattr__(self, name):
        def call(*args, **kwargs):
            out = getattr(mpi4jax, name)(*args, token=self.token, **kwargs)
            y, self.token = out if SPECS[name].returns else (None, out)
            return y

        return call


def is_token(token):
    return jnp.shape(token) == () and token.dtype == np.float32


@pytest.mark.parametrize("name", SPECS)
def test_signatures(name):
    signature = inspect.signature(getattr(mpi4jax, name))
    expected = SIGNATURES[name]
    bare = signature.replace(
        parameters=[
            p.replace(annotation=p.empty, default=p.empty) for p in signature.parameters.values()
        ],
        return_annotation=signature.empty,
    )
    assert str(bare) == expected
    for parameter in signature.parameters.values():
        default = DEFAULTS.get((name, parameter.name), DEFAULTS.get(parameter.name, inspect._empty))
        assert parameter.default == default, parameter

    without = inspect.signature(getattr(notoken, name))
    assert [*without.parameters, "token"] == [*signature.parameters]
    with pytest.raises(TypeError, match="token"):
        getattr(notoken, name)(*[0] * (len(without.parameters)), token=None)


@jits
@each
def test_result_and_new_token(case, jit):
    xs = case.operands(float32)

    @jit
    def f(x, token):
        api = Threaded(token)
        return case.run(api, x), api.token

    for token in (None, mpi4jax.create_token(), mpi4jax.gen_token()):
        y, new = f(xs[RANK], token)
        assert is_token(new)
        assert_equal(y, case.expected(xs))


@each
def test_return_types(case):
    """A pair where there is a result, else the token alone; as earlier packages have it."""
    name = case.name
    x = case.operands(float32)[RANK]
    args = {
        "barrier": (),
        "bcast": (x, case.root),
        "gather": (x, case.root),
        "scatter": (x, case.root),
        "halo_exchange": (x, ring()),
        "allreduce": (x, MPI.SUM),
        "scan": (x, MPI.SUM),
        "reduce": (x, MPI.SUM, case.root),
        "send": (x, MPI.PROC_NULL),
        "recv": (x, MPI.PROC_NULL),
        "sendrecv": (x, x, LEFT, RIGHT),
    }.get(name, (x,))
    out, alone = getattr(mpi4jax, name)(*args), getattr(notoken, name)(*args)
    if SPECS[name].returns:
        assert isinstance(out, tuple)
        assert len(out) == 2
        assert is_token(out[1])
        assert_equal(alone, np.asarray(out[0]))
    else:
        assert is_token(out)
        assert alone is None
    jaxpr = jax.make_jaxpr(lambda: getattr(mpi4jax, name)(*args))()
    assert len(jaxpr.out_avals) == 1 + SPECS[name].returns


def test_create_token():
    assert mpi4jax.gen_token is mpi4jax.create_token
    assert is_token(mpi4jax.create_token())
    assert is_token(mpi4jax.create_token(jnp.ones(3)))
    assert is_token(jax.jit(mpi4jax.create_token)())


@jits
def test_tokens_of_jax(jit):
    """`jax.lax.create_token()` was what older programs of this kind began with."""

    def f(x):
        token = lax.create_token()
        x, token = mpi4jax.allreduce(x, MPI.SUM, token=token)
        token = mpi4jax.barrier(token=token)
        x, token = mpi4jax.allreduce(x, MPI.SUM, token=token)
        return x

    assert float(jit(f)(jnp.float32(1))) == SIZE**2


@jits
def test_chain_of_all_ops(jit):
    inputs = {case: case.operands(float32) for case in ALL}

    @jit
    def f(xs):
        api = Threaded(mpi4jax.create_token())
        return {str(case): case.run(api, xs[str(case)]) for case in ALL}, api.token

    results, token = f({str(case): inputs[case][RANK] for case in ALL})
    assert is_token(token)
    for case in ALL:
        assert_equal(results[str(case)], case.expected(inputs[case]))


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


def test_token_across_jitted_functions():
    first = mpi4jax.jit(lambda x, t: mpi4jax.allreduce(x, MPI.SUM, token=t))
    second = jax.jit(lambda t: mpi4jax.barrier(token=t))
    y, token = first(jnp.float32(1), None)
    token = second(token)
    y, token = first(y, token)
    y, token = mpi4jax.allreduce(y, MPI.SUM, token=token)
    assert float(y) == SIZE**3
    assert is_token(token)


def test_tokens_under_vmap():
    """Like any other value: one token for each element comes out."""

    def f(x, token):
        y, token = mpi4jax.allreduce(x, MPI.SUM, token=token)
        return y, mpi4jax.barrier(token=token)

    expected = SIZE * np.arange(3, dtype=np.float32)
    for token, axis in [(mpi4jax.create_token(), None), (jnp.zeros(3), 0)]:
        y, tokens = jax.vmap(f, (0, axis))(jnp.arange(3.0), token)
        assert_equal(y, expected)
        assert tokens.shape == (3,)
    y = jax.vmap(lambda x: f(x, mpi4jax.create_token())[0])(jnp.arange(3.0))
    assert_equal(y, expected)


@pytest.mark.parametrize("jit", [jax.jit, mpi4jax.jit], ids=["jax.jit", "mpi4jax.jit"])
def test_token_stays_unbatched_under_vmap(jit):
    """It does not depend on what the batch holds."""

    def f(x, token):
        y, token = mpi4jax.allreduce(x, MPI.SUM, token=token)
        z, token = mpi4jax.allgather(np.float32(RANK), token=token)  # no operand is batched
        return y, z, mpi4jax.barrier(token=token)

    y, z, token = jit(jax.vmap(f, (0, None), (0, 0, None)))(jnp.arange(3.0), mpi4jax.create_token())
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


def test_token_does_not_change_what_is_compiled():
    """Eager ops with a token take the same path as those without."""
    from reference import compilations

    x = jnp.ones(7)
    _, token = mpi4jax.allreduce(x, MPI.SUM)
    with compilations() as compiled:
        for _ in range(3):
            _, token = mpi4jax.allreduce(x, MPI.SUM, token=token)
            _, token = mpi4jax.allreduce(x, MPI.SUM, token=mpi4jax.create_token())
            _, token = mpi4jax.allreduce(x, MPI.SUM)
    assert len(compiled) == 0


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


def test_experimental_notoken():
    from mpi4jax.experimental import notoken as other

    for name in SPECS:
        assert getattr(other, name) is getattr(notoken, name)
