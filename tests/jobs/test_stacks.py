"""Who looks where Python is, and the signals that serve this, leave programs as they are."""

import re
import signal
import subprocess
import sys
import time

import pytest

from mpirun import environment_outside_mpi

CHURN = """
import sys, threading
import mpi4jax

class Local:
    def __del__(self):
        if threading.get_ident() != main: elsewhere.append(1)

class Context:
    def __enter__(self): return self
    def __exit__(self, *exception): pass

main, elsewhere = threading.get_ident(), []
def deep(n):
    local = Local()
    return 0 if n == 0 else deep(n - 1) + 1
def numbers(n): yield from range(n)

def step():
    def total(*args, **kwargs): return sum(numbers(3)) + len(args)
    with Context(): return deep(5) + total(1, key=2) + max([3, 1], key=lambda v: -v)

print("ready", flush=True)
end = threading.Thread(target=sys.stdin.read)
end.start()
while end.is_alive(): step()
print("deleted by other threads:", len(elsewhere))
"""


@pytest.fixture
def start(tmp_path):
    """Starts a program of one process, until it is ready."""
    jobs = []

    def start(source):
        program = tmp_path / "program.py"
        program.write_text(source)
        env = {**environment_outside_mpi(), "MPI4JAX_DUMP_DIR": str(tmp_path)}
        pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
        err = open(tmp_path / "err", "w+")  # noqa: SIM115
        job = subprocess.Popen([sys.executable, program], env=env, stderr=err, text=True, **pipes)
        jobs.append((job, err))
        assert job.stdout.readline() == "ready\n", (tmp_path / "err").read_text()
        return job, tmp_path / "err"

    yield start
    for job, err in jobs:
        job.kill()
        job.communicate()
        err.close()


def test_who_looks_does_no_harm(start):
    """Also when it comes in the midst of a call of Python's."""
    job, err = start(CHURN)
    for _ in range(2000):
        job.send_signal(signal.SIGUSR1)
        time.sleep(0.002)
    out, _ = job.communicate(timeout=60)
    assert (job.returncode, out) == (0, "deleted by other threads: 0\n")
    assert len(re.findall(r"Python is at .*program.py:\d+", err.read_text())) > 10


def test_programs_wait_for_their_own_threads():
    """Programs that join all threads, or wait until there is one, would wait forever."""
    program = (
        "import threading, mpi4jax; print([t.name for t in threading.enumerate()], end='');"
        "[t.join() for t in threading.enumerate() if t is not threading.main_thread()]"
    )
    job = [sys.executable, "-c", program]
    result = subprocess.run(
        job, env=environment_outside_mpi(), capture_output=True, text=True, timeout=60
    )
    assert (result.stdout, result.returncode) == ("['MainThread']", 0), result.stderr


def test_without_a_thread_all_else_works():
    program = (
        "import _thread, jax\ndef refuse(*_): raise RuntimeError('there is no more')\n"
        "_thread.start_new_thread = refuse\n"
        "from mpi4jax import notoken as nt\nprint(nt.allreduce(1), end='')"
    )
    job = [sys.executable, "-c", program]
    result = subprocess.run(
        job, env=environment_outside_mpi(), capture_output=True, text=True, timeout=60
    )
    assert (result.stdout, result.returncode) == ("1", 0), result.stderr


OWN = "import faulthandler, signal; faulthandler.register(signal.SIGUSR1)\n"
WAITS = "print('ready', flush=True); input()\n"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_program_has_faulthandler_look_at_the_same_signal(start, when):
    job, err = start(
        OWN + "import mpi4jax\n" + WAITS if when == "before" else "import mpi4jax\n" + OWN + WAITS
    )
    job.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + 60
    while not re.search(r"^ +File .*program.py\", line \d+ in <module>$", err.read_text(), re.M):
        assert time.monotonic() < deadline, err.read_text()
        time.sleep(0.1)
    job.communicate("\n", timeout=60)
    assert job.returncode == 0
