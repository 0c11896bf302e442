"""One rank of a small program, written for mpi4jax 0.9.1, in steps for third_party.py.

    mpiexec -n 2 python benches/programs/on_small.py SOCKET CONTENDER PROGRAM

Two training loops with averaged gradients, NNX and Equinox, and a matrix-free conjugate gradient.
"""

import sys
import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "suite"))

from serving import serve

import mpi4jax

jax.config.update("jax_enable_x64", sys.argv[3] == "cg")

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
SIZES = (784, 128, 10)  # as for digits of 28 x 28 pixels
BATCH = 64  # on each rank
CELLS = 256  # in each direction


def digits():
    """Some that each rank makes for itself, and their labels."""
    generator = np.random.default_rng(rank)
    x = generator.normal(size=(BATCH, SIZES[0])).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(generator.integers(0, SIZES[-1], BATCH))


def averaged(gradients):
    return jax.tree.map(lambda g: mpi4jax.allreduce(g, op=MPI.SUM, comm=comm) / size, gradients)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class Network(nnx.Module):
    def __init__(self, rngs):
        inner, hidden, outer = SIZES
        self.first = nnx.Linear(inner, hidden, rngs=rngs)
        self.second = nnx.Linear(hidden, outer, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


class TrainNNX:
    def __init__(self):
        self.model = Network(nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.adam(1e-3), wrt=nnx.Param)
        self.x, self.labels = digits()
        self.loss = jnp.zeros(())

    @staticmethod
    @nnx.jit
    def train(model, optimizer, x, labels):
        loss, gradients = nnx.value_and_grad(lambda m: cross_entropy(m(x), labels))(model)
        optimizer.update(model, averaged(gradients))
        return loss

    def step(self):
        self.loss = self.train(self.model, self.optimizer, self.x, self.labels)

    def fields(self):
        return [self.loss, *jax.tree.leaves(nnx.state(self.model))]


class TrainEquinox:
    def __init__(self):
        inner, hidden, outer = SIZES
        self.model = eqx.nn.MLP(inner, outer, hidden, depth=1, key=jax.random.key(0))
        self.rule = optax.adam(1e-3)
        self.state = self.rule.init(eqx.filter(self.model, eqx.is_array))
        self.x, self.labels = digits()
        self.loss = jnp.zeros(())

    @eqx.filter_jit
    def train(self, model, state, x, labels):
        def loss_of(model):
            return cross_entropy(jax.vmap(model)(x), labels)

        loss, gradients = eqx.filter_value_and_grad(loss_of)(model)
        updates, state = self.rule.update(averaged(gradients), state)
        return eqx.apply_updates(model, updates), state, loss

    def step(self):
        new = self.train(self.model, self.state, self.x, self.labels)
        self.model, self.state, self.loss = new

    def fields(self):
        return [self.loss, *jax.tree.leaves(eqx.filter(self.model, eqx.is_array))]


class SolvePoisson:
    """(1 - laplace) x = b on a torus: each rank has some of the rows."""

    def __init__(self):
        b = np.random.default_rng(0).normal(size=(CELLS, CELLS))
        self.b = jnp.asarray(np.split(b, size)[rank])
        self.x, self.iterations = self.b, 0

    @staticmethod
    @jax.jit
    def solve(b):
        above, below = (rank - 1) % size, (rank + 1) % size

        def exchange(row, source, dest):
            return mpi4jax.sendrecv(row, row, source=source, dest=dest, comm=comm)

        def apply(x):
            upper = exchange(x[-1:], source=above, dest=below)
            lower = exchange(x[:1], source=below, dest=above)
            high = jnp.concatenate([upper, x, lower])
            beside = jnp.roll(x, 1, 1) + jnp.roll(x, -1, 1)
            return 5 * x - high[:-2] - high[2:] - beside

        def dot(a, b):
            return mpi4jax.allreduce(jnp.vdot(a, b), op=MPI.SUM, comm=comm)

        def better(state):
            x, r, p, square, count = state
            image = apply(p)
            alpha = square / dot(p, image)
            x, r = x + alpha * p, r - alpha * image
            new = dot(r, r)
            return x, r, r + new / square * p, new, count + 1

        square = dot(b, b)
        state = jnp.zeros_like(b), b, b, square, 0
        state = lax.while_loop(lambda state: state[3] > 1e-20 * square, better, state)
        return state[0], state[4]

    def step(self):
        self.x, self.iterations = self.solve(self.b)

    def fields(self):
        return [self.x, jnp.asarray(self.iterations)]


program = {"nnx": TrainNNX, "equinox": TrainEquinox, "cg": SolvePoisson}[sys.argv[3]]()


def start():
    step(2)  # compiled
    return True


def step(count):
    """Seconds of a step."""
    jax.block_until_ready(program.fields())
    comm.Barrier()
    begin = time.perf_counter()
    for _ in range(count):
        program.step()
    jax.block_until_ready(program.fields())
    return (time.perf_counter() - begin) / count


def result():
    """Sums over all ranks of what a step changes."""
    fields = [np.asarray(field, np.float64) for field in program.fields()]
    sums = np.array([total for x in fields for total in (x.sum(), (x**2).sum())])
    return comm.allreduce(sums).tolist()


serve({"start": start, "step": step, "result": result})
