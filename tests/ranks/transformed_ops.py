"""What a check of a transformation is about: an op in a program, and what it should give.

The op becomes a *unit*: a function from an array to one of the same shape, the same on all ranks,
so that it can stand in a loop, a branch, a custom rule. The program under test makes `STEPS` steps
with it. What it should give is computed in one process, by JAX, from the model of the op in
`table.py` on all ranks' inputs: the value, the Jacobian of the whole job, the Hessian of a loss.
"""

import functools
import zlib
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from reference import RANK, SIZE
from table import REDUCING, ROWS, Case, cases

import mpi4jax

SHAPE = (2,)
STEPS = 2
# On many ranks, products over them would overflow, and iterations diverge.
FACTOR, COUPLING, LOW, HIGH = (1, 0.1, 0.5, 1.5) if SIZE <= 4 else (0.1, 1e-5, 0.7, 1.1)

# With which reductions an operation is tested: one that is linear, and another.
REDUCTIONS = {
    **dict.fromkeys(ROWS, ("SUM",)),
    **dict.fromkeys(REDUCING, ("SUM", "MAX")),
    "allreduce": ("SUM", "MEAN", "PROD"),
    "reduce_scatter": ("MEAN", "PROD"),
    "reduce_scatterv": ("MEAN", "MAX"),
    "scan": ("SUM", "MIN"),
}
CASES = [case for name in ROWS for op in REDUCTIONS[name] for case in cases(op, only=(name,))]


def title(case):
    """It has the same name on any number of ranks."""
    return str(replace(case, root=None))


class NotApplicable(Exception):
    """There is nothing that this transformation of this op could mean."""


# ---- The unit, its model, and the program


def _many(xp, x, blocks):
    return xp.stack([x * (1 + FACTOR * j) for j in range(blocks)]) if blocks else x


def _one(y, x):
    return sum(y[j] / (1 + FACTOR * j) for j in range(len(y))) if y.ndim > x.ndim else y


def unit(case, api):
    def f(x):
        y = case.run(api, _many(jnp, x, case.blocks()))
        # Ranks use a global result differently.
        return _one(mpi4jax.pvary(y) if case.row.replicated else y, x)

    return f


@functools.partial(jnp.vectorize, excluded=(0,), signature="(r,i)->(r,i)")
def unit_of_all(case, X):
    """The model of the unit; the last two axes of ``X`` are the rank and the axis of SHAPE."""
    ys = case.model(jnp, [_many(jnp, X[r], case.blocks(r)) for r in range(SIZE)])
    return jnp.stack([_one(y, X[r]) for r, y in enumerate(ys)])


def step(u, x):
    return 0.5 * x + COUPLING * u(x * x)


def program(u):
    def f(x):
        for _ in range(STEPS):
            x = step(u, x)
        return x

    return f


WEIGHTS = np.arange(1, SIZE * SHAPE[0] + 1, dtype=np.float32).reshape(SIZE, *SHAPE)


def loss(f):
    """This rank's part of the loss of the job."""
    return lambda x: jnp.sum(WEIGHTS[RANK] * f(x))


class Reference:
    """What the job as a whole gives. The axes of a result come first, then the axes of an input."""

    def __init__(self, case):
        rng = np.random.default_rng(zlib.crc32(str(case).encode()))
        self.X, self.T = rng.uniform(LOW, HIGH, (2, SIZE, *SHAPE)).astype(np.float32)
        self.unit = jax.jit(functools.partial(unit_of_all, case))
        self.program = jax.jit(program(functools.partial(unit_of_all, case)))
        self.jacobian_at = jax.jit(jax.jacobian(self.program))
        self.value, self.jacobian = self.program(self.X), np.asarray(self.jacobian_at(self.X))
        # All of a rank's input, to all of a rank's result.
        self.tangent = np.einsum("risj,sj->ri", self.jacobian, self.T)
        self.cotangent = np.einsum("ri,risj->sj", WEIGHTS, self.jacobian)

    @functools.cached_property
    def hessian(self):
        whole = jax.hessian(lambda X: jnp.sum(WEIGHTS * self.program(X)))
        return np.asarray(jax.jit(whole)(self.X))

    @functools.cached_property
    def matrix(self):
        """Of the unit, where it is linear."""
        return np.asarray(jax.jit(jax.jacobian(self.unit))(self.X))


reference = functools.lru_cache(maxsize=None)(lambda row: Reference(CASES[row]))


@dataclass
class Subject:
    """One cell of the table, ready to be checked."""

    case: Case
    api: str
    jit: Any
    ref: Reference

    @property
    def x(self):
        return jnp.asarray(self.ref.X[RANK])

    @property
    def t(self):
        return jnp.asarray(self.ref.T[RANK])

    @property
    def w(self):
        return WEIGHTS[RANK]

    @property
    def u(self):
        return unit(self.case, self.api)

    @property
    def f(self):
        return program(self.u)

    def linear(self):
        if not self.case.linear:
            raise NotApplicable("the op is not linear")

    def check(self, f, forward=True, reverse=True):
        """Whether ``f`` is the program, and its derivatives are the program's."""

        def everything(x, t):
            out = [f(x)]
            if forward:
                out.append(jax.jvp(f, (x,), (t,))[1])
            if reverse:
                out.append(jax.grad(loss(f))(x))
            return out

        value, *derivatives = self.jit(everything)(self.x, self.t)
        close(value, self.ref.value[RANK])
        if forward:
            close(derivatives.pop(0), self.ref.tangent[RANK])
        if reverse:
            close(derivatives.pop(0), self.ref.cotangent[RANK])


def close(actual, expected):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=2e-4, atol=1e-5)
