"""What the ops mean, in NumPy, and how tests call them.

A *case* is one way to call one op. ``case.run(api, x)`` calls it on this rank's operand, and
``case.expected(xs)`` is this rank's result, computed from the operands of all ranks.
"""

import contextlib
import functools
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.experimental
import jax.monitoring
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from mpi4py import MPI

import mpi4jax
from mpi4jax import notoken
from mpi4jax._primitive import DTYPES
from mpi4jax._spec import SPECS

COMM = mpi4jax.default_comm()
RANK, SIZE = COMM.rank, COMM.size
RIGHT, LEFT = (RANK + 1) % SIZE, (RANK - 1) % SIZE

# From JAX 0.8 on it is in `jax`.
enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64


# ---- The two APIs, with the same signatures


def _without_token(name):
    op = getattr(mpi4jax, name)

    @functools.wraps(op)
    def call(*args, **kwargs):
        out = op(*args, **kwargs)
        return out[0] if SPECS[name].returns else None

    return call


APIS = {
    "token": SimpleNamespace(**{name: _without_token(name) for name in SPECS}),
    "notoken": notoken,
}


# ---- Reductions

FOLDS = {
    "SUM": np.add,
    "PROD": np.multiply,
    "MAX": np.maximum,
    "MIN": np.minimum,
    "LAND": lambda a, b: np.logical_and(a, b).astype(a.dtype),
    "LOR": lambda a, b: np.logical_or(a, b).astype(a.dtype),
    "LXOR": lambda a, b: np.logical_xor(a, b).astype(a.dtype),
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}
NEEDS = {
    **dict.fromkeys(("SUM", "PROD"), "arithmetic"),
    **dict.fromkeys(("MAX", "MIN"), "ordered"),
    **dict.fromkeys(("LAND", "LOR", "LXOR"), "logical"),
    **dict.fromkeys(("BAND", "BOR", "BXOR"), "bitwise"),
}


def fold(name, xs):
    """The reduction of arrays, in the order of the ranks."""
    dtype = xs[0].dtype
    wide = {"f": np.float32, "i": np.int8, "u": np.uint8}[kind(dtype)] if small(dtype) else dtype
    total = functools.reduce(FOLDS[name], [x.astype(wide) for x in xs])
    return total.astype(dtype)


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
    elif name.startswith("float8"):
        values = np.array([0, 1, -1, 0.5])
    elif kind(dtype) == "u":
        values = np.array([0, 1, 2, 3])
    else:
        values = np.array([0, 1, -1, 2, -2])
    return rng.choice(values, shape).astype(dtype)


def assert_equal(actual, expected, bits=False):
    """Same shape, type and values; the same bits, if wanted, which compares NaNs as well."""
    if expected is None:
        assert actual is None
        return
    actual = np.asarray(actual)
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    message = f"rank {RANK}: got\n{actual}\nexpected\n{expected}"
    if bits:
        assert actual.tobytes() == expected.tobytes(), message
    else:
        assert np.array_equal(actual, expected), message


# ---- Cases


def _exchange(api, x, template=None, **kwargs):
    """Send to the right and receive from the left, in an order that needs no buffering."""
    template = x if template is None else template
    if SIZE == 1:
        api.send(x, MPI.PROC_NULL, **kwargs)
        return api.recv(x, MPI.PROC_NULL, **kwargs)
    if RANK == 0:
        api.send(x, RIGHT, **kwargs)
        return api.recv(template, LEFT, **kwargs)
    y = api.recv(template, LEFT, **kwargs)
    api.send(x, RIGHT, **kwargs)
    return y


@functools.cache
def ring():
    """All ranks as a periodic line."""
    return COMM.Create_cart([SIZE], [True])


REDUCING = tuple(name for name, spec in SPECS.items() if spec.has_reduction)

# How an op is called, with the case's parameters ...
CALLS = {
    "allgather": lambda api, x: api.allgather(x),
    "allreduce": lambda api, x, op: api.allreduce(x, op=op),
    "alltoall": lambda api, x: api.alltoall(x),
    "barrier": lambda api, x: api.barrier(),
    "bcast": lambda api, x, root: api.bcast(x, root),
    "gather": lambda api, x, root: api.gather(x, root),
    # One inner cell, and behind it one ghost cell.
    "halo_exchange": lambda api, x: api.halo_exchange(x, ring(), axes=0, width=[(0, 1)]),
    "recv": _exchange,
    "reduce": lambda api, x, op, root: api.reduce(x, op, root),
    "scan": lambda api, x, op: api.scan(x, op),
    "scatter": lambda api, x, root: api.scatter(x, root),
    "send": _exchange,
    "sendrecv": lambda api, x: api.sendrecv(x, x, LEFT, RIGHT),
}

# ... and what comes of it on one rank, given the operands of all.
MODELS = {
    "allgather": lambda xs, rank: np.stack(xs),
    "allreduce": lambda xs, rank, op: fold(op, xs),
    "alltoall": lambda xs, rank: np.stack([x[rank] for x in xs]),
    "barrier": lambda xs, rank: None,
    "bcast": lambda xs, rank, root: xs[root],
    "gather": lambda xs, rank, root: np.stack(xs) if rank == root else xs[rank],
    "halo_exchange": lambda xs, rank: np.stack([xs[rank][0], xs[(rank + 1) % len(xs)][0]]),
    "recv": lambda xs, rank: xs[rank - 1],
    "reduce": lambda xs, rank, op, root: fold(op, xs) if rank == root else xs[rank],
    "scan": lambda xs, rank, op: fold(op, xs[: rank + 1]),
    "scatter": lambda xs, rank, root: xs[root][rank],
    "send": lambda xs, rank: xs[rank - 1],
    "sendrecv": lambda xs, rank: xs[rank - 1],
}


@dataclass(frozen=True)
class Case:
    """One way to call one op: with this root, with this reduction."""

    name: str
    root: int | None = None
    op: str | None = None

    def __str__(self):
        parts = [self.op, None if self.root is None else f"root{self.root}"]
        return "-".join([self.name, *(p for p in parts if p is not None)])

    @property
    def params(self):
        return {k: v for k in ("op", "root") if (v := getattr(self, k)) is not None}

    def run(self, api, x):
        params = self.params
        if self.op is not None:
            params["op"] = getattr(MPI, self.op)
        return CALLS[self.name](api, x, **params)

    def expected(self, xs, rank=RANK):
        return MODELS[self.name](xs, rank, **self.params)

    def shape(self, payload, rank):
        """The shape of a rank's operand."""
        stacked = self.name == "alltoall" or (self.name == "scatter" and rank == self.root)
        if self.name == "halo_exchange":
            return (2, *payload)
        return (SIZE, *payload) if stacked else payload

    def operands(self, make, payload=(2, 3)):
        """The operands of all ranks, each ``make(shape, seed)``."""
        return [make(self.shape(payload, rank), seed=[rank, 42]) for rank in range(SIZE)]


def cases(op="SUM", roots=None, where=lambda spec: True):
    """Each op of the table, once for each root."""
    roots = (SIZE - 1,) if roots is None else roots
    for spec in SPECS.values():
        reduction = op if spec.has_reduction else None
        if where(spec):
            for root in roots if "root" in spec.params else (None,):
                yield Case(spec.name, root, reduction)


def names_of(cases):
    return [str(case) for case in cases]


def float32(shape, seed):
    return exact_values("float32", shape, seed)


def supported_dtypes():
    """Those of the native table with which this JAX can compute at all."""
    for name in DTYPES:
        # JAX has the names of the 1-bit integers, but XLA refuses the simplest program with them.
        if hasattr(jnp, name if name != "bool" else "bool_") and name not in ("int1", "uint1"):
            yield name


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
