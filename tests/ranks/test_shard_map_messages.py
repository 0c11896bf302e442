"""How many collectives the steps of `spmd_steps.py` have, as docs/from-shard-map.md says."""

import collections
import functools
import re
from pathlib import Path

import devices
import jax
import pytest
import spmd_steps
from reference import COMM, SIZE

import mpi4jax

PAGE = Path(__file__).parent.parent.parent / "docs" / "from-shard-map.md"


def table(column):
    """What a column of the page says of each step: the number of collectives of each kind."""
    lines = PAGE.read_text().partition("<!-- collectives of steps -->\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines()]
    count = lambda cell: {kind: int(k) for k, kind in re.findall(r"(\d+) `([\w-]+)`", cell)}
    return {row[0]: count(row[column]) for row in rows[2:]}


@pytest.mark.min_ranks(2)
def test_collectives_of_steps():
    mesh, found = mpi4jax.Mesh(axis_names="i", comm=COMM), {}
    for name in spmd_steps.STEPS:
        step = spmd_steps.gradient_step(name, functools.partial(mpi4jax.shard_map, mesh=mesh))
        text = jax.jit(step).lower(*spmd_steps.arguments(name, SIZE, SIZE)).as_text()
        counts = collections.Counter(re.findall(r"custom_call @mpi4jax_(\w+)", text))
        found[name] = {kind: k for kind, k in counts.items() if kind not in ("pack", "unpack")}
    assert found == table(2)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the page has the numbers of JAX 0.12")
@pytest.mark.min_ranks(2)
def test_collectives_of_xla():
    assert devices.on_devices(spmd_steps.__file__, SIZE, sources="spmd*.py") == table(1)
