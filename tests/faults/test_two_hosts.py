"""Two hosts: network namespaces of one machine.

Where their link is cut in the middle of an allreduce, raw Open MPI waits for ever, and so does its
mpiexec.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mpi4py import MPI

SCRIPT = Path(__file__).resolve().parents[3] / "shared" / "multihost" / "run.sh"

PROGRAM = """
import sys, time
import jax.numpy as jnp
from mpi4py import MPI
import mpi4jax
from mpi4jax import notoken as nt
f = mpi4jax.jit(lambda x: nt.allreduce(x, MPI.MAX))
x = f(jnp.ones(200000)).block_until_ready()
print("started", flush=True)
if sys.argv[1] == "elsewhere" and MPI.COMM_WORLD.rank == 1: time.sleep(60)
while True: x = f(x).block_until_ready()
"""

# What goes wrong, whether the hosts see one directory, and what rank 0 says of rank 1.
CASES = [
    ("cut", True, r"ranks 0-1 are in allreduce #\d+ |rank 1 is in allreduce #\d+ "),
    ("cut", False, "rank 1 is silent: it does not answer over MPI"),
    ("elsewhere", False, r"rank 1 is in no operation; .*Python is at .*program.py:10"),
]


def can_run():
    return (
        SCRIPT.exists()
        and os.getuid() == 0
        and shutil.which("ip")
        and MPI.get_vendor()[0] == "Open MPI"
        and MPI.get_vendor()[1] >= (5,)
        and subprocess.run(["ip", "netns", "add", "mpi4jax-probe"], capture_output=True).returncode
        == 0
        and subprocess.run(["ip", "netns", "del", "mpi4jax-probe"], check=False).returncode == 0
    )


@pytest.mark.ranks(1)
@pytest.mark.parametrize("fault, shared, says", CASES)
def test_two_hosts(tmp_path, fault, shared, says):
    if not can_run():
        pytest.skip("needs root, iproute2, Open MPI 5 and ../shared/multihost/run.sh")
    program, log = tmp_path / "program.py", tmp_path / "log"
    program.write_text(PROGRAM)
    prefix = f"mj{os.getpid()}{fault[0]}{'s' if shared else 'p'}"
    outer = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_"))}
    env = {
        **outer,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PREFIX": prefix,
        "JAX_PLATFORMS": "cpu",
        "MPI4JAX_TIMEOUT": "2",
    }
    # `hostname` differs between the two: a directory per host, if it is part of the name.
    directory = tmp_path / ("all" if shared else "$(hostname)")
    command = f"MPI4JAX_DUMP_DIR={directory} exec $0 {program} {fault}"
    exported = ["-x", "PATH", "-x", "JAX_PLATFORMS", "-x", "MPI4JAX_TIMEOUT"]
    if "PYTHONPATH" in env:
        exported += ["-x", "PYTHONPATH"]
    with open(log, "w") as output:
        job = subprocess.Popen(
            ["bash", SCRIPT, "1", *exported, "sh", "-c", command, sys.executable],
            env=env,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + 60
            while log.read_text().count("started") < 2 and time.monotonic() < deadline:
                assert job.poll() is None, log.read_text()
                time.sleep(0.1)
            if fault == "cut":
                inside = ["ip", "netns", "exec", f"{prefix}-1"]
                subprocess.run([*inside, "ip", "link", "set", f"{prefix}-v1", "down"], check=True)
            status = job.wait(60)
        finally:
            job.terminate()
            job.wait(30)
    text = log.read_text()
    assert status != 0
    assert "r0 | mpi4jax: allreduce #" in text, text
    assert "has not ended after MPI4JAX_TIMEOUT=2 s" in text, text
    (report,) = re.findall(r"^r0 \| mpi4jax: .*\n(?:  .*\n)+", text, re.MULTILINE)
    assert re.search(says, report), text
