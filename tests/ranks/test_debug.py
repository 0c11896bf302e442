"""`MPI4JAX_DEBUG=1`: a line when each MPI call starts, and one when it ends."""

import re

import jax
from mpi4py import MPI
from reference import LEFT, RANK, RIGHT, SIZE, jits
from table import ROWS, cases

import mpi4jax
from mpi4jax import _native, notoken


def check(lines, rank, op, details):
    start, end = lines
    found = re.fullmatch(rf"r{rank} \| (\w{{8}}) \| {ROWS[op].mpi} ?{details}( \(\w+\))?", start)
    assert found, start
    assert re.fullmatch(
        rf"r{rank} \| {found[1]} \| {ROWS[op].mpi} done with code 0 \(\d\.\d\de[+-]\d\ds\)", end
    ), end


@jits
def test_lines(jit, logged):
    """Of each op, in a program of all of them."""
    operands = {str(case): case.operands()[RANK] for case in cases()}
    f = jit(lambda xs: [case.run("notoken", xs[str(case)]) for case in cases()])
    _, lines = logged(lambda: f(operands))
    for case in cases():
        if case.name == "recv":
            right = RIGHT if RANK < SIZE - 1 else MPI.PROC_NULL
            check(lines[:2], RANK, "send", f"-> {right} with tag 0 and 6 items")
            del lines[:2]
            if RANK > 0:  # from MPI.PROC_NULL there is nothing to call
                check(lines[:2], RANK, "recv", f"<- {LEFT} with tag {MPI.ANY_TAG} and 6 items")
                del lines[:2]
            continue
        items = 6 * case.counted()
        details = case.row.log.format(items=items, root=case.root, left=LEFT, right=RIGHT)
        check(lines[:2], RANK, case.name, details)
        del lines[:2]
    assert not lines


def test_rank_is_that_in_the_communicator(logged):
    comm = MPI.COMM_WORLD.Split(0, -RANK)
    _, lines = logged(lambda: notoken.barrier(comm=comm))
    check(lines, SIZE - 1 - RANK, "barrier", "")
    comm.Free()


def test_each_call_has_its_own_id(logged):
    _, lines = logged(mpi4jax.jit(lambda: [notoken.barrier() for _ in range(5)]))
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
