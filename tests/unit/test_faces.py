"""Ghost cells that XLA writes: boxes that are side by side are one update."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpi4jax._grid import faces

# Widths of the ghost cells along an axis, and the length of the axis.
AXES = [((1, 1), 5), ((2, 1), 6), ((0, 1), 4)]


def ghosts(widths, shape, corners):
    """The boxes around the inner cells, as the messages of a halo exchange have them."""
    along = [
        [(0, low), (low, n - high), (n - high, n)]
        for (low, high), n in zip(widths, shape, strict=True)
    ]
    for steps in itertools.product(range(3), repeat=len(shape)):
        away = sum(step != 1 for step in steps)
        if away == 1 or (away and corners):
            yield 0, tuple(cells[step] for cells, step in zip(along, steps, strict=True))


@pytest.mark.parametrize("corners", [True, False])
@pytest.mark.parametrize("axes", [AXES[:1], AXES[:2], AXES[1:], AXES, [AXES[0]] * 3])
def test_all_ghost_cells_are_filled_by_as_few_updates_as_a_block_has_faces(axes, corners):
    widths, shape = zip(*axes, strict=True)
    boxes = tuple(ghosts(widths, shape, corners))
    cells = np.arange(faces.cells_in(boxes), dtype=np.float32) + 1
    expected, start = np.zeros(shape, np.float32), 0
    for _, ranges in boxes:
        part = expected[tuple(slice(*cells) for cells in ranges)]
        part[:] = cells[start : start + part.size].reshape(part.shape)
        start += part.size

    def fill(x, cells):
        return faces.filled(boxes, [x], cells)[0]

    x = jnp.zeros(shape, np.float32)
    np.testing.assert_array_equal(fill(x, jnp.asarray(cells)), expected)
    updates = str(jax.make_jaxpr(fill)(x, cells)).count("dynamic_update_slice")
    assert updates == sum(width > 0 for pair in widths for width in pair)
