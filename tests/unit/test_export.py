"""`jax.export`: what cannot be exported. Programs that can are in tests/jobs/test_programs.py."""

import jax
import jax.export
import jax.numpy as jnp
import pytest
from mpi4py import MPI
from table import ROWS

from mpi4jax import notoken

CALLS = [jax.export.DisabledSafetyCheck.custom_call(f"mpi4jax_{name}") for name in ROWS]


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
