"""The values of reductions, to the bit: what ranks get, and what `jax.lax` gives on devices."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import values_on_devices
from devices import on_devices
from mpi4py import MPI
from reference import COMM, DTYPES, RANK, SIZE, enable_x64, kind
from values_on_devices import EIGHT_BITS, FLOATS, LENGTHS, operands, reductions

from mpi4jax import notoken

NAMES = [name for name in values_on_devices.DTYPES if name in DTYPES]
FLOATING = (*FLOATS, *EIGHT_BITS)


@functools.cache
def on_several_devices():
    return on_devices(values_on_devices.__file__, SIZE, sources="values_on_devices.py")


def bits(x):
    """As unsigned integers, all NaN the same; of complex numbers, two for each."""
    x = np.asarray(x)
    if kind(x.dtype) == "c":
        x = x.view(x.real.dtype)
    out = x.view(f"u{x.dtype.itemsize}").copy()
    if kind(x.dtype) == "f":
        out[np.isnan(x.astype(np.float64))] = 0x5A
    return out


def is_tiny(x):
    """Not normal: XLA's threads may take these for zeros, or give zero in their place."""
    x = np.asarray(x)
    x = x.view(x.real.dtype) if kind(x.dtype) == "c" else x
    if x.dtype == np.float16 or kind(x.dtype) != "f" or x.dtype.itemsize == 1:
        return np.zeros(x.shape, bool)  # computed in float32
    wide = abs(x.astype(np.float64))
    return (wide != 0) & (wide <= float(ml_dtypes.finfo(x.dtype).tiny))


def extremum(op, xs):
    """MAX or MIN of floats by their bits: -0 is less than 0; NaN if there is one."""
    sign = 1 << 8 * xs.dtype.itemsize - 1
    keys = [[int(v) if v < sign else sign - 1 - int(v) for v in row] for row in bits_of(xs)]
    best = (np.argmax if op == "MAX" else np.argmin)(np.array(keys, object), axis=0)
    found = xs[best, np.arange(xs.shape[1])]
    nan = np.isnan(xs.astype(np.float64)).any(axis=0)
    return np.where(nan, np.array(np.nan, xs.dtype), found)


def bits_of(x):
    return x.view(f"u{x.dtype.itemsize}")


def expected_of(name, op, ranks=range(SIZE)):
    """The bits, and where JAX defines them: not in the order of a sum, not for denormals."""
    xs = operands(name, SIZE)[list(ranks)]
    folds = on_several_devices()[name][op]
    if op in ("MAX", "MIN") and name in FLOATING:
        model = bits(extremum(op, xs))
        normal = ~is_tiny(xs).any(axis=0)
        np.testing.assert_array_equal(model[normal], bits(folds[0])[normal], err_msg="the model")
        return model, np.ones_like(normal)
    every = np.stack([bits(y) for y in folds])
    defined = (every == every[0]).all(axis=0)
    if op in ("SUM", "PROD"):
        defined &= ~(is_tiny(xs).any(axis=0) | is_tiny(folds).any(axis=0))
    return every[0], defined


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("name", NAMES)
def test_values_of_reductions(name):
    x = operands(name, SIZE)[RANK]
    # Of 8-bit floats: test_small_floats_are_computed_in_float32. Between two additions of 16-bit
    # floats, XLA need not round.
    is_exact = name not in EIGHT_BITS and (SIZE == 2 or name not in ("float16", "bfloat16"))
    ops = reductions(name) if is_exact else ["MAX", "MIN"]
    blocks = np.stack([np.roll(x, r) for r in range(SIZE)])

    @jax.jit
    def run(x, blocks):
        found = {}
        for op in ops:
            by = getattr(MPI, op)
            found[op] = [notoken.allreduce(x[:n], by) for n in LENGTHS]
            found[op] += [notoken.reduce(x, by, 0), notoken.scan(x, by)]
            found[op] += [notoken.reduce_scatter(blocks, by)]
        return found

    with enable_x64(True):
        found = run(jnp.asarray(x), jnp.asarray(blocks))
    for op in ops:
        expected, defined = expected_of(name, op)
        parts = 2 if name.startswith("complex") else 1
        *whole, reduced, scanned, own = map(np.asarray, found[op])
        whole.append(np.roll(own, -RANK))
        whole += [reduced] if RANK == 0 else []
        whole += [scanned] if RANK == SIZE - 1 else []
        for y in whole:
            n = parts * len(y)
            np.testing.assert_array_equal(
                bits(y)[defined[:n].nonzero()],
                expected[:n][defined[:n]],
                err_msg=f"{op} of {len(y)} {name} on rank {RANK}",
            )
        assert defined.mean() > 0.2, f"{op}: {defined.mean()} of the values are compared"
        everywhere = COMM.allgather(whole[0].tobytes())
        assert len(set(everywhere)) == 1
