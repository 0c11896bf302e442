"""Compare `mpi4jax.fft` with mpi4py-fft.

    mpiexec -n 2 python benches/micro/fft.py [--pencils] [--sizes ...]

Forward and backward transforms of global arrays in slabs, or in pencils; and the redistribution
between the two layouts of the first transform beside a bare MPI_Alltoall of as many bytes, into
memory that is there already. Both libraries take turns. Prints medians, and the ratio of ours to
theirs with its quartiles over the rounds.

mpi4py-fft is left out if it is not installed. To install it from PyPI, FFTW's headers have to be
there: `apt-get install libfftw3-dev`, then `pip install mpi4py-fft`.
"""

import argparse
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpi4jax import Layout, fft, redistribute

try:
    import mpi4py_fft
except ImportError:
    mpi4py_fft = None

COMM = MPI.COMM_WORLD
SIZES = ("256x256x256", "512x512x64", "100x101x103")
DTYPES = ("complex128", "complex64", "float64", "float32")


def ours(layout, dtype, x):
    """Forward and backward, as functions without arguments; and the spectrum's number of points."""
    real = dtype.kind == "f"
    forward, backward = (fft.rfftn, fft.irfftn) if real else (fft.fftn, fft.ifftn)
    there = jax.jit(lambda x: forward(x, layout, comm=COMM))
    back = jax.jit(lambda y: backward(y, layout, comm=COMM))
    x = jnp.asarray(x)
    y = jax.block_until_ready(there(x))
    np.testing.assert_allclose(back(y), x, atol=1e-4)
    return y, [lambda: jax.block_until_ready(there(x)), lambda: jax.block_until_ready(back(y))]


def theirs(layout, dtype, x, pencils, y):
    plan = mpi4py_fft.PFFT(COMM, layout.shape, dtype=dtype, slab=not pencils)
    u, spectrum = (mpi4py_fft.newDistArray(plan, forward) for forward in (False, True))
    if u.shape != x.shape:
        return None  # their pencils are others
    u[:] = x
    plan.forward(u, spectrum, normalize=False)
    if spectrum.shape == y.shape:
        np.testing.assert_allclose(spectrum.v, y, rtol=1e-3, atol=1e-3 * np.abs(y).max())
    return [lambda: plan.forward(u, spectrum, normalize=False), lambda: plan.backward(spectrum, u)]


def transposes(layout, dtype):
    """Return a redistribution between two layouts, and MPI_Alltoall of as many bytes."""
    after = fft.spectral_layout(layout, axes=[a for a, _ in layout.cuts[-1:]])
    x = jnp.zeros(layout.block_shape(COMM.rank), jnp.result_type(dtype, jnp.complex64))
    move = jax.jit(lambda x: redistribute(x, layout, after, comm=COMM))
    jax.block_until_ready(move(x))
    # As many as the largest of the grid's lines exchanges: of slabs, all ranks.
    part = math.ceil(COMM.allreduce(x.size, MPI.MAX) / COMM.size)
    sent = np.zeros((COMM.size, part), x.dtype)
    received = np.zeros_like(sent)
    return [lambda: jax.block_until_ready(move(x)), lambda: COMM.Alltoall(sent, received)]


def compare(name, pairs, rounds):
    """Print how long a function of each library takes, which take turns."""
    functions = [f for f in pairs if f is not None]
    times = []
    for _ in range(rounds + 1):
        row = []
        for function in functions:
            COMM.Barrier()
            start = time.perf_counter()
            result = function()
            COMM.Barrier()
            row.append(time.perf_counter() - start)
            del result
        times.append(row)
    a, *others = 1e3 * np.array(times[1:]).T
    if COMM.rank == 0:
        line = f"{name:44}{np.median(a):9.2f} ms"
        for b in others:
            low, middle, high = np.percentile(a / b, [25, 50, 75])
            line += f"{np.median(b):9.2f} ms, ratio {middle:.2f} ({low:.2f} to {high:.2f})"
        print(line, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pencils", action="store_true")
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--dtypes", nargs="+", default=DTYPES)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    if COMM.rank == 0 and mpi4py_fft is None:
        print("there is no mpi4py-fft (apt-get install libfftw3-dev; pip install mpi4py-fft)")
    parts = MPI.Compute_dims(COMM.size, 2) if args.pencils else [COMM.size]
    for size in args.sizes:
        layout = Layout([int(n) for n in size.split("x")], dict(enumerate(parts)))
        for dtype in map(np.dtype, args.dtypes):
            rng = np.random.default_rng(COMM.rank)
            x = rng.random(layout.block_shape(COMM.rank))
            x = (x if dtype.kind == "f" else x - 0.5j * x).astype(dtype)
            y, mine = ours(layout, dtype, x)
            other = theirs(layout, dtype, x, args.pencils, y) if mpi4py_fft else None
            label = f"{size} {dtype}, {'x'.join(map(str, parts))} ranks"
            for k, name in enumerate(("forward", "backward")):
                compare(f"{label}, {name}", [mine[k], other and other[k]], args.rounds)
            if dtype.kind == "c" and COMM.size > 1:
                name = f"{label}, redistribute beside Alltoall"
                compare(name, transposes(layout, dtype), args.rounds)


if __name__ == "__main__":
    main()
