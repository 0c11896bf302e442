"""Examples in the README and in docs/ run as they stand."""

import re

import pytest
from run_examples import FILES, blocks


@pytest.mark.parametrize(
    "block", [block for file in FILES for block in blocks(file)], ids=lambda block: block.name
)
def test_markdown(mpirun, tmp_path, block):
    (tmp_path / block.program).write_text(block.code)
    job = mpirun(block.ranks, block.program, env=block.env, fork=block.status == 0)
    if absent := re.search(r"No module named '(equinox|flax)'", job.stderr):
        pytest.skip(f"there is no {absent[1]}")
    assert not block.differs(job), block.differs(job)
