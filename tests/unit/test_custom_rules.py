"""Functions with a rule of the user's: how often they are called; the first operation in one."""

import os
import subprocess
import sys

import pytest

# Each prints how often JAX calls the innermost of four nested functions.
HEAD = """
import sys, jax, jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
if sys.argv[1] == "imported": import mpi4jax
seen = []
def base(x):
    seen.append(1)
    return x * 2
def with_jvp(g):
    h = jax.custom_jvp(lambda x: g(x)); h.defjvp(lambda p, t: (g(*p), t[0])); return h
def with_zeros(g):
    h = jax.custom_jvp(lambda x, y: g(x) * y)
    h.defjvp(lambda p, t: (g(p[0]) * p[1], jax.jvp(g, p[:1], p[:1])[1]), symbolic_zeros=True)
    return lambda x: h(x, 1.0)
def with_vjp(g):
    h = jax.custom_vjp(lambda x: g(x))
    h.defvjp(lambda x: (g(x), x), lambda x, c: (c * jax.vjp(g, x)[1](c)[0],))
    return h
def in_shard_map(g):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(g, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
def nested(around):
    g = base
    for _ in range(1 if around is in_shard_map else 4): g = around(g)
    return g
x = jnp.ones(3)
EAGER, JITTED = jax.grad, lambda f: jax.jit(jax.grad(f))
def count(f):
    f(x)
    print(len(seen)); seen.clear()
"""
PROGRAMS = {
    "unperturbed": "count(grad(lambda x: (nested(around)(lax.stop_gradient(x)) * x).sum()))",
    "perturbed": "count(grad(lambda x: (nested(around)(x) * x).sum()))",
}


def calls(program, around, mode):
    command = [sys.executable, "-c", f"{HEAD}around = {around}\n{program}", mode]
    env = {**os.environ, "MPI4JAX_TRANSPORT": "mpi"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


# How often in each program, eagerly and jitted; without the import 1, or 5 where it is 15 or 46.
CALLS = {
    "with_jvp": ["2", "1", "1", "1"],
    "with_zeros": ["2", "1", "46", "46"],
    "with_vjp": ["2", "1", "15", "15"],
    "in_shard_map": ["2", "2", "1", "1"],
}


@pytest.mark.parametrize("around", CALLS)
def test_functions_are_called_once_more_to_see_whether_they_communicate(around):
    """Of rules, once more for each rule around them; of rules with symbolic zeros, up to twice.

    Functions none of whose arguments is perturbed, only in eager code: in a `jit`, JAX stages them.
    """
    lines = (f"for grad in EAGER, JITTED: {program}\n" for program in PROGRAMS.values())
    programs = "".join(lines)
    assert calls(programs, around, "imported") == CALLS[around]


FIRST = """
import jax, jax.numpy as jnp, mpi4jax.notoken as mpi4jax
@jax.custom_vjp
def copied(x): return x * 1.0
copied.defvjp(lambda x: (x * 1.0, None), lambda _, c: (mpi4jax.allreduce(c),))
def unused(x):
    copied(x)
    return (x * 3).sum()
print(str(jax.make_jaxpr(jax.grad(unused))(jnp.ones(2))).count("mpi4jax_allreduce"))
"""


STAGED = """
import mpi4jax.notoken as mpi4jax
@jax.custom_jvp
def total(x):
    seen.append(1)
    return jax.jit(mpi4jax.allreduce)(x) * 2
total.defjvp(lambda p, t: (total(*p), 2 * mpi4jax.allreduce(t[0])))
def loss(x): return (x * total(jnp.ones(3))).sum()
def batched(x): return jax.vmap(lambda y: y * total(jnp.ones(())), axis_size=3)(x).sum()
for f in loss, batched:
    seen.clear()
    jaxpr = str(jax.make_jaxpr(jax.grad(f))(x))
    print(len(seen), jaxpr.count("mpi4jax_allreduce["), jax.jit(jax.grad(f))(x)[0])
"""


def test_a_staged_function_that_communicates_is_differentiated_on_all_ranks():
    """JAX stages it, and once more for the derivative, which communicates the tangent, too."""
    assert calls("", f"None\n{STAGED}", "imported") == ["2 2 2.0", "2 2 2.0"]


def test_the_first_operation_of_a_process_in_a_backward_pass():
    """Also on a rank that does not use the result: another one may, and waits for it."""
    assert calls("", f"None\n{FIRST}", "imported") == ["1"]
