"""Operands at the edges of each dtype, and what `jax.lax` makes of them on devices.

Run as a program on `n` virtual devices of one process, this writes the results that
`test_values.py` compares with the results on `n` ranks: `python values_on_devices.py n file`.
"""

import functools
import itertools
import pickle
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

# Around the widths of vectors of all dtypes, and more than one step of vectorized code.
LENGTHS = (1, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129, 600)
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2")
DTYPES = ("bool", *INTEGERS, *FLOATS, *EIGHT_BITS, "complex64", "complex128")

logical = lambda f: lambda a, b: f(a != 0, b != 0).astype(a.dtype)
FOLDS = {
    **{"SUM": lax.add, "PROD": lax.mul, "MAX": lax.max, "MIN": lax.min},
    **{"BAND": lax.bitwise_and, "BOR": lax.bitwise_or, "BXOR": lax.bitwise_xor},
    **{"LAND": logical(jnp.logical_and), "LOR": logical(jnp.logical_or)},
    "LXOR": logical(jnp.logical_xor),
}
COLLECTIVES = {"SUM": lax.psum, "MAX": lax.pmax, "MIN": lax.pmin}


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def edges(name):
    """Values at which implementations differ."""
    dtype = dtype_of(name)
    if name == "bool":
        return np.array([False, True])
    if name in INTEGERS:
        info = np.iinfo(dtype)
        ends = [info.min, info.min + 1, info.max // 2 + 1, info.max - 1, info.max]
        return np.array([0, 1, 2, 3, 100, *ends, *(v for v in (-1, -2) if info.min)], dtype)
    if name.startswith("complex"):
        part = edges("float32" if name == "complex64" else "float64")
        return (part + 0j + 1j * np.roll(np.where(np.isfinite(part), part, 1), 5)).astype(dtype)
    info = ml_dtypes.finfo(dtype)
    positive = [0, info.smallest_subnormal, 3 * float(info.smallest_subnormal)]
    positive += [float(info.tiny) / 2, info.tiny, 1, 1 + float(info.eps), 3, info.max]
    positive += [] if name == "float8_e4m3fn" else [np.inf]
    positive = np.array([*map(float, positive), np.nan])
    return np.concatenate([positive, -positive]).astype(dtype)


def operands(name, n):
    """The operands of all ranks: every pair of edges on the first two, then random values."""
    some, rng = edges(name), np.random.default_rng(len(name))
    pairs = np.array(list(itertools.product(some, some))).astype(some.dtype)
    rows = [pairs[:, 0], pairs[:, 1]] + [rng.choice(some, len(pairs)) for _ in range(n - 2)]
    rows = np.stack(rows[:n])[:, rng.permutation(len(pairs))[: max(LENGTHS) - 100]]
    shape = n, max(LENGTHS) - rows.shape[1]
    if name == "bool":
        random = rng.integers(0, 2, shape).astype(bool)
    elif name in INTEGERS:
        info = np.iinfo(name)
        wide = np.uint64 if name.startswith("u") else np.int64
        random = rng.integers(info.min, info.max, shape, wide, endpoint=True)
    else:
        random = rng.normal(size=shape) * 2.0 ** rng.integers(-9, 9, shape)
        random = random + 1j * rng.normal(size=shape) if name.startswith("complex") else random
    return np.concatenate([rows, random.astype(some.dtype)], axis=1)


def reductions(name):
    if name.startswith("complex"):
        return ["SUM"]  # of products, the compiler chooses where they are rounded
    bits = ["BAND", "BOR", "BXOR", "LAND", "LOR", "LXOR"]
    if name == "bool":
        return ["MAX", "MIN", *bits]
    return ["SUM", "PROD", "MAX", "MIN", *(bits if name in INTEGERS else [])]


def reference(name, n):
    """By reduction: the folds of all ranks' operands in each order; and JAX's collective."""
    mesh = Mesh(np.array(jax.devices()[:n]), ("i",))

    def run(x):
        every = lax.all_gather(x[0], "i")
        found = {}
        for op in reductions(name):
            orders = list(itertools.permutations(range(n))) if n > 1 else [(0,)]
            folds = [functools.reduce(FOLDS[op], [every[r] for r in order]) for order in orders]
            found[op] = jnp.stack(folds)
            if op in COLLECTIVES and name != "bool" and name not in EIGHT_BITS:
                found[f"p{op}"] = COLLECTIVES[op](x[0], "i")
        return found

    run = jax.shard_map(run, mesh=mesh, in_specs=P("i"), out_specs=P(), check_vma=False)
    return jax.tree.map(np.asarray, jax.jit(run)(operands(name, n)))


if __name__ == "__main__":
    n, file = int(sys.argv[1]), sys.argv[2]
    jax.config.update("jax_num_cpu_devices", n)
    jax.config.update("jax_enable_x64", True)
    with open(file, "wb") as out:
        pickle.dump({name: reference(name, n) for name in DTYPES}, out)
