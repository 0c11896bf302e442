"""Ghost cells that XLA writes or adds: the boxes at one side of a block are one update."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpi4jax._grid import faces

# Widths of the ghost cells along an axis, and the length of the axis.
AXES = [((1, 1), 5), ((2, 1), 6), ((0, 1), 4)]


def ghosts(widths, shape, corners):
    """The cells around the inner ones, as the messages of a halo exchange have them."""
    along = [
        [(0, low), (low, n - high), (n - high, n)]
        for (low, high), n in zip(widths, shape, strict=True)
    ]
    for steps in itertools.product(range(3), repeat=len(shape)):
        away = sum(step != 1 for step in steps)
        if away == 1 or (away and corners):
            box = 0, tuple(cells[step] for cells, step in zip(along, steps, strict=True))
            yield 0, tuple(step - 1 for step in steps), box


def cells_of(boxes, shape):
    """Cells of boxes, one after the other, and their sum in an array of this shape."""
    cells, expected = [], np.zeros(shape, np.float32)
    for _, ranges in boxes:
        part = expected[tuple(slice(*along) for along in ranges)]
        cells.append(np.arange(part.size, dtype=np.float32) + 7 * len(cells) + 1)
        part += cells[-1].reshape(part.shape)
    return np.concatenate(cells), expected


@pytest.mark.parametrize("corners", [True, False])
@pytest.mark.parametrize("axes", [AXES[:1], AXES[:2], AXES[1:], AXES, [AXES[0]] * 3])
def test_all_ghost_cells_are_filled_by_as_few_updates_as_a_block_has_faces(axes, corners):
    widths, shape = zip(*axes, strict=True)
    boxes = tuple(box for *_, box in ghosts(widths, shape, corners))
    cells, expected = cells_of(boxes, shape)

    def fill(x, cells):
        return faces.filled(boxes, [x], cells)[0]

    x = jnp.zeros(shape, np.float32)
    np.testing.assert_array_equal(fill(x, jnp.asarray(cells)), expected)
    updates = str(jax.make_jaxpr(fill)(x, cells)).count("dynamic_update_slice")
    assert updates == sum(width > 0 for pair in widths for width in pair)


@pytest.mark.parametrize("corners", [True, False])
@pytest.mark.parametrize("axes", [AXES[:1], AXES[:2], AXES])
def test_cells_are_added_by_as_few_updates_as_a_block_has_faces(axes, corners):
    """The cells of neighbors at an edge or a corner are part of the update of a face."""
    widths, shape = zip(*axes, strict=True)
    found = []
    for peer, steps, (leaf, ranges) in ghosts(widths, shape, corners):
        inner = [
            (0, n) if step == 0 else at for step, at, n in zip(steps, ranges, shape, strict=True)
        ]
        found.append((peer, steps, (leaf, tuple(inner))))
    cells, expected = cells_of([box for *_, box in found], shape)

    def add(x, cells):
        return faces.added(tuple(found), [x], cells)[0]

    x = jnp.ones(shape, np.float32)
    np.testing.assert_array_equal(add(x, jnp.asarray(cells)), expected + 1)
    updates = str(jax.make_jaxpr(add)(x, cells)).count("dynamic_update_slice")
    assert updates <= 2 * len(shape)
