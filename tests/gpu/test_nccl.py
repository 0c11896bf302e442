"""What NCCL carries, what it leaves to staging, and what ranks that differ are told."""

import re

import pytest
from libraries import compile_library
from stand_ins import ALLREDUCE, HERE, RANKS, fails, passes


def test_nccl_never_waits_on_the_host(python, fakes, tmp_path):
    cuda, nccl = tmp_path / "cuda.log", tmp_path / "nccl.log"
    logs = {"FAKE_CUDA_LOG": cuda, "FAKE_NCCL_LOG": nccl}
    result = python(ALLREDUCE, {**fakes, "MPI4JAX_TRANSPORT": "nccl", **logs})
    assert result.returncode == 0, result.stderr
    assert cuda.read_text() == "copies 0 waits 0 allocations 0 events 2 copied 0\n"
    assert nccl.read_text() == "operations 3 groups 3\ncommunicators 0\n"


HALO = """
import jax, jax.numpy as jnp, numpy as np
from mpi4py import MPI
import mpi4jax
from mpi4jax import notoken as nt
cart = MPI.COMM_WORLD.Create_cart([MPI.COMM_WORLD.size, 1], periods=[True, True])
n = 6
x = np.arange(float(n * n)).reshape(n, n)  # all ranks hold the same
wrapped = np.pad(x[1:-1, 1:-1], 1, "wrap")
f = mpi4jax.jit(lambda *xs: nt.halo_exchange(xs, cart))
for y in f(x, x + 1):
    np.testing.assert_array_equal(y - y[1, 1], wrapped - wrapped[1, 1])
(g,) = mpi4jax.jit(jax.linear_transpose(lambda x: nt.halo_exchange(x, cart), jnp.asarray(x)))(x)
assert g.sum() == x.sum() and (g[0] == 0).all() and (g[:, -1] == 0).all()
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_halo_exchange_never_leaves_the_device(mpirun, fakes, tmp_path, ranks):
    """One group of a message to and one from each rank around, all at once."""
    cuda, nccl = tmp_path / "cuda.log", tmp_path / "nccl.log"
    logs = {"FAKE_CUDA_LOG": str(cuda), "FAKE_NCCL_LOG": str(nccl)}
    result = mpirun(ranks, "-c", HALO, env={**fakes, "MPI4JAX_TRANSPORT": "nccl", **logs})
    assert result.returncode == 0, result.stderr
    nothing = "copies 0 waits 0 allocations 0 events 2 copied 0\n"
    assert cuda.read_text() == ranks * nothing
    # Also before the transposed one there is one.
    three_exchanges = f"operations {3 * 2 * ranks} groups 3\ncommunicators 0\n"
    assert nccl.read_text() == ranks * three_exchanges


def test_blocks_that_do_not_fit_are_found_before_nccl_waits(mpirun, fakes):
    code = """
import jax.numpy as jnp
from mpi4py import MPI
from mpi4jax import notoken as nt
cart = MPI.COMM_WORLD.Create_cart([2], periods=[True])
nt.halo_exchange(jnp.ones((4, 2 + cart.rank)), cart, axes=0)
"""
    env = {**fakes, "MPI4JAX_TRANSPORT": "nccl", "MPI4JAX_CHECK": "1"}
    result = mpirun(2, "-c", code, env=env)
    fails(result, "alltoallv", "the counts of the two ranks must agree", "<string>:6")


@pytest.mark.parametrize(("transport", "status"), [("nccl", 0), ("staged", 1)])
def test_waits_are_counted_on_a_machine_with_a_gpu(mpirun, fakes, tmp_path, transport, status):
    counter, driver = tmp_path / "libcount.so", fakes["MPI4JAX_LIBCUDA"]
    compile_library(counter, HERE / "count.c", "-Wl,--no-as-needed", driver)
    env = {**fakes, "MPI4JAX_TRANSPORT": transport, "MPI4JAX_LIBCUDA": str(counter)}
    result = mpirun(1, HERE / "waits.py", env=env)
    assert "160 operations, 160 calls on the host" in result.stdout, result.stderr
    assert ("160 calls on the host, 0 waits" in result.stdout) == (status == 0)
    assert result.returncode == status


@pytest.mark.parametrize(
    ("op", "words"),
    [
        ("nt.recv(x)", "receiving from ANY_SOURCE"),
        ("nt.recv(x, tag=5)", "receiving from ANY_SOURCE"),
        ("nt.recv(x, 0, tag=5)", "receiving with tag 5"),
        ("nt.send(x, 0, tag=5)", "sending with tag 5"),
        ("nt.sendrecv(x, x, 0, 0, sendtag=5)", "sending with tag 5"),
        ("nt.sendrecv(x, x, 0, 0, recvtag=5)", "receiving with tag 5"),
        ("nt.send(x, 0)", "a send between a rank and itself"),
        ("jax.grad(lambda x: nt.recv(x).sum())(x)", "receiving from ANY_SOURCE"),
    ],
)
def test_nccl_refuses_what_needs_matching(python, fakes, op, words):
    """Where the two ends of a message could take different ways, none is sent."""
    code = f"import jax; from mpi4jax import notoken as nt; x = jax.numpy.ones(3); {op}"
    result = python(code, {**fakes, "MPI4JAX_TRANSPORT": "nccl"})
    fails(result, words, "MPI4JAX_NCCL_MESSAGES=staged")


# Of other files: wildcards, tags that select, statuses, short messages, and a communicator on which
# ranks do not come together.
MATCHING = (
    "test_wildcards or tags_select or status_of_recv or largest_tag or shorter or open_chain "
    "or mpi4py_in_between"
)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("transport", ["nccl", "auto"])
def test_messages_that_need_matching_beside_nccl(mpirun, fakes, transport):
    """`auto` takes NCCL for all else, and breaks no program."""
    env = {**fakes, "MPI4JAX_TRANSPORT": transport}
    if transport != "auto":
        env["MPI4JAX_NCCL_MESSAGES"] = "staged"
    files = [RANKS / "test_status.py", RANKS / "test_order.py"]
    passes(mpirun, files, MATCHING, env, time_limit=120)


# A barrier on two ranks, whose settings depend on the rank.
UNLIKE = """
import os
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
{setting}
from mpi4jax import notoken as nt
try:
    nt.barrier()
except Exception as error:
    print(error)
MPI.COMM_WORLD.Barrier()
"""


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            "os.environ['MPI4JAX_NCCL_MESSAGES'] = ['nccl', 'staged'][rank]",
            ["here it is nccl", "here it is staged"],
        ),
        (
            "os.environ['FAKE_NCCL_BROKEN'] = str(rank)",
            ["ncclCommInitRank returned error code 2", "another rank could not make it"],
        ),
        (
            "os.environ['FAKE_NCCL_BROKEN'] = str(rank); os.environ['FAKE_CUDA_SHARED'] = '1'",
            ["could not make it (ranks 0 and 1 compute on one GPU)"],
        ),
        (
            "os.environ['FAKE_NCCL_VERSION'] = str(22800 + rank)",
            ["rank 0 has NCCL 2.28.0, rank 1 has NCCL 2.28.1"],
        ),
        (
            "os.environ['FAKE_NCCL_NAMELESS'] = '1'",
            ["ncclGetUniqueId returned error code 2", "another rank has no NCCL"],
        ),
        (
            "if rank: os.environ['FAKE_CUDA_FULL'] = '1'",
            ["cuMemAlloc returned error code 2", "another rank has no NCCL"],
        ),
        (
            "if rank: os.environ['MPI4JAX_LIBNCCL'] = '/nowhere'",
            ["/nowhere", "another rank has no NCCL"],
        ),
    ],
)
def test_ranks_that_differ_all_learn_of_it(mpirun, fakes, setting, words):
    env = {**fakes, "MPI4JAX_TRANSPORT": "nccl"}
    result = mpirun(2, "-c", UNLIKE.format(setting=setting), env=env)
    assert result.stdout.count("has no counterpart") == 2, result
    assert all(word in result.stdout for word in words), result.stdout


# Rank 0 compiles its second operation while its first waits for rank 1, where both are one program.
WHILE_OTHERS_WAIT = """
import time
import jax, jax.numpy as jnp, numpy as np
from mpi4py import MPI
from mpi4jax import notoken as nt
comm = MPI.COMM_WORLD

def slow(x):
    return jax.lax.fori_loop(0, 20, lambda _, x: jnp.sin(x @ x), x) * 0 + 1

largest = lambda x: nt.allreduce(slow(x).astype(int), MPI.BAND, comm=comm)
total = lambda x: nt.allreduce(x, MPI.SUM, comm=comm)
x = jnp.ones((300, 300))
nt.barrier(comm=MPI.COMM_SELF)
if comm.rank == 0:
    y = jax.jit(largest)(x)
    time.sleep(1)
    z = jax.jit(total)(x)
else:
    y, z = jax.jit(lambda x: (largest(x), total(x)))(x)
np.testing.assert_array_equal(y, x)
np.testing.assert_array_equal(z, np.full((300, 300), comm.size))
print("good")
"""


def test_ranks_agree_beside_what_is_under_way(mpirun, fakes):
    """A bitwise reduction goes through MPI, on the program's communicator."""
    env = {**fakes, "MPI4JAX_TRANSPORT": "nccl"}
    result = mpirun(2, "-c", WHILE_OTHERS_WAIT, env=env, time_limit=60)
    assert result.stdout.count("good") == 2, result.stdout + result.stderr


def test_its_connections_are_events(mpirun, fakes):
    env = {**fakes, "MPI4JAX_TRANSPORT": "nccl", "MPI4JAX_LOG": "transport=info"}
    result = mpirun(2, "-c", ALLREDUCE, env=env)
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        line = rf"r{rank} \| .* INFO transport \| NCCL has connected comm=\S+ rank={rank} seconds="
        assert len(re.findall(line, result.stderr)) == 1, result.stderr
