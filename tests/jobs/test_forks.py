"""What stands for a rank has the files that its launcher opened for it, and compiles no program
that another rank compiles (tests/forks).
"""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

FORKS = Path(__file__).parent.parent / "forks"
CLIENT = FORKS / "client.py"

# A POSIX shell knows descriptors of one digit only. The server's own have the same numbers.
NUMBERS = range(3, 10)
OPEN_THEM = "".join(f"exec {n}>&1; " for n in NUMBERS) + 'exec "$@"'
PROGRAM = f"""
import gc, os
gc.collect()
for number in {list(NUMBERS)}: os.write(number, str(number).encode())
"""


def test_descriptors_stay_open(fork_server):
    client = [sys.executable, "-I", "-S", CLIENT, fork_server, "-c", PROGRAM]
    result = subprocess.run(
        ["sh", "-c", OPEN_THEM, "sh", *client], capture_output=True, text=True, timeout=60
    )
    assert (result.stdout, result.stderr) == ("3456789", "")


def test_they_end_with_the_server(tmp_path):
    server = subprocess.Popen([sys.executable, FORKS / "server.py", tmp_path / "socket"])
    while not (tmp_path / "socket").exists():
        assert server.poll() is None
        time.sleep(0.02)
    program = "import time; print('runs', flush=True); time.sleep(1000)"
    command = [sys.executable, "-I", "-S", CLIENT, tmp_path / "socket", "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout.readline() == "runs\n"
        server.kill()
        server.wait()
        client.kill()
        # Its end, when nobody has it open.
        assert client.stdout.read() == ""


COMPILES = """
import sys
import jax
from jax import monitoring
events = []
monitoring.register_event_listener(lambda name, **_: events.append(name.split("/")[-1]))
jax.jit(lambda x: x * float(sys.argv[1])).lower(1.0).compile()
print(*(event for event in events if event in ("cache_hits", "cache_misses")))
"""


@pytest.mark.skipif("MPI4JAX_TEST_COMPILED" not in os.environ, reason="each rank compiles here")
def test_one_rank_compiles_for_all(mpirun):
    job = mpirun(3, "-c", COMPILES, random.random())  # a program that no run has compiled
    assert sorted(job.stdout.split()) == ["cache_hits", "cache_hits", "cache_misses"], job.stderr
