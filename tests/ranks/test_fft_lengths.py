"""Padded Fourier transforms, and cosine and sine transforms, against NumPy and SciPy."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.fft
from reference import RANK, SIZE, enable_x64
from test_fft import LAYOUTS, NORMS, REAL, both, close, numbers, part

from mpi4jax import Layout, fft, notoken


@pytest.fixture(autouse=True)
def _in_double_precision():
    with enable_x64(True):
        yield


# Longer, shorter and equal lengths, of decomposed axes and of others.
LENGTHS = {"slabs": (8, 7, 3), "pencils": (9, 4, 10), "slabs along the last axis": (4, 5, 6)}


@pytest.mark.parametrize("name", LENGTHS)
@both
def test_padded_and_truncated(name, real):
    """The transform is NumPy's; the way back gives the elements that are not beyond `s`."""
    layout, s = LAYOUTS[name], LENGTHS[name]
    forward, inverse = REAL[real]
    x = numbers((2, *layout.shape), np.float64 if real else np.complex128)
    of = np.fft.rfftn if real else np.fft.fftn
    known = np.zeros_like(x)
    inner = (..., *(slice(0, n) for n in s))
    known[inner] = x[inner]

    @jax.jit
    def run(x):
        y = forward(x, layout, s=s, norm="ortho")
        return y, inverse(y, layout, s=s, norm="ortho")

    y, z = run(part(x, layout))
    spectrum = fft.spectral_layout(layout, real=real, s=s)
    close(y, part(of(x, s, axes=(1, 2, 3), norm="ortho"), spectrum))
    close(z, part(known.astype(z.dtype), layout))


def test_convolution_of_a_padded_array():
    """In twice the box, there are no periodic images."""
    layout = LAYOUTS["slabs"]
    x, kernel = numbers(layout.shape), numbers(layout.shape, seed=1)
    s = tuple(2 * n for n in layout.shape)

    @jax.jit
    def run(*blocks):
        one, two = (fft.rfftn(block, layout, s=s) for block in blocks)
        return fft.irfftn(one * two, layout, s=s)

    expected = np.zeros(s)
    for at in np.ndindex(*layout.shape):
        expected[tuple(slice(k, k + n) for k, n in zip(at, x.shape, strict=True))] += kernel[at] * x
    close(run(part(x, layout), part(kernel, layout)), part(expected[inner_of(x)], layout))


def inner_of(x):
    return tuple(slice(0, n) for n in x.shape)


def interpolated(x, shape):
    """A trigonometric polynomial through points, by its sum, at other points."""
    for axis, n in enumerate(shape):
        old = x.shape[axis]
        k = np.fft.fftfreq(old, 1 / old)
        waves = np.exp(2j * np.pi * np.outer(np.arange(n) / n, k))
        if old % 2 == 0:
            waves[:, old // 2] = waves[:, old // 2].real
        matrix = waves @ np.fft.fft(np.eye(old)) / old
        x = np.moveaxis(np.tensordot(matrix, x, (1, axis)), 0, axis)
    return x


@pytest.mark.parametrize("norm", ["backward", "ortho"])
@both
def test_modes_interpolate(real, norm):
    """The 3/2 rule: from few modes to many points, and back, each in one call."""
    few = (6, 5, 4)
    dtype = np.float64 if real else np.complex128
    fine = Layout((9, 8, 6), {0: SIZE})
    coarse = Layout(few, {0: SIZE})
    forward, inverse = REAL[real]
    x, c = numbers(few, dtype), numbers(fine.shape, dtype, 1)
    options = {"modes": few, "norm": norm}

    @jax.jit
    def run(x, c):
        y = forward(x, coarse, norm=norm)
        up = lambda y: inverse(y, fine, **options)
        points, pull = jax.vjp(up, y)
        _, slope = jax.jvp(up, (y,), (2 * y,))
        return y, points, forward(points, fine, **options), pull(c)[0], slope

    y, points, again, cotangent, slope = run(part(x, coarse), part(c, fine))
    expected = interpolated(x, fine.shape)
    close(points, part(expected.real if real else expected, fine))
    close(again, np.asarray(y))
    close(slope, 2 * np.asarray(points))
    # The dot-product test: the sums over all ranks of c * f(y) and pull(c) * y are equal.
    both_sides = np.array([np.sum(part(c, fine) * points), np.sum(cotangent * y)]).real
    total = np.asarray(notoken.allreduce(jnp.asarray(both_sides)))
    np.testing.assert_allclose(total[0], total[1], rtol=1e-12)


def test_modes_of_higher_frequencies_are_dropped():
    """As many complex modes as there are frequencies below the highest, of both signs."""
    fine, few = Layout((10, 9), {0: SIZE}), (7, 5)
    x = numbers(fine.shape, complex)
    y = fft.fftn(part(x, fine), fine, modes=few, norm="forward")
    spectrum = fft.spectral_layout(fine, modes=few)
    kept = [np.fft.fftfreq(m, 1 / m).astype(int) for m in few]
    expected = np.fft.fftn(x, norm="forward")[np.ix_(*kept)]
    close(y, part(expected, spectrum))
    k = fft.frequencies(fine, modes=few, d=[1 / n for n in fine.shape])
    for axis, values in enumerate(k):
        own = kept[axis][spectrum.block(RANK)[axis]]
        np.testing.assert_allclose(values.ravel(), own, atol=1e-9)


# ---- Cosine and sine transforms

PAIRS = {
    "cosine": (fft.dctn, fft.idctn, scipy.fft.dctn, scipy.fft.idctn),
    "sine": (fft.dstn, fft.idstn, scipy.fft.dstn, scipy.fft.idstn),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize(
    "name, dtype",
    [("slabs", "float32"), ("pencils", "complex128"), ("slabs along the last axis", "float64")],
)
def test_cosines_and_sines(kind, name, dtype):
    """Of all types and norms, along decomposed axes and others: values, and the way back."""
    forward, inverse, scipys, _ = PAIRS[kind]
    layout = LAYOUTS[name]
    cases = [
        (type, *case)
        for type, case in itertools.product((1, 2, 3), [(None, None), *list(NORMS.items())[1:]])
    ]
    x = numbers((2, *layout.shape), np.dtype(dtype))

    @jax.jit
    def run(x):
        ys = [forward(x, layout, *case) for case in cases]
        return ys, [inverse(y, layout, *case) for y, case in zip(ys, cases, strict=True)]

    eps = 1e-7 if dtype == "float32" else 1e-14
    for case, y, z in zip(cases, *run(part(x, layout)), strict=True):
        type, axes, norm = case
        known = range(3) if axes is None else axes
        at = [axis % 3 + 1 for axis in known]
        assert y.dtype == z.dtype == np.dtype(dtype)
        spectrum = fft.spectral_layout(layout, axes)
        close(y, part(scipys(x, type, axes=at, norm=norm), spectrum), eps)
        close(z, part(x, layout), eps)


def test_transforms_of_one_point():
    for type, (forward, _, scipys, _) in itertools.product((2, 3), PAIRS.values()):
        layout, x = Layout((1, 3), {1: SIZE}), numbers((1, 3))
        close(forward(part(x, layout), layout, type, (0,)), part(scipys(x, type, axes=[0]), layout))


def test_derivatives_of_cosines_and_sines():
    """The matrix of a transform, and its transpose: by the dot-product test, and along a line."""
    layout = LAYOUTS["pencils"]
    x, c = numbers(layout.shape), numbers(layout.shape, seed=1)

    @jax.jit
    def run(x, c):
        out = []
        for type, kind in itertools.product((1, 2, 3), PAIRS):
            f = functools.partial(PAIRS[kind][0], layout=layout, type=type, natural=True)
            y, pull = jax.vjp(f, x)
            _, t = jax.jvp(f, (x,), (c,))
            out.append([jnp.sum(y * c), jnp.sum(pull(c)[0] * x), jnp.sum(t * x)])
        return notoken.allreduce(jnp.array(out))

    forward, backward, tangent = run(part(x, layout), part(c, layout)).T
    np.testing.assert_allclose(forward, backward, rtol=1e-11, atol=1e-11)
    whole = [
        np.sum(PAIRS[kind][2](c, type) * x) for type, kind in itertools.product((1, 2, 3), PAIRS)
    ]
    np.testing.assert_allclose(tangent, whole, rtol=1e-10, atol=1e-10)


WRONG = [
    (lambda: fft.fftn(1, Layout((3, 4)), s=(3,)), ValueError, r"fftn: argument 's' must be 2 .*"),
    (lambda: fft.fftn(1, Layout((3, 4)), s=(3, 0)), ValueError, r"'s' must be 2 lengths.*\(3, 0\)"),
    (lambda: fft.fftn(1, Layout((3, 4)), s=3), TypeError, r"'s' must be 2 lengths.* got 3"),
    (lambda: fft.rfftn(1, Layout((3, 4)), modes=(3, 1.5)), TypeError, "'modes' must be .*"),
    (lambda: fft.dctn(1, Layout((3, 4)), 4), ValueError, "dctn: argument 'type' must be 1, 2 or 3"),
    (lambda: fft.idctn(1, Layout((3, 1)), 1), ValueError, "'type' is 1, which needs axes of leng"),
    (lambda: fft.dstn(1, Layout((3, 4))), ValueError, r"dstn: argument 'x' has shape \(\)"),
]


@pytest.mark.parametrize("call, kind, words", WRONG, ids=[words for _, _, words in WRONG])
def test_wrong_arguments(call, kind, words):
    with pytest.raises(kind, match=words):
        call()
