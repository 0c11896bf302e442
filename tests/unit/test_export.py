"""`jax.export`: programs that communicate, saved by one job and run by another."""

import textwrap

import jax
import jax.export
import jax.numpy as jnp
import pytest
from mpi4py import MPI
from reference import SPECS

from mpi4jax import notoken

CALLS = [jax.export.DisabledSafetyCheck.custom_call(f"mpi4jax_{name}") for name in SPECS]

SAVE = """
    import sys
    from pathlib import Path

    import jax, jax.export, jax.numpy as jnp, mpi4jax
    from mpi4jax import notoken
    from mpi4py import MPI

    file = Path(sys.argv[1] + str(MPI.COMM_WORLD.rank))
    call = jax.export.DisabledSafetyCheck.custom_call
    rows = MPI.COMM_WORLD.Dup()
    rows.Set_name("rows")
"""
SAVE_IT = """
    def f(x):
        notoken.send(x, MPI.COMM_WORLD.size - 1 - MPI.COMM_WORLD.rank)
        y = notoken.recv(x, tag=0)
        return notoken.allreduce(y * rows.rank, MPI.SUM, comm=rows)

    checks = [call(f"mpi4jax_{op}") for op in ("allreduce", "send", "recv")]
    exported = jax.export.export(jax.jit(f), disabled_checks=checks)(jnp.ones(3))
    file.write_bytes(exported.serialize())
"""
RUN_IT = """
    f = jax.export.deserialize(file.read_bytes()).call
    try:
        jax.block_until_ready(f(jnp.ones(3)))
    except jax.errors.JaxRuntimeError as error:
        assert "no communicator" in str(error) and "Set_name" in str(error), error
    else:
        raise AssertionError("the communicator is not known yet")
    mpi4jax.barrier(comm=rows), mpi4jax.barrier()
    for g in (f, jax.jit(f), mpi4jax.jit(f), mpi4jax.jit(lambda x: [f(x), f(2 * x)][1] / 2)):
        assert g(jnp.ones(3)).tolist() == [1] * 3
"""


@pytest.mark.ranks(1)
def test_communicators_are_found_again_by_name(mpirun, tmp_path):
    for name, program in (("save.py", SAVE_IT), ("run.py", RUN_IT)):
        file = tmp_path / name
        file.write_text(textwrap.dedent(SAVE + program))
        job = mpirun(2, file, tmp_path / "exported")
        assert job.returncode == 0, job.stderr


def test_what_has_no_name():
    comm = MPI.COMM_WORLD.Dup()
    comm.Set_name("")
    status, first = MPI.Status(), MPI.Op.Create(lambda a, b, _: None)
    x = jnp.ones(3)
    for f, expected in {
        lambda x: notoken.bcast(x, 0, comm=comm): "give it one with comm.Set_name",
        lambda x: notoken.allreduce(x, first): "MPI.Op.Create",
        lambda x: notoken.recv(x, MPI.PROC_NULL, status=status): "status",
    }.items():
        jitted = jax.jit(f)
        with pytest.raises(ValueError, match=expected):
            jax.export.export(jitted, disabled_checks=CALLS)(x)
    comm.Free()
    first.Free()
