"""What each op means, in NumPy: functions of the arrays of all ranks at once.

A `Case` is one op with its parameters and the inputs of every rank. It has the op itself, which
each rank calls on its own input, and the model, which has all ranks' inputs and gives all ranks'
results. `pushforward` is the derivative of the model, written down by hand.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpi4jax
from mpi4jax import notoken

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
APIS = ("token", "notoken")
SHAPE = (2,)  # of one rank's block

REDUCTIONS = {"SUM": MPI.SUM, "PROD": MPI.PROD, "MAX": MPI.MAX, "MIN": MPI.MIN}
FOLDS = {"SUM": "sum", "PROD": "prod", "MAX": "max", "MIN": "min"}


def call(api: str, name: str, /, *args: Any, **kwargs: Any) -> Any:
    """An op through one of the two APIs: its result alone (None for send and barrier)."""
    if api == "notoken":
        return getattr(notoken, name)(*args, **kwargs)
    out = getattr(mpi4jax, name)(*args, token=mpi4jax.create_token(), **kwargs)
    return None if name in ("send", "barrier") else out[0]


# ---- The ops, as models: (array module, parameters, all ranks' inputs) -> all ranks' results

Model = Callable[[Any, dict[str, Any], list[Any]], list[Any]]


def _allgather(xp: Any, p: dict[str, Any], xs: list[Any]) -> list[Any]:
    return [xp.stack(xs)] * len(xs)


def _fold(xp: Any, p: dict[str, Any], xs: list[Any]) -> Any:
    return getattr(xp, FOLDS[p["op"]])(xp.stack(xs), axis=0)


def _allreduce(xp: Any, p: dict[str, Any], xs: list[Any]) -> list[Any]:
    return [_fold(xp, p, xs)] * len(xs)


def _alltoall(xp: Any, p: dict[str, Any], xs: list[Any]) -> list[Any]:
    return [xp.stack([x[r] for x in xs]) for r in range(len(xs))]


def _identity(xp: Any, p: dict[str, Any], xs: list[Any]) -> list[Any]:
    return list(xs)


def _bcast(xp: Any, p: dict[str, Any], xs: list[Any]) -> list[Any]:
    return [xs[p["root"]]] * len(xs)


def _gather(xp: Any, p: dict[str, Any], xs: list[Any]) -> list[Any]:
    return [xp.stack(xs) if r == p["root"] else x for r, x in enumerate(xs)]


def _halo_exchange(xp: Any, p: dict[str, Any], xs: list[Any]) -> list[Any]:
    """Along a line: a ghost cell of this rank's, its inner cells, one of the next rank's."""
    n = len(xs)
    low = [xs[r - 1][-1:] if r > 0 else xs[0][:1] for r in range(n)]
    high = [xs[r + 1][:1] if r + 1 < n else xs[-1][-1:] for r in range(n)]
    return [xp.concatenate(parts) for parts in zip(low, xs, high, strict=True)]


def _reduce(xp: Any, p: dict[str, Any], xs: list[Any]) -> list[Any]:
    return [_fold(xp, p, xs) if r == p["root"] else x for r, x in enumerate(xs)]


def _scan(xp: Any, p: dict[str, Any], xs: list[Any]) -> list[Any]:
    return [_fold(xp, p, xs[: r + 1]) for r in range(len(xs))]


def _scatter(xp: Any, p: dict[str, Any], xs: list[Any]) -> list[Any]:
    return [xs[p["root"]][r] for r in range(len(xs))]


def _shift(xp: Any, p: dict[str, Any], xs: list[Any]) -> list[Any]:
    """send to the right, recv from the left; rank 0 keeps its template."""
    return [xs[max(r - 1, 0)] for r in range(len(xs))]


def _ring(xp: Any, p: dict[str, Any], xs: list[Any]) -> list[Any]:
    return [xs[(r - 1) % len(xs)] for r in range(len(xs))]


# ---- The derivative of a reduction: dy/dx_s, element by element, for each rank s


def weights(op: str, xs: list[np.ndarray]) -> np.ndarray:
    stack = np.stack(xs)
    if op == "SUM":
        return np.ones_like(stack)
    if op == "PROD":
        return np.stack([np.prod(np.delete(stack, s, 0), axis=0) for s in range(len(xs))])
    attained = stack == getattr(np, FOLDS[op])(stack, axis=0)
    return attained / attained.sum(axis=0)


def _push_reduction(ranks: Callable[[int], range]) -> Callable[..., list[np.ndarray]]:
    def push(p: dict[str, Any], xs: list[np.ndarray], ts: list[np.ndarray]) -> list[np.ndarray]:
        out = []
        for r in range(len(xs)):
            if "root" in p and r != p["root"]:
                out.append(ts[r])
                continue
            chosen = [xs[s] for s in ranks(r)]
            w = weights(p["op"], chosen)
            out.append(sum(w[i] * ts[s] for i, s in enumerate(ranks(r))))
        return out

    return push


# ---- What this rank calls

Call = Callable[[str, Any, dict[str, Any]], Any]


def _static(p: dict[str, Any]) -> dict[str, Any]:
    return {**p, "op": REDUCTIONS[p["op"]]} if "op" in p else p


def _plain(op: str) -> Call:
    return lambda api, x, p: call(api, op, x, **_static(p))


def _call_barrier(api: str, x: Any, p: dict[str, Any]) -> Any:
    call(api, "barrier")
    return x


def _call_shift(api: str, x: Any, p: dict[str, Any]) -> Any:
    right = RANK + 1 if RANK + 1 < SIZE else MPI.PROC_NULL
    left = RANK - 1 if RANK else MPI.PROC_NULL
    call(api, "send", x, right, tag=3)
    return call(api, "recv", x, left, tag=3)


@functools.cache
def _line() -> MPI.Cartcomm:
    line = COMM.Create_cart([SIZE], [False])
    line.Set_name("line")
    return line


def _call_halo_exchange(api: str, x: Any, p: dict[str, Any]) -> Any:
    padded = jnp.concatenate([x[:1], x, x[-1:]])
    return call(api, "halo_exchange", padded, _line())


def _call_ring(api: str, x: Any, p: dict[str, Any]) -> Any:
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    return call(api, "sendrecv", x, x, source=left, dest=right, sendtag=5)


# ---- Cases


@dataclass(frozen=True)
class Row:
    """One op (or the pair of send and recv)."""

    ops: tuple[str, ...]
    call: Call
    model: Model
    replicated: bool = False  # one global result
    push: Callable[..., list[np.ndarray]] | None = None  # default: the model itself, it is linear


_everyone = _push_reduction(lambda r: range(SIZE))
_prefix = _push_reduction(lambda r: range(r + 1))

ROWS = {
    "allgather": Row(("allgather",), _plain("allgather"), _allgather, replicated=True),
    "allreduce": Row(("allreduce",), _plain("allreduce"), _allreduce, True, _everyone),
    "alltoall": Row(("alltoall",), _plain("alltoall"), _alltoall),
    "barrier": Row(("barrier",), _call_barrier, _identity),
    "bcast": Row(("bcast",), _plain("bcast"), _bcast, replicated=True),
    "gather": Row(("gather",), _plain("gather"), _gather),
    "halo_exchange": Row(("halo_exchange",), _call_halo_exchange, _halo_exchange),
    "reduce": Row(("reduce",), _plain("reduce"), _reduce, push=_everyone),
    "scan": Row(("scan",), _plain("scan"), _scan, push=_prefix),
    "scatter": Row(("scatter",), _plain("scatter"), _scatter),
    "send-recv": Row(("send", "recv"), _call_shift, _shift),
    "sendrecv": Row(("sendrecv",), _call_ring, _ring),
}


@dataclass(frozen=True)
class Case:
    """A row with parameters and with the inputs of all ranks (the same lists on every rank)."""

    row: str
    params: dict[str, Any] = field(default_factory=dict)
    values: str = "generic"

    @property
    def id(self) -> str:
        parts = [self.row, *(f"{v}" for v in self.params.values())]
        return "-".join(parts + ([self.values] if self.values != "generic" else []))

    @property
    def replicated(self) -> bool:
        return ROWS[self.row].replicated

    @property
    def linear(self) -> bool:
        return self.params.get("op", "SUM") == "SUM"

    def f(self, api: str) -> Callable[[Any], Any]:
        """What this rank computes from its own input."""
        return lambda x: ROWS[self.row].call(api, x, self.params)

    def inputs(self, dtype: Any = np.float64) -> list[np.ndarray]:
        shapes = [self.input_shape(r) for r in range(SIZE)]
        rng = np.random.default_rng(zlib.crc32(self.id.encode()))
        xs = [rng.uniform(0.5, 2, s) * rng.choice([-1, 1], s) for s in shapes]
        if np.issubdtype(dtype, np.complexfloating):
            xs = [x + 1j * rng.uniform(0.5, 2, x.shape) for x in xs]
        xs = [x.astype(dtype) for x in xs]
        # Element 0 is special, element 1 stays generic.
        if self.values == "zero":
            xs[-1][0] = 0
        if self.values == "zeros":
            xs[0][0] = xs[-1][0] = 0
        if self.values == "ties":
            for x in xs[:2]:
                x[0] = 3 if self.params["op"] == "MAX" else -3
        if self.values == "all equal":
            for x in xs:
                x[0] = 1.25
        return xs

    def input_shape(self, rank: int) -> tuple[int, ...]:
        whole = self.row == "alltoall" or (self.row == "scatter" and rank == self.params["root"])
        return (SIZE, *SHAPE) if whole else SHAPE

    def model(self, xp: Any, xs: list[Any]) -> list[Any]:
        """The results of all ranks."""
        return ROWS[self.row].model(xp, self.params, xs)

    def pushforward(self, xs: list[np.ndarray], ts: list[np.ndarray]) -> list[np.ndarray]:
        """The tangents of all ranks' results."""
        push = ROWS[self.row].push
        return push(self.params, xs, ts) if push else self.model(np, ts)

    def distinct(self, ys: list[Any]) -> list[Any]:
        """The results, a global one once."""
        return ys[:1] if self.replicated else ys


# Ops without parameters that make a difference.
LINEAR_MOVES = (
    *("allgather", "alltoall", "barrier", "halo_exchange"),
    *("send-recv", "sendrecv"),
)


def cases() -> list[Case]:
    roots = sorted({0, SIZE - 1})
    out = [Case(row) for row in LINEAR_MOVES]
    out += [Case(row, {"root": r}) for row in ("bcast", "gather", "scatter") for r in roots]
    for op in REDUCTIONS:
        special = {"SUM": [], "PROD": ["zero", "zeros"]}.get(op, ["ties", "all equal"])
        for values in ["generic", *special]:
            out += [Case("allreduce", {"op": op}, values), Case("scan", {"op": op}, values)]
            out += [Case("reduce", {"op": op, "root": r}, values) for r in roots]
    return out


CASES = cases()
LINEAR = [case for case in CASES if case.linear]


# ---- The Jacobian of the whole job


def flatten(arrays: list[Any]) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(a)) for a in arrays])


def basis(shapes: list[tuple[int, ...]], dtype: Any) -> list[list[np.ndarray]]:
    """All lists of arrays of these shapes that hold a single 1."""
    out = []
    for r, shape in enumerate(shapes):
        for i in np.ndindex(*shape):
            zeros = [np.zeros(s, dtype) for s in shapes]
            zeros[r][i] = 1
            out.append(zeros)
    return out


def model_jacobian(case: Case, xs: list[np.ndarray]) -> np.ndarray:
    """Rows: the distinct results. Columns: all ranks' inputs."""
    columns = basis([x.shape for x in xs], xs[0].dtype)
    pushed = [flatten(case.distinct(case.pushforward(xs, ts))) for ts in columns]
    return np.stack(pushed, axis=1)


def collect(local: list[Any]) -> list[np.ndarray]:
    """For each of the arrays that every rank has got: all ranks' side by side."""
    mine = [np.asarray(a) for a in local]
    return [flatten(list(parts)) for parts in zip(*COMM.allgather(mine), strict=True)]


def jacobian_from_jvp(case: Case, push: Callable[[Any], Any], xs: list[np.ndarray]) -> np.ndarray:
    """Column by column: one rank has a tangent, the others have zeros."""
    columns = collect([push(ts[RANK]) for ts in basis([x.shape for x in xs], xs[0].dtype)])
    whole = np.stack(columns, axis=1)
    if case.replicated:  # every rank has the same copy
        copies = np.split(whole, SIZE)
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy, copies[0])
        return copies[0]
    return whole


def jacobian_from_vjp(case: Case, pull: Callable[[Any], Any], xs: list[np.ndarray]) -> np.ndarray:
    """Row by row: one rank has a cotangent; of a global result, all ranks have the same one."""
    shapes = [y.shape for y in case.distinct(case.model(np, xs))]
    rows = basis(shapes, xs[0].dtype)
    return np.stack(collect([pull(cs[0] if case.replicated else cs[RANK]) for cs in rows]))
