"""Examples in the README and in docs/ run as they stand."""

import re

import pytest
from run_examples import FILES, blocks


@pytest.mark.parametrize(
    "block", [block for file in FILES for block in blocks(file)], ids=lambda block: block.name
)
def test_markdown(mpirun, tmp_path, block):
    file = tmp_path / "example.py"
    file.write_text(block.code)
    job = mpirun(block.ranks, file)
    if absent := re.search(r"No module named '(equinox|flax)'", job.stderr):
        pytest.skip(f"there is no {absent[1]}")
    assert job.returncode == 0, job.stdout + job.stderr
    assert not block.differs(job.stdout), block.differs(job.stdout)
