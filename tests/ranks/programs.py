"""Random programs: ops nested at random in JAX's control flow, beside a NumPy interpreter of them.

A program is a list of statements about a few vectors of integers, which wrap, so that results are
exact. ``run`` executes it with JAX on this rank, ``interpret`` with NumPy on all ranks at once.
The interpreter also notes which MPI calls each rank makes, in program order.
"""

import random
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from mpi4py import MPI
from reference import FOLDS, LEFT, RANK, RIGHT, SIZE, SPECS, ring

import mpi4jax
from mpi4jax import notoken

VECTORS, LENGTH, TOKENS, DEPTH = 4, 6, 2, 3
ONE_RANK = [name for name in SPECS if name not in ("send", "recv")]
OPS = ONE_RANK if SIZE == 1 else list(SPECS)
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
    y, token = _call(op, x, None if op.take is None else tokens[op.take])
    if y is not None and op.target is not None:
        if y.ndim > x.ndim:  # a block from each rank
            y = jnp.sum(_weighted(y), 0, dtype=jnp.int32)
        vectors[op.target] = vectors[op.target].at[: op.items].set(y)
    if token is not None and op.keep is not None:
        tokens[op.keep] = token
    return vectors, tokens


def _weighted(x):
    """Different multiples for different ranks."""
    return np.arange(1, SIZE + 1, dtype=np.int32).reshape(SIZE, *(1,) * (x.ndim - 1)) * x


def _call(op, x, token):
    """Result and new token, either of which may be None."""
    name, spec = op.name, SPECS[op.name]
    args, kwargs = [x], {}
    if name in ("send", "recv"):  # both: a message from the root to the next rank
        sender, receiver = op.root, (op.root + 1) % SIZE
        if sender not in (RANK, RANK - 1, RANK - 1 + SIZE):
            return None, None
        name = "send" if sender == RANK else "recv"
        spec, kwargs["tag"] = SPECS[name], op.items
        args.append(receiver if name == "send" else sender)
        if op.name == "recv" and name == "recv":
            args[1] = MPI.ANY_SOURCE
    elif name == "sendrecv":
        args = [x, x, LEFT, RIGHT]
    elif name == "alltoall" or (name == "scatter" and op.root == RANK):
        args = [_weighted(x[None])]
    elif name == "barrier":
        args = []
    elif name == "halo_exchange":  # the ghost cell behind one inner cell
        args, kwargs = [jnp.stack([x, x]), ring()], {"axes": 0, "width": [(0, 1)]}
    if "reduction" in spec.params:
        args.append(getattr(MPI, op.reduction))
    if "root" in spec.params:
        args.append(op.root)
    if op.take is None and op.keep is None:
        y, token = getattr(notoken, name)(*args, **kwargs), None
    else:
        out = getattr(mpi4jax, name)(*args, token=token, **kwargs)
        y, token = out if spec.returns else (None, out)
    return y[1] if name == "halo_exchange" else y, token


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
    spec, items = SPECS[op.name], prod(xs[0].shape)
    message = op.name in ("send", "recv")
    for rank in range(SIZE):
        is_root, is_next = rank == op.root, rank == (op.root + 1) % SIZE
        if message and not (is_root or is_next):
            continue
        name = spec.mpi if not message else "MPI_Send" if is_root else "MPI_Recv"
        counted = {"barrier": None, "halo_exchange": 2 * items}.get(op.name, items)
        log[rank].append((name, counted))
        y = _model(op, xs, rank)
        if y is None or op.target is None or (message and is_root):
            continue
        target = new[rank][op.target].copy()
        target[..., : op.items] = y
        new[rank][op.target] = target
    return new


def _model(op, xs, rank):
    fold = FOLDS[op.reduction]
    weighted = lambda blocks: sum(np.int32(r + 1) * x for r, x in enumerate(blocks))
    match op.name:
        case "allgather":
            return weighted(xs)
        case "allreduce":
            return _reduce(fold, xs)
        case "alltoall":
            return weighted([np.int32(rank + 1) * x for x in xs])
        case "barrier":
            return None
        case "bcast":
            return xs[op.root]
        case "gather":
            return weighted(xs) if rank == op.root else xs[rank]
        case "halo_exchange":
            return xs[(rank + 1) % SIZE]
        case "reduce":
            return _reduce(fold, xs) if rank == op.root else xs[rank]
        case "scan":
            return _reduce(fold, xs[: rank + 1])
        case "scatter":
            return np.int32(rank + 1) * xs[op.root]
        case "sendrecv" | "send" | "recv":
            return xs[rank - 1]
        case _:
            raise NotImplementedError(f"{op.name} has no model here")


def _reduce(fold, xs):
    total = xs[0]
    for x in xs[1:]:
        total = fold(total, x)
    return total
