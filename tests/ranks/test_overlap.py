"""Operations that are started, and waited for later."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from mpi4py import MPI
from reference import (
    COMM,
    LEFT,
    RANK,
    RIGHT,
    SIZE,
    Started,
    each,
    enable_x64,
    float32,
    jits,
)
from table import STARTED, cases, derivative_cases

import mpi4jax


def started(found):
    return [case for case in found if case.name in STARTED and case.linear]


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


# ---- Values and derivatives: equal to the blocking operations'


@pytest.mark.one_in(3)
@each(started(cases()))
@jits
def test_value(case, jit):
    xs = case.operands()
    x = jnp.asarray(xs[RANK])
    f = jit(lambda x: case.run(Started(), x))
    for _ in range(2):
        np.testing.assert_array_equal(f(x), case.expected(xs))


@pytest.mark.one_in(2)
@each(started(derivative_cases()))
def test_derivatives(case):
    with enable_x64(True):
        xs = case.inputs()
        x, expected = jnp.asarray(xs[RANK]), oracle.model_jacobian(case, xs)
        f = lambda x: case.run(Started(), x)
        pushed = jax.jit(lambda x, t: jax.jvp(f, (x,), (t,))[1])
        pulled = jax.jit(lambda x, c: jax.vjp(f, x)[1](c)[0])
        from_jvp = oracle.jacobian_from_jvp(case, lambda t: pushed(x, t), xs)
        np.testing.assert_allclose(from_jvp, expected, rtol=1e-12, atol=1e-12)
        from_vjp = oracle.jacobian_from_vjp(case, lambda c: pulled(x, c), xs)
        np.testing.assert_allclose(from_vjp, expected, rtol=1e-12, atol=1e-12)


# ---- Loops, branches, functions: a request is a pytree


def _steps(overlap, x):
    """Each step uses the sum of what the one before has left."""

    def reduced(x):
        return mpi4jax.iallreduce(x) if overlap else mpi4jax.notoken.allreduce(x)

    def body(carry, k):
        request, x = carry
        z = jnp.sin(mpi4jax.after(request, x) if overlap else x) * k
        y = mpi4jax.wait(request, after=z) if overlap else request
        x = z + 0.1 * mpi4jax.pvary(y)
        return (reduced(x), x), jnp.sum(y)

    first = reduced(x)  # on another line than that in the loop
    (last, x), sums = jax.lax.scan(body, (first, x), jnp.arange(3.0))
    y = mpi4jax.wait(last) if overlap else last
    return jnp.sum(mpi4jax.pvary(y) * x * (RANK + 1)) + jnp.sum(sums)


def _batch(f):
    return lambda x: jax.vmap(f)(jnp.stack([x, 2 * x]))


LOOPS = {
    "value": lambda f: f,
    "grad": jax.grad,
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,))[1],
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](x),
    "vmap": _batch,
    "grad of vmap": lambda f: jax.grad(lambda x: _batch(f)(x).sum()),
    "vmap of grad": lambda f: _batch(jax.grad(f)),
    "hessian": jax.hessian,
}


@pytest.mark.parametrize("transform", LOOPS.values(), ids=LOOPS)
def test_a_loop_carries_requests(transform):
    x = jnp.asarray(float32((4,), seed=[RANK]))
    with_overlap = jax.jit(transform(lambda x: _steps(True, x)))(x)
    close(with_overlap, jax.jit(transform(lambda x: _steps(False, x)))(x))


def test_requests_of_a_while_loop_and_of_branches():
    @jax.jit
    def f(x):
        def step(state):
            i, request = state
            y = mpi4jax.wait(request)
            start = jax.lax.cond(
                i % 2 == 0, lambda: mpi4jax.iallreduce(y), lambda: mpi4jax.iallreduce(y + 1)
            )
            return i + 1, start

        _, request = jax.lax.while_loop(lambda s: s[0] < 3, step, (0, mpi4jax.iallreduce(x)))
        return mpi4jax.wait(request)

    expected = 1.0
    for add in (0, 0, 1, 0):
        expected = SIZE * (expected + add)
    close(f(jnp.ones(2)), np.full(2, expected))


def test_a_request_goes_from_function_to_function():
    start = jax.jit(lambda x: mpi4jax.iallreduce(x))
    request = start(jnp.ones(3))
    eager = mpi4jax.iallreduce(jnp.full(3, 2.0))
    assert jax.tree.structure(request) == jax.tree.structure(eager)
    end = jax.jit(lambda request: mpi4jax.wait(request) * 2)
    close(end(eager), np.full(3, 4.0 * SIZE))
    close(mpi4jax.wait(request), np.full(3, SIZE))


def test_many_are_under_way_and_end_in_any_order():
    @jax.jit
    def f(x):
        requests = [mpi4jax.iallreduce(x * k) for k in range(20)]
        others = {"a": mpi4jax.ialltoall(jnp.ones((SIZE, 2)) * RANK), "b": mpi4jax.ibarrier()}
        ys = mpi4jax.waitall(requests[::-1])
        return jnp.stack(ys[::-1]), mpi4jax.waitall(others)["a"]

    sums, blocks = f(jnp.ones(3))
    close(sums, np.arange(20.0)[:, None] * SIZE * np.ones(3))
    close(blocks, np.arange(SIZE)[:, None] * np.ones(2))


@each(("float16", "bfloat16", "complex64", "int8", "bool", "int4"))
def test_types(case):
    x = jnp.arange(2 * SIZE).reshape(SIZE, 2).astype(case)
    y = mpi4jax.wait(mpi4jax.ialltoall(x))
    assert y.dtype == x.dtype
    expected = np.stack([np.asarray(x[RANK].astype(np.float32))] * SIZE)
    close(np.asarray(y.astype(np.float32)), expected)


@jits
def test_trees(jit):
    key = jax.random.key(RANK)
    tree = {
        "a": jnp.full((2, 2), RANK),
        "b": [jnp.full(3, 1.5 * RANK), jnp.float32(RANK)],
        "k": key,
    }
    out = jit(lambda tree: mpi4jax.wait(mpi4jax.ibcast(tree, SIZE - 1)))(tree)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    close(out["b"][0], np.full(3, 1.5 * (SIZE - 1)))
    assert (jax.random.key_data(out["k"]) == jax.random.key_data(jax.random.key(SIZE - 1))).all()


def test_mean_and_max():
    x = jnp.full(3, RANK + 1.0)
    close(mpi4jax.wait(mpi4jax.iallreduce(x, mpi4jax.MEAN)), np.full(3, (SIZE + 1) / 2))
    close(mpi4jax.wait(mpi4jax.iallreduce(x, MPI.MAX)), np.full(3, SIZE))
    f = lambda x: mpi4jax.wait(mpi4jax.iallreduce(x, MPI.MAX)).sum()
    with pytest.raises(NotImplementedError, match="iallreduce: reduction MAX has no derivative"):
        jax.grad(f)(x)
    close(jax.grad(lambda x: f(jax.lax.stop_gradient(x)) * x[0])(x), [3.0 * SIZE, 0, 0])
    with pytest.raises(TypeError, match="MEAN is not defined for dtype int32"):
        mpi4jax.iallreduce(jnp.arange(3), mpi4jax.MEAN)


def test_large_messages_in_pieces():
    mpi4jax._native.set_count_limit(5)
    try:
        x = jnp.arange(17.0) * (RANK + 1)
        total = sum(range(1, SIZE + 1))
        close(mpi4jax.wait(mpi4jax.iallreduce(x)), np.arange(17.0) * total)
        blocks = jnp.arange(SIZE * 11.0).reshape(SIZE, 11)
        close(mpi4jax.wait(mpi4jax.ireduce_scatter(blocks)), np.asarray(blocks)[RANK] * SIZE)
        close(mpi4jax.wait(mpi4jax.ialltoall(blocks))[0], np.asarray(blocks)[RANK])
    finally:
        mpi4jax._native.set_count_limit(None)


# ---- Order


@pytest.mark.min_ranks(2)
def test_what_is_between_is_computed_between(own_comm):
    """Rank 0's message comes when rank 1 has been told of by what is computed between."""
    x = jnp.arange(3.0)

    def tell(x):
        own_comm.send("computed", 1, tag=9)
        return x

    def is_posted(x):
        # Rank 1 has what was started, so it was.
        own_comm.recv(source=1, tag=9)
        return x

    @jax.jit
    def with_wait(x):
        request = mpi4jax.irecv(x, 1)
        z = jax.pure_callback(tell, x, x)
        return mpi4jax.wait(request, after=z)

    @jax.jit
    def with_after(x):
        request = mpi4jax.isend(x + 2, 1)
        z = jax.pure_callback(is_posted, x, mpi4jax.after(request, x))
        mpi4jax.wait(request)
        return z

    if RANK == 0:
        close(with_wait(x), np.arange(3.0) + 5)
        close(with_after(x), x)
    elif RANK == 1:
        own_comm.recv(source=0, tag=9)
        mpi4jax.notoken.send(x + 5, 0)
        close(mpi4jax.notoken.recv(x, 0), np.arange(3.0) + 2)
        own_comm.send("received", 0, tag=9)


@pytest.fixture
def own_comm():
    comm = COMM.Dup()
    yield comm
    mpi4jax.flush()
    comm.Free()


def _order(f, *args):
    """What a function starts, waits for, and computes between, in its order."""
    names = {"mpi4jax_start": "start", "mpi4jax_wait": "wait", "sin": "sin", "cos": "cos"}
    eqns = jax.make_jaxpr(f)(*args).eqns
    return [names[e.primitive.name] for e in eqns if e.primitive.name in names]


def test_waitall_depends_on_what_is_computed_before():
    f = lambda x, z: mpi4jax.waitall([mpi4jax.iallreduce(x)], after=z)
    jaxpr = jax.make_jaxpr(f)(jnp.ones(3), jnp.ones(2)).jaxpr
    assert any(jaxpr.invars[1] in eqn.invars for eqn in jaxpr.eqns)


def test_derivatives_overlap_too():
    x = jnp.ones((SIZE, 2))

    def f(x):
        request = mpi4jax.ialltoall(x)
        z = jnp.sin(mpi4jax.after(request, x))
        return jnp.sum(mpi4jax.wait(request, after=z) * z)

    assert _order(f, x) == ["start", "sin", "wait"]
    forward = _order(lambda x: jax.jvp(f, (x,), (x,)), x)
    assert forward == ["start", "start", "sin", "cos", "wait", "wait"]
    backward = jax.make_jaxpr(jax.grad(f))(x)
    assert _order(jax.grad(f), x) == ["start", "sin", "cos", "wait", "start", "wait"]
    # The product with the cosine depends on the second start, and the second wait on it.
    depends = {}
    for k, eqn in enumerate(backward.eqns):
        of = {k}.union(*(depends.get(id(v), ()) for v in eqn.invars))
        depends.update((id(v), of) for v in eqn.outvars)
    places = {}
    for k, eqn in enumerate(backward.eqns):
        places.setdefault(eqn.primitive.name, []).append(k)
    start, wait = places["mpi4jax_start"][1], places["mpi4jax_wait"][1]
    product = places["mul"][-1]
    assert start in depends[id(backward.eqns[product].outvars[0])]
    assert product in depends[id(backward.eqns[wait].invars[0])]


# ---- ipvary: nothing forwards, an allreduce backwards


def _layers(is_started, ws, x):
    """Layers that ranks use with data of their own; a loss of all."""
    marked = [mpi4jax.ipvary(w) if is_started else mpi4jax.pvary(w) for w in ws]
    y = x * (RANK + 1)
    for w in marked:
        w = mpi4jax.wait(w, after=y) if is_started else w
        y = jnp.sin(w["a"] * y + w["b"][0])
    return mpi4jax.notoken.allreduce(jnp.sum(y), mpi4jax.MEAN)


@each(("value", "grad", "grad of checkpoint", "jvp", "vmap of grad", "hessian"))
def test_ipvary_is_pvary(case):
    transform = {
        **LOOPS,
        "jvp": lambda f: lambda ws: jax.jvp(f, (ws,), (ws,))[1],
        "vmap of grad": lambda f: (
            lambda ws: jax.vmap(jax.grad(f))(jax.tree.map(lambda w: jnp.stack([w, 2 * w]), ws))
        ),
    }[case]
    ws = [{"a": jnp.float32(k), "b": [jnp.arange(3.0, dtype="bfloat16") + k]} for k in (1, 2)]
    results = [
        jax.jit(transform(lambda ws, s=s: _layers(s, ws, jnp.arange(3.0))))(ws) for s in (0, 1)
    ]
    assert jax.tree.structure(results[0]) == jax.tree.structure(results[1])
    for expected, actual in zip(*map(jax.tree.leaves, results), strict=True):
        assert actual.dtype == expected.dtype
        close(np.asarray(actual, np.float32), np.asarray(expected, np.float32))


def test_ipvary_starts_while_the_layers_before_are_computed():
    ws = [{"a": jnp.float32(k), "b": jnp.ones(1)} for k in (1, 2, 3)]
    f = lambda ws: _layers(True, ws, jnp.arange(3.0))
    starts, waits, depends = [], [], {}
    for k, eqn in enumerate(jax.make_jaxpr(jax.grad(f))(ws).eqns):
        name = eqn.primitive.name
        of = {k}.union(*(depends.get(id(v), ()) for v in eqn.invars))
        # Not through tokens, which order operations alone.
        data = eqn.outvars[:1] if name.startswith("mpi4jax_") else eqn.outvars
        depends.update((id(v), of) for v in data)
        if name in ("mpi4jax_start", "mpi4jax_wait") and not eqn.params["op"].adjoint:
            (starts if name == "mpi4jax_start" else waits).append((k, of))
    assert len(starts) == len(waits) == len(ws)
    assert max(starts)[0] < min(waits)[0]
    # A layer's cotangent is computed once the reduction of the layer behind it has started.
    for (behind, _), (_, of) in itertools.pairwise(starts):
        assert behind in of


def test_ipvary_of_integers():
    with pytest.raises(TypeError, match=r"ipvary: argument 'x' has dtype int32 at \['n'\]; expec"):
        mpi4jax.ipvary({"w": jnp.ones(2), "n": jnp.arange(2)})


# ---- Misuse

WRONG = (ValueError, RuntimeError)  # what XLA raises depends on JAX's version


def test_each_request_is_waited_for_once():
    request = mpi4jax.iallreduce(jnp.ones(3))
    close(mpi4jax.wait(request), np.full(3, SIZE))
    line = r"iallreduce #\d+ \(SUM, 3 x float32\) on mpi4jax.default, test_overlap.py:\d+"
    with pytest.raises(WRONG, match=rf"the request \({line}\) has been waited for before, test_o"):
        jax.block_until_ready(mpi4jax.wait(request))

    @jax.jit
    def twice(x):
        request = mpi4jax.iallreduce(x)
        return mpi4jax.wait(request) + mpi4jax.wait(request)

    with pytest.raises(ValueError, match="this request of iallreduce has been waited for before"):
        twice(jnp.ones(3))
    # Nobody is out of step.
    close(mpi4jax.wait(mpi4jax.iallreduce(jnp.ones(3))), np.full(3, SIZE))


def test_a_request_that_is_lost():
    @jax.jit
    def f(x):
        mpi4jax.isend(x, RIGHT)
        return x

    with pytest.raises(
        ValueError, match=r"test_overlap.py:\d+: the request of isend is never waited"
    ):
        f(jnp.ones(3))


def test_what_is_no_request():
    x = jnp.ones(3)
    with pytest.raises(
        TypeError, match=r"wait: argument 'request' must be a request.* got .*Array"
    ):
        mpi4jax.wait(x)
    request = mpi4jax.iallreduce(x)
    with pytest.raises(TypeError, match="iallreduce returns a request, not a token"):
        _, _ = request
    mpi4jax.wait(request)
    with pytest.raises(TypeError, match="status"):
        mpi4jax.irecv(x, LEFT, status=MPI.Status())
    with pytest.raises(ValueError, match="would receive the messages of derivatives"):
        mpi4jax.irecv(x, MPI.ANY_SOURCE, tag=MPI.ANY_TAG)
    with pytest.raises(TypeError, match="allreduce: argument 'x' must be an array"):
        mpi4jax.iallreduce("x")
    with pytest.raises(NotImplementedError, match="irecv: has no derivative if its source"):
        jax.grad(lambda x: mpi4jax.wait(mpi4jax.irecv(x, MPI.ANY_SOURCE)).sum())(x)


def test_a_request_that_was_changed():
    request = mpi4jax.iallreduce(jnp.ones(3))
    with pytest.raises(WRONG, match="no nonblocking operation has this request"):
        jax.block_until_ready(mpi4jax.wait(jax.tree.map(lambda n: n + 1, request)))
    with pytest.raises(WRONG, match="the request was never started"):
        jax.block_until_ready(mpi4jax.wait(jax.tree.map(jnp.zeros_like, request)))
    other = mpi4jax.iallreduce(jnp.ones(4))
    swapped = jax.tree.unflatten(jax.tree.structure(other), jax.tree.leaves(request))
    with pytest.raises(WRONG, match="a result of another type or size than the wait"):
        jax.block_until_ready(mpi4jax.wait(swapped))
    mpi4jax.waitall([request, other])
    with pytest.raises(ValueError, match="inside the vmap in which"):
        jax.jit(lambda x: mpi4jax.wait(jax.vmap(mpi4jax.iallreduce)(x)))(jnp.ones((2, 3)))
