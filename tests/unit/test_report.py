"""The flight recorder, its reports and timelines, without a job."""

import os
import re
import subprocess
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import mpi4jax
from mpi4jax import _native, notoken, report, timeline
from mpi4jax._job import job, watch


def record(op="allreduce", number=1, **other):
    common = {
        "comm": ["c", 1, [[0, 1, 1]]],
        "reduction": "SUM",
        "dtype": "float32",
        "count": 3,
        "any_size": False,
        "root": -1,
        "source": -1,
    }
    text = f"{op} #{number}"
    return {
        **common,
        "op": op,
        "sequence": number,
        "collective": op not in ("send", "recv", "sendrecv"),
        "dest": -1,
        "state": "done",
        "started": float(number),
        "text": text,
        **other,
    }


def dump(rank, records, state="in no operation", size=2):
    return {
        "rank": rank,
        "size": size,
        "host": "here",
        "pid": 1,
        "time": 10.0,
        "state": state,
        "python": [],
        "records": records,
    }


# ---- python -m mpi4jax.report


def test_report_says_who_did_something_else_first():
    dumps = {
        0: dump(0, [record(), record("bcast", 2, root=0), record("scan", 3)]),
        1: dump(1, [record(), record("allreduce", 2), record("scan", 3)]),
    }
    ((_, words),) = report.divergences(dumps)
    assert "do not match at collective #2 of c" in words
    assert "rank 0: bcast #2" in words
    assert "rank 1: allreduce #2" in words


def test_report_says_who_never_came():
    dumps = {0: dump(0, [record(), record(number=2)]), 1: dump(1, [record()], "in recv from 0")}
    ((_, words),) = report.divergences(dumps)
    assert words.startswith("rank 1 never called the collective of rank 0: allreduce #2")
    assert "rank 1: in recv from 0" in words


def test_report_tells_communicators_of_one_name_apart():
    again = record(number=1, comm=["c", 2, [[0, 1, 1]]])
    dumps = {r: dump(r, [record(), {**again}]) for r in range(2)}
    assert report.divergences(dumps) == []
    dumps[1]["records"][1]["op"] = "barrier"
    assert len(report.divergences(dumps)) == 1


def test_report_takes_forgotten_records_for_no_difference():
    dumps = {0: dump(0, [record(number=n) for n in (8, 9)]), 1: dump(1, [record(number=9)])}
    assert report.divergences(dumps) == []


def test_report_names_ranks_without_a_slot():
    dumps = {r: dump(r, [record()], size=3) for r in (0, 2)}
    assert "rank 1 left nothing" in report.report(dumps)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00" * 9000, b"a board" * 20_000])
def test_files_that_are_no_boards_are_named(content, tmp_path, capsys):
    (tmp_path / "board").write_bytes(content)
    assert report.main([str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert f"there is no board in {tmp_path}: {tmp_path}/board: it is no board" in err, err
    assert report.main([str(tmp_path / "nowhere")]) == 1
    assert "no job has left one" in capsys.readouterr().err


def test_reports_escape_control_characters(tmp_path, monkeypatch, capsys):
    notoken.allreduce(np.ones(2), MPI.SUM).block_until_ready()
    board = (_native.board_place() / job.board(1)).read_bytes()
    name = b"test_report.py"  # of the call
    assert name in board
    # An escape sequence that clears the screen, a new line, a carriage return, and U+202E, which
    # reverses the text behind it.
    forged = b"\x1b[2J\nok\r\xe2\x80\xae.py"
    assert len(forged) == len(name)
    (tmp_path / "board").write_bytes(board.replace(name, forged))
    monkeypatch.setattr(report.os, "getpid", lambda: 1)  # this process's own board is left out
    assert report.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert " on mpi4jax.default, \\x1b[2J\\nok\\r\\u202e.py:" in out, out
    assert all(line.isprintable() for line in out.split("\n")), out
    # Names of files come from the directory too.
    wrong = tmp_path / "\x1b[2J"
    wrong.mkdir()
    (wrong / "board").write_bytes(b"")
    assert report.main([str(wrong)]) == 1
    assert f"{tmp_path}/\\x1b[2J/board: it is no board" in capsys.readouterr().err


@pytest.mark.parametrize("inside", ["", "board", "other/board"])
def test_reports_do_not_wait_for_a_fifo(inside, tmp_path, capsys):
    fifo = tmp_path / "job" / inside
    fifo.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(fifo)
    assert report.main([str(tmp_path / "job")]) == 1
    assert f"{fifo}: it is not a regular file" in capsys.readouterr().err


# ---- The recorder


def test_the_recorder_knows_the_last_operations(tmp_path):
    @mpi4jax.jit
    def f(x):
        return notoken.allreduce(x, MPI.SUM)

    f(jnp.ones(5, np.int32)).block_until_ready()
    words = "\n".join(_native.operations())
    line = rf"allreduce #\d+ \(SUM, 5 x int32\) on mpi4jax.default, test_report.py:{f_line()}"
    assert re.search(line, words), words


def f_line():
    source = Path(__file__).read_text().splitlines()
    return 1 + next(
        i for i, line in enumerate(source) if "return notoken.allreduce(x, MPI.SUM)" in line
    )


# ---- Settings


def test_settings_are_checked(monkeypatch):
    monkeypatch.setenv("MPI4JAX_TIMEOUT", "-1")
    with pytest.raises(ValueError, match=r"MPI4JAX_TIMEOUT must be a number of seconds.*'-1'"):
        watch.seconds("MPI4JAX_TIMEOUT")
    monkeypatch.setenv("MPI4JAX_TIMEOUT", "1.5")
    assert watch.seconds("MPI4JAX_TIMEOUT") == 1.5
    monkeypatch.setenv("MPI4JAX_CHECK", "maybe")
    with pytest.raises(ValueError, match=r"MPI4JAX_CHECK must be one of samples, 0.*'maybe'"):
        watch.set_check()


def test_the_directory_is_the_jobs(monkeypatch, tmp_path):
    for name in os.environ:
        if name.startswith(("PMI", "OMPI", "SLURM", "MPI_LOCAL")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MPI4JAX_DUMP_DIR", str(tmp_path))
    monkeypatch.setenv("PMIX_NAMESPACE", "job@1/x")
    folder = f"job@1_x+{os.uname().nodename}"  # there may be other hosts
    assert not job.shares_board()
    assert job.directory(4) == tmp_path / f"mpi4jax-{os.geteuid()}" / folder
    # On one host, it also says which: launchers in containers choose the same names.
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "4")
    assert job.job(4).startswith("job@1_x-")
    here = job.job(4)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(job.os, "readlink", lambda path: "pid:[1]")
        assert job.job(4) != here
    # A server's port tells as much, and is the same for ranks that have a container each.
    monkeypatch.setenv("PMIX_SERVER_URI2", "job@0.0;tcp4://127.0.0.1:52415")
    here = job.job(4)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(job.os, "readlink", lambda path: "pid:[1]")
        assert job.job(4) == here
    monkeypatch.setenv("PMIX_SERVER_URI2", "job@0.0;tcp4://127.0.0.1:52416")
    assert job.job(4) != here


def test_processes_have_names_and_parents():
    own = _native.process(os.getpid())
    assert own is not None
    assert own[0] == os.getppid()
    assert next(job._ancestors())[0] == os.getppid()
    assert job._start(os.getpid()) == str(own[2])
    child = subprocess.Popen(["sleep", "100"])
    try:
        while (of_child := _native.process(child.pid)) and of_child[1] != "sleep":
            pass  # not yet executed
        assert (of_child or [None])[0] == os.getpid()
    finally:
        child.kill()
        child.wait()
    assert _native.process(child.pid) is None
    assert job._start(child.pid) == ""


def test_jobs_of_one_allocation_are_told_apart(monkeypatch):
    for name in os.environ:
        if name.startswith(("PMI", "OMPI", "MPI_LOCAL")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    ancestors = iter([(5, "bash"), (4, "hydra_pmi_proxy"), (3, "slurmstepd")])
    options = {4: "a:1-0"}
    monkeypatch.setattr(job, "_options", options.get)
    monkeypatch.setattr(job, "_ancestors", lambda: ancestors)
    assert job.job(2) == "hydra-17-a_1-0"
    monkeypatch.setattr(job, "_ancestors", lambda: iter([(3, "slurmstepd")]))
    monkeypatch.setenv("SLURM_STEP_ID", "2")
    assert job.job(2) == "slurm-17-2"
    # Of a Slurm that has not started the ranks, nothing is believed.
    monkeypatch.setattr(job, "_ancestors", lambda: iter([(3, "bash")]))
    assert "17" not in job.job(2).split("-")
    # Programs without a launcher, or with an unknown one: of one shell or daemon.
    assert all(str(os.getpid()) in job.job(size) for size in (1, 2))
    monkeypatch.setenv("PALS_APID", "a-7")
    assert job.job(2) == "a-7"


def test_pictures_need_matplotlib(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(timeline.importlib.util, "find_spec", lambda name: None)
    assert timeline.main([str(tmp_path / "t.json"), "--png", str(tmp_path / "t.png")]) == 1
    assert "--png needs Matplotlib" in capsys.readouterr().err


def test_limits_are_checked():
    for wrong in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="time_limit: argument 'seconds' must be a finite"):
            mpi4jax.time_limit(wrong).__enter__()
    for wrong in (True, "soon", 1j):
        with pytest.raises(TypeError, match="time_limit: argument 'seconds' must be a number"):
            mpi4jax.time_limit(wrong).__enter__()


def test_timelines_have_a_file_per_rank():
    assert watch.trace_file("a/t.json", 3) == Path("a/t.3.json")
    assert watch.trace_file("a/t-{rank}.json", 3) == Path("a/t-3.json")


def test_timelines_of_jobs_that_were_aborted(tmp_path):
    file = tmp_path / "trace.0.json"
    file.write_text('[{"ph": "M", "pid": 0, "args": {}}\n,{"ph": "X", "pid": 0, "na')
    assert len(timeline.load(file)) == 1
    file.write_text("nonsense")
    with pytest.raises(ValueError, match="is not a timeline"):
        timeline.load(file)


def test_clocks_of_hosts_are_aligned():
    def span(pid, number, start, end):
        args = {"key": "c", "members": "0", "record": {"collective": True, "sequence": number}}
        return {
            "ph": "X",
            "name": "barrier",
            "pid": pid,
            "ts": start,
            "dur": end - start,
            "args": args,
        }

    names = [
        {"ph": "M", "name": "process_name", "pid": r, "args": {"host": f"h{r}"}} for r in range(2)
    ]
    events = [*names]
    for n in range(5):
        events += [
            span(0, n, 100.0 * n, 100.0 * n + 30),
            span(1, n, 1e6 + 100 * n + 20, 1e6 + 100 * n + 30),
        ]
    assert timeline.offsets(events) == {0: 0.0, 1: 1e6}
    waits = [e["dur"] for e in timeline.merge(events) if e["name"] == "wait"]
    assert waits == [20.0] * 5
