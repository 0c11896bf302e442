"""Random programs: ops nested at random in JAX's control flow, beside a NumPy interpreter of them.

A program is a list of statements about a few vectors of integers, which wrap, so that results are
exact. ``run`` executes it with JAX on this rank, ``interpret`` with NumPy on all ranks at once.
The interpreter also notes which MPI calls each rank makes, in program order.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from mpi4py import MPI
from reference import RANK, SIZE, Threaded
from table import ROWS, Case

import mpi4jax
from mpi4jax import notoken

VECTORS, LENGTH, TOKENS, DEPTH = 4, 6, 2, 3
MESSAGES = ("send", "recv")
OPS = [name for name in ROWS if SIZE > 1 or name not in MESSAGES]
LOOPS = ("scan", "fori", "while", "map")
CHOICES = ("cond", "switch")
CALLS = ("jit", "mpijit", "remat", "custom_jvp", "custom_vjp", "vmap")


@dataclass
class Op:
    """One op on the first ``items`` elements of a vector."""

    name: str
    items: int
    source: int
    target: int | None  # None: the result is dropped
    take: int | None  # the token that goes in
    keep: int | None  # where the token that comes out is kept
    root: int
    reduction: str

    @property
    def case(self):
        given = ROWS[self.name].positional
        return Case(
            self.name,
            self.root if "root" in given else None,
            self.reduction if "op" in given else None,
        )


@dataclass
class Local:
    """Arithmetic between two vectors."""

    target: int
    source: int


@dataclass
class Nest:
    """Statements inside one of JAX's higher-order functions."""

    kind: str
    dropped: bool  # nothing uses its results
    bodies: list[list[Any]] = field(default_factory=list)
    count: int = 1
    taken: int = 0
    by_value: bool = False  # which branch: decided by a value that is reduced over the ranks
    test: Op | None = None  # an op in the condition of a while loop


# ---- Making


def generate(seed):
    r = random.Random(seed)
    return [_statement(r, 0, False) for _ in range(r.randint(3, 6))]


def _op(r):
    pick = lambda n: r.choice([None, *range(n)])
    items = r.randint(0 if r.random() < 0.1 else 1, LENGTH)
    return Op(
        name=r.choice(OPS),
        items=items,
        source=r.randrange(VECTORS),
        target=pick(VECTORS),
        take=pick(TOKENS),
        keep=pick(TOKENS),
        root=r.randrange(SIZE),
        reduction=r.choice(["SUM", "MAX", "MIN", "BXOR"]),
    )


def _statement(r, depth, batched):
    if depth == DEPTH or r.random() < 0.55:
        return _op(r) if r.random() < 0.75 else Local(r.randrange(VECTORS), r.randrange(VECTORS))
    nest = Nest(r.choice(LOOPS + CHOICES + CALLS), r.random() < 0.3)
    branches = {"cond": 2, "switch": 3}.get(nest.kind, 1)
    inner = batched or nest.kind == "vmap"
    for _ in range(branches):
        nest.bodies.append([_statement(r, depth + 1, inner) for _ in range(r.randint(1, 3))])
    nest.count = r.randint(0 if r.random() < 0.15 else 1, 3)
    nest.taken = r.randrange(branches)
    # Below a vmap a value would be one for each element of the batch.
    nest.by_value = not batched and r.random() < 0.5
    nest.test = _op(r) if r.random() < 0.5 else None
    return nest


# ---- Running with JAX


def run(program, vectors, one):
    """Execute on this rank. ``one`` is 1, but JAX should not know it."""
    tokens = [mpi4jax.create_token() for _ in range(TOKENS)]
    return _run(program, ([jnp.asarray(v) for v in vectors], tokens), one)[0]


def _run(block, state, one):
    for statement in block:
        vectors, tokens = list(state[0]), list(state[1])
        if isinstance(statement, Op):
            state = _run_op(statement, vectors, tokens)
        elif isinstance(statement, Local):
            i, j = statement.target, statement.source
            vectors[i] = vectors[i] * 3 + jnp.flip(vectors[j]) + 1
            state = vectors, tokens
        else:
            new = _run_nest(statement, (vectors, tokens), one)
            state = (vectors, new[1]) if statement.dropped else new
    return state


def _run_nest(nest, state, one):
    body = lambda state: _run(nest.bodies[0], state, one)
    match nest.kind:
        case "jit":
            return jax.jit(body)(state)
        case "mpijit":
            return mpi4jax.jit(body)(state)
        case "remat":
            return jax.checkpoint(body)(state)
        case "custom_jvp":
            f = jax.custom_jvp(body)
            f.defjvp(lambda primals, tangents: (body(*primals), tangents[0]))
            return f(state)
        case "custom_vjp":
            f = jax.custom_vjp(body)
            f.defvjp(lambda state: (body(state), None), lambda _, ct: (ct,))
            return f(state)
        case "vmap":
            stacked = [jnp.stack([v, v + 1]) for v in state[0]]
            out = jax.vmap(lambda vectors: body((vectors, state[1]))[0])(stacked)
            return [v[0] + 2 * v[1] for v in out], state[1]
        case "scan":
            return lax.scan(lambda c, _: (body(c), None), state, None, length=nest.count)[0]
        case "fori":
            return lax.fori_loop(0, nest.count * one, lambda i, c: body(c), state)
        case "while":

            def more(carry):
                if nest.test is not None:
                    _run_op(nest.test, *carry[1])
                return carry[0] < nest.count * one

            return lax.while_loop(more, lambda c: (c[0] + 1, body(c[1])), (0, state))[1]
        case "map":
            steps = jnp.arange(nest.count, dtype=jnp.int32)
            out = lax.map(lambda i: body(([v + i for v in state[0]], state[1]))[0], steps)
            return [jnp.sum(v, 0, dtype=jnp.int32) for v in out], state[1]
        case "cond" | "switch":
            branches = [lambda s, b=block: _run(b, s, one) for block in nest.bodies]
            index = nest.taken * one
            if nest.by_value:
                index = notoken.allreduce(state[0][0][0], MPI.SUM) % len(branches)
            if nest.kind == "cond":
                return lax.cond(index == 0, *branches, state)
            return lax.switch(index, branches, state)


def _run_op(op, vectors, tokens):
    vectors, tokens = list(vectors), list(tokens)
    x = vectors[op.source][: op.items]
    api = notoken
    if (op.take, op.keep) != (None, None):
        api = Threaded(None if op.take is None else tokens[op.take])
    if op.name in MESSAGES:
        y = _message(op, api, x)
    else:
        y = _one(op.case.run(api, _many(x, op.case.blocks())), x)
    if y is not None and op.target is not None:
        vectors[op.target] = vectors[op.target].at[: op.items].set(y)
    if op.keep is not None and api.token is not None:
        tokens[op.keep] = api.token
    return vectors, tokens


def _message(op, api, x):
    """From the root to the next rank: a send on the one and a recv on the other."""
    receiver = (op.root + 1) % SIZE
    if op.root == RANK:
        return api.send(x, receiver, tag=op.items)
    if receiver == RANK:
        return api.recv(x, MPI.ANY_SOURCE if op.name == "recv" else op.root, tag=op.items)
    return None


def _many(x, blocks):
    """Different multiples of a vector, as blocks."""
    return np.arange(1, blocks + 1, dtype=np.int32).reshape(-1, *[1] * x.ndim) * x if blocks else x


def _one(y, x):
    """A sum of different multiples of the blocks, if there are blocks."""
    return sum(np.int32(j + 1) * y[j] for j in range(len(y))) if y.ndim > x.ndim else y


# ---- Interpreting with NumPy, on all ranks at once


def interpret(program, vectors):
    """``vectors[rank]`` to the final ones, and to each rank's list of (MPI's name, items)."""
    log = [[] for _ in range(SIZE)]
    with np.errstate(over="ignore"):
        return _interpret(program, vectors, log), log


def _interpret(block, state, log):
    for statement in block:
        if isinstance(statement, Op):
            state = _interpret_op(statement, state, log)
        elif isinstance(statement, Local):
            i, j = statement.target, statement.source
            state = [list(vectors) for vectors in state]
            for vectors in state:
                vectors[i] = vectors[i] * np.int32(3) + np.flip(vectors[j], -1) + np.int32(1)
        else:
            new = _interpret_nest(statement, state, log)
            state = state if statement.dropped else new
    return state


def _interpret_nest(nest, state, log):
    block = nest.bodies[0]
    match nest.kind:
        case "vmap":
            stacked = [[np.stack([v, v + np.int32(1)]) for v in vectors] for vectors in state]
            out = _interpret(block, stacked, log)
            return [[v[0] + np.int32(2) * v[1] for v in vectors] for vectors in out]
        case "scan" | "fori":
            for _ in range(nest.count):
                state = _interpret(block, state, log)
            return state
        case "while":
            for i in range(nest.count + 1):
                if nest.test is not None:
                    _interpret_op(nest.test, state, log)
                state = _interpret(block, state, log) if i < nest.count else state
            return state
        case "map":
            total = [[v * np.int32(0) for v in vectors] for vectors in state]
            for i in range(nest.count):
                moved = [[v + np.int32(i) for v in vectors] for vectors in state]
                out = _interpret(block, moved, log)
                total = [
                    [a + b for a, b in zip(s, t, strict=True)]
                    for s, t in zip(total, out, strict=True)
                ]
            return total
        case "cond" | "switch":
            taken = nest.taken
            if nest.by_value:
                taken = int(sum(vectors[0][0] for vectors in state).astype(np.int32))
                taken %= len(nest.bodies)
                for lines in log:
                    lines.append(("MPI_Allreduce", 1))
            return _interpret(nest.bodies[taken], state, log)
        case _:
            return _interpret(block, state, log)


def _interpret_op(op, state, log):
    xs = [vectors[op.source][..., : op.items] for vectors in state]
    new = [list(vectors) for vectors in state]
    receiver, items = (op.root + 1) % SIZE, xs[0].size
    if op.name in MESSAGES:
        log[op.root].append(("MPI_Send", items))
        log[receiver].append(("MPI_Recv", items))
        results = {receiver: xs[op.root]}
    else:
        row = op.case.row
        for rank, lines in enumerate(log):
            lines.append((row.mpi, row.counts and op.case.counted(rank) * items))
        blocks = [_many(x, op.case.blocks(r)) for r, x in enumerate(xs)]
        results = {r: _one(y, xs[r]) for r, y in enumerate(op.case.model(np, blocks))}
    for rank, y in results.items():
        if op.target is not None:
            new[rank][op.target] = np.concatenate(
                [y, new[rank][op.target][..., op.items :]], axis=-1
            )
    return new
