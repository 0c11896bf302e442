"""Examples in the README and in docs/ run as they stand."""

import re
import subprocess

import pytest
from run_examples import FILES, ROOT, blocks

# How many examples a job runs, one after the other: half of their time would be the start of jobs.
TOGETHER = 8

# Each example as a program of its own, which prints into a file of its own.
PROGRAM = """
import contextlib, sys
from pathlib import Path
from mpi4py import MPI
import jax
for name in sys.argv[1:]:
    path = Path(name)
    with open(f"{name}.{MPI.COMM_WORLD.rank}", "w") as file, contextlib.redirect_stdout(file):
        exec(compile(path.read_text(), name, "exec"), {"__name__": "__main__"})
    jax.config.update("jax_enable_x64", False)
"""


OPTIONAL = re.compile(
    r"^ *(?:import|from) (diffrax|equinox|flax|optimistix|pyamg|xarray)\b", re.MULTILINE
)


def is_ordinary(block):
    """Whether an example runs beside others, in the environment that all have."""
    of_its_own = re.search(r"jax_num_cpu_devices|jax\.distributed|__main__", block.code)
    special = of_its_own or OPTIONAL.search(block.code)
    return not (special or block.status or block.env or block.errors)


def jobs():
    """Lists of examples: those that a job runs."""
    every = [block for file in FILES for block in blocks(file)]
    alone = [[block] for block in every if not is_ordinary(block)]
    of_ranks = {block.ranks: [] for block in every}
    for block in filter(is_ordinary, every):
        of_ranks[block.ranks].append(block)
    return alone + [
        found[start : start + TOGETHER]
        for found in of_ranks.values()
        for start in range(0, len(found), TOGETHER)
    ]


@pytest.mark.timeout(250)
@pytest.mark.parametrize("together", jobs(), ids=lambda found: found[0].name)
def test_markdown(mpirun, tmp_path, together):
    if len(together) == 1:
        (block,) = together
        for package in OPTIONAL.findall(block.code):
            pytest.importorskip(package)
        (tmp_path / block.program).write_text(block.code)
        job = mpirun(
            block.ranks, block.program, env=block.env, fork=block.status == 0, time_limit=220
        )
        assert not block.differs(job), block.differs(job)
        return
    (tmp_path / "program.py").write_text(PROGRAM)
    for block in together:
        (tmp_path / block.name).write_text(block.code)
    job = mpirun(
        together[0].ranks, "program.py", *[block.name for block in together], time_limit=200
    )
    assert job.returncode == 0, job.stderr
    for block in together:
        printed = [(tmp_path / f"{block.name}.{rank}").read_text() for rank in range(block.ranks)]
        one = subprocess.CompletedProcess(block.command, 0, "".join(printed), job.stderr)
        assert not block.differs(one), f"{block.name}: {block.differs(one)}"


def test_notebooks(mpirun):
    """Each cell prints what the notebook shows below it."""
    job = mpirun(1, str(ROOT / "docs" / "notebooks.py"))
    assert job.returncode == 0, job.stdout + job.stderr
