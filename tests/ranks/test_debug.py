"""`MPI4JAX_DEBUG=1`: a line when each MPI call starts, and one when it ends."""

import functools
import re
import textwrap

import jax
import jax.numpy as jnp
import pytest
from mpi4py import MPI
from reference import LEFT, RANK, RIGHT, SIZE, SPECS, cases, float32, names_of

import mpi4jax
from mpi4jax import _native, notoken

ROOT = SIZE - 1
ALL = list(cases())

# Of a call with operands of shape (2, 3) for each rank: what stands after "MPI_<Op>".
EXPECTED = {
    "allgather": "with 6 items",
    "allreduce": "with 6 items",
    "alltoall": "with 6 items",
    "barrier": "",
    "bcast": rf"-> root {ROOT} with 6 items",
    "gather": rf"-> root {ROOT} with 6 items",
    "halo_exchange": "for ghost cells, with 12 items",
    "reduce": rf"-> root {ROOT} with 6 items",
    "scan": "with 6 items",
    "scatter": rf"-> root {ROOT} with 6 items",
    "sendrecv": rf"<- {LEFT} \(tag {MPI.ANY_TAG}, 6 items\) / -> {RIGHT} \(tag 0, 6 items\)",
}


@pytest.fixture
def debug(capfd):
    """``debug(f)``: the lines that ``f()`` prints."""

    def run(f):
        mpi4jax.flush()
        capfd.readouterr()
        _native.set_debug(True)
        try:
            jax.block_until_ready(f())
            mpi4jax.flush()
        finally:
            _native.set_debug(False)
        return [line for line in capfd.readouterr().out.splitlines() if " | MPI_" in line]

    return run


def check(lines, rank, op, details):
    start, end = lines
    found = re.fullmatch(rf"r{rank} \| (\w{{8}}) \| {SPECS[op].mpi} ?{details}( \(\w+\))?", start)
    assert found, start
    assert re.fullmatch(
        rf"r{rank} \| {found[1]} \| {SPECS[op].mpi} done with code 0 \(\d\.\d\de[+-]\d\ds\)", end
    ), end


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("case", ALL, ids=names_of(ALL))
def test_lines(case, jit, debug):
    x = case.operands(float32)[RANK]
    lines = debug(functools.partial(jit(functools.partial(case.run, notoken)), x))
    if case.name not in ("send", "recv"):
        check(lines, RANK, case.name, EXPECTED[case.name])
    elif SIZE == 1:
        check(lines, 0, "send", f"-> {MPI.PROC_NULL} with tag 0 and 6 items")
    else:
        sent = [line for line in lines if "MPI_Send" in line]
        received = [line for line in lines if "MPI_Recv" in line]
        assert len(lines) == 4
        check(sent, RANK, "send", f"-> {RIGHT} with tag 0 and 6 items")
        check(received, RANK, "recv", f"<- {LEFT} with tag {MPI.ANY_TAG} and 6 items")


def test_lines_of_the_documentation(debug):
    lines = debug(lambda: notoken.send(jnp.ones((3, 3)), MPI.PROC_NULL, tag=7))
    check(lines, RANK, "send", f"-> {MPI.PROC_NULL} with tag 7 and 9 items")


def test_rank_is_that_in_the_communicator(debug):
    comm = MPI.COMM_WORLD.Split(0, -RANK)
    lines = debug(lambda: notoken.barrier(comm=comm))
    check(lines, SIZE - 1 - RANK, "barrier", "")
    comm.Free()


def test_each_call_has_its_own_id(debug):
    lines = debug(mpi4jax.jit(lambda: [notoken.barrier() for _ in range(5)]))
    ids = [line.split(" | ")[1] for line in lines]
    assert len(ids) == 10
    assert len(set(ids)) == 5
    assert ids[::2] == ids[1::2]


def test_off_means_silent(capfd):
    assert _native.get_debug() is False
    jax.block_until_ready(notoken.allreduce(1.0, MPI.SUM))
    mpi4jax.flush()
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_on_and_off():
    _native.set_debug(True)
    assert _native.get_debug() is True
    _native.set_debug(False)
    assert _native.get_debug() is False


PROGRAM = textwrap.dedent("""
    from mpi4py import MPI
    import jax.numpy as jnp
    from mpi4jax import notoken
    notoken.allreduce(jnp.ones((3, 3)), MPI.SUM)
""")


@pytest.mark.ranks(1)
@pytest.mark.parametrize("value, on", [("1", True), ("true", True), ("0", False)])
def test_environment_variable(mpirun, tmp_path, value, on):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    job = mpirun(2 if on else 1, file, env={"MPI4JAX_DEBUG": value})
    assert job.returncode == 0, job.stderr
    if on:
        for rank in range(2):
            lines = [line for line in job.stdout.splitlines() if line.startswith(f"r{rank} | ")]
            check(lines, rank, "allreduce", "with 9 items")
    else:
        assert job.stdout == ""
