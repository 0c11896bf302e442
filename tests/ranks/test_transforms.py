"""Every op under every transformation of JAX, in both APIs, under both jits.

Each pair of op and transformation is checked in one of the four combinations of API and jit, on 1
to 4 ranks in all four. `make table` writes docs/transformations.md of it.
"""

import pytest
from reference import APIS, JITS, SIZE
from subjects import CASES, NotApplicable, Subject, reference, title
from transforms import CHECKS

WAYS = [(api, jit) for api in APIS for jit in ("jax.jit", "mpi4jax.jit")]


def cells():
    for row, case in enumerate(CASES):
        for column, name in enumerate(CHECKS):
            api, jit = WAYS[(row + column + SIZE) % len(WAYS)]
            yield pytest.param(row, name, api, jit, id=f"{title(case)}|{name}|{api}|{jit}")


@pytest.mark.one_in(17)
@pytest.mark.parametrize("row, name, api, jit", list(cells()))
def test_cell(row, name, api, jit):
    subject = Subject(CASES[row], api, JITS[jit], reference(row))
    try:
        CHECKS[name](subject)
    except NotApplicable as reason:
        pytest.skip(str(reason))
