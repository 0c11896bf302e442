"""Every op under every transformation of JAX, in both APIs; and started.

Each pair of op and transformation is checked in one of the APIs, on 1 and 2 ranks in both.
`make table` writes docs/transformations.md of it.
"""

import jax
import pytest
from reference import APIS, SIZE, Started
from test_overlap import started
from transformed_ops import CASES, NotApplicable, Subject, reference, title
from transforms import CHECKS


def cells():
    for row, case in enumerate(CASES):
        for column, name in enumerate(CHECKS):
            api = APIS[(row + column + SIZE) % len(APIS)]
            yield pytest.param(row, name, api, id=f"{title(case)}|{name}|{api}")


def check(row, name, api):
    try:
        CHECKS[name](Subject(CASES[row], api, jax.jit, reference(row)))
    except NotApplicable as reason:
        pytest.skip(str(reason))


@pytest.mark.one_in(17)
@pytest.mark.parametrize("row, name, api", list(cells()))
def test_cell(row, name, api):
    check(row, name, api)


@pytest.mark.one_in(61)
@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("row", [CASES.index(case) for case in started(CASES)])
def test_started(row, name):
    check(row, name, Started())
