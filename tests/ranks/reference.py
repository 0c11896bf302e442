"""What tests have in common: this rank, data types and values of them, reductions, comparisons."""

import contextlib
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental
import jax.monitoring
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr
from mpi4py import MPI

import mpi4jax
from mpi4jax import _native
from mpi4jax._op.operation import OPERATIONS

COMM = mpi4jax.default_comm()
RANK, SIZE = COMM.rank, COMM.size
RIGHT, LEFT = (RANK + 1) % SIZE, (RANK - 1) % SIZE

ON_GPU = _native.is_gpu_on_cpu() or jax.default_backend() == "gpu"

# From JAX 0.8 on it is in `jax`.
enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64


# Also what takes long: `MPI4JAX_TEST_ALL=1`.

APIS = ("token", "notoken")
# `mpi4jax.jit` returns what `jax.jit` does: tests/ranks/test_jit.py.
JITS = {"eager": lambda f: f, "jax.jit": jax.jit}
jits = pytest.mark.parametrize("jit", JITS.values(), ids=JITS)


def each(cases):
    return pytest.mark.parametrize("case", cases, ids=str)


class Threaded:
    """The API with tokens as if it had none: one is handed from op to op."""

    def __init__(self, token=None):
        self.token = token

    def __getattr__(self, name):
        def call(*args, **kwargs):
            out = getattr(mpi4jax, name)(*args, token=self.token, **kwargs)
            if name in OPERATIONS and not OPERATIONS[name].returns:
                result, self.token = None, out
            else:
                assert isinstance(out, tuple), "a pair"
                result, self.token = out
            return result

        return call


class Started:
    """The API as if it had only operations that are waited for later: each is waited for at once,
    with something computed between."""

    def __getattr__(self, name):
        def call(*args, **kwargs):
            request = getattr(mpi4jax, f"i{name}")(*args, **kwargs)
            between = mpi4jax.after(request, jnp.ones(2))
            return mpi4jax.wait(request, after=between * 2)

        return call


# ---- Reductions: names of NumPy's functions, and which data types have them

FOLDS = {
    **{"SUM": "add", "PROD": "multiply", "MAX": "maximum", "MIN": "minimum"},
    **{"LAND": "logical_and", "LOR": "logical_or", "LXOR": "logical_xor"},
    **{"BAND": "bitwise_and", "BOR": "bitwise_or", "BXOR": "bitwise_xor"},
}
LOGICAL, BITWISE, ORDER = "LAND LOR LXOR", "BAND BOR BXOR", "MAX MIN"


class Reduction(NamedTuple):
    """A reduction of the user's: what MPI calls, and what it does to two arrays."""

    op: MPI.Op
    fold: Any


def fold(op, xs, xp=np):
    """The reduction of arrays, in the order of the ranks."""
    if isinstance(op, Reduction):
        return functools.reduce(op.fold, xs)
    if op == "MEAN":
        total = fold("SUM", xs, xp)
        wide = total.astype(np.float32) if small(total.dtype) else total
        return (wide / len(xs)).astype(total.dtype)
    function, dtype = getattr(xp, FOLDS[op]), xs[0].dtype
    if small(dtype):
        xs = [x.astype({"f": np.float32, "i": np.int8, "u": np.uint8}[kind(dtype)]) for x in xs]
    return functools.reduce(function, xs).astype(dtype)


# ---- Data types


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def kind(dtype):
    """b, i, u, f or c, also for the types that NumPy does not know."""
    name = dtype.name
    return "b" if name == "bool" else "f" if name == "bfloat16" else name[0]


def small(dtype):
    """Whether NumPy computes with it only after a conversion."""
    return dtype.kind == "V" or dtype.name == "float16"


def random_bits(name, shape, seed):
    """Any values of a type, NaNs included."""
    rng, dtype = np.random.default_rng(seed), dtype_of(name)
    if name == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if name.startswith(("int", "uint")):
        info = ml_dtypes.iinfo(dtype)
        wide = np.int64 if kind(dtype) == "i" else np.uint64
        return rng.integers(int(info.min), int(info.max), shape, wide, endpoint=True).astype(dtype)
    bits = rng.integers(0, 16 if "float4" in name else 256, (*shape, dtype.itemsize), np.uint8)
    return bits.view(dtype).reshape(shape)


def exact_values(name, shape, seed):
    """Values of a type whose sums and products over a few ranks are exact in any order."""
    rng, dtype = np.random.default_rng(seed), dtype_of(name)
    if name == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if kind(dtype) == "c":
        values = np.array([0, 1, 1j, -1, 2 - 1j])
    elif name == "float8_e8m0fnu":  # has nothing but positive powers of two
        values = np.array([0.5, 1, 2])
    elif name == "float4_e2m1fn" or name.endswith(("int2", "int4")):
        values = np.array([0, 1])
    elif name.startswith("float8"):  # those with three significant bits have no 4.5
        values = np.array([0, 1, -1, *([0.5] if SIZE <= 4 else [])])
    elif kind(dtype) == "u":
        values = np.array([0, 1, 2, 3])
    else:
        values = np.array([0, 1, -1, 2, -2])
    return rng.choice(values, shape).astype(dtype)


def assert_equal(actual, expected, bits=False, what=""):
    """Same shape, type and values; the same bits, if wanted, which compares NaNs as well."""
    actual = np.asarray(actual)
    assert actual.dtype == expected.dtype, (what, actual.dtype, expected.dtype)
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    message = f"{what} on rank {RANK}: got\n{actual}\nexpected\n{expected}"
    if bits:
        assert actual.tobytes() == expected.tobytes(), message
    else:
        assert np.array_equal(actual, expected), message


def assert_close(actual, expected, what=""):
    """Same shape and type; values that the last bit tells apart, at most: XLA may divide by a
    number by multiplying with its inverse."""
    actual = np.asarray(actual)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), what
    wide = np.complex128 if kind(expected.dtype) == "c" else np.float64
    eps = float(ml_dtypes.finfo(expected.dtype).eps)
    np.testing.assert_allclose(actual.astype(wide), expected.astype(wide), rtol=eps, err_msg=what)


def float32(shape, seed):
    return exact_values("float32", shape, seed)


# ---- What is supported: the reductions of each data type. All other ops move all of these.

_FLOATS = "float16 bfloat16 float32 float64 float4_e2m1fn float8_e3m4 float8_e4m3"
_FLOATS += " float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz"
_FLOATS += " float8_e8m0fnu"
_INTEGERS = "int2 int4 int8 int16 int32 int64 uint2 uint4 uint8 uint16 uint32 uint64"
SUPPORTED = {
    "bool": f"{ORDER} {LOGICAL} {BITWISE}".split(),
    **dict.fromkeys(_INTEGERS.split(), f"SUM PROD {ORDER} {LOGICAL} {BITWISE}".split()),
    **dict.fromkeys(_FLOATS.split(), f"SUM MEAN PROD {ORDER}".split()),
    "complex64": ["SUM", "MEAN", "PROD"],
    "complex128": ["SUM", "MEAN", "PROD"],
}
# Those that this JAX has.
DTYPES = [name for name in SUPPORTED if hasattr(jnp, name if name != "bool" else "bool_")]


# ---- Compilations

_compilations = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: event.endswith("backend_compile_duration") and _compilations.append(1)
)


@contextlib.contextmanager
def compilations():
    """A list that has one element, when the block is left, for each program XLA compiled in it."""
    before, found = len(_compilations), []
    yield found
    found += _compilations[before:]


def marks(jaxpr, name):
    """Of each op in program order, whether a pass has set this field of its parameter ``how``."""
    out = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith("mpi4jax_"):
            out.append("how" in eqn.params and getattr(eqn.params["how"], name))
        for value in eqn.params.values():
            several = value if isinstance(value, tuple) else (value,)
            inner = [v for v in several if isinstance(v, (ClosedJaxpr, Jaxpr))]
            out += [mark for j in inner for mark in marks(j, name)]
    return out
