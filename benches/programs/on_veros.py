"""One rank of the ocean model Veros, unmodified, in steps for third_party.py.

mpiexec -n 2 python benches/programs/on_veros.py SOCKET CONTENDER SETUP
"""

import importlib
import sys
import time
from pathlib import Path

import jax
import numpy as np
from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "suite"))

from serving import serve
from veros import runtime_settings

comm = MPI.COMM_WORLD
runtime_settings.backend = "jax"
runtime_settings.num_proc = {1: (1, 1), 2: (2, 1), 4: (2, 2)}[comm.size]
runtime_settings.diskless_mode = True
runtime_settings.loglevel = "error"

name = sys.argv[3]
module = importlib.import_module(f"veros.setups.{name}.{name}")
model = getattr(module, {"acc": "ACCSetup", "acc_basic": "ACCBasicSetup"}[name])()


def settled():
    """Return the fields of the model, when they are there."""
    v = model.state.variables
    return jax.block_until_ready([v.temp, v.salt, v.u, v.psi])


def start():
    model.setup()
    step(2)  # compiled
    return True


def step(count):
    """Seconds of a step."""
    settled()
    comm.Barrier()
    begin = time.perf_counter()
    for _ in range(count):
        model.step(model.state)
    settled()
    return (time.perf_counter() - begin) / count


def result():
    """Sums over all ranks' cells, without ghost cells, of what a step may change."""
    inner = [np.asarray(field, np.float64)[2:-2, 2:-2] for field in settled()]
    sums = np.array([total for x in inner for total in (x.sum(), (x**2).sum())])
    return comm.allreduce(sums).tolist()


serve({"start": start, "step": step, "result": result})
