"""Every op under every transformation of JAX, in both APIs, under both jits.

Each pair of op and transformation is checked in one of the four combinations of API and jit, on 1
to 4 ranks in all four. That takes a while: MPI4JAX_TEST_ALL=1 asks for it, as `make table` does to
write docs/transformations.md. Without it a part of the pairs is checked, another one for each
number of ranks.
"""

import os
from pathlib import Path

import pytest
from oracle import APIS, SIZE
from transforms import CHECKS, JITS, ROWS, NotApplicable, Subject, reference, title

WAYS = [(api, jit) for api in APIS for jit in JITS]
# One in so many pairs.
STRIDE = 1 if os.environ.get("MPI4JAX_TEST_ALL") == "1" else 8 if SIZE == 2 else 12
TABLE = Path(__file__).parent.parent.parent / "docs" / "transformations.md"


def cells():
    for row, case in enumerate(ROWS):
        for column, name in enumerate(CHECKS):
            if (row + 3 * column + SIZE) % STRIDE == 0:
                api, jit = WAYS[(row + column + SIZE) % len(WAYS)]
                yield pytest.param(row, name, api, jit, id=f"{title(case)}|{name}|{api}|{jit}")


@pytest.mark.parametrize("row, name, api, jit", list(cells()))
def test_cell(row, name, api, jit):
    subject = Subject(ROWS[row], api, JITS[jit], reference(row))
    try:
        CHECKS[name](subject)
    except NotApplicable as reason:
        pytest.skip(str(reason))


@pytest.mark.ranks(1)
def test_table_is_complete():
    """The documentation has a row for each transformation, and a column for each op."""
    rows = [line.split("|")[1:-1] for line in TABLE.read_text().splitlines() if line[:1] == "|"]
    header, _, *body = [[cell.strip() for cell in row] for row in rows]
    assert header[1:] == [title(case) for case in ROWS], "run `make table`"
    assert [row[0] for row in body] == list(CHECKS), "run `make table`"
    assert {cell for row in body for cell in row[1:]} <= {"yes", "-"}
