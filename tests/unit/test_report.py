"""The flight recorder, its reports and timelines; what goes wrong is in tests/faults."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import mpi4jax
from mpi4jax import _native, _watch, notoken, report, timeline
from mpi4jax._spec import SPECS
from mpirun import environment_outside_mpi

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size


def record(op="allreduce", number=1, **other):
    common = {
        "comm": 0,
        "reduction": "SUM",
        "dtype": "float32",
        "count": 3,
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
    collectives = max((r["sequence"] for r in records if r["collective"]), default=0)
    group = {
        "key": "c",
        "rank": rank,
        "size": size,
        "world": list(range(size)),
        "collectives": collectives,
    }
    return {
        "rank": rank,
        "size": size,
        "host": "here",
        "pid": 1,
        "time": 10.0,
        "reason": "a test",
        "state": state,
        "python": [],
        "communicators": [group],
        "records": records,
    }


# ---- python -m mpi4jax.report


def test_report_says_who_did_something_else_first():
    dumps = {
        0: dump(0, [record(), record("bcast", 2, root=0), record("scan", 3)]),
        1: dump(1, [record(), record("allreduce", 2), record("scan", 3)]),
    }
    ((_, words),) = report.divergences(dumps)
    assert "collective #2 of c" in words
    assert "rank 0: bcast #2" in words
    assert "rank 1: allreduce #2" in words


def test_report_says_who_never_came():
    dumps = {0: dump(0, [record(), record(number=2)]), 1: dump(1, [record()], "in recv from 0")}
    ((_, words),) = report.divergences(dumps)
    assert words.startswith("rank 1 never came to the collective of rank 0: allreduce #2")
    assert "rank 1: in recv from 0" in words


def test_report_takes_forgotten_records_for_no_difference():
    dumps = {0: dump(0, [record(number=n) for n in (8, 9)]), 1: dump(1, [record(number=9)])}
    assert report.divergences(dumps) == []


def test_report_names_ranks_that_wait_for_each_other():
    waiting = {
        r: dump(r, [record("recv", state="started", source=(r + 1) % 3)], size=3) for r in range(3)
    }
    assert report.cycle(waiting) == [0, 1, 2]
    assert "rank 0 -> rank 1 -> rank 2 -> rank 0" in report.report(waiting)
    del waiting[1]
    assert report.cycle(waiting) == []
    assert "rank 1 left no dump" in report.report(waiting)


def test_report_names_ranks_in_runs():
    assert report.rank_names([3]) == "rank 3"
    assert report.rank_names([5, 0, 1, 2]) == "ranks 0-2, 5"


def test_report_without_dumps(tmp_path, capsys):
    assert report.main([str(tmp_path)]) == 1
    assert "there are no dumps" in capsys.readouterr().err


# ---- The recorder


def test_the_recorder_knows_the_last_operations(tmp_path):
    @mpi4jax.jit
    def f(x):
        return notoken.allreduce(x, MPI.SUM)

    f(jnp.ones(5, np.int32)).block_until_ready()
    words = _native.watch_report()
    assert words is not None
    line = rf"allreduce #\d+ \(SUM, 5 x int32\) on mpi4jax.default, test_report.py:{f_line()}"
    assert re.search(line + r": took .* ago", words), words
    comm.Barrier()


def f_line():
    source = Path(__file__).read_text().splitlines()
    return 1 + next(
        i for i, line in enumerate(source) if "return notoken.allreduce(x, MPI.SUM)" in line
    )


def test_equal_lines_of_a_program_are_told_apart():
    def f(x):
        a = notoken.allreduce(x, MPI.SUM)
        b = notoken.allreduce(x, MPI.SUM)
        return a + b

    text = jax.jit(f).lower(jnp.ones(3)).as_text()
    assert len(set(re.findall(r'site = "(test_report.py:\d+)"', text))) == 2


# ---- Settings


def test_settings_are_checked(monkeypatch):
    monkeypatch.setenv("MPI4JAX_TIMEOUT", "-1")
    with pytest.raises(ValueError, match=r"MPI4JAX_TIMEOUT must be a number of seconds.*'-1'"):
        _watch.timeout()
    monkeypatch.setenv("MPI4JAX_TIMEOUT", "1.5")
    assert _watch.timeout() == 1.5
    monkeypatch.setenv("MPI4JAX_CHECK", "maybe")
    with pytest.raises(ValueError, match=r"MPI4JAX_CHECK must be one of 0.*'maybe'"):
        _watch.set_check()


def test_the_directory_is_the_jobs(monkeypatch, tmp_path):
    monkeypatch.setenv("MPI4JAX_DUMP_DIR", str(tmp_path))
    monkeypatch.setenv("PMIX_NAMESPACE", "job@1/x")
    assert _watch.directory() == tmp_path / f"mpi4jax-{os.getuid()}-job@1_x"


def test_timelines_have_a_file_per_rank():
    assert _watch.trace_file("a/t.json", 3) == Path("a/t.3.json")
    assert _watch.trace_file("a/t-{rank}.json", 3) == Path("a/t-3.json")


# ---- Jobs of their own

LOOP = """
import sys, time
import jax.numpy as jnp
from mpi4py import MPI
import mpi4jax
from mpi4jax import notoken as nt
x, rank = jnp.ones(100), MPI.COMM_WORLD.rank
for i in range(int(sys.argv[1])):
    x = nt.allreduce(x, MPI.MAX).block_until_ready()
    x = nt.sendrecv(x, x, 1 - rank, 1 - rank)
"""


@pytest.mark.ranks(1)
def test_timeline(mpirun, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(LOOP)
    result = mpirun(2, program, "600", env={"MPI4JAX_TRACE": str(tmp_path / "trace.json")})
    assert result.returncode == 0, result.stderr
    files = [str(tmp_path / f"trace.{r}.json") for r in range(2)]
    merged, picture = tmp_path / "merged.json", tmp_path / "merged.png"
    assert timeline.main([*files, "-o", str(merged), "--png", str(picture)]) == 0
    events = json.loads(merged.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X" and e["name"] != "wait"]
    assert len(spans) == 2 * 1200
    allreduces = [e for e in spans if e["name"] == "allreduce"]
    assert all(e["args"]["bytes"] == 400 and e["dur"] > 0 for e in allreduces)
    parts = [e["args"]["wait_us"] + e["args"]["transfer_us"] - e["dur"] for e in allreduces]
    assert np.allclose(parts, 0)
    assert picture.stat().st_size > 0


def test_timelines_of_jobs_that_were_aborted(tmp_path):
    file = tmp_path / "trace.0.json"
    file.write_text('[{"ph": "M", "pid": 0, "args": {}}\n,{"ph": "X", "pid": 0, "na')
    assert len(timeline.load(file)) == 1
    file.write_text("nonsense")
    with pytest.raises(ValueError, match="is not a timeline"):
        timeline.load(file)


def test_clocks_of_hosts_are_aligned():
    def span(pid, number, start, end):
        args = {"key": "c", "world": [0, 1], "record": {"collective": True, "sequence": number}}
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


@pytest.mark.ranks(1)
def test_signals_print_the_state_and_the_job_goes_on(tmp_path):
    """Also when Python runs, and its stack changes, while it is looked at."""
    program = tmp_path / "program.py"
    program.write_text(LOOP.replace("1 - rank", "rank") + "print('the end')\n")
    env = {
        **environment_outside_mpi(),
        "MPI4JAX_DUMP_DIR": str(tmp_path),
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, str(program), "200000"]
    with subprocess.Popen(command, env=env, stdout=-1, stderr=-1, text=True) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("mpi4jax-*/rank0.pid")) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
        for _ in range(40):
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.05)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "the end" in out
    assert "r0 | mpi4jax: report (SIGUSR1)" in err, err
    assert "Python is at" in err or "allreduce" in err
    (dumped,) = report.load(tmp_path).values()
    assert dumped["rank"] == 0


@pytest.mark.ranks(1)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_check_of_the_installation(mpirun, ranks):
    result = mpirun(ranks, "-m", "mpi4jax", "--quick", env={"JAX_PLATFORMS": "cpu"})
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(SPECS)} ops, eager and compiled: passed" in result.stdout
    assert "all is well" in result.stdout


@pytest.mark.ranks(1)
def test_the_check_of_the_installation_notices_a_foreign_mpiexec(mpirun):
    env = {"OMPI_COMM_WORLD_SIZE": "4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "mpi4jax", "--quick"]
    result = subprocess.run(
        command,
        env={**environment_outside_mpi(), **env},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 1
    assert "the launcher has started 4 ranks, but each is alone" in result.stdout
