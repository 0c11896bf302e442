"""Run a script that uses mpi4jax.notoken and mpi4jax.jit on mpi4jax 0.9.1, which has neither name.

mpiexec -n 2 python benches/programs/on_reference.py examples/shallow_water.py --benchmark
"""

import runpy
import sys

import jax

import mpi4jax

mpi4jax.notoken = sys.modules["mpi4jax.notoken"] = mpi4jax
mpi4jax.jit = jax.jit
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
