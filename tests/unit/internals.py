"""Functions that communicate, and what becomes of them: for the tests of JAX's internals."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from mpi4py import MPI

from mpi4jax import notoken
from mpi4jax._jax.functions import inner_jaxprs
from mpi4jax._op.primitive import PRIMITIVES

X, CONSTANT = jnp.ones(3), np.ones(3, np.float32)
NAMES = {p.name: name for name, p in PRIMITIVES.items()}
CALLS = [jax.export.DisabledSafetyCheck.custom_call(f"mpi4jax_{name}") for name in PRIMITIVES]


def total(x):
    return notoken.allreduce(x, MPI.SUM)


def send(x=CONSTANT):
    notoken.send(x, MPI.PROC_NULL)


def receive():
    return notoken.recv(CONSTANT, MPI.PROC_NULL)


def no_arguments(x):
    jax.jit(jax.checkpoint(receive))()
    return x * x


def squared_beside(f):
    """A function of which ``f``, called without arguments, is no part of the result."""

    def g(x):
        f()
        return x * x

    return g


def ops(f, *args):
    """The ops of a function in program order, each as (name, shape of the first operand)."""
    return ops_of(jax.make_jaxpr(f)(*(args or (X,))).jaxpr)


def ops_of(jaxpr):
    out = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in NAMES:
            out.append((NAMES[eqn.primitive.name], eqn.invars[0].aval.shape))
        for _, inner in inner_jaxprs(eqn.params):
            out += ops_of(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)
    return out


def names(f, *args):
    return [name for name, _ in ops(f, *args)]


def grad(f):
    return jax.grad(lambda x: jnp.sum(f(x)))


def lowered(f, *args, **kwargs):
    return jax.jit(f, **kwargs).lower(*(args or (X,))).as_text()
