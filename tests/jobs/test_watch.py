"""Timelines, signals, and the check of the installation; what goes wrong is in faults_*.py."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from mpi4py import MPI

from mpi4jax import report, timeline
from mpirun import captured, environment_outside_mpi

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


GROUPS = """
import jax.numpy as jnp
from mpi4py import MPI
from mpi4jax import notoken as nt
world, rank = MPI.COMM_WORLD, MPI.COMM_WORLD.rank
if rank == 1: alone = world.Create_group(world.group.Incl([1]))
first, second = world.Dup(), world.Dup()
if rank == 0: alone = world.Create_group(world.group.Incl([0]))
for i in range(20):
    nt.allreduce(jnp.ones(3), MPI.SUM, comm=first).block_until_ready()
    nt.allreduce(jnp.ones(5, jnp.int32), MPI.MAX, comm=second).block_until_ready()
if rank == 0: nt.allreduce(jnp.ones(3), MPI.SUM, comm=first)
else: nt.allreduce(jnp.ones(4), MPI.SUM, comm=first)
"""


def test_a_communicator_of_a_group_is_no_duplicate(mpirun, tmp_path):
    """Open MPI copies attributes for it. The duplicates around it are told apart, and compared."""
    (tmp_path / "program.py").write_text(GROUPS)
    result = mpirun(2, tmp_path / "program.py")
    assert "MAX" not in result.stderr, result.stderr
    assert re.search(r"rank 0: allreduce #21 \(SUM, 3 x float32\)", result.stderr), result.stderr


@pytest.mark.timeout(300)
def test_signals_print_the_state_and_the_job_goes_on(tmp_path):
    """Also when Python runs, and its stack changes, while it is looked at."""
    program = tmp_path / "program.py"
    says = "    if i == 10: print('in the loop', flush=True)\nprint('the end')\n"
    program.write_text(LOOP.replace("1 - rank", "rank") + says)
    env = {
        **environment_outside_mpi(),
        "MPI4JAX_DUMP_DIR": str(tmp_path),
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, str(program), "100000"]
    with subprocess.Popen(command, env=env, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout.readline() == "in the loop\n"
        for _ in range(40):
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.05)
        out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert "the end" in out
    assert "r0 | mpi4jax: report (SIGUSR1)" in err, err
    assert re.search(r"Python is at .*program.py:\d+", err), err
    assert re.search(r"allreduce #\d+ \(MAX, 100 x float32\)", err), err
    (dumped,) = report.load(tmp_path)[0].values()
    assert dumped["rank"] == 0


ONE = """
import jax.numpy as jnp
from mpi4py import MPI
import mpi4jax
from mpi4jax import notoken as nt
print("sum", nt.allreduce(jnp.ones(()), MPI.SUM))
"""


# What is wrong with shared memory, in a mount namespace of the job's own, and what is said of it.
BROKEN = {
    "missing": (
        "umount -l /dev/shm 2>/dev/null; rmdir /dev/shm 2>/dev/null; true",
        "No such file|",
    ),
    "read-only": ("mount -t tmpfs -o ro none /dev/shm", "Read-only file system"),
    "full": ("mount -t tmpfs -o size=8k none /dev/shm", "No space left on device"),
    "a link": (
        "mount -t tmpfs none /dev/shm; ln -s {other} /dev/shm/mpi4jax-$(id -u)",
        "is a link",
    ),
    "open to others": (
        "mount -t tmpfs none /dev/shm; mkdir -m 777 /dev/shm/mpi4jax-$(id -u)",
        r"is open to others \(mode 0777\)",
    ),
    "another user's": (
        "d=/dev/shm/mpi4jax-$(id -u); mount -t tmpfs m /dev/shm; mkdir -m 700 $d; chown 12345 $d",
        "belongs to user 12345",
    ),
}


@pytest.mark.parametrize("how", [how for how in BROKEN if how != "missing"])
def test_a_job_runs_without_a_board_and_says_why(tmp_path, how):
    change, words = BROKEN[how]
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make namespaces")
    (tmp_path / "program.py").write_text(ONE)
    # Where a link leads to, files look like boards of old jobs.
    (tmp_path / "other").mkdir()
    others = [tmp_path / "other" / f"{number}" for number in range(40)]
    for file in others:
        file.touch()
        os.utime(file, (0, 0))
    change = change.replace("{other}", str(tmp_path / "other"))
    shell = f"{change}; exec {sys.executable} program.py"
    env = {"JAX_PLATFORMS": "cpu", "OMPI_MCA_btl": "self,tcp", "OMPI_MCA_pml": "ob1"}
    command = ["unshare", "-m", "sh", "-c", shell]
    result = captured(2, command, cwd=tmp_path, time_limit=100, env=env)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("sum 2.0") == 2
    assert all(file.exists() for file in others)
    lines = re.findall(rf"r0 \| mpi4jax: no board in /dev/shm/.*{words}", result.stderr)
    assert len(lines) == result.stderr.count("mpi4jax: no board") == 1, result.stderr


HANGS = """
import jax, jax.numpy as jnp, sys, time
from mpi4py import MPI
from mpi4jax import notoken as nt
if MPI.COMM_WORLD.rank == int(sys.argv[1]):
    jax.block_until_ready(nt.recv(jnp.ones(3), 1 - int(sys.argv[1]), tag=3, comm=MPI.COMM_WORLD))
time.sleep(60)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_without_a_board_leaves_its_report(tmp_path, rank):
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make namespaces")
    (tmp_path / "program.py").write_text(HANGS)
    (tmp_path / "reports").mkdir()
    shell = f"{BROKEN['full'][0]}; exec {sys.executable} program.py {rank}"
    env = {"JAX_PLATFORMS": "cpu", "OMPI_MCA_btl": "self,tcp", "OMPI_MCA_pml": "ob1"}
    env |= {"MPI4JAX_TIMEOUT": "2", "MPI4JAX_DUMP_DIR": str(tmp_path / "reports")}
    command = ["unshare", "-m", "sh", "-c", shell]
    result = captured(2, command, cwd=tmp_path, time_limit=50, env=env)
    (file,) = (tmp_path / "reports").glob("*/*/report.txt")
    assert f"this report: {file}" in result.stderr
    assert f"rank {rank} is in recv from {1 - rank}, tag 3" in file.read_text()


def boards_with(program):
    """Return the boards that name a program, and are newer than the program."""
    boards, start = [], program.stat().st_mtime
    for path in report._native.board_place().iterdir():
        with contextlib.suppress(FileNotFoundError):  # of another job, which has ended meanwhile
            if program.name.encode() in path.read_bytes() and path.stat().st_mtime > start:
                boards.append(path)
    return boards


def test_the_board_is_this_users_alone_and_goes_with_the_job(mpirun, tmp_path):
    program = tmp_path / "leaves_no_board.py"
    program.write_text(
        ONE + "from mpi4jax import _native\n"
        "place = _native.board_place()\n"
        "for path in (place, *place.iterdir()):\n"
        # A board of another job may have been removed meanwhile.
        "    try: print(path, oct(path.stat().st_mode), flush=True)\n"
        "    except FileNotFoundError: pass\n"
        "mpi4jax.flush(); nt.barrier(); mpi4jax.flush()\n"
    )
    result = mpirun(2, program, env={"JAX_PLATFORMS": "cpu", "MPI4JAX_DUMP_DIR": str(tmp_path)})
    assert result.returncode == 0, result.stderr
    assert set(re.findall(r"mpi4jax-\d+ 0o(\d+)", result.stdout)) == {"40700"}, result.stdout
    assert set(re.findall(r"mpi4jax-\d+/\S+ 0o(\d+)", result.stdout)) == {"100600"}
    assert not boards_with(program), "a job that ends leaves nothing"


KILLED = """
import os, signal, time
import jax, jax.numpy as jnp
from mpi4py import MPI
from mpi4jax import notoken as nt
comm, x = MPI.COMM_WORLD, jnp.ones(3)
for _ in range(3): x = nt.allreduce(x, op=MPI.MAX).block_until_ready()
last = jax.jit(lambda x: nt.allreduce(x)).lower(x).compile()
comm.Barrier()
# The other rank calls its next operation meanwhile, and does not have to compile it.
if comm.rank == 1: time.sleep(4); os.kill(os.getpid(), signal.SIGKILL)
last(x).block_until_ready()
"""


def test_what_a_killed_rank_did_last_is_read_from_the_board(mpirun, tmp_path, capsys):
    (tmp_path / "killed_by_itself.py").write_text(KILLED)
    env = {"JAX_PLATFORMS": "cpu", "MPI4JAX_DUMP_DIR": str(tmp_path)}
    result = mpirun(2, tmp_path / "killed_by_itself.py", env=env)
    assert result.returncode != 0
    (board,) = boards_with(tmp_path / "killed_by_itself.py")
    dumps, wrong = report.load(board)
    assert wrong == []
    last = dumps[1]["records"][-1]
    assert last["text"].startswith("allreduce #3 (MAX, 3 x float32) on mpi4jax.default, killed")
    assert "has died; the last one was allreduce #3" in dumps[1]["state"]
    assert "rank 1 never called the collective of rank 0" in report.report(dumps)
    board.unlink()


CONTAINERS = """
import os, time
import jax, jax.numpy as jnp
from mpi4py import MPI
import mpi4jax
from mpi4jax import notoken as nt
comm, x = MPI.COMM_WORLD, jnp.ones(3)
jax.block_until_ready(nt.allreduce(x, MPI.SUM, comm=comm))
if comm.rank == 1: time.sleep(8)
jax.block_until_ready(nt.allreduce(x, MPI.SUM, comm=comm))
print("process", os.getpid(), "ends", flush=True)
"""


def test_ranks_in_containers_of_one_host_name_are_not_taken_for_gone(tmp_path):
    """Each has a number that means nothing, or another process, to the others."""
    isolated = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*isolated, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make namespaces")
    program = tmp_path / "program.py"
    program.write_text(CONTAINERS)
    env = {
        "JAX_PLATFORMS": "cpu",
        "MPI4JAX_DUMP_DIR": str(tmp_path),
        "MPI4JAX_REPORT_AFTER": "2",
        # Open MPI names its shared memory by process numbers too.
        "OMPI_MCA_btl": "self,tcp",
        "MPIR_CVAR_NOLOCAL": "1",
    }
    command = [*isolated, sys.executable, str(program)]
    result = captured(2, command, cwd=tmp_path, time_limit=100, env=env)
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    assert output.count("process 1 ends") == 2, output
    assert "gone" not in output, output
    if "Open MPI" in MPI.Get_library_version():
        assert re.search("s: rank 1 is in no operation; .*Python is at .*program.py:9", output), (
            output
        )


REPORTED = """
import os, signal, time
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")))
os.environ["MPI4JAX_TEST_HOST"] = f"host{rank // 2}"
import jax.numpy as jnp
from mpi4jax import notoken as nt
nt.allreduce(jnp.ones(3)).block_until_ready()
if rank == 1:
    # Until all others are in their next operation.
    for _ in range(3):
        time.sleep(3)
        os.kill(os.getpid(), signal.SIGUSR1)
nt.allreduce(jnp.ones(3)).block_until_ready()
"""


def test_each_rank_of_a_host_may_be_asked_for_a_report_of_all_hosts(run_job, tmp_path):
    """Ranks of one host have one board: these are of two."""
    (tmp_path / "program.py").write_text(REPORTED)
    env = {"JAX_PLATFORMS": "cpu"}
    result = run_job(4, "program.py", cwd=tmp_path, env=env)
    assert result.returncode == 0, result.stderr
    assert "r1 | mpi4jax: report (SIGUSR1)" in result.stderr, result.stderr
    assert "ranks 0, 2-3 are in allreduce #2" in result.stderr, result.stderr


def test_timelines_of_a_job_that_is_ended_are_kept(mpirun, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        ONE + "import time\n"
        "for _ in range(4): nt.barrier()\n"
        "mpi4jax.flush()\n"
        "time.sleep(3)\n"
        "if MPI.COMM_WORLD.rank == 1:\n"
        "    with mpi4jax.time_limit(4): nt.recv(jnp.ones(3), 0).block_until_ready()\n"
        "time.sleep(60)\n"
    )
    env = {
        "MPI4JAX_TRACE": str(tmp_path / "trace.json"),
        "JAX_PLATFORMS": "cpu",
        "MPI4JAX_DUMP_DIR": str(tmp_path),
    }
    result = mpirun(2, program, env=env)
    assert result.returncode != 0
    for rank in range(2):
        events = timeline.load(tmp_path / f"trace.{rank}.json")
        names = [event["name"] for event in events if event["ph"] == "X"]
        assert names[:5] == ["allreduce", *["barrier"] * 4], result.stderr
