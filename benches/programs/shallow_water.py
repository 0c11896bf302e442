"""The shallow-water example on this package and on mpi4jax 0.9.1."""

import re
import subprocess
import sys
from collections.abc import Sequence

from contenders import ROOT, environment
from measurements import HALO, NEW, OLD

import mpirun

EXAMPLE = ROOT / "examples" / "shallow_water.py"


def contenders(old: str | None) -> dict[str, list[str]]:
    """{name: how the example is started}, with 0.9.1 if there is a Python that has it."""
    ours = [sys.executable, str(EXAMPLE)]
    found = {NEW: ours, HALO: [*ours, "--halo"]}
    if old is not None:
        found[OLD] = [old, str(ROOT / "benches" / "programs" / "on_reference.py"), str(EXAMPLE)]
    return found


def seconds_per_step(
    command: list[str], ranks: int, mpiexec: Sequence[str], arguments: Sequence[str]
) -> float:
    python = command[0]
    command = [*command, "--benchmark", *arguments]
    job = subprocess.run(
        [*(mpiexec or [mpirun.find_mpiexec(python)]), "-n", str(ranks), *command],
        env=environment(python),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    found = re.search(r"([\d.]+) steps per second", job.stdout)
    if found is None:
        raise RuntimeError(f"the example printed no speed, but: {job.stdout}")
    return 1 / float(found[1])
