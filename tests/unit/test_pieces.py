"""Pieces of blocks in messages: many equal ones are packed by a transpose, and not one by one."""

import itertools

import jax
import numpy as np
import pytest

from mpi4jax._numerics import layout as layout_module
from mpi4jax._numerics.layout import Layout, Pieces
from mpi4jax._numerics.local_fft import local_fft

SHAPE = (6, 7, 4)
# Equal, unequal and empty pieces; axes in the order of the ranks, and in the other order.
LAYOUTS = [
    Layout(SHAPE, {0: 3}),
    Layout(SHAPE, {1: 7}),
    Layout(SHAPE, {2: 5}),
    Layout(SHAPE, {0: 4, 1: 3}),
    Layout(SHAPE, {1: 3, 0: 4}),
    Layout(SHAPE, {2: [1, 3], 0: [2, 1, 3]}),
    Layout(SHAPE, {0: 2, 1: 2, 2: 2}),
    Layout.on_grid(SHAPE, (2, 3, 2), [(0, 2), (1,), ()]),
    Layout.on_grid(SHAPE, (2, 3, 2), [(1,), (2, 0), ()]),
]


@pytest.fixture
def none_are_few(monkeypatch):
    monkeypatch.setattr(layout_module, "FEW", 0)


def one_by_one(pieces, x):
    each = [x]
    for axis, lengths in enumerate(pieces.lengths):
        ends = np.cumsum(lengths)[:-1]
        each = [part for piece in each for part in np.split(piece, ends, axis)]
    return np.concatenate([np.ravel(each[k]) for k in np.argsort(pieces.ranks)])


def test_pieces_are_packed_as_one_by_one(none_are_few):
    seen = set()
    for k, (old, new) in enumerate(itertools.product(LAYOUTS, repeat=2)):
        block = old.block(k % old.ranks)
        if any(s.stop == s.start for s in block):
            continue
        pieces = Pieces.of((2,) * (k % 2), block, new)
        x = np.arange(np.prod(pieces.shape), dtype=np.float32).reshape(pieces.shape)
        both = jax.jit(lambda x: (y := pieces.pack(x), pieces.unpack(y)))  # noqa: B023
        packed, back = both(x)
        np.testing.assert_array_equal(packed, one_by_one(pieces, x))
        np.testing.assert_array_equal(back, x)
        seen.add((pieces.split_axes is None, len(pieces.ranks) > 1))
    # With and without a transpose.
    assert seen >= {(False, True), (True, True)}


def instructions(f, *shapes):
    compiled = jax.jit(f).lower(*(jax.ShapeDtypeStruct(s, np.complex64) for s in shapes)).compile()
    return sum(" = " in line for line in compiled.as_text().splitlines())


@pytest.mark.parametrize("ranks", [64, 48], ids=["equal", "unequal"])
def test_programs_do_not_grow_with_the_number_of_pieces(ranks):
    """The message of a redistribution and of an FFT, of slabs and of four times as many slabs."""

    def counts(ranks):
        slabs, columns = (Layout((1024, 1024, 8), {axis: ranks}) for axis in (0, 1))
        incoming = Pieces.of((), columns.block(ranks // 2), slabs)
        outgoing = Pieces.of((), slabs.block(ranks // 2), columns)
        message = (np.prod(outgoing.shape),)
        fft = lambda x: local_fft(x, outgoing, (2,), outgoing, False)
        return (
            instructions(outgoing.pack, outgoing.shape),
            instructions(incoming.unpack, message),
            instructions(fft, message),
        )

    few, many = counts(ranks), counts(4 * ranks)
    assert max(few[:2]) < 20
    assert few[2] < 400  # with JAX 0.12 330, with JAX 0.10 fewer than 300
    assert all(b <= a + 10 for a, b in zip(few, many, strict=True)), (few, many)
