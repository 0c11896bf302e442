"""Requests that nobody waits for, waits that hang, and what goes wrong under way."""

import json
import re
import textwrap

import pytest

HEAD = """
import sys, time
import jax, jax.numpy as jnp, numpy as np
from mpi4py import MPI
import mpi4jax
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
"""


@pytest.fixture
def run(mpirun, tmp_path):
    def run(ranks, text, **env):
        file = tmp_path / "program.py"
        file.write_text(HEAD + textwrap.dedent(text))
        return mpirun(ranks, file, env={"MPI4JAX_DUMP_DIR": str(tmp_path), **env})

    return run


def test_what_nobody_has_waited_for_is_named_at_the_end(run):
    job = run(
        2,
        """
        request = mpi4jax.iallreduce(jnp.ones(3))
        other = mpi4jax.isend(jnp.ones(4), 1 - rank, tag=3)
        print(mpi4jax.wait(mpi4jax.irecv(jnp.ones(4), 1 - rank, tag=3)))
        """,
    )
    assert job.returncode == 0, job.stderr
    for rank in range(2):
        for words in (
            r"iallreduce #1 \(SUM, 3 x float32\) on mpi4jax.default, program.py:8",
            rf"isend to {1 - rank}, tag 3 \(4 x float32\) on mpi4jax.default, program.py:9",
        ):
            line = rf"r{rank} \| mpi4jax: {words} was never waited for"
            assert re.search(line, job.stderr), job.stderr


def test_a_wait_for_a_rank_that_has_finished_ends_the_job(run):
    job = run(
        2,
        """
        if rank == 0:
            mpi4jax.wait(mpi4jax.irecv(jnp.ones(3), 1)).block_until_ready()
        else:
            mpi4jax.default_comm()
        """,
    )
    assert job.returncode != 0
    line = (
        r"wait for irecv from 1, tag 0 \(3 x float32\) on mpi4jax.default, started at program.py:9"
    )
    assert re.search(line, job.stderr), job.stderr
    assert "rank 1 has finished" in job.stderr, job.stderr


@pytest.mark.parametrize("progress", ["0", "1"])
def test_progress(run, progress):
    """What is under way goes on, with the thread and without it, while threads compute and wait."""
    job = run(
        2,
        """
        import threading
        comms = [MPI.COMM_WORLD.Dup() for _ in range(3)]
        def work(comm):
            f = jax.jit(lambda x: mpi4jax.wait(mpi4jax.iallreduce(x, comm=comm)))
            for i in range(30):
                x = jnp.full(1 << 16, 1.0 * i)
                assert (f(x) == 2 * i).all()
        threads = [threading.Thread(target=work, args=[comm]) for comm in comms]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        print("the end")
        """,
        MPI4JAX_PROGRESS=progress,
    )
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("the end") == 2


def test_a_wrong_setting(run):
    job = run(
        1,
        "jax.block_until_ready(jax.tree.leaves(mpi4jax.iallreduce(jnp.ones(3))))",
        MPI4JAX_PROGRESS="maybe",
    )
    assert job.returncode != 0
    assert "MPI4JAX_PROGRESS=maybe is not understood: expected 1 or 0" in job.stderr


def test_started_collectives_are_compared_before_they_run(run):
    text = """
        request = mpi4jax.irecv(jnp.ones(3), MPI.ANY_SOURCE)
        send = mpi4jax.isend(jnp.ones(3), 1 - rank)
        mpi4jax.waitall([request, send])
        mpi4jax.notoken.barrier()
        x = jnp.ones(3)
        mpi4jax.wait(mpi4jax.{}(x)).block_until_ready()
        print("the end")
        """
    job = run(2, text.format("iallreduce"), MPI4JAX_CHECK="1")
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("the end") == 2
    job = run(2, text.format("iallreduce(x) if rank else mpi4jax.iscan"), MPI4JAX_CHECK="1")
    assert job.returncode != 0
    assert "rank 0: iscan #2" in job.stderr, job.stderr
    assert "rank 1: iallreduce #2" in job.stderr, job.stderr


def test_counts_that_do_not_agree_end_the_job(run):
    text = """
        counts = [0, 2] if rank == 0 else [3, 0]
        none = [0, 0]
        sends, receives = (counts, none) if rank == 0 else (none, counts)
        request = mpi4jax.ialltoallv(jnp.ones((sum(sends), 2)), sends, receives)
        mpi4jax.wait(request).block_until_ready()
        mpi4jax.notoken.barrier()
        """
    job = run(2, text)
    assert job.returncode != 0
    words = (
        r"received 4 elements from rank 0, expected 6: the counts of the two ranks must "
        r"agree\n *in wait for ialltoallv #1 \(0 x float32\) on mpi4jax.default, started at program"
    )
    assert re.search(words, job.stderr), job.stderr


def test_timelines_have_both(run, tmp_path):
    job = run(
        2,
        "mpi4jax.wait(mpi4jax.iallreduce(jnp.ones(3))).block_until_ready()",
        MPI4JAX_TRACE=str(tmp_path / "trace.json"),
    )
    assert job.returncode == 0, job.stderr
    events = json.loads((tmp_path / "trace.0.json").read_text() + "]")
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert names == ["iallreduce", "wait for iallreduce"]
