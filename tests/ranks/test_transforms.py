"""Every op under every transformation of JAX, in both APIs, under both jits.

Each pair of op and transformation is checked in one of the four combinations of API and jit, on 1
to 4 ranks in all four. That takes a while: MPI4JAX_TEST_ALL=1 asks for it, as `make table` does to
write docs/transformations.md. Without it a part of the pairs is checked, another one for each
number of ranks.
"""

import pytest
from reference import APIS, EVERYTHING, JITS, SIZE
from subjects import CASES, NotApplicable, Subject, reference, title
from transforms import CHECKS

WAYS = [(api, jit) for api in APIS for jit in ("jax.jit", "mpi4jax.jit")]
# One in so many pairs.
STRIDE = 1 if EVERYTHING else 8 if SIZE == 2 else 12


def cells():
    for row, case in enumerate(CASES):
        for column, name in enumerate(CHECKS):
            if (row + 3 * column + SIZE) % STRIDE == 0:
                api, jit = WAYS[(row + column + SIZE) % len(WAYS)]
                yield pytest.param(row, name, api, jit, id=f"{title(case)}|{name}|{api}|{jit}")


@pytest.mark.parametrize("row, name, api, jit", list(cells()))
def test_cell(row, name, api, jit):
    subject = Subject(CASES[row], api, JITS[jit], reference(row))
    try:
        CHECKS[name](subject)
    except NotApplicable as reason:
        pytest.skip(str(reason))
