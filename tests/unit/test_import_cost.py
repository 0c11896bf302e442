"""Importing mpi4jax costs little in programs that never communicate: their calls in Python."""

import os
import subprocess
import sys

# Prints the number of calls in Python while each program is traced, and lowered or run.
PROGRAM = """
import sys, jax, jax.numpy as jnp
from jax import lax
if sys.argv[1] == "imported": import mpi4jax
def net(w, x):
    for _ in range(4): x = jnp.tanh(x @ w) + jnp.sin(x)
    return (x * x).sum()
def scanned(w, x):
    turn = lambda c, _: (jnp.tanh(c @ w) * 0.5, c.sum())
    return lax.scan(turn, x, None, length=3)[0].sum()
def looped(w, x):
    return lax.fori_loop(0, 3, lambda i, c: jnp.where(c > 0, c @ w, c), x).sum()
def constants(w, x):
    for _ in range(4): x = jax.nn.relu(jnp.ones(4)) * x + jax.nn.silu(x)
    return (x * w).sum()
@jax.custom_vjp
def scaled(x): return jnp.sin(x) * 0.5
scaled.defvjp(lambda x: (scaled(x), x), lambda x, c: (jnp.cos(x) * c * 0.5,))
def with_rules(w, x):
    for _ in range(4): x = scaled(jnp.tanh(x @ w) + jnp.sin(x))
    return (x * x).sum()
w, x, xs = jnp.ones((4, 4)), jnp.ones(4), jnp.ones((3, 4))
PROGRAMS = {
    "lowered": lambda: jax.jit(lambda w, x: net(w, x)).lower(w, x),
    "gradient": lambda: jax.jit(jax.grad(lambda w, x: net(w, x))).lower(w, x),
    "eager gradient": lambda: jax.grad(lambda w, x: net(w, x))(w, x),
    "vmap": lambda: jax.jit(jax.vmap(jax.grad(lambda w, x: net(w, x)), (None, 0))).lower(w, xs),
    "scan": lambda: jax.jit(jax.grad(lambda w, x: scanned(w, x))).lower(w, x),
    "loop": lambda: jax.jit(jax.grad(lambda w, x: looped(w, x))).lower(w, x),
    "custom_jvp of constants": lambda: jax.jit(jax.grad(lambda w, x: constants(w, x))).lower(w, x),
    "custom_vjp": lambda: jax.jit(jax.grad(lambda w, x: with_rules(w, x))).lower(w, x),
    "hessian": lambda: jax.jit(jax.hessian(lambda x: net(w, x))).lower(x),
}
for name, program in PROGRAMS.items():
    program()
    jax.clear_caches()
    calls = 0
    def count(frame, event, _):
        global calls
        calls += event == "call"
    sys.setprofile(count)
    program()
    sys.setprofile(None)
    print(name, calls, sep=": ")
"""


def calls(mode):
    command = [sys.executable, "-c", PROGRAM, mode]
    env = {**os.environ, "MPI4JAX_TRANSPORT": "mpi", "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return {k: int(v) for k, v in (line.split(": ") for line in done.stdout.splitlines())}


def test_programs_that_never_communicate_make_less_than_one_percent_more_calls():
    without, imported = calls("plain"), calls("imported")
    assert len(without) == 9
    more = {name: imported[name] / n - 1 for name, n in without.items()}
    # The exception: a rule whose argument is perturbed is called once more to see whether it
    # communicates. There are four such rules here, which are most of what this program traces.
    assert 0.01 < more.pop("custom_vjp") < 0.1, more
    # A tracer, an equation and a lowered module call one function of mpi4jax each. On JAX 0.12 the
    # counts of two runs differ by up to 0.1 %, which is more than one program has of them.
    assert 0 < max(more.values()) < 0.01, more


MODULES = """
import sys, jax, jax.numpy, mpi4py.MPI
before = {*sys.modules}
import mpi4jax
after = {*sys.modules} - before
own = {name for name in after if name.partition(".")[0] == "mpi4jax"}
print(len(own), len(after - own))
"""


def test_the_import_reads_few_files():
    """A file for each module. JAX and mpi4py read some 700 before, whatever mpi4jax does."""
    env = {**os.environ, "MPI4JAX_TRANSPORT": "mpi"}
    command = [sys.executable, "-c", MODULES]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    own, others = map(int, done.stdout.split())
    assert 100 < own <= 155, own
    # Of JAX and of the standard library: `jax.extend`, `multiprocessing`.
    assert others <= 60, others
