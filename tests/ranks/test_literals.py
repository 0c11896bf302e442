"""Numbers as operands, which are literals of a jaxpr and have no shape there.

Each operation on a number, in each control flow and under each transformation, gives what it gives
for the same number as an array, which is an argument of the compiled function.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from mpi4py import MPI
from reference import LEFT, RANK, RIGHT, SIZE
from test_halo import cart_of

import mpi4jax.notoken as m

NUMBERS = {
    "float": 1.5,
    "int": 2,
    "bool": True,
    "complex": 1.5 + 1j,
    "numpy.float32": np.float32(1.5),
    "numpy.int32": np.int32(2),
    "numpy.bool": np.bool_(True),
    "numpy.complex64": np.complex64(1.5 + 1j),
}


def _sum_of(v):
    return MPI.LOR if jnp.issubdtype(jnp.result_type(v), bool) else MPI.SUM


def _other_than_sum(v):
    return MPI.LAND if jnp.issubdtype(jnp.result_type(v), bool) else MPI.PROD


def _send_and_recv(v):
    m.send(v, RIGHT if RANK < SIZE - 1 else MPI.PROC_NULL)
    return m.recv(v, LEFT if RANK > 0 else MPI.PROC_NULL)


@jax.jit
def _to(v, dest, source):
    return m.sendrecv(v, v, source, dest)


def _scatter(v):
    return m.scatter(jnp.stack([jnp.asarray(v)] * SIZE) if RANK == 0 else v, 0)


# Functions of a number.
OPERATIONS = {
    "allreduce": lambda v: m.allreduce(v, op=_sum_of(v)),
    "allreduce, PROD": lambda v: m.allreduce(v, op=_other_than_sum(v)),
    "allgather": m.allgather,
    "barrier": lambda v: m.barrier() or v,
    "bcast": lambda v: m.bcast(v, SIZE - 1),
    "exscan": lambda v: m.exscan(v, op=_sum_of(v)),
    "gather": lambda v: m.gather(v, 0),
    "permute": lambda v: m.permute(v, [(r, (r + 1) % SIZE) for r in range(SIZE)]),
    "reduce": lambda v: m.reduce(v, op=_sum_of(v), root=0),
    "reduce, PROD": lambda v: m.reduce(v, op=_other_than_sum(v), root=0),
    "scan": lambda v: m.scan(v, op=_sum_of(v)),
    "scan, PROD": lambda v: m.scan(v, op=_other_than_sum(v)),
    "scatter": _scatter,
    "send and recv": _send_and_recv,
    "sendrecv": lambda v: m.sendrecv(v, v, LEFT, RIGHT),
    "sendrecv, an array": lambda v: m.sendrecv(jnp.asarray(v), v, LEFT, RIGHT),
    "sendrecv, traced ranks": lambda v: _to(v, np.int32(RIGHT), LEFT),
    "tree": lambda v: m.allreduce({"a": v, "b": v}, op=_sum_of(v)),
    "iallreduce": lambda v: m.wait(m.iallreduce(v, op=_sum_of(v))),
    "isendrecv": lambda v: m.wait(m.isendrecv(v, v, LEFT, RIGHT)),
    "pvary": m.pvary,
    "halo_exchange, a border": lambda v: m.halo_exchange(
        jnp.ones(3, jnp.result_type(v)), cart_of((SIZE,), (False,)), border=v
    ),
}


def _custom_jvp(u):
    f = jax.custom_jvp(lambda x: x * u())
    f.defjvp(lambda xs, ts: (xs[0] * u(), ts[0] * u()))
    return f


def _custom_vjp(u):
    f = jax.custom_vjp(lambda x: x * u())
    f.defvjp(lambda x: (x * u(), None), lambda _, c: (c * u(),))
    return f


# Functions of a function `u` without arguments, which returns a number of x's dtype.
FLOWS = {
    "plain": lambda u: lambda x: x * u(),
    "jit": lambda u: jax.jit(lambda x: x * u()),
    "cond": lambda u: lambda x: lax.cond(x < 3, lambda x: x * u(), lambda x: x, x),
    "switch": lambda u: lambda x: lax.switch(1, [lambda x: x, lambda x: x * u()], x),
    "scan": lambda u: lambda x: lax.scan(lambda c, _: (c * u(), u()), x, None, length=2)[0],
    "while, body": lambda u: (
        lambda x: lax.while_loop(
            lambda s: s[1] < 2, lambda s: (s[0] * u(), s[1] + 1, 3.0), (x, 0, 1.0)
        )[0]
    ),
    "while, condition": lambda u: (
        lambda x: lax.while_loop(
            lambda s: s[0] < 1 + 0 * u(), lambda s: (s[0] + 1, s[1]), (x, u())
        )[0]
    ),
    "fori": lambda u: lambda x: lax.fori_loop(0, 2, lambda i, c: c * u(), x),
    "map": lambda u: lambda x: lax.map(lambda v: v * u(), jnp.stack([x, x]))[1],
    "checkpoint": lambda u: jax.checkpoint(lambda x: x * u()),
    "custom_jvp": _custom_jvp,
    "custom_vjp": _custom_vjp,
}

X = np.float32([0.5, -1.5])
TRANSFORMATIONS = {
    "none": lambda f, x: f(x[0]),
    "vmap": lambda f, x: jax.vmap(f)(x),
    "vmap of vmap": lambda f, x: jax.vmap(jax.vmap(f))(jnp.stack([x, x])),
    "jvp": lambda f, x: jax.jvp(f, (x[0],), (x[1],)),
    "grad": lambda f, x: jax.value_and_grad(f)(x[0]),
    "vmap of grad": lambda f, x: jax.vmap(jax.grad(f))(x),
    "grad of vmap": lambda f, x: jax.grad(lambda v: jnp.sum(jax.vmap(f)(v)))(x),
    "jvp of grad": lambda f, x: jax.jvp(jax.grad(f), (x[0],), (x[1],)),
    "vmap of jvp": lambda f, x: jax.vmap(lambda t: jax.jvp(f, (x[0],), (t,))[1])(x),
    "jacfwd": lambda f, x: jax.jacfwd(lambda v: f(v[0]) * v)(x),
    "jacrev": lambda f, x: jax.jacrev(lambda v: f(v[0]) * v)(x),
}
REVERSE = {name for name in TRANSFORMATIONS if "grad" in name or name == "jacrev"}
FORWARD = {name for name in TRANSFORMATIONS if "j" in name and name != "jacrev"}


def exists(flow, transformation):
    """Whether JAX has it: loops of unknown length in reverse, or a custom_vjp forward, are not."""
    if flow == "custom_vjp":
        return transformation not in FORWARD
    return not (flow.startswith("while") and transformation in REVERSE)


CELLS = [
    pair for pair in itertools.product(FLOWS, TRANSFORMATIONS) if exists(*pair)
]  # fmt: skip


def check(flow, transformation, operation, number):
    op, v = OPERATIONS[operation], NUMBERS[number]

    def of(v):
        x = jnp.asarray(X)

        def u():
            y = op(v)
            return sum(jnp.sum(jnp.real(leaf)) for leaf in jax.tree.leaves(y)).astype(np.float32)

        return TRANSFORMATIONS[transformation](FLOWS[flow](u), x)

    found = jax.jit(lambda: of(v))()
    expected = jax.jit(of)(v)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def cells():
    """Each pair of control flow and transformation with three operations and numbers."""
    for k, ((flow, transformation), turn) in enumerate(itertools.product(CELLS, range(3))):
        operation = [*OPERATIONS][(7 * k + turn) % len(OPERATIONS)]
        number = [*NUMBERS][(3 * k + turn) % len(NUMBERS)]
        yield pytest.param(
            flow, transformation, operation, number,
            id="|".join((flow, transformation, operation, number)),
        )  # fmt: skip


@pytest.mark.one_in(12)
@pytest.mark.parametrize("flow, transformation, operation, number", list(cells()))
def test_a_number(flow, transformation, operation, number):
    check(flow, transformation, operation, number)


def test_of_each_operation_in_a_batched_loop():
    """The form in which most programs have one."""
    loop, vmap = "while, body", "vmap"
    for k, operation in enumerate(OPERATIONS):
        check(loop, vmap, operation, [*NUMBERS][k % len(NUMBERS)])
