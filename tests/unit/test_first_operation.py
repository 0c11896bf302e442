"""What `import mpi4jax` costs a program without operations: no call of its functions more."""

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
    "vjp twice": "_, f = jax.vjp(nested(around), x); count(f); count(f)",
    "transposed": "count(jax.linear_transpose(lambda x: base(x), x))",
}


def calls(program, around, mode):
    command = [sys.executable, "-c", f"{HEAD}around = {around}\n{program}", mode]
    env = {**os.environ, "MPI4JAX_TRANSPORT": "mpi"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("around", ["with_jvp", "with_zeros", "with_vjp", "in_shard_map"])
def test_functions_are_called_as_often_as_without_the_import(around):
    lines = (f"for grad in EAGER, JITTED: {program}\n" for program in PROGRAMS.values())
    programs = "".join(lines)
    counted = calls(programs, around, "imported")
    assert counted == calls(programs, around, "not imported")
    assert len(counted) == 10
    assert all(int(n) > 0 for n in counted[:4])


def test_rules_inside_of_rules_are_asked_once():
    """In a program that communicates, a rule is called once more for each rule around it."""
    communicates = "mpi4jax.barrier()\ngrad = JITTED\n" + PROGRAMS["perturbed"]
    (asked,) = calls(communicates, "with_vjp", "imported")
    assert int(asked) == 15  # 5 without the import
