"""Sources, destinations and tags that a program computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI
from reference import LEFT, RANK, RIGHT, SIZE, assert_equal, compilations

import mpi4jax
from mpi4jax import notoken
from mpi4jax._op.arguments import DERIVATIVE

X = np.arange(3, dtype=np.float32) + 10 * RANK


def of(rank):
    """``X`` of a rank."""
    return X + 10 * (rank - RANK)


def shift(x, step, tag=0):
    """What the rank ``step`` before this one has."""
    return notoken.sendrecv(
        x, x, (RANK + SIZE - step) % SIZE, (RANK + step) % SIZE, sendtag=tag, recvtag=tag
    )


def test_ring_whose_step_is_the_loop_index():
    def body(total, step):
        return total + (step + 1) * shift(X, step, tag=step), step

    total, _ = jax.jit(lambda: jax.lax.scan(body, 0 * X, jnp.arange(SIZE)))()
    assert_equal(total, sum((s + 1) * of((RANK - s) % SIZE) for s in range(SIZE)))


def test_one_program_for_all_ranks_and_tags():
    f = jax.jit(shift)
    f(X, 1, 0).block_until_ready()
    with compilations() as compiled:
        for step in range(SIZE):
            for tag in (0, 3):
                assert_equal(f(X, step, tag), of((RANK - step) % SIZE))
    assert not compiled


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32])
def test_integer_types(dtype):
    assert_equal(jax.jit(shift)(X, np.array(SIZE and 1 % SIZE, dtype)), of((RANK - 1) % SIZE))


@pytest.mark.min_ranks(2)
def test_messages_between_two():
    """Of each, one side is traced, and the other is not."""
    send = jax.jit(lambda x, dest, tag: notoken.send(x, dest, tag=tag))
    receive = jax.jit(lambda x, source, tag: notoken.recv(x, source, tag=tag))
    if RANK == 0:
        send(X, 1, 7)
        notoken.send(X, 1, tag=8)
    elif RANK == 1:
        assert_equal(notoken.recv(X, 0, tag=7), of(0))
        assert_equal(receive(X, 0, 8), of(0))


def test_nobody():
    """A source that turns out to be nobody leaves the template, as one that is known does."""
    f = jax.jit(lambda x, source, dest: notoken.sendrecv(x + 1, x, source, dest))
    assert_equal(f(X, MPI.PROC_NULL, MPI.PROC_NULL), X)
    assert_equal(jax.jit(lambda x, s: notoken.recv(x, s))(X, MPI.PROC_NULL), X)


def test_trees_and_statuses():
    status = MPI.Status()

    @jax.jit
    def f(tree, source, dest, tag):
        return notoken.sendrecv(tree, tree, source, dest, sendtag=tag, status=status)

    out = f({"a": X, "b": (X + 1, np.int32(RANK))}, LEFT, RIGHT, 5)
    jax.block_until_ready(out)
    assert_equal(out["a"], of(LEFT))
    assert_equal(out["b"][0], of(LEFT) + 1)
    assert int(out["b"][1]) == LEFT
    assert (status.Get_source(), status.Get_tag()) == (LEFT, 5)


# ---- Derivatives


def weights(rank):
    return np.arange(1, 4, dtype=np.float32) * (rank + 1)


@pytest.mark.parametrize("how", ["grad", "jit of grad", "grad of jit", "linear_transpose"])
def test_cotangents_go_back(how):
    def f(x, step):
        return (shift(x, step) * weights(RANK)).sum()

    x, step = jnp.asarray(X), 1 % SIZE
    if how == "grad":
        ct = jax.grad(lambda x: f(x, jnp.int32(step)))(x)
    elif how == "jit of grad":
        ct = jax.jit(jax.grad(f))(x, step)
    elif how == "grad of jit":
        ct = jax.grad(jax.jit(f))(x, step)
    else:
        ct = jax.jit(lambda step: jax.linear_transpose(lambda x: f(x, step), x)(jnp.float32(1))[0])(
            step
        )
    assert_equal(ct, weights(RIGHT))


def test_in_a_loop_under_checkpoint():
    """Each step's peers are kept, and the backward pass uses them in the opposite order."""

    @jax.checkpoint
    def body(total, step):
        return total + shift(total, step), None

    def f(x):
        return (jax.lax.scan(body, x, jnp.arange(1, 3))[0] * weights(RANK)).sum()

    ct = jax.jit(jax.grad(f))(jnp.asarray(X))
    w = np.stack([weights(r) for r in range(SIZE)])
    for step in (2, 1):
        w = w + np.roll(w, -step, axis=0)
    assert_equal(ct, w[RANK])


def test_wildcards_that_are_traced():
    """The cotangent goes to who has sent, with the tag that the message had."""

    def f(x, source, tag):
        y = notoken.sendrecv(x, x, source, RIGHT, sendtag=4, recvtag=tag)
        return (y * weights(RANK)).sum()

    ct = jax.jit(jax.grad(f))(jnp.asarray(X), MPI.ANY_SOURCE, MPI.ANY_TAG)
    assert_equal(ct, weights(RIGHT))


def test_the_ends_of_a_chain():
    """Nobody before the first rank and nobody after the last: the template has the cotangent."""

    def f(x, template, source, dest):
        return (notoken.sendrecv(x, template, source, dest) * weights(RANK)).sum()

    source = RANK - 1 if RANK else MPI.PROC_NULL
    dest = RANK + 1 if RANK + 1 < SIZE else MPI.PROC_NULL
    x = jnp.asarray(X)
    ct, of_template = jax.jit(jax.grad(f, (0, 1)))(x, x, source, dest)
    assert_equal(ct, weights(RANK + 1) if RANK + 1 < SIZE else 0 * X)
    assert_equal(of_template, 0 * X if RANK else weights(0))


# ---- vmap


def test_one_message_for_the_batch():
    batch = jnp.stack([jnp.asarray(X), jnp.asarray(X) + 1])
    y = jax.jit(jax.vmap(shift, in_axes=(0, None)))(batch, 1 % SIZE)
    assert_equal(y, np.stack([of(LEFT), of(LEFT) + 1]))


@pytest.mark.parametrize("argument", ["source", "dest", "sendtag", "recvtag"])
def test_batched_peers_are_refused(argument):
    given = {"source": LEFT, "dest": RIGHT, "sendtag": 0, "recvtag": 0}

    def f(x, value):
        return notoken.sendrecv(x, x, **{**given, argument: value})

    with pytest.raises(NotImplementedError, match=r"sendrecv: .* batched by vmap"):
        jax.vmap(f, in_axes=(None, 0))(X, jnp.arange(2))


# ---- Errors

RANKS = f"a rank from 0 to {SIZE - 1}"
BAD = [
    ("send", {"dest": SIZE}, f"'dest' must be {RANKS} or MPI.PROC_NULL, got {SIZE} when it ran"),
    ("send", {"dest": -77}, "got -77 when it ran"),
    ("send", {"dest": MPI.PROC_NULL, "tag": -5}, "'tag' must be an integer from 0 to"),
    ("send", {"dest": MPI.PROC_NULL, "tag": DERIVATIVE}, f"to {DERIVATIVE - 1}, got {DERIVATIVE} "),
    ("recv", {"source": MPI.PROC_NULL, "tag": 2**31 - 1}, f"or MPI.ANY_TAG, got {2**31 - 1} "),
    ("recv", {"source": SIZE}, f"'source' must be {RANKS} or MPI.ANY_SOURCE or MPI.PROC_NULL"),
    ("recv", {"source": MPI.PROC_NULL, "tag": -5}, "or MPI.ANY_TAG, got -5"),
    ("sendrecv", {"source": MPI.PROC_NULL, "dest": 2**31 - 1}, f"'dest' .* got {2**31 - 1}"),
    ("sendrecv", {"source": -78, "dest": MPI.PROC_NULL}, "'source' .* got -78"),
    ("sendrecv", {"source": -(2**31) + 1, "dest": MPI.PROC_NULL}, f"got {-(2**31) + 1}"),
]


@pytest.mark.parametrize("name, given, words", BAD, ids=str)
def test_values_out_of_range(name, given, words):
    names, values = list(given), [np.int32(v) for v in given.values()]
    arrays = {"sendbuf": X, "recvbuf": X} if name == "sendrecv" else {"x": X}

    # Of its own: after an error nothing else runs on it.
    comm = MPI.COMM_WORLD.Dup()

    @jax.jit
    def f(*values):
        peers = dict(zip(names, values, strict=True))
        return getattr(mpi4jax, name)(**arrays, **peers, comm=comm, token=mpi4jax.create_token())

    with pytest.raises(Exception, match=words) as e:
        jax.block_until_ready(f(*values))
    comm.Free()
    message = str(e.value)
    assert f"INVALID_ARGUMENT: {name}: argument" in message
    assert "test_traced_peers.py:" in message


# ---- In branches that are never taken


def to_nobody(x):
    """A message to a rank that there is not."""
    notoken.send(x, dest=SIZE)
    return notoken.recv(x, source=SIZE + 2**40, tag=1)


def started(x):
    request = mpi4jax.isend(x, SIZE)
    mpi4jax.wait(request)
    return x


def in_cond(f, x, taken=False):
    return jax.lax.cond(taken, f, lambda x: 2 * x, x)


@pytest.mark.parametrize("f", [to_nobody, started])
@pytest.mark.parametrize("how", ["eager", "jit", "grad", "vmap", "jit in it", "switch"])
def test_no_rank_in_a_branch_that_is_not_taken(f, how):
    if how == "eager":
        assert_equal(in_cond(f, X), 2 * X)
    elif how == "jit":
        assert_equal(jax.jit(lambda x, taken: in_cond(f, x, taken))(X, False), 2 * X)
    elif how == "grad":  # what is started has no derivative where its peers are traced
        assert_equal(
            jax.grad(lambda x: in_cond(to_nobody, x).sum())(jnp.asarray(X)),
            np.full(3, 2, np.float32),
        )
    elif how == "vmap":
        batch = np.stack([X, X + 1])
        assert_equal(jax.vmap(lambda x: in_cond(f, x))(batch), 2 * batch)
    elif how == "jit in it":
        assert_equal(in_cond(jax.jit(f), X), 2 * X)
    else:
        branches = [lambda x: x, f, lambda x: 2 * x]
        assert_equal(jax.jit(lambda i: jax.lax.switch(i, branches, X))(2), 2 * X)


def test_no_rank_in_a_branch_that_is_taken():
    comm = MPI.COMM_WORLD.Dup()

    def send(x):
        notoken.send(x, dest=SIZE, comm=comm)
        return x

    with pytest.raises(Exception, match=f"argument 'dest' must be a rank .*{SIZE}") as e:
        jax.block_until_ready(jax.jit(lambda taken: in_cond(send, X, taken))(True))
    comm.Free()
    assert "test_traced_peers.py:" in str(e.value)


def test_no_rank_elsewhere():
    """Behind a branch, in a loop and in a function that is only compiled: while it is traced."""

    def behind(x):
        return to_nobody(in_cond(lambda x: x, x))

    loop = lambda x: jax.lax.fori_loop(0, 0, lambda i, x: to_nobody(x), x)
    # Not the function of another test, which JAX may have traced in a branch there.
    for f in (behind, loop, lambda x: to_nobody(x)):
        with pytest.raises(ValueError, match="send: argument 'dest' must be a rank"):
            jax.jit(f).lower(X)
    with jax.disable_jit(), pytest.raises(ValueError, match="send: argument 'dest' must be a rank"):
        in_cond(to_nobody, X, True)


def test_64_bits_are_not_cut_off():
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        for value in (2**32, -(2**32)):
            comm = MPI.COMM_WORLD.Dup()
            f = jax.jit(lambda x, d, c=comm: notoken.sendrecv(x, x, MPI.PROC_NULL, d, comm=c))
            with pytest.raises(Exception, match="'dest' must be"):
                jax.block_until_ready(f(X, np.int64(value)))
            comm.Free()


@pytest.mark.parametrize("value", [np.float32(0), np.zeros(1, np.int32), np.bool_(True)], ids=repr)
def test_wrong_types(value):
    with pytest.raises(TypeError, match="send: argument 'dest' must be an integer, or a traced"):
        jax.jit(lambda dest: notoken.send(X, dest))(value)
