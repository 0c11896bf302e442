"""Two hosts, network namespaces of one machine, whose link is cut in the middle of an allreduce.

Raw Open MPI waits for ever then, and so does its mpiexec.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mpi4py import MPI

SCRIPT = Path(__file__).resolve().parents[3] / "shared" / "multihost" / "run.sh"

PROGRAM = """
import jax.numpy as jnp
from mpi4py import MPI
import mpi4jax
from mpi4jax import notoken as nt
f = mpi4jax.jit(lambda x: nt.allreduce(x, MPI.MAX))
x = f(jnp.ones(200000)).block_until_ready()
print("started", flush=True)
while True: x = f(x).block_until_ready()
"""


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
@pytest.mark.parametrize("shared", [True, False], ids=["one directory", "a directory per host"])
def test_a_link_that_is_cut(tmp_path, shared):
    if not can_run():
        pytest.skip("needs root, iproute2, Open MPI 5 and ../shared/multihost/run.sh")
    program, log = tmp_path / "program.py", tmp_path / "log"
    program.write_text(PROGRAM)
    prefix = f"mj{os.getpid()}{'s' if shared else 'p'}"
    inside = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_"))}
    env = {
        **inside,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PREFIX": prefix,
        "JAX_PLATFORMS": "cpu",
        "MPI4JAX_TIMEOUT": "2",
    }
    # `hostname` differs between the two: a directory per host, if it is part of the name.
    command = f"MPI4JAX_DUMP_DIR={tmp_path}/{'all' if shared else '$(hostname)'} exec $0 {program}"
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
            cut = [
                "ip",
                "netns",
                "exec",
                f"{prefix}-1",
                "ip",
                "link",
                "set",
                f"{prefix}-v1",
                "down",
            ]
            subprocess.run(cut, check=True)
            status = job.wait(60)
        finally:
            job.terminate()
            job.wait(30)
    text = log.read_text()
    assert status != 0
    assert "r0 | mpi4jax: allreduce #" in text, text
    assert "has not ended after MPI4JAX_TIMEOUT=2 s" in text, text
    if not shared:
        assert (
            "rank 1 is unknown: it has not imported mpi4jax, or does not share this directory"
            in text
        )
