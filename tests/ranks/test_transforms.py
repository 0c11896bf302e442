"""Every op under every transformation of JAX, in both APIs; and started.

Each pair of op and transformation is checked in one of the APIs, on 1 and 2 ranks in both. A run
takes each transformation and each op once or twice. `make table` runs all of
them, and writes the table in docs/autodiff.md.
"""

import jax
import pytest
from reference import APIS, SIZE, Started
from test_overlap import started
from transformed_ops import CASES, NotApplicable, Subject, reference, title
from transforms import CHECKS

OTHERS = pytest.mark.one_in(2**33)  # none, but with -k or MPI4JAX_TEST_ALL


def cells(rows, apis):
    for row in rows:
        for column, name in enumerate(CHECKS):
            api = apis[(row + column + SIZE) % len(apis)]
            marks = () if row == rows[5 * column % len(rows)] else OTHERS
            yield pytest.param(row, name, api, id=f"{title(CASES[row])}|{name}|{api}", marks=marks)


def check(row, name, api):
    try:
        # In half of the cells, JAX checks the types of all that it makes.
        with jax.enable_checks((row + list(CHECKS).index(name)) % 2 == 0):
            api = Started() if api == "started" else api
            CHECKS[name](Subject(CASES[row], api, jax.jit, reference(row)))
    except NotApplicable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("row, name, api", list(cells(range(len(CASES)), APIS)))
def test_cell(row, name, api):
    check(row, name, api)


STARTED = [CASES.index(case) for case in started(CASES)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("row, name, api", list(cells(STARTED, ["started"])))
def test_started(row, name, api):
    check(row, name, api)
