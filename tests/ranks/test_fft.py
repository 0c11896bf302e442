"""`mpi4jax.redistribute` and `mpi4jax.fft` on slabs, pencils and blocks, against NumPy."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI
from reference import JITS, RANK, SIZE, assert_equal, each, enable_x64

from mpi4jax import Layout, fft, redistribute
from mpi4jax._numerics import layout as layout_module, local_fft

PAIR = MPI.Compute_dims(SIZE, 2)
# Global shapes and cuts: slabs, pencils and blocks, unequal, empty, and on fewer ranks.
LAYOUTS = {
    "slabs": Layout((5, 7, 6), {0: SIZE}),
    "slabs along the last axis": Layout((4, 3, 9), {-1: SIZE}),
    "pencils": Layout((6, 5, 7), dict(enumerate(PAIR))),
    "pencils the other way": Layout((5, 4, 7), {2: PAIR[0], 1: PAIR[1]}),
    "blocks": Layout((7, 6), dict(enumerate(PAIR))),
    "a thin array": Layout((2, 2), {0: SIZE}),
    "one rank": Layout((3, 4)),
    "four axes": Layout((3, 4, 2, 1), {1: PAIR[0], 2: PAIR[1]}),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
REAL = {False: (fft.fftn, fft.ifftn), True: (fft.rfftn, fft.irfftn)}
both = pytest.mark.parametrize("real", REAL, ids=["fft", "rfft"])


@pytest.fixture(autouse=True)
def _in_double_precision():
    with enable_x64(True):
        yield


@pytest.fixture
def tiles(monkeypatch, request):
    """As large arrays do it, in tiles; but in the cases named rfft, as on many ranks."""
    monkeypatch.setattr(local_fft, "TILE", 8)
    if "rfft" not in request.node.name:
        monkeypatch.setattr(layout_module, "FEW", 1)


def numbers(shape, dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    real, imaginary = rng.normal(size=(2, *shape))
    return (real + 1j * imaginary if np.issubdtype(dtype, np.complexfloating) else real).astype(
        dtype
    )


def part(whole, layout):
    return whole[(..., *layout.block(RANK))]


def close(actual, expected, eps=1e-13):
    assert actual.shape == expected.shape
    scale = max(1, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=0, atol=100 * eps * scale)


# ---- Layouts


@layouts
def test_blocks_are_those_of_array_split(layout):
    whole = np.arange(np.prod(layout.shape)).reshape(layout.shape)
    blocks = [whole]
    for axis, parts in layout.cuts:
        blocks = [p for block in blocks for p in np.array_split(block, parts, axis)]
    assert layout.blocks == len(blocks)
    for rank, block in enumerate(blocks):
        assert_equal(whole[layout.block(rank)], block)
        assert layout.block_shape(rank) == block.shape
    assert layout.block_shape(layout.blocks) == (0,) * whole.ndim


def cuts_of(shape):
    yield from ({}, {0: SIZE}, {-1: SIZE}, {0: PAIR[0], 1: PAIR[1]}, {1: PAIR[0], 0: PAIR[1]})
    if len(shape) > 2:
        yield {2: PAIR[0], 0: PAIR[1]}


@pytest.mark.parametrize("shape, jit", [((2, 3), lambda f: f), ((4, 3, 5), jax.jit)], ids=JITS)
def test_redistribute(shape, jit):
    whole = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
    for a in cuts_of(shape):
        source = Layout(shape, a)
        targets = [Layout(shape, b) for b in cuts_of(shape)]
        ys = jit(lambda x, s=source, t=targets: [redistribute(x, s, u) for u in t])(
            part(whole, source)
        )
        for target, y in zip(targets, ys, strict=True):
            assert_equal(y, part(whole, target))


@pytest.mark.one_in(2)
@layouts
def test_transformations_of_redistribute(layout):
    target = Layout(layout.shape, {1: SIZE})
    x, c = numbers((2, 3, *layout.shape)), numbers((2, 3, *layout.shape), seed=1)
    f = jax.checkpoint(lambda x: redistribute({"x": x}, layout, target)["x"] ** 2)
    mine = part(x, layout)
    batched = jax.jit(jax.vmap(f, 1, 1))(mine)
    assert_equal(batched, part(x**2, target))
    _, forward = jax.jvp(f, (mine,), (part(c, layout),))
    close(forward, part(2 * x * c, target))
    (back,) = jax.jit(lambda x, c: jax.vjp(f, x)[1](c))(mine, part(c, target))
    close(back, part(2 * x * c, layout))


# ---- Transforms


def reference(real, axes=None, norm=None):
    return functools.partial(np.fft.rfftn if real else np.fft.fftn, axes=axes, norm=norm)


@pytest.mark.one_in(2)
@layouts
@both
@pytest.mark.usefixtures("tiles")
def test_transform_and_back(layout, real):
    forward, inverse = REAL[real]
    x = numbers((2, *layout.shape), np.float64 if real else np.complex128)
    expected = reference(real, range(1, x.ndim))(x)

    @jax.jit
    def run(x):
        ys = [forward(x, layout, natural=natural) for natural in (False, True)]
        return ys, [inverse(y, layout, natural=k > 0) for k, y in enumerate(ys)]

    ys, zs = run(part(x, layout))
    for natural, y, z in zip((False, True), ys, zs, strict=True):
        spectrum = fft.spectral_layout(layout, real=real, natural=natural)
        assert not natural or spectrum.cuts == layout.cuts
        close(y, part(expected, spectrum))
        close(z, part(x, layout))


NORMS = {(0,): "ortho", (1, 2): "forward", (-1, 0): "backward", (2, 0, 1): "ortho"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("axes, norm", NORMS.items(), ids=str)
@pytest.mark.parametrize("name", ["slabs", "slabs along the last axis", "pencils"])
def test_axes_and_norms(name, axes, norm):
    layout = LAYOUTS[name]
    x = numbers(layout.shape)

    @jax.jit
    def run(x):
        ys = [forward(x, layout, axes, norm) for forward, _ in REAL.values()]
        return ys, [f(y, layout, axes, norm) for (_, f), y in zip(REAL.values(), ys, strict=True)]

    for real, y, z in zip(REAL, *run(part(x, layout)), strict=True):
        spectrum = fft.spectral_layout(layout, axes, real=real)
        close(y, part(reference(real, axes, norm)(x), spectrum))
        close(z, part(x.astype(z.dtype), layout))


@each(["float32", "float64", "complex64", "complex128"])
def test_types(case):
    layout = LAYOUTS["pencils"]
    x = numbers(layout.shape, np.dtype(case))
    single = case in ("float32", "complex64")
    for real in (False, True) if case[0] == "f" else (False,):
        forward, inverse = REAL[real]
        y = forward(part(x, layout), layout)
        assert y.dtype == (np.complex64 if single else np.complex128)
        spectrum = fft.spectral_layout(layout, real=real)
        close(y, part(reference(real)(x), spectrum), 1e-7 if single else 1e-13)
        z = inverse(y, layout)
        assert z.dtype == (np.dtype(case) if real else y.dtype)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["pencils", "a thin array"])
@both
@pytest.mark.usefixtures("tiles")
def test_derivatives(name, real):
    """They are the derivatives of JAX's transform of the whole array; in batches too."""
    layout, (forward, inverse) = LAYOUTS[name], REAL[real]
    x, t, c = (numbers(layout.shape, np.float64 if real else complex, seed) for seed in range(3))
    spectrum = fft.spectral_layout(layout, real=real)
    weights = numbers(spectrum.shape, complex, 3)

    def there_and_back(forward, inverse, weights, x):
        y = forward(x)
        return inverse(y * weights + y * jnp.abs(y))

    if real:
        back = functools.partial(jnp.fft.irfftn, s=layout.shape)
        serial = functools.partial(there_and_back, jnp.fft.rfftn, back, weights)
    else:
        serial = functools.partial(there_and_back, jnp.fft.fftn, jnp.fft.ifftn, weights)
    transforms = [functools.partial(f, layout=layout) for f in (forward, inverse)]
    ours = jax.checkpoint(functools.partial(there_and_back, *transforms, part(weights, spectrum)))

    @jax.jit
    def everything(x, t, c):
        y, pull = jax.vjp(ours, x)
        batched = jax.vmap(ours, 0, -1)(jnp.stack([x, 2 * x]))
        return y, jax.jvp(ours, (x,), (t,))[1], pull(c)[0], batched[..., 0]

    actual = everything(*(part(v, layout) for v in (x, t, c)))
    y, pull = jax.vjp(serial, x)
    expected = y, jax.jvp(serial, (x,), (t,))[1], pull(c)[0], y
    for a, e in zip(actual, expected, strict=True):
        close(a, part(np.asarray(e), layout), 1e-12)


@pytest.mark.parametrize("name", ["pencils the other way", "blocks", "one rank"])
@both
def test_frequencies(name, real):
    """With them, a derivative of a wave."""
    layout = LAYOUTS[name]
    axes = (0, 1)
    lengths = [2 * np.pi / layout.shape[a] for a in axes]
    k = fft.frequencies(layout, axes, d=1 / np.array([layout.shape[a] for a in axes]), real=real)
    spectrum = fft.spectral_layout(layout, axes, real=real)
    for axis, values in zip(axes, k, strict=True):
        n = layout.shape[axis]
        whole = np.fft.rfftfreq(n, 1 / n) if real and axis == axes[-1] else np.fft.fftfreq(n, 1 / n)
        assert_equal(values.ravel(), whole[spectrum.block(RANK)[axis]])
        assert values.ndim == len(layout.shape)
    forward, inverse = REAL[real]
    if layout.shape[0] > 2:
        at = np.arange(layout.shape[0]).reshape(-1, *[1] * (len(layout.shape) - 1)) * lengths[0]
        x, slope = (np.broadcast_to(f(at), layout.shape) for f in (np.sin, np.cos))
        y = inverse(1j * k[0] * forward(part(x, layout), layout, axes), layout, axes)
        close(y.real, part(slope, layout))
    (single,) = fft.frequencies(layout, (0,), dtype=np.float32)
    assert single.dtype == np.float32


def test_messages():
    """A slab costs one exchange, a pencil two, the natural layout one more; nothing moves twice."""
    exchanges = lambda f, layout, **options: str(
        jax.make_jaxpr(lambda x: f(x, layout, **options))(jnp.ones(layout.block_shape(RANK)))
    ).count("mpi4jax_alltoallv[")
    slabs, pencils = Layout((4, 4, 4), {0: SIZE}), LAYOUTS["pencils"]
    moved = int(SIZE > 1)
    assert exchanges(fft.rfftn, slabs) == moved
    assert exchanges(fft.fftn, slabs, natural=True) == 2 * moved
    assert exchanges(fft.fftn, pencils) == sum(n > 1 for n in PAIR)
    assert exchanges(fft.fftn, slabs, axes=(1, 2)) == 0


@pytest.mark.min_ranks(2)
@pytest.mark.usefixtures("tiles")
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="only the CPU's transforms go by tiles")
def test_tiles_are_written_to_an_array_that_is_not_filled_first():
    """But in an exported program, which calls only operations."""
    layout = Layout((2 * SIZE, 6, 6), {0: SIZE})
    f, x = jax.jit(lambda x: fft.fftn(x, layout)), jnp.ones(layout.block_shape(RANK))
    exchange = jax.export.DisabledSafetyCheck.custom_call("mpi4jax_alltoallv")
    exported = jax.export.export(f, disabled_checks=[exchange])(x)
    assert "@mpi4jax_empty(" in f.lower(x).as_text()
    assert "mpi4jax_empty" not in exported.mlir_module()


WRONG = [
    (lambda: Layout((3, 4), {2: 2}), ValueError, "'cuts' must map .* got 2 for axis 2"),
    (lambda: Layout((3, 4), {0: 2, -2: 2}), ValueError, "'cuts' cuts an axis twice"),
    (lambda: Layout((3, 4), {0: 0}), ValueError, "'cuts' must map .* got 0 for axis 0"),
    (lambda: Layout((3.0, 4)), TypeError, "'shape' must be integers, got float: 3.0"),
    (lambda: Layout(()), ValueError, "'shape' must be the lengths of one axis or more"),
    (lambda: redistribute(1, 2, Layout((3,))), TypeError, "'source' must be a Layout.*, got int"),
    (
        lambda: redistribute(np.ones(3), Layout((3,), {0: SIZE + 1}), Layout((3,))),
        ValueError,
        f"'source' has {SIZE + 1} blocks; expected {SIZE} at most",
    ),
    (
        lambda: redistribute(np.ones(3), Layout((3,)), Layout((4,))),
        ValueError,
        r"have shapes \(3,\) and \(4,\); expected two layouts of one array",
    ),
    (
        lambda: redistribute(np.ones(99), Layout((3,)), Layout((3,))),
        ValueError,
        rf"'x' has shape \(99,\) on rank {RANK}; expected",
    ),
    (lambda: fft.fftn(np.ones((3, 9)), Layout((3, 4))), ValueError, "fftn: argument 'x' has shape"),
    (lambda: fft.fftn(1, Layout((3, 4)), (0, 2)), ValueError, r"'axes' must be .* got \(0, 2\)"),
    (lambda: fft.ifftn(1, Layout((3, 4)), (0, -2)), ValueError, r"ifftn: .* got \(0, -2\)"),
    (lambda: fft.fftn(1, Layout((3, 0))), ValueError, "'axes' has an axis of length 0"),
    (lambda: fft.fftn(1, Layout((3, 4)), norm="no"), ValueError, "'norm' must be .* got 'no'"),
    (lambda: fft.fftn(1, (3, 4)), TypeError, "'layout' must be a Layout.*, got tuple"),
    (
        lambda: fft.rfftn(np.ones(Layout((3,)).block_shape(RANK), complex), Layout((3,))),
        TypeError,
        "rfftn: argument 'x' must be real, got dtype complex128",
    ),
    (
        lambda: fft.spectral_layout(Layout((3,), {0: 2})),
        ValueError,
        "'layout' decomposes the only axis",
    ),
    (
        lambda: fft.frequencies(Layout((3, 4)), d=(1.0,)),
        ValueError,
        "'d' must be a number, or one for each of 2 axes",
    ),
]


@pytest.mark.parametrize("call, kind, words", WRONG, ids=[words for _, _, words in WRONG])
def test_wrong_arguments(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


def test_frequencies_are_no_integers():
    with pytest.raises(TypeError, match=r"^frequencies: argument 'dtype' must be a floating-point"):
        fft.frequencies(Layout((4, 4), {0: SIZE}), dtype=int)
