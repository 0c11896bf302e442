"""The memory of a job stays the same: a short run of soak.py."""

import json
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "soak.py"

# How often, and the bytes that each may keep. What is below the size of one allocation fills tables
# that have a bound; a communicator and its operation have some kilobytes.
PARTS = {"operations": (40_000, 16), "compilations": (100, 4096), "communicators": (100, 8192)}


@pytest.mark.parametrize("part", PARTS)
def test_memory_at_the_half_and_at_the_end(mpirun, tmp_path, part):
    count, kept = PARTS[part]
    file = tmp_path / "soak.json"
    options = [f"--{part}", count, "--only", part, "--ours", "--json", file]
    job = mpirun(2, PROGRAM, *options)
    assert job.returncode == 0, job.stderr
    ((name, times, of_ranks),) = json.loads(file.read_text())
    assert (name, times) == (part, count)
    assert len(of_ranks) == 2
    for (_, *half), (_, *end) in of_ranks:
        allocated, blocks, board = (after - before for before, after in zip(half, end, strict=True))
        assert board == 0
        # JAX and MPI keep some themselves, whatever their number.
        assert blocks < 500 + count // 20, job.stdout
        assert allocated < 32_768 + kept * count // 2, job.stdout
