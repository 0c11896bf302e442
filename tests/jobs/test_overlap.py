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


def test_many_operations_that_are_never_waited_for_are_one_line(run):
    job = run(
        2,
        """
        for i in range(300):
            jax.block_until_ready(mpi4jax.isend(jnp.ones(3), 1 - rank, tag=i))
            jax.block_until_ready(mpi4jax.notoken.recv(jnp.ones(3), 1 - rank, tag=i))
        """,
    )
    assert job.returncode == 0, job.stderr
    for rank in range(2):
        words = rf"isend to {1 - rank}, tag 0 .* was never waited for .*, nor were 299 others"
        line = rf"r{rank} \| mpi4jax: {words}"
        assert re.search(line, job.stderr), job.stderr
    assert job.stderr.count("never waited for") == 2, job.stderr


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


def test_what_was_waited_for_is_forgotten_while_a_thread_waits(run):
    """Started operations of one thread, while another one is in a wait for a message."""
    job = run(
        2,
        """
        import threading
        from pathlib import Path
        mpi4jax.default_comm()
        def rss(): return int(Path("/proc/self/statm").read_text().split()[1]) * 4 / 1024
        alone = MPI.COMM_SELF.Dup()
        @jax.jit
        def many(x):
            def one(i, x): return mpi4jax.wait(mpi4jax.iallreduce(x, comm=alone))
            return jax.lax.fori_loop(0, 40_000, one, x)
        x = jnp.zeros(1)
        if rank == 0:
            many(x).block_until_ready(); many(x).block_until_ready()
            # What the thread needs is compiled before, and takes no memory later.
            mpi4jax.wait(mpi4jax.irecv(x, MPI.PROC_NULL)).block_until_ready()
            request = mpi4jax.irecv(x, 1, tag=3)
            thread = threading.Thread(target=lambda: mpi4jax.wait(request).block_until_ready())
            thread.start(); time.sleep(1)
            before = rss()
            many(x).block_until_ready()
            print("grown by", rss() - before, "MiB")
            MPI.COMM_WORLD.send(0, 1)
            thread.join()
        else:
            MPI.COMM_WORLD.recv(source=0)
            mpi4jax.send(x, 0, tag=3)
            mpi4jax.flush()
        """,
    )
    assert job.returncode == 0, job.stderr
    assert float(re.search(r"grown by (\S+) MiB", job.stdout)[1]) < 4, job.stdout


@pytest.mark.parametrize("check", ["", "1"])
@pytest.mark.parametrize(
    "start",
    [
        "isend(jnp.ones(3), 1 - rank, tag=7)",
        "iallreduce(jnp.ones(3))",
        "ialltoallv(jnp.ones((2 * size, 3)), [2] * size, [2] * size)",
        "ireduce_scatterv(jnp.ones(2 * size), [2] * size)",
    ],
    ids=lambda start: start.partition("(")[0],
)
def test_a_start_beyond_the_limit_has_communicated_nothing(run, start, check):
    job = run(
        2,
        f"""
        mpi4jax.default_comm()
        comm = MPI.COMM_WORLD.Dup()
        x = jnp.zeros(1)
        @jax.jit
        def many(x):
            def one(i, n):
                mpi4jax.irecv(x, MPI.PROC_NULL)
                return n + 1
            return jax.lax.fori_loop(0, 65_535, one, 0)
        start = lambda: mpi4jax.{start[:-1]}, comm=comm)
        if rank == 0:
            many(x).block_until_ready()
            request = mpi4jax.irecv(x, MPI.PROC_NULL)
            mpi4jax.flush()
            try:
                jax.block_until_ready(jax.tree.leaves(start()))
                mpi4jax.flush()
            except Exception as error:
                print("refused:", "operations have been started and not waited for" in str(error))
            mpi4jax.wait(request)
        MPI.COMM_WORLD.barrier()
        if rank == 1:
            time.sleep(0.2)
            print("arrived:", comm.Iprobe(source=0, tag=7))
        MPI.COMM_WORLD.barrier()
        # The next collective of the communicator is the first one of both ranks.
        print("result:", comm.allreduce(rank + 1))
        """,
        MPI4JAX_CHECK=check,
    )
    assert job.returncode == 0, job.stderr
    assert "refused: True" in job.stdout, job.stdout
    assert "arrived: False" in job.stdout, job.stdout
    assert job.stdout.count("result: 3") == 2, job.stdout


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


def test_compared_starts_wait_for_no_rank(run):
    """Ranks start on two communicators in their own order, and wait in their own order too."""
    job = run(
        2,
        """
        comms = [MPI.COMM_WORLD.Dup() for _ in range(2)]
        x = jnp.ones(3)
        starts = [
            lambda comm: mpi4jax.iallreduce(x, comm=comm),
            lambda comm: mpi4jax.ialltoallv(jnp.ones((2, 3)), [1] * 2, [1] * 2, comm=comm),
            lambda comm: mpi4jax.iscan(x, comm=comm),
            lambda comm: mpi4jax.ibcast(x, 0, comm=comm),
        ]
        for start in starts:
            requests = {k: start(comms[k]) for k in ([0, 1] if rank == 0 else [1, 0])}
            for k in [0, 1]:
                jax.block_until_ready(mpi4jax.wait(requests[k]))
        print("the end")
        """,
        MPI4JAX_CHECK="1",
    )
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("the end") == 2


def test_ranks_that_start_different_operations_learn_of_it_in_the_wait(run):
    """Whatever they start between, on the same communicator."""
    job = run(
        2,
        """
        comm = MPI.COMM_WORLD.Dup()
        comm.Set_name("pair")
        x = jnp.ones(3)
        first = (mpi4jax.iallreduce if rank == 0 else mpi4jax.iscan)(x, comm=comm)
        others = [mpi4jax.iallreduce(x, comm=comm) for _ in range(rank * 3)]
        mpi4jax.wait(first).block_until_ready()
        """,
        MPI4JAX_CHECK="1",
    )
    assert job.returncode != 0
    for words in ("rank 0: iallreduce #1", "rank 1: iscan #1"):
        assert words in job.stderr, job.stderr


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


def test_timelines_name_the_function_that_the_line_calls(run, tmp_path):
    job = run(
        2,
        """
        x = jnp.ones(4)
        y = mpi4jax.migrate(x, np.full(4, 1 - rank), 4)
        f = lambda x: mpi4jax.migrate(x, np.full(4, 1 - rank), 4)[0]
        y = jax.jit(f)(x).block_until_ready()
        y = mpi4jax.allreduce(y)[0].block_until_ready()
        """,
        MPI4JAX_TRACE=str(tmp_path / "trace.json"),
    )
    assert job.returncode == 0, job.stderr
    events = json.loads((tmp_path / "trace.0.json").read_text() + "]")
    found = [event for event in events if event["ph"] == "X"]
    sites = [event["args"]["record"]["site"] for event in found]
    lines = [int(site.rpartition(":")[2]) for site in sites]
    first = lines[0]
    assert [re.sub(r":\d+", "", site) for site in sites] == [
        *["migrate at program.py"] * (len(sites) - 1),
        "program.py",
    ]
    assert sorted({*lines}) == [first, first + 1, first + 3]
    moved = [e["args"] for e in found if e["name"] == "ragged_alltoall"]
    assert [(args["messages"], args["bytes"]) for args in moved] == 2 * [(1, 16)]
