"""One row an op: its signature, how tests call it, what comes of it in NumPy, its derivative.

A `Case` is a row with parameters. `case.run(api, x)` calls the op on this rank's operand;
`case.model(np, xs)` gives all ranks' results from all ranks' operands, and `case.pushforward` their
tangents. Nothing here asks the implementation what is right.
"""

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import rows
from mpi4py import MPI
from reference import COMM, RANK, SIZE, Threaded, float32, fold

import mpi4jax
from mpi4jax import notoken
from mpi4jax._op.operation import OPERATIONS, Operation

# ---- Models: (array module, case, all ranks' operands) -> all ranks' results


def _allgather(xp, case, xs):
    return [xp.stack(xs)] * len(xs)


def _allreduce(xp, case, xs):
    return [fold(case.op, xs, xp)] * len(xs)


def _alltoall(xp, case, xs):
    return [xp.stack([x[r] for x in xs]) for r in range(len(xs))]


def _barrier(xp, case, xs):
    return list(xs)


def _bcast(xp, case, xs):
    return [xs[case.root]] * len(xs)


def _exscan(xp, case, xs):
    return [xp.zeros_like(xs[0]), *_scan(xp, case, xs[:-1])]


def _gather(xp, case, xs):
    return [xp.stack(xs) if r == case.root else x for r, x in enumerate(xs)]


def _halo_exchange(xp, case, xs):
    """One inner cell, and behind it a ghost cell, which is the next rank's inner one."""
    return [xp.stack([x[0], xs[(r + 1) % len(xs)][0]]) for r, x in enumerate(xs)]


def _reduce(xp, case, xs):
    return [fold(case.op, xs, xp) if r == case.root else x for r, x in enumerate(xs)]


def _reduce_scatter(xp, case, xs):
    return [fold(case.op, [x[r] for x in xs], xp) for r in range(len(xs))]


def _scan(xp, case, xs):
    return [fold(case.op, xs[: r + 1], xp) for r in range(len(xs))]


def _scatter(xp, case, xs):
    return [xs[case.root][r] for r in range(len(xs))]


def _shift(xp, case, xs):
    """To the next rank; the first one has its template."""
    return [xs[max(r - 1, 0)] for r in range(len(xs))]


def _ring(xp, case, xs):
    return [xs[r - 1] for r in range(len(xs))]


# ---- Derivatives: where the model itself, which is linear, is not one


def weights(op, xs):
    """dy/dx_s of a reduction, element by element, for each rank s."""
    stack = np.stack(xs)
    if op in ("SUM", "MEAN"):
        return np.full_like(stack, 1 if op == "SUM" else 1 / len(xs))
    if op == "PROD":
        return np.stack([np.prod(np.delete(stack, s, 0), axis=0) for s in range(len(xs))])
    attained = stack == {"MAX": np.max, "MIN": np.min}[op](stack, axis=0)
    return attained / attained.sum(axis=0)


def _push(ranks: Callable[[Any, int, int], list[int]]):
    """Of a reduction over these ranks; without any, a rank's result is its operand."""

    def push(case, xs, ts):
        out = []
        for r, t in enumerate(ts):
            of = ranks(case, r, len(xs))
            w = weights(case.op, [xs[s] for s in of]) if of else None
            out.append(sum(w[i] * ts[s] for i, s in enumerate(of)) if of else t)
        return out

    return push


_to_all = _push(lambda case, r, n: list(range(n)))
_to_root = _push(lambda case, r, n: list(range(n)) if r == case.root else [])
_to_later = _push(lambda case, r, n: list(range(r + 1)))


def _to_those_after(case, xs, ts):
    return [np.zeros_like(ts[0]), *_to_later(case, xs[:-1], ts[:-1])]


def _to_own_rows(case, xs, ts):
    parts, tangents = ([rows.split(np, v, rows.counts(len(xs))) for v in vs] for vs in (xs, ts))
    return [
        sum(
            w * t[r] for w, t in zip(weights(case.op, [p[r] for p in parts]), tangents, strict=True)
        )
        for r in range(len(xs))
    ]


def _to_own_blocks(case, xs, ts):
    return [
        sum(w * t[r] for w, t in zip(weights(case.op, [x[r] for x in xs]), ts, strict=True))
        for r in range(len(xs))
    ]


# ---- Calls that need more than the operand and the case's parameters


@functools.cache
def _ring_of_all():
    comm = COMM.Create_cart([SIZE], [True])
    comm.Set_name("ring")  # an exported program finds it by that
    return comm


def ring(comm=COMM):
    """All ranks of a communicator as a periodic line."""
    if comm is COMM:
        return _ring_of_all()
    return comm if comm.Get_topology() == MPI.CART else comm.Create_cart([comm.size], [True])


def _call_barrier(api, x, comm):
    api.barrier(comm=comm)
    return x  # for there to be something to differentiate and to batch


def _call_halo_exchange(api, x, comm):
    return api.halo_exchange(x, ring(comm), axes=0, width=[(0, 1)])


def _call_alltoallv(api, x, comm):
    return api.alltoallv(x, *rows.row_counts(comm.rank, comm.size), comm=comm)


def _call_ragged_alltoall(api, x, comm):
    n = comm.size
    counts = np.int32(rows.ragged_counts(comm.rank, n))
    expected = [rows.ragged_counts(r, n)[comm.rank] for r in range(n)]
    y, received = api.ragged_alltoall(x, counts, sum(expected) + rows.SPARE, comm=comm)
    assert received.shape == (n,)
    assert received.dtype == np.int32
    return y


def _call_permute(api, x, comm):
    return api.permute(x, rows.pairs(comm.size), comm=comm)


def _call_shift(api, x, comm):
    last = comm.rank == comm.size - 1
    api.send(x, MPI.PROC_NULL if last else comm.rank + 1, comm=comm)
    return api.recv(x, comm.rank - 1 if comm.rank else MPI.PROC_NULL, comm=comm)


def _call_ring(api, x, comm):
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    return api.sendrecv(x, x, left, right, comm=comm)


# ---- The rows


class Cheat(NamedTuple):
    """The cells of the cheat sheet: JAX's name, the shapes of operand and result, the gradient.

    `S` is any shape, `n` the size of the communicator, `r` this rank.
    """

    jax: str
    operand: str
    result: str
    gradient: str


@dataclass(frozen=True)
class Row:
    """One op.

    Attributes:
        signature: of the function with a token.
        mpi: the name in log lines.
        model: see above; None: the op has no case of its own, as `send`, which `recv` calls.
        call: (api, x, comm); None: the op takes the operand and the case's parameters.
        push: of the tangents; None: the model, which is linear.
        blocks: given the case, a rank and their number: how many blocks are stacked in its operand,
            along a first axis. 0: the operand is one block, and has no such axis.
        replicated: whether the results are one global result.
        log: what stands in the log line after the name.
        counts: what a log line counts, in items of a block, or of all blocks; None: nothing.
        title: the name of the case, where it is of two ops.
        cheat: what the cheat sheet says.
    """

    signature: str
    mpi: str
    model: Callable[..., Any] | None
    call: Callable[..., Any] | None = None
    push: Callable[..., Any] | None = None
    blocks: Callable[[Any, int, int], int] = lambda case, rank, size: 0
    replicated: bool = False
    log: str = "with {items} items"
    counts: Any = 1
    title: str = ""
    cheat: Cheat = field(kw_only=True)

    @property
    def positional(self) -> list[str]:
        return self.signature.strip("()").split("*")[0].replace(" ", "").strip(",").split(",")


_ROOT = "-> root {root} with {items} items"

ROWS = {
    "allgather": Row(
        "(x, *, comm, token)",
        "MPI_Allgather",
        _allgather,
        replicated=True,
        cheat=Cheat("all_gather", "S", "(n, *S)", "row `r`"),
    ),
    "allgatherv": Row(
        "(x, counts, *, comm, token)",
        "MPI_Allgatherv",
        rows.allgatherv,
        blocks=lambda case, rank, size: rows.counts(size)[rank],
        replicated=True,
        counts="blocks",
        cheat=Cheat("", "(counts[r], *S)", "(sum(counts), *S)", "rows of this rank"),
    ),
    "allreduce": Row(
        "(x, op, *, comm, token)",
        "MPI_Allreduce",
        _allreduce,
        push=_to_all,
        replicated=True,
        cheat=Cheat("psum", "S", "S", "SUM: identity; MEAN, PROD, MAX, MIN too"),
    ),
    "alltoall": Row(
        "(x, *, comm, token)",
        "MPI_Alltoall",
        _alltoall,
        blocks=lambda case, rank, size: size,
        cheat=Cheat("all_to_all", "(n, *S)", "(n, *S)", "`alltoall`"),
    ),
    "alltoallv": Row(
        "(x, send_counts, recv_counts, *, comm, token)",
        "MPI_Alltoallv",
        rows.alltoallv,
        _call_alltoallv,
        blocks=lambda case, rank, size: sum(rows.row_counts(rank, size)[0]),
        counts="blocks",
        cheat=Cheat("", "(sum(send_counts), *S)", "(sum(recv_counts), *S)", "rows go back"),
    ),
    "barrier": Row(
        "(*, comm, token)",
        "MPI_Barrier",
        _barrier,
        _call_barrier,
        log="",
        counts=None,
        cheat=Cheat("", "", "", "`barrier`"),
    ),
    "bcast": Row(
        "(x, root, *, comm, token)",
        "MPI_Bcast",
        _bcast,
        replicated=True,
        log=_ROOT,
        cheat=Cheat("", "S", "S", "cotangent on the root, zeros elsewhere"),
    ),
    "exscan": Row(
        "(x, op, *, comm, token)",
        "MPI_Exscan",
        _exscan,
        push=_to_those_after,
        cheat=Cheat("", "S", "S", "SUM: sum over the ranks behind"),
    ),
    "gather": Row(
        "(x, root, *, comm, token)",
        "MPI_Gather",
        _gather,
        log=_ROOT,
        cheat=Cheat("", "S", "(n, *S) on the root, S elsewhere", "`scatter`"),
    ),
    "gatherv": Row(
        "(x, counts, root, *, comm, token)",
        "MPI_Gatherv",
        rows.gatherv,
        blocks=lambda case, rank, size: rows.counts(size)[rank],
        log=_ROOT,
        counts="blocks",
        cheat=Cheat(
            "",
            "(counts[r], *S)",
            "(sum(counts), *S) on the root, unchanged elsewhere",
            "`scatterv`",
        ),
    ),
    "halo_exchange": Row(
        "(x, cart, *, axes, width, corners, border, token)",
        "MPI_Wait",
        _halo_exchange,
        _call_halo_exchange,
        blocks=lambda case, rank, size: 2,
        log="for ghost cells, with {items} items",
        counts="blocks",
        cheat=Cheat("", "S", "S", "ghost cells add to their originals (`halo_add`)"),
    ),
    "permute": Row(
        "(x, perm, *, comm, token)",
        "MPI_Sendrecv",
        rows.permute,
        _call_permute,
        cheat=Cheat("ppermute", "S", "S", "the pairs reversed"),
    ),
    "ragged_alltoall": Row(
        "(x, send_counts, capacity, *, comm, token)",
        "MPI_Alltoallv",
        rows.ragged_alltoall,
        _call_ragged_alltoall,
        blocks=lambda case, rank, size: sum(rows.ragged_counts(rank, size)) + rows.SPARE,
        counts="blocks",
        cheat=Cheat("ragged_all_to_all", "(rows, *S)", "(capacity, *S)", "rows go back"),
    ),
    "recv": Row(
        "(x, source, *, tag, comm, status, token)",
        "MPI_Recv",
        _shift,
        _call_shift,
        title="send-recv",
        cheat=Cheat("", "S", "S", "is sent back"),
    ),
    "reduce": Row(
        "(x, op, root, *, comm, token)",
        "MPI_Reduce",
        _reduce,
        push=_to_root,
        log=_ROOT,
        cheat=Cheat("", "S", "S", "SUM: `bcast`"),
    ),
    "reduce_scatter": Row(
        "(x, op, *, comm, token)",
        "MPI_Reduce_scatter_block",
        _reduce_scatter,
        push=_to_own_blocks,
        blocks=lambda case, rank, size: size,
        cheat=Cheat("psum_scatter", "(n, *S)", "S", "SUM: `allgather`"),
    ),
    "reduce_scatterv": Row(
        "(x, counts, op, *, comm, token)",
        "MPI_Reduce_scatter",
        rows.reduce_scatterv,
        push=_to_own_rows,
        blocks=lambda case, rank, size: sum(rows.counts(size)),
        counts="blocks",
        cheat=Cheat("", "(sum(counts), *S)", "(counts[r], *S)", "SUM: `allgatherv`"),
    ),
    "scan": Row(
        "(x, op, *, comm, token)",
        "MPI_Scan",
        _scan,
        push=_to_later,
        cheat=Cheat("", "S", "S", "SUM: sum over this rank and those behind"),
    ),
    "scatter": Row(
        "(x, root, *, comm, token)",
        "MPI_Scatter",
        _scatter,
        blocks=lambda case, rank, size: size if rank == case.root else 0,
        log=_ROOT,
        cheat=Cheat("", "(n, *S) on the root, S elsewhere", "S", "`gather`"),
    ),
    "scatterv": Row(
        "(x, counts, root, *, comm, token)",
        "MPI_Scatterv",
        rows.scatterv,
        blocks=lambda case, rank, size: (
            sum(rows.counts(size)) if rank == case.root else rows.counts(size)[rank]
        ),
        log=_ROOT,
        counts="blocks",
        cheat=Cheat(
            "",
            "(sum(counts), *S) on the root, (counts[r], *S) elsewhere",
            "(counts[r], *S)",
            "`gatherv`",
        ),
    ),
    "send": Row(
        "(x, dest, *, tag, comm, token)", "MPI_Send", None, cheat=Cheat("", "S", "", "is received")
    ),
    "sendrecv": Row(
        "(sendbuf, recvbuf, source, dest, *, sendtag, recvtag, comm, status, token)",
        "MPI_Sendrecv",
        _ring,
        _call_ring,
        log=r"<- {left} \(tag -1, {items} items\) / -> {right} \(tag 0, {items} items\)",
        cheat=Cheat("", "S", "S", "sent the other way"),
    ),
}
REDUCING = tuple(name for name, row in ROWS.items() if "op" in row.positional)
STARTED = tuple(
    name
    for name, op in OPERATIONS.items()
    if op.row.started or op.initiate is not Operation.initiate
)
AVERAGING = tuple(name for name in REDUCING if OPERATIONS[name].row.has_mean)


def reduction_of(name):
    return mpi4jax.MEAN if name == "MEAN" else getattr(MPI, name)


def good(name):
    """The arguments of a good call on one rank."""
    x = np.ones((SIZE, 3), np.float32)
    values = {"op": MPI.SUM, "root": 0, "source": MPI.PROC_NULL, "dest": MPI.PROC_NULL}
    values |= {"x": x, "sendbuf": x, "recvbuf": x, "cart": ring(), "perm": [(0, 0)]}
    ones = [1] * SIZE
    values |= {"capacity": SIZE, "send_counts": ones, "recv_counts": ones, "counts": ones}
    if name in ("allgatherv", "gatherv"):
        values["counts"] = [SIZE] * SIZE
    return {a: values[a] for a in ROWS[name].positional if a}


# ---- Cases


@dataclass(frozen=True)
class Case:
    """A row, with this root, with this reduction, at operands of this kind."""

    name: str
    root: int | None = None
    op: Any = None  # a name of MPI's, or a `reference.Reduction`
    values: str = ""

    def __str__(self):
        parts = [self.row.title or self.name, self.op and str(self.op)]
        parts += [None if self.root is None else f"root{self.root}", self.values]
        return "-".join(filter(None, parts))

    @property
    def row(self):
        return ROWS[self.name]

    @property
    def linear(self):
        return self.op in (None, "SUM", "MEAN")

    def run(self, api, x, comm=COMM):
        """Call the op: on the API of that name, or that object. Its result, None without one."""
        api = (
            {"token": Threaded, "notoken": lambda: notoken}[api]() if isinstance(api, str) else api
        )
        if self.row.call:
            return self.row.call(api, x, comm)
        op = reduction_of(self.op) if isinstance(self.op, str) else self.op and self.op.op
        values = {"x": x, "op": op, "root": self.root, "counts": rows.counts(comm.size)}
        given = [values[a] for a in self.row.positional]
        return getattr(api, self.name)(*given, comm=comm)

    def model(self, xp, xs):
        return self.row.model(xp, self, xs)

    def expected(self, xs, rank=RANK):
        return self.model(np, xs)[rank]

    def pushforward(self, xs, ts):
        return self.row.push(self, xs, ts) if self.row.push else self.model(np, ts)

    def blocks(self, rank=RANK, size=SIZE):
        return self.row.blocks(self, rank, size)

    def counted(self, rank=RANK, size=SIZE):
        """How many blocks, of those in its operand, a log line counts."""
        return self.blocks(rank, size) if self.row.counts == "blocks" else self.row.counts or 0

    def shape(self, payload, rank=RANK, size=SIZE):
        """The shape of a rank's operand."""
        blocks = self.blocks(rank, size)
        return (blocks, *payload) if blocks else payload

    def operands(self, make=float32, payload=(2, 3), size=SIZE):
        """The operands of all ranks, each ``make(shape, seed)``."""
        return [make(self.shape(payload, rank, size), seed=[rank, 42]) for rank in range(size)]

    def inputs(self, dtype=np.float64, payload=(2,)):
        """Operands at which to differentiate. Element 0 is special, if `values` says so."""
        rng = np.random.default_rng(zlib.crc32(str(self).encode()))
        shapes = [self.shape(payload, r) for r in range(SIZE)]
        xs = [(rng.uniform(0.5, 2, s) * rng.choice([-1, 1], s)).astype(dtype) for s in shapes]
        if self.values == "zero":
            xs[-1][0] = 0
        if self.values == "zeros":
            xs[0][0] = xs[-1][0] = 0
        if self.values == "ties":
            for x in xs[:2]:
                x[0] = 3 if self.op == "MAX" else -3
        if self.values == "all equal":
            for x in xs:
                x[0] = 1.25
        return xs


def cases(op="SUM", roots=(SIZE - 1,), only=ROWS):
    """Each op, once for each root."""
    return [
        Case(name, root, op if "op" in row.positional else None)
        for name, row in ROWS.items()
        if row.model
        and name in only
        and (op != "MEAN" or name not in REDUCING or name in AVERAGING)
        for root in (roots if "root" in row.positional else (None,))
    ]


def cases_with_data():
    """All but the barrier, whose case gives back what it is given."""
    return [case for case in cases() if case.name != "barrier"]


# The points at which reductions are differentiated, beside generic ones.
SPECIAL = {
    "SUM": (),
    "MEAN": (),
    "PROD": ("zero", "zeros"),
    "MAX": ("ties", "all equal"),
    "MIN": ("ties", "all equal"),
}


def derivative_cases():
    roots = sorted({0, SIZE - 1})
    found = [case for case in cases(roots=roots) if case.op is None]
    for op, special in SPECIAL.items():
        for case in cases(op, roots, REDUCING):
            found += [Case(case.name, case.root, op, values) for values in ("", *special)]
    return found
